"""Tests of the lines at the end of a run, and of the metrics that show whether the model learned."""

import math
import re
import shlex
import sys

import pytest

from rlhf import evaluate, sample
from rlhf.checks.check import problems
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.conftest import rows

OFFLINE = (
    *("generator=dataset", "scorer=labels", "schedule.total_episodes=null", "schedule.total_epochs=0.125"),
)


@pytest.fixture
def ended(tiny, tmp_path, monkeypatch, capsys):
    """`ended(*overrides)` carries out a run in `run`, and returns its folder and its closing lines."""
    monkeypatch.chdir(tmp_path)

    def get(*overrides: str) -> tuple[RunFolder, list[str]]:
        folder = RunFolder(tmp_path / "run")
        run(tiny(*overrides), folder)
        lines = capsys.readouterr().out.splitlines()
        start = max(i for i, line in enumerate(lines) if line.startswith("finished: "))
        return folder, lines[start:]

    return get


@pytest.mark.smoke
def test_the_closing_lines_have_results_files_and_commands_in_80_columns(ended, monkeypatch, capsys):
    folder, lines = ended()
    assert lines[0].startswith("finished: 2 updates, 32 episodes, in 0:")
    text = "\n".join(lines)
    for name in ("win rate vs. references (facts)", "judge (facts)", "reward (reward_model)", "KL to the"):
        assert f"  {name}" in text
    assert "16 held-out prompts" in text and "-0.000" not in text
    for path in ("run/model", "run/completions.jsonl", "run/metrics.jsonl"):
        assert any(line.endswith(f" {path}") for line in lines)
    assert not [line for line in lines if len(line) > 80 and "/artefacts/" not in line]
    assert text == "\n".join(line.rstrip() for line in lines)
    report, evaluation, show, talk = map(
        shlex.split, re.split("^  (?=python)", text.replace("\\\n", "").split("next:\n")[1], flags=re.M)[1:]
    )
    assert report == ["python", "-m", "rlhf.report", "run"]
    assert show[2:] == ["rlhf.sample", "run=run", "show=4"] and talk[2:] == ["rlhf.sample", "run=run"]
    assert {line.partition(" ")[0] for line in rows_of_log(folder)} == {"finished:"}
    monkeypatch.setattr(sys, "argv", evaluation[2:])
    evaluate.main()
    assert "win rate" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", show[2:])
    sample.main()
    assert "[4]" in capsys.readouterr().out


def rows_of_log(folder: RunFolder) -> list[str]:
    """Return the messages of train.log that begin with "finished"."""
    lines = folder.log.read_text().splitlines()
    return [line[line.index("finished: ") :] for line in lines if "finished: " in line]


def test_a_run_without_a_judge_reports_the_score_and_the_win_rate_against_the_initial_policy(ended):
    folder, lines = ended("scorer@gold=none", "scorer=facts", "schedule.eval_every=1")
    first, *_, last = [row for row in rows(folder) if "eval/score" in row]
    assert {
        *("eval/score", "eval/score_low", "eval/score_high"),
    } <= first.keys() and "eval/win_rate_vs_initial" not in first
    assert 0 <= last["eval/win_rate_vs_initial"] <= 1 and "eval/win_rate" not in last
    assert folder.finished()["result"]["eval/score"] == last["eval/score"]
    assert any(line.startswith("  reward (facts)") for line in lines)
    assert any(line.startswith("  win rate vs. initial policy") for line in lines)


def test_offline_dpo_reports_loss_accuracy_and_margin_of_held_out_pairs(ended):
    folder, lines = ended(*OFFLINE)
    first, *_, last = [row for row in rows(folder) if "eval/kl" in row]
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-5) and first["eval/margin"] == 0
    assert last["eval/loss"] != first["eval/loss"] and 0 <= last["eval/accuracy"] <= 1
    assert last["eval/accuracy_low"] <= last["eval/accuracy"] <= last["eval/accuracy_high"]
    assert last["eval/kl_low"] < last["eval/kl"] < last["eval/kl_high"]
    assert "eval/accuracy_ci95" not in last and "eval/score" not in last
    assert any(line.startswith("  accuracy on held-out pairs") for line in lines)


@pytest.mark.parametrize("algo", ["sft", "reward"])
def test_supervised_runs_report_their_held_out_loss(ended, algo):
    _, lines = ended(f"algo={algo}")
    assert "examples" in lines[0] and any(line.startswith("  held-out loss") for line in lines)
    text = "\n".join(lines).replace("\\\n", "").split("next:\n")[1]
    python, _, module, *words = shlex.split(text.splitlines()[0])
    assert (python, module) == ("python", "rlhf.train") and "algo=dpo" in words
    assert f"model.{'policy' if algo == 'sft' else 'reward'}=run/model" in words
    assert not problems(compose(words))


def test_a_run_without_evaluations_says_so(ended):
    _, lines = ended("schedule.eval_every=0")
    assert lines[1] == "  not evaluated (schedule.eval_every=0; 1000000: before and after training)"
