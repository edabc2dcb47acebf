"""Differences between settings: pairs, intervals, verdicts; which runs are ranked together."""

import math
import random
from statistics import mean, stdev

import pytest

from rlhf.core.statistics import holm, p_t
from rlhf.report.__main__ import main
from rlhf.report.runs import value_of
from rlhf.report.tables import differences, result, results
from tests.report.test_report import read, write_run

SFT = {"algo.name": "sft", "generator.name": "dataset"}


def answers(scores, update=4, key="score"):
    """Return rows of completions.jsonl, one prompt per score; the first evaluation has other scores."""
    before = [{"update": 0, "prompt": f"p{i}", "response": "", key: 9.0} for i in range(len(scores))]
    last = [{"update": update, "prompt": f"p{i}", "response": "", key: each} for i, each in enumerate(scores)]
    return (*before, *last)


def write_scores(folder, scores, **settings):
    evaluation, settings = {"eval/score": mean(scores)}, {"optim.lr": 0.01, **settings}
    return write_run(folder, completions=answers(scores), evaluation=evaluation, **settings)


def only(folder):
    (section,) = read(folder)
    return differences(section)


def test_single_runs_are_paired_over_the_prompts_that_both_have_answered(tmp_path):
    draw = random.Random(0)
    one = [draw.gauss(5, 3) for _ in range(64)]  # prompts differ by far more than settings
    other = [score - 0.2 + draw.gauss(0, 0.3) for score in one]
    write_scores(tmp_path / "a", one)
    write_scores(tmp_path / "b", other, **{"optim.lr": 0.1})
    (found,) = only(tmp_path)
    each = [a - b for a, b in zip(one, other, strict=True)]
    half = 1.998 * stdev(each) / math.sqrt(64)  # t quantile of 63 degrees of freedom
    assert found.estimate.centre == pytest.approx(mean(each))
    assert found.estimate.low == pytest.approx(mean(each) - half, abs=1e-4)
    assert found.pairs == "64 prompts of 1 seed" and found.p < 0.001
    text = f"beats lr=0.1 by {mean(each):.2f} [{mean(each) - half:.2f}, {mean(each) + half:.2f}], paired over"
    assert text in str(found)


def test_a_difference_within_the_noise_is_undecided(tmp_path):
    draw = random.Random(0)
    for place in range(3):
        write_scores(tmp_path / str(place), [draw.gauss(5, 3) for _ in range(64)], **{"optim.lr": place})
    found = only(tmp_path)
    assert len(found) == 2 and all("undecided, difference" in str(each) for each in found)


def test_settings_with_three_seeds_are_paired_over_seeds(tmp_path):
    for seed, noise in enumerate((0.0, 0.3, 0.1)):
        write_run(tmp_path / f"a{seed}", won=0.2 + noise, seed=seed)
        write_run(tmp_path / f"b{seed}", won=0.15 + noise + 0.001 * seed, seed=seed, **{"optim.lr": 0.1})
    (found,) = only(tmp_path)
    assert found.pairs == "3 seeds" and found.estimate.seeds == 3
    assert found.estimate.centre == pytest.approx(4 * (0.05 - 0.001)) and found.p < 0.05
    assert "beats" in str(found), "the seeds differ by more than the settings, but alike"


def test_comparisons_with_the_best_setting_are_corrected_for_their_number(tmp_path):
    draw = random.Random(1)
    base = [draw.gauss(5, 1) for _ in range(64)]
    write_scores(tmp_path / "best", base)
    for place in range(4):
        write_scores(
            tmp_path / str(place), [x - 0.1 + draw.gauss(0, 0.3) for x in base], **{"optim.lr": place + 1}
        )
    found = only(tmp_path)
    last = {each.best for each in found} | {each.other for each in found}
    scores = {group: [row["score"] for row in group.runs[0].completions()[64:]] for group in last}
    alone = [p_t([x - y for x, y in zip(scores[one.best], scores[one.other], strict=True)]) for one in found]
    assert len(found) == 4 and [each.p for each in found] == pytest.approx(holm(alone))
    assert min(alone) < min(each.p for each in found)


def test_where_lower_is_better_the_difference_is_what_the_better_one_saves(tmp_path):
    for seed in range(3):
        for name, loss in (("a", 1.0), ("b", 1.5)):
            extra = {"optim.lr": loss, "seed": seed, **SFT}
            write_run(tmp_path / f"{name}{seed}", evaluation={"eval/loss": loss + 0.01 * seed}, **extra)
    (found,) = only(tmp_path)
    assert "lr=1.0 beats lr=1.5 by 0.500 [0.500, 0.500]" in str(found) or "undecided" in str(found)
    assert found.estimate.centre == pytest.approx(-0.5)


def test_equal_and_unfinished_runs_do_not_beat_each_other(tmp_path):
    write_scores(tmp_path / "a", [1.0] * 32)
    write_scores(tmp_path / "b", [1.0] * 32, **{"optim.lr": 0.1})
    write_scores(tmp_path / "c", [9.0] * 32, finished=False, **{"optim.lr": 0.2})
    (found,) = only(tmp_path)
    assert found.p == 1.0 and "undecided" in str(found)
    assert only(tmp_path / "c") == []


def test_runs_of_other_lengths_are_not_ranked_together(tmp_path):
    for length, won in ((100, 0.1), (100, 0.12), (1000, 0.2), (1000, 0.15)):
        keys = {"schedule.total_episodes": length, "optim.lr": won}
        write_run(tmp_path / f"{length}-{won}", won=won, **keys)
    (section,) = read(tmp_path)
    said = result(section)
    assert "total_episodes=100: Best of 2 settings" in said
    assert "total_episodes=1000: Best of 2 settings" in said
    order = [group.config["schedule.total_episodes"] for group, _ in results(section).rows]
    assert order in ([100, 100, 1000, 1000], [1000, 1000, 100, 100])
    pairs = [(each.best.config, each.other.config) for each in differences(section)]
    assert all(one["schedule.total_episodes"] == two["schedule.total_episodes"] for one, two in pairs)


def test_the_terminal_markdown_and_the_page_state_the_differences(tmp_path, monkeypatch, capsys):
    write_scores(tmp_path / "a", [float(i) for i in range(32)])
    write_scores(tmp_path / "b", [i - 1 - i % 2 / 9 for i in range(32)], **{"optim.lr": 0.1})
    main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert "beats" in capsys.readouterr().out
    assert "beats" in (tmp_path / "out" / "index.html").read_text()
    main([str(tmp_path / "a"), str(tmp_path / "b"), "--markdown"])
    assert "\n- " in capsys.readouterr().out


@pytest.mark.parametrize("key", ["score", "gold_score"])
def test_accuracies_of_single_runs_are_paired_over_prompts(tmp_path, key):
    for name, right in (("a", 30), ("b", 20)):
        scores = [float(place < right) for place in range(40)]
        rows = answers(scores, key=key)
        write_run(
            tmp_path / name,
            completions=rows,
            evaluation={"eval/accuracy": mean(scores)},
            **{"optim.lr": right},
        )
    (found,) = only(tmp_path)
    assert found.estimate.centre == pytest.approx(0.25) and found.pairs == "40 prompts of 1 seed"


def test_the_completions_of_another_judge_do_not_determine_an_accuracy():
    assert value_of({"gold_score": 1.0, "reference_gold_score": 0.3}, "eval/accuracy") is None
