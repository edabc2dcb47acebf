"""Tests of the annotator process, which scores rollouts ahead of the trainer."""

import os

import pytest

from rlhf.core.errors import RunError
from rlhf.core.files import files
from rlhf.engines.engine import TorchEngine
from rlhf.generators.generator import read
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import RewardModelScorer
from rlhf.stages.run import run
from tests.end_to_end.conftest import nightly, rows
from tests.end_to_end.test_async import workers

RUN = [
    *("schedule.max_lag=1", "schedule.total_episodes=48", "schedule.eval_every=0", "schedule.save_every=0"),
    "algo.samples_per_prompt=2",
]


def refuse(*_):
    raise AssertionError("the trainer annotates although the annotator should")


@pytest.mark.parametrize("algo", ["dpo", "ppo", nightly("grpo")])
def test_metrics_with_annotator_equal_metrics_of_a_trainer_that_scores(tiny, tmp_path, monkeypatch, algo):
    plain, ahead = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "ahead")
    words = [f"algo={algo}", *RUN, "save_generations=true", "scorer.missing_eos_score=null"]
    run(tiny(*words, "generator.worker=false"), plain)
    infer = TorchEngine.infer
    monkeypatch.setattr(RewardModelScorer, "score", refuse)
    monkeypatch.setattr(
        TorchEngine,
        "infer",
        lambda self, module, *rest: refuse() if module is self.reference else infer(self, module, *rest),
    )
    run(tiny(*words), ahead)
    assert [row["lag"] for row in rows(plain)] == [0, 1, 1]
    for a, b in zip(rows(ahead), rows(plain), strict=True):
        assert a.pop("generator/restarts") == a.pop("annotator/restarts") == 0
        if a["update"] == 1:  # the policy equals the reference, so rounding decides the sign of a margin
            for row in (a, b):
                row.pop("rewards/accuracies", None)
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    kept = [[read(file, 0).labels for file in files(folder.generations)] for folder in (plain, ahead)]
    assert len(kept[0]) == 3 and kept[0][0].unique().numel() > 8
    for a, b in zip(*kept, strict=True):
        assert a.flatten().tolist() == pytest.approx(b.flatten().tolist(), rel=1e-5, abs=1e-5)


def test_an_error_in_a_scorer_function_stops_the_run_and_names_the_log(tiny, tmp_path, monkeypatch):
    # the log must contain printed lines without this variable
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    file = tmp_path / "own_rewards.py"
    file.write_text(
        "calls = []\n\n\n"
        "def score(response):\n"
        "    print('scoring', len(response))\n    calls.append(response)\n"
        "    if len(calls) > 9: raise ValueError('no idea')\n    return 1.0\n"  # the trial makes fewer calls
    )
    words = ["scorer=function", f"scorer.path={file}:score"]
    folder, before = RunFolder(tmp_path / "run"), workers(os.getpid())
    with pytest.raises(RunError) as stopped:
        run(tiny(*RUN, *words), folder)
    told = str(stopped.value)
    assert f"scorer.path={file}:score raised ValueError: no idea ({file}, line 7) for row" in told
    assert "annotator.log" in told and not folder.finished()
    log = (folder.path / "annotator.log").read_text()
    assert "scoring" in log and "ValueError: no idea" in log and "Traceback" in log
    assert workers(os.getpid()) == before
