"""Tests of complete runs whose learning rate is scaled by the effective sample size, and of their warning."""

import pytest

from rlhf.report.__main__ import main as report
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.training.recorder import METRIC, Limits
from tests.end_to_end.conftest import UPDATES_ONLY, rows
from tests.end_to_end.test_algorithms import SCORED, updates

STALE = ("schedule.max_lag=2", "generator.worker=false", "schedule.total_episodes=96", *UPDATES_ONLY)


def test_at_lag_0_the_run_is_the_run_without_scaling(finished, tiny, tmp_path):
    plain = finished("algo=rloo", *SCORED, *UPDATES_ONLY)
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=rloo", *SCORED, *UPDATES_ONLY, "optim.ess_scaling=sqrt"), folder)
    scaled = rows(folder)
    assert [row.pop("policy/lr_scale") for row in scaled if "lr" in row] == [1.0] * len(updates(folder))
    assert scaled == rows(plain)
    trained, expected = ((each.model / "model.safetensors").read_bytes() for each in (folder, plain))
    assert trained == expected


@pytest.mark.parametrize("algo", ["dpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_a_stale_batch_lowers_the_rate_of_its_step(finished, tiny, tmp_path, algo):
    plain = updates(finished(f"algo={algo}", *SCORED, *STALE))
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", *SCORED, *STALE, "optim.ess_scaling=sqrt"), folder)
    scaled = updates(folder)
    assert scaled[0]["policy/lr_scale"] == 1 > scaled[-1]["policy/lr_scale"]
    for row, other in zip(scaled, plain, strict=True):
        assert row["policy/lr_scale"] == pytest.approx(row["mismatch/step_ess"] ** 0.5, abs=1e-6)
        assert row["lr"] == pytest.approx(other["lr"] * row["policy/lr_scale"])


def test_the_warning_of_a_collapse_is_in_the_terminal_the_rows_and_the_report(
    tiny, finished, tmp_path, monkeypatch, capsys
):
    quiet = finished("algo=dpo", *SCORED)
    assert not any(METRIC in row for row in rows(quiet))
    monkeypatch.setattr("rlhf.assembly.training.LIMITS", Limits(entropy=100.0))  # every row is beyond it
    folder = RunFolder(tmp_path / "runs" / "run")
    run(tiny("algo=dpo", *SCORED), folder)
    text = "the policy may collapse: entropy per token at 1 of its first value, limit 1e+02, at update 1; "
    log = folder.log.read_text()
    assert log.count("the policy may collapse") == 1 and text in log and "set optim.lr=" in log
    assert text in " ".join(capsys.readouterr().out.split())
    assert [row.pop(METRIC) for row in updates(folder)] == [1.0] * len(updates(folder))
    bare = [{name: value for name, value in row.items() if name != METRIC} for row in rows(folder)]
    assert bare == rows(quiet), "the warning changes no other metric"
    report([str(tmp_path / "runs"), "--out", str(tmp_path / "report")])
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Runs that warned of a collapse of the policy: run (update 1)" in page
