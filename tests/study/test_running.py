"""A study of short runs from the plan to rows, in this process."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from rlhf.core.errors import UserError
from rlhf.loggers.logger import Hook
from rlhf.report.runs import read_run
from rlhf.study import work
from rlhf.study.plan import DONE
from rlhf.study.rows import read_rows
from rlhf.study.study import Study, difference, differing
from rlhf.study.work import machine_class, read_pilots
from tests.study.test_kills import TIMES

STUDY = """\
study: tiny
set: [task=arithmetic, model=pythia, debug=tiny, algo.beta=0.1, clock=virtual, cache_dir={cache}]
methods: {{dpo: [algo=dpo], ipo: [algo=dpo, algo.loss_type=ipo]}}
seeds: 1
claims: {{dpo is better: value(dpo) > value(ipo)}}
budget: {{cpu_hours: 1}}
"""

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny.yaml").write_text(STUDY.format(cache=folder / "cache"))
    found = Study(folder / "tiny.yaml")
    found.run(workers=2)
    return found


def test_rows_of_portable_runs_do_not_name_the_processor(study):
    run = read_run(next((study.spec.folder / "runs").iterdir()))
    assert run.environment["processor"] in machine_class(run)
    portable = machine_class(replace(run, config={**run.config, "backend.portable": True}))
    assert portable.startswith("every x86 processor, 1 threads, torch")


def test_a_study_has_a_row_for_each_run_and_no_models(study):
    rows = read_rows(study.spec.rows)
    assert len(rows) == 2 and [each.state for each in study.plan().runs] == [DONE] * 2
    (row, *_) = rows
    assert row.prompts == len(row.outcomes) == 16
    assert row.outcomes.mean() == row.metrics["eval/win_rate"]
    assert row.evaluations["update"] == [0, 1, 2] and len(row.evaluations["eval/kl"]) == 3
    times = row.evaluations["rollouts/time_s"]
    assert times[0] == 0 < times[1] < times[2]
    assert row.means["objective/kl"] and not any("time/" in name for name in row.means)
    assert row.models.keys() == {"SFT model"} and "1 threads, torch" in row.machine
    assert row.cpu_s > 0 and row.memory_gb > 0 and row.results == 1
    runs = [*(study.spec.folder / "runs").iterdir()]
    assert len(runs) == 2 and not [
        *study.spec.folder.glob("runs/*/model"),
        *study.spec.folder.glob("runs/*/.lock"),
    ]
    assert study.spec.events("claims")[0]["claims"] == study.spec.claims
    assert study.rows().shape[0] == 2


def test_a_complete_study_runs_nothing_and_its_claims_are_not_recorded_again(study, tmp_path):
    history = study.spec.folder / "history.jsonl"
    history.rename(tmp_path / history.name)
    try:
        study.run()
        assert not history.exists()
    finally:
        (tmp_path / history.name).rename(history)


def test_a_study_shows_its_tables_and_claims(study):
    table = study.table("value")
    assert {*table.index.get_level_values(1)} == {"dpo", "ipo"}
    for text, found in {
        "loss over lag": r"a table must be over an axis \(there are none\), got lag; choose one of them",
        "gain": "a table must be <quantity> over <axis> .*, got gain; write value over <axis>",
        "eval/klm": "a table must name a metric of the rows, got eval/klm; did you mean eval/kl?",
    }.items():
        with pytest.raises(UserError, match=found):
            study.table(text)
    assert study.page().is_file() and len(study.claims()) == 1


def test_a_pilot_stands_for_all_runs_of_its_cost(study):
    (pilot,) = read_pilots(study.spec.folder / "price.json").values()
    assert pilot.episode > 0 and pilot.evaluation > 0 and pilot.stages > 0
    price = study.price()
    assert price.done_s > 0 and price.left_s == price.unknown == 0
    dear = Study(study.spec.file)
    dear.spec.budget["cpu_hours"] = 0
    with pytest.raises(UserError, match="budget.cpu_hours must be at least the price"):
        dear.price()


def test_workers_of_an_array_write_the_same_rows(study, monkeypatch, tmp_path):
    pytest.importorskip("submitit")
    monkeypatch.setattr(work, "LAUNCHER", "local")  # processes of this machine in place of SLURM
    text = STUDY.format(cache=study.spec.file.parent / "cache")
    (tmp_path / "tiny.yaml").write_text(text.partition("budget")[0] + "resources: {minutes: 9, threads: 1}\n")
    array = Study(tmp_path / "tiny.yaml")
    with pytest.raises(UserError, match="hydra.launcher.partitions must be a setting of hydra.launcher"):
        array.run(slurm=["partitions=gpu"])
    array.run(workers=2, slurm=["cpus_per_task=1"])
    assert len([*array.spec.folder.glob("workers/worker-?.job")]) == 2
    rows = [
        [vars(row) | dict.fromkeys(TIMES) for row in read_rows(each.spec.rows)] for each in (study, array)
    ]
    assert rows[0] == rows[1]


def test_a_row_has_the_seconds_of_attempts_that_a_signal_stopped(study, monkeypatch, tmp_path):
    class Stop(Hook):
        """Stops the first attempt at a run after its first update, and pretends that it was long."""

        def after_update(self, state, metrics):
            if not (stopped := tmp_path / "stopped").exists():
                stopped.touch()
                os.kill(os.getpid(), signal.SIGTERM)
            for file in tmp_path.rglob(work.USED):
                assert json.loads(file.read_text())["cpu_s"] > 0
                file.write_text('{"cpu_s": 1000.0, "taken_s": 1000.0}\n')

    (tmp_path / "tiny.yaml").write_text(STUDY.format(cache=study.spec.file.parent / "cache"))
    other = Study(tmp_path / "tiny.yaml")
    other.price()  # the pilots run without the hook
    monkeypatch.setattr(work, "check_job", lambda cfg: [Stop()])
    other.run(only={"method": ["dpo"]})
    (row,) = read_rows(other.spec.rows)
    (calm,) = (each for each in read_rows(study.spec.rows) if each.method == "dpo")
    assert 1000 < row.cpu_s < 1100 and row.metrics == calm.metrics


def test_a_run_is_repeated_to_the_bit(study):
    row, new = study.repeat({"method": "ipo", "seed": "1"})
    assert differing(row, new) == [] and difference(row, new) is None
    assert differing(row, replace(new, metrics={**new.metrics, "eval/new": 1.0})) == []
    assert differing(replace(row, metrics={**row.metrics, "eval/gone": 1.0}), new) == ["metrics"]
    other = replace(new, machine="another", metrics={**new.metrics, new.metric: 0.5})
    assert difference(row, other) == (
        f"the run differs from its row in metrics, machine: {row.metric} {row.metrics[row.metric]} and 0.5; "
        f"the bits depend on the machine class, which was {row.machine}, and is another"
    )
    assert "machine" not in str(difference(row, replace(new, status="diverged")))


def test_a_portable_run_whose_reward_computes_with_torch_has_a_row(tmp_path):
    code = "import torch\n\n\ndef longer(response):\n    return torch.tensor(float(len(response))).sqrt()\n"
    (tmp_path / "rewards.py").write_text(code)
    text = STUDY.format(cache=tmp_path / "cache").replace("debug=tiny", "debug=tiny, backend.portable=true")
    text = text.replace("[algo=dpo]", "[algo=dpo, scorer=function, 'scorer.path=rewards.py:longer']")
    (tmp_path / "tiny.yaml").write_text(text)
    words = [sys.executable, "-m", "rlhf.study", "run", "tiny.yaml", "--only", "method=dpo"]
    subprocess.run(words, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()})
    (row,) = read_rows(Study(tmp_path / "tiny.yaml").spec.rows)
    assert row.status == "finished", row.error
