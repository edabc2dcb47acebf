"""Tests of the off-policy study: equal budgets, the tables, and the generated part of the document."""

from dataclasses import replace

import pytest

from benchmarks import off_policy
from benchmarks.off_policy import ALGORITHMS, MARKS, MINIBATCHES, SEEDS, STEP, SWEEPS, Setting
from rlhf.core.errors import UserError
from rlhf.study.page import fill
from tests.docs.snapshots import objects
from tests.report.test_report import write_run

SWEPT = ("algo=", "seed=", "schedule.minibatches=", "hydra")


def study(folder, skip=()):
    """Write runs of two algorithms; each minibatch of an update lowers the final win rate by 0.01."""
    for seed in SEEDS:
        for algorithm in ("dpo", "ppo"):
            for n, lag in ((1, 0), (32, 0), (1, 1)):
                settings = {"algo.name": algorithm, "schedule.minibatches": n, "schedule.max_lag": lag}
                won = (0.8 - 0.01 * n + 0.04 * seed) / 4  # win rate gained per update; a run has 4 updates
                write_run(folder / f"{algorithm}-{n}-{lag}-{seed}", seed=seed, won=won, **settings)
    return folder


def test_all_runs_have_the_same_number_of_episodes_and_the_same_batch_size_per_step():
    for algorithm in ALGORITHMS:
        for n in (MINIBATCHES[0], MINIBATCHES[-1]):
            words = [word for word in SWEEPS[0] if not word.startswith(SWEPT)]
            cfg = objects(*words, f"algo={algorithm}", f"schedule.minibatches={n}")
            assert cfg.schedule.prompts_per_update == STEP * n
            assert cfg.num_updates() * n == 64 and cfg.episodes_per_update == 2 * STEP * n
        lagging = objects(*(word for word in SWEEPS[1] if not word.startswith(SWEPT)), f"algo={algorithm}")
        alone = objects(*words, f"algo={algorithm}", "schedule.minibatches=1", "schedule.max_lag=1")
        assert replace(lagging, generator=alone.generator) == alone, (
            "only the processes and threads of the generator may differ"
        )


def test_a_cell_is_the_mean_over_seeds_with_their_range(tmp_path):
    cells = off_policy.read(study(tmp_path))
    assert [run.seed for run in cells[Setting("dpo", 32)]] == [1, 2]
    first, *_ = off_policy.tables(cells)
    heading, _, dpo, *_, bok = first.splitlines()
    assert heading == "| Win rate | 1 | 2 | 4 | 8 | 16 | 32 | 1, lag 1 |"
    assert dpo == "| `dpo` | 0.850 (0.830, 0.870) |  |  |  |  | 0.540 (0.520, 0.560) | 0.850 (0.830, 0.870) |"
    assert bok == "| `bok` |  |  |  |  |  |  |  |"
    assert off_policy.cell(cells[Setting("dpo", 32)][:1], "eval/win_rate", 3) == "0.520"


def test_unfinished_runs_are_skipped_and_duplicate_runs_are_rejected(tmp_path):
    folder = study(tmp_path)
    write_run(folder / "open", finished=False, **{"schedule.minibatches": 2})
    assert Setting("dpo", 2) not in off_policy.read(folder)
    write_run(folder / "other", **{"schedule.minibatches": 1, "optim.lr": 0.1})
    with pytest.raises(UserError, match="one run per setting and seed"):
        off_policy.read(folder)


def test_the_document_keeps_its_handwritten_text(tmp_path, monkeypatch, capsys):
    document, figure = tmp_path / "off_policy.md", tmp_path / "off_policy.png"
    document.write_text(f"# Title\n{MARKS[0]}\nstale\n{MARKS[1]}\n\nA reading.\n")
    for name, value in (("DOCUMENT", document), ("FIGURE", figure), ("OUTPUTS", study(tmp_path / "runs"))):
        monkeypatch.setattr(off_policy, name, value)
    off_policy.main(["--draw"])
    text = document.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nA reading.\n") and "stale" not in text
    assert "12 of 56 runs" in text and "python -m rlhf.train -m sweep=minibatches" in text
    assert "| Gold score |" in text and "| Win rate |" in text
    assert "| `dpo` |" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    off_policy.main(["--draw"])
    assert document.read_text() == text, "a second call must not change the document"
    with pytest.raises(UserError, match="must contain"):
        fill("no marks", MARKS, "text")


def test_the_document_contains_the_marks():
    assert fill(off_policy.DOCUMENT.read_text(), MARKS, "text")
