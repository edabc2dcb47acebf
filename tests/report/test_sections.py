"""Sections of a report: kinds of runs, labels, scales, lines of a figure, sentences, tables, legends."""

import re
import warnings
from datetime import datetime

import pytest
from rich.console import Console

from rlhf.report import figures
from rlhf.report.__main__ import main
from rlhf.report.figures import (
    HEIGHT,
    SERIES,
    STYLE,
    WIDTH,
    Chart,
    Key,
    Panel,
    axes_at,
    charts,
    lines,
    panels_of,
    times_of,
)
from rlhf.report.runs import METRICS, duration, find_runs, number
from rlhf.report.tables import (
    LINES,
    LONGEST_LABEL,
    TERMINAL_ROWS,
    differing,
    for_terminal,
    labels,
    not_drawn,
    remarks,
    result,
    results,
    settings,
)
from tests.report.test_report import read, write_run

SFT = {"algo.name": "sft", "generator.name": "dataset"}
REWARD = {"algo.name": "reward", "generator.name": "dataset"}
OFFLINE = {"algo.name": "dpo", "generator.name": "dataset"}


def curves(section, name):
    """Return the groups of each panel that shows the metric `name` over updates, by drawing the panels."""
    from matplotlib.figure import Figure

    shown = []
    for panel in panels_of(section.drawn, METRICS[name], "update", "updates", []):
        axes = Figure().subplots()
        panel.draw(axes)
        shown.append({line.get_gid() for line in axes.lines})
    return shown


def test_each_kind_of_run_has_a_section_and_runs_of_other_data_have_another(tmp_path):
    write_run(tmp_path / "a", **SFT)
    write_run(tmp_path / "b", **REWARD)
    write_run(tmp_path / "c", **OFFLINE)
    write_run(tmp_path / "d")
    for name in ("mine", "yours"):
        write_run(tmp_path / name, **{"task.path": f"/data/{name}/prompts.jsonl"})
    assert [(section.title, section.name) for section in read(tmp_path)] == [
        ("RL on tldr_mini", "rl_tldr_mini"),
        ("RL on tldr_mini (mine/prompts.jsonl)", "rl_tldr_mini_mine_prompts.jsonl"),
        ("RL on tldr_mini (yours/prompts.jsonl)", "rl_tldr_mini_yours_prompts.jsonl"),
        ("Offline training of the policy on tldr_mini", "offline_tldr_mini"),
        ("Reward model on tldr_mini", "reward_tldr_mini"),
        ("SFT on tldr_mini", "sft_tldr_mini"),
    ]


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (  # the algorithm first
            [
                {"algo.name": "dpo", "optim.lr": 1e-3},
                {"algo.name": "dpo", "optim.lr": 1e-4},
                {"algo.name": "rloo", "optim.lr": 3e-4},
            ],
            ["algo=dpo lr=0.001", "algo=dpo lr=0.0001", "algo=rloo lr=0.0003"],
        ),
        ([{"stages.sft": ["x" * 40, place]} for place in range(2)], ["run 1", "run 2"]),  # long values
        ([{"model.policy": f"/models/{size}"} for size in "ab"], ["policy=a", "policy=b"]),
        ([{"model.policy": f"out/{name}/model"} for name in "ab"], ["policy=a/model", "policy=b/model"]),
        (
            [{f"{part}.threads": 1 + (part == more) for part in ("backend", "generator")} for more in "x"]
            + [
                {"backend.threads": 1, "generator.threads": 2},
                {"backend.threads": 2, "generator.threads": 2},
            ],
            [f"backend.threads={one} generator.threads={two}" for one, two in ((1, 1), (1, 2), (2, 2))],
        ),
    ],
)
def test_a_label_has_the_settings_in_which_runs_differ(configs, expected):
    assert labels([{"algo.name": "dpo", **each} for each in configs]) == expected


def test_settings_that_need_more_than_three_pairs_are_numbered():
    keys = ("algo.beta", "optim.lr", "optim.eps", "eval.prompts")
    configs = [{key: i >> place & 1 for place, key in enumerate(keys)} for i in range(16)]
    assert labels(configs) == [f"run {place}" for place in range(1, 17)]
    assert labels(configs[:8])[0] == "beta=0 lr=0 eps=0"


def test_a_run_of_an_earlier_version_without_a_key_does_not_differ_from_a_run_with_its_default():
    assert differing([{}, {"schedule.replay": 1}]) == []
    assert differing([{}, {"schedule.replay": 2}]) == ["schedule.replay"]


@pytest.mark.parametrize("seconds", [0.2, 0.00025, 20.0])
def test_the_label_of_a_tick_at_the_right_edge_is_inside_of_the_panel(tmp_path, seconds):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    took = seconds / 1.14  # with the margin of the figure, its axis ends at `seconds`
    write_run(tmp_path / "a", training={"time/update_s": took, "time/train_s": took, "time/wait_s": 0.0})
    made = figures.time_per_phase(read(tmp_path)[0])
    (panel,) = made.panels
    with rc_context(fname=STYLE):
        drawing = Figure(figsize=(WIDTH, panel.height))
        axes = axes_at(drawing, 0.0, 0.0, panel.height)
        panel.draw(axes)
        drawing.draw_without_rendering()
    assert axes.get_xlim()[1] == pytest.approx(seconds)
    last = axes.get_xticklabels()[-1 if axes.get_xticks()[-1] <= 1.0001 * seconds else -2]
    assert last.get_text() == f"{seconds:g}"
    assert last.get_window_extent().x1 <= drawing.bbox.x1


def test_scores_of_different_scorers_and_losses_of_different_algorithms_have_their_own_axes(tmp_path):
    for name, scorer, algorithm in (("a", "http", "dpo"), ("b", "function", "dpo"), ("c", "http", "ppo")):
        write_run(
            tmp_path / name,
            training={"loss/policy": 1.0},
            **{"scorer.name": scorer, "algo.name": algorithm, "scorer.timeout_s": len(name)},
        )
    (section,) = read(tmp_path)
    of_label = {group.label: f"series-{group.index}" for group in section.groups}
    http, function, ppo = (
        of_label[f"algo={algorithm} scorer={scorer}"]
        for algorithm, scorer in (("dpo", "http"), ("dpo", "function"), ("ppo", "http"))
    )
    assert sorted(map(sorted, curves(section, "objective/scores"))) == sorted(
        [sorted([http, ppo]), [function]]
    )
    assert sorted(map(sorted, curves(section, "loss/policy"))) == sorted([sorted([http, function]), [ppo]])
    assert curves(section, "eval/win_rate") == [{http, function, ppo}]


def test_a_figure_shows_the_best_eight_settings_and_names_the_others(tmp_path):
    for place in range(10):
        write_run(tmp_path / f"a{place}", won=0.01 * place, **{"optim.lr": place})
    (section,) = read(tmp_path)
    assert [group.label for group in section.groups] == [f"lr={place}" for place in reversed(range(10))]
    assert [group.label for group in section.drawn] == [f"lr={place}" for place in range(9, 1, -1)]
    assert LINES == 8 and [len(shown) for shown in curves(section, "eval/win_rate")] == [8]
    assert not_drawn(section) == (
        "The figures show 8 of 10 settings, those with the best win rate. Not drawn: lr=1, lr=0."
    )
    write_run(tmp_path / "b", won=0.0, **{"optim.lr": 0, "gold.name": "mild"})  # another judge
    (section,) = read(tmp_path)
    assert "gold=mild" in " ".join(group.label for group in section.drawn)


def test_values_that_differ_from_a_constant_by_rounding_noise_are_not_drawn(tmp_path):
    noise = {"mismatch/kl": 2.1e-13, "mismatch/max_ratio": 1.000004, "loss/policy": -4e-9}
    write_run(tmp_path / "a", training=noise)
    made, remarks = charts(read(tmp_path)[0])
    assert "lag_and_mismatch" not in [chart.name for chart in made]
    assert remarks == [
        "loss/policy (always 0)",
        "lag (always 0)",
        "mismatch/kl (always 0)",
        "mismatch/max_ratio (always 1)",
    ]


def test_curves_of_optimization_are_drawn(tmp_path):
    training = {
        "loss/policy": 0.6,
        "rewards/accuracies": 0.5,
        "policy/grad_norm": 2.0,
        "memory/peak_gib": 1.5,
        "objective/kl": 1.0,
    }
    write_run(tmp_path / "a", training=training)
    chart = next(chart for chart in charts(read(tmp_path)[0])[0] if chart.name == "optimization")
    text = "".join(chart.svg())
    for title in ("loss", "accuracy on training pairs", "gradient norm", "learning rate", "peak memory"):
        assert f">{title}" in text


@pytest.mark.parametrize("ends", [{"_low": 0.375, "_high": 0.75}, {"_ci95": 0.125}], ids=["now", "earlier"])
def test_the_interval_of_a_single_seed_is_a_band_and_several_seeds_show_their_range(tmp_path, ends):
    for seed in (1, 2):
        evaluation = {"eval/score": 0.5 * seed, **{f"eval/score{end}": value for end, value in ends.items()}}
        write_run(tmp_path / f"a{seed}", seed=seed, evaluation=evaluation)
    (alone,) = read(tmp_path / "a1")
    high = ends.get("_high", 0.625)
    assert str(results(alone).rows[0][1][0]) == f"0.50 → 0.50 (95 %: 0.38 to {high:.2f})"
    points, _ = next(lines(alone.groups[0], "update", METRICS["eval/score"]))
    assert (points.low.iloc[0], points.high.iloc[0]) == (0.375, high)
    (both,) = read(tmp_path)
    assert str(results(both).rows[0][1][0]) == "0.75 → 0.75 (0.50 to 1.00)"


def test_sampling_is_a_phase_of_the_trainer_only_in_a_synchronous_run_and_in_virtual_time(tmp_path):
    lag = {"schedule.max_lag": 1}
    for name, more in {"a": {}, "b": lag, "c": lag | {"clock.name": "virtual"}}.items():
        write_run(tmp_path / name, training={"time/generate_s": 0.4}, **more)
    synchronous, asynchronous, virtual = (times_of(group) for group in read(tmp_path)[0].groups)
    assert synchronous == virtual == (pytest.approx({"generate": 0.4, "wait": 0.1, "train": 1.5}), {})
    assert asynchronous == ({"wait": 0.5, "train": 1.5}, {"generate": 0.4})


def boxes(count, length, monkeypatch):
    """Return the boxes of axes and legend, in inches, of a PNG with `count` labels of `length` characters."""
    from matplotlib.figure import Figure

    seen = []
    save = Figure.savefig

    def keep(drawing, *args, **kwargs):
        save(drawing, *args, **kwargs)
        inches = drawing.dpi_scale_trans.inverted()
        legend = [each.get_window_extent().transformed(inches) for each in drawing.legends]
        axes = [each.get_tightbbox().transformed(inches) for each in drawing.axes]
        sizes = [each.get_window_extent().transformed(inches).size.tolist() for each in drawing.axes]
        seen.append((axes, legend, sizes, drawing.get_size_inches()[0]))

    monkeypatch.setattr(Figure, "savefig", keep)
    keys = [Key(f"{place} ".ljust(length, "m"), SERIES[place], place, place) for place in range(count)]
    Chart("x", "", "", [Panel(lambda axes: axes.set(xlabel="x", title="two\nlines"))] * 3, keys).image("png")
    return seen[0]


def test_the_legend_never_overlaps_the_axes_and_does_not_change_their_size(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = boxes(2, 10, monkeypatch)
        many = boxes(8, LONGEST_LABEL, monkeypatch)
    for axes, (legend,), _, width in (few, many):
        assert all(legend.y1 < each.y0 for each in axes) and legend.x0 >= 0 and legend.x1 <= width
    assert few[2] == [pytest.approx(size) for size in many[2]] and few[2][0][1] > HEIGHT / 2


def rewarded(*values):
    return [{"evaluation": {"eval/score": each}, "optim.lr": place} for place, each in enumerate(values)]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (
            [{"won": 0.1 * seed, "seed": seed} for seed in (1, 2)],
            "Win rate vs. reference responses from 0.000 to 0.600 (2 seeds: 0.400 to 0.800), KL 2.00, "
            "8.0 s of training.",
        ),
        ([{"won": 0.1}, {"won": 0.01, "optim.lr": 1e-4}], ".* 8.0 s of training, worst setting 0.040."),
        (  # a lower loss is better
            [{**SFT, "evaluation": {"eval/loss": each}, "optim.lr": each} for each in (2.0, 1.0, 3.0)],
            "Best of 3 settings: lr=1.0, held-out loss (nats) from 1.000 to 1.000.* worst setting 3.000.",
        ),
        (rewarded(0.375, 0.375), "2 of 2 settings tie: lr=0, lr=1, reward on held-out .* 8.0 s of training."),
        (rewarded(0.375, 0.375, 0.1), "2 of 3 settings tie: lr=0, lr=1, .* worst setting 0.10."),
        (
            [{"evaluation": {"eval/score": 1.0}, "scorer.name": name} for name in ("function", "http")],
            "scorer=function: Reward on held-out prompts from 1.00 to 1.00, 8.0 s of training. "
            "scorer=http: Reward on held-out prompts from 1.00 to 1.00, 8.0 s of training.",
        ),
        (
            [{"evaluation": {"step": 1}}],
            "Training reward from 1.00 to 4.00, 8.0 s of training. There are no evaluations on .*",
        ),
        ([{"finished": False, "updates": 2}], ".*, 4.0 s of training, unfinished."),
    ],
)
def test_a_sentence_states_the_best_setting_its_change_range_kl_and_time(tmp_path, runs, said):
    for place, given in enumerate(runs):
        write_run(tmp_path / str(place), **given)
    (section,) = read(tmp_path)
    assert re.fullmatch(re.escape(said).replace(r"\.\*", ".*"), result(section))


def test_a_run_with_one_evaluation_has_no_change_and_no_curve(tmp_path):
    write_run(tmp_path / "a", updates=1, finished=False, evaluation={"eval/score": -0.13, "eval/kl": 0.0})
    (section,) = read(tmp_path)
    assert result(section).startswith("Reward on held-out prompts -0.13, KL 0.00")
    assert str(results(section).rows[0][1][0]) == "-0.13"
    drawn, remarks = figures.charts(section)
    assert not {"win_rate_against_kl", "win_rate_against_time", "learning_curves"} & {c.name for c in drawn}
    assert any(text.startswith("eval/score (a single value: ") and "-0.13" in text for text in remarks)


def test_finished_runs_come_before_unfinished_ones_of_another_length(tmp_path):
    write_run(tmp_path / "a", finished=False, won=0.9, **{"schedule.total_episodes": 1, "optim.lr": 1})
    write_run(tmp_path / "b", won=0.1, **{"schedule.total_episodes": 2, "optim.lr": 2})
    (section,) = read(tmp_path)
    assert [bool(group.finished) for group in section.groups] == [True, False]


def test_means_over_fewer_runs_than_all_are_named(tmp_path):
    for seed in (1, 2, 3):
        evaluation = {"eval/score": 1.0 * seed} | ({"eval/accuracy": 0.5} if seed < 3 else {})
        write_run(tmp_path / f"a{seed}", seed=seed, evaluation=evaluation)
    (text,) = [note for note in remarks(read(tmp_path), find_runs([str(tmp_path)])) if "Means" in note]
    assert "eval/accuracy (2 of 3 of algo=dpo)" in text and "score" not in text


def test_numbers_have_no_negative_zero_and_durations_have_the_fitting_unit():
    assert [number(-1e-9, 3), number(-0.1, 1), number(1234.5, 0)] == ["0.000", "-0.1", "1,234"]
    assert list(map(duration, (9.94, 43, 600, 7500))) == ["9.9 s", "43 s", "10 min", "2 h 5 min"]


def test_settings_are_those_in_which_runs_differ_and_the_usual_ones_that_they_share(tmp_path):
    common = {"optim.lr": 0.001, "model.policy": "/models/smol", "clock.name": "virtual"}
    write_run(tmp_path / "a", **common, **{"algo.beta": 0.1, "eval.prompts": 8, "algo.name": "dpo"})
    write_run(tmp_path / "b", **common, **{"algo.vf_coef": 1, "eval.prompts": 9, "algo.name": "ppo"})
    found = settings(read(tmp_path)[0])
    assert found.shared == ["policy=smol", "lr=0.001", "clock=virtual"]
    assert found.headings == ["algo", "beta", "prompts"]  # vf_coef follows from the algorithm
    assert [row for _, row in found.rows] == [["dpo", "0.1", "8"], ["ppo", None, "9"]]
    for beta in (0.1, 0.5):
        write_run(tmp_path / "labels" / f"{beta}", **{"algo.beta": beta})
    assert settings(read(tmp_path / "labels")[0]).keys == [], "the labels contain all settings"


def test_a_run_of_an_own_model_is_shown_with_the_name_of_that_model(tmp_path):
    write_run(tmp_path / "a", **{"model.name": "pythia", "model.policy": "models/smol"})
    write_run(tmp_path / "b", seed=2, **{"model.name": "pythia", "model.policy": None})
    labels = {run.config["seed"]: run.config["model.name"] for run in find_runs([str(tmp_path)]).runs}
    assert labels == {1: "smol", 2: "pythia"}


def test_the_terminal_table_fits_80_columns_and_has_at_most_twenty_rows(tmp_path):
    evaluation = {
        **{name: 0.123 for name in METRICS if name.startswith("eval/")},
        "eval/gold_score": -12345.67,
        "eval/score": -12345.67,
    }
    keys = ("optim.max_grad_norm", "generator.response_length", "optim.warmup")
    for place in range(TERMINAL_ROWS + 5):
        differ = {key: 1000 + place // 3**digit % 3 for digit, key in enumerate(keys)}
        write_run(tmp_path / str(place), evaluation=evaluation, **differ)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(for_terminal(results(read(tmp_path)[0]), 80))
    shown = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in shown) <= 80
    assert sum("max_grad_norm=" in line for line in shown) == TERMINAL_ROWS == 20
    assert "5 more settings" in shown[-1]


def page(tmp_path):
    out = tmp_path / "report"
    main([str(tmp_path / "runs"), "--out", str(out)])
    return (out / "index.html").read_text()


def test_sections_of_a_page_have_their_own_ids_and_files(tmp_path):
    write_run(tmp_path / "runs" / "a", training={"memory/peak_gib": 1.25})
    write_run(tmp_path / "runs" / "b", **SFT, evaluation={"eval/loss": 2.0})
    html = page(tmp_path)
    for name in ("results_rl_tldr_mini", "settings_sft_tldr_mini", "learning_curves_sft_tldr_mini"):
        assert f'<section id="{name}">' in html
    assert (tmp_path / "report" / "win_rate_against_kl_rl_tldr_mini.png").exists()
    row = next(line for line in html.splitlines() if 'title="' in line and "/runs/a" in line)
    assert f"{datetime.now():%Y-%m-%d}" in row and "8.0 s" in row and "1.25" in row
    assert "<code>a</code>" in row


def test_damaged_completions_are_reported_and_prompts_without_reference_are_shown(tmp_path):
    answer = {"update": 4, "prompt": "Why?", "response": "Because.", "score": 0.5}
    write_run(tmp_path / "runs" / "a", completions=(answer,), **{"optim.lr": 1})
    other = write_run(tmp_path / "runs" / "b", **{"optim.lr": 2})
    (other / "completions.jsonl").write_text("[]\n")
    html = page(tmp_path)
    assert "The completions of b are not shown (completions.jsonl, line 1: not a row with " in html
    assert "Because." in html and "reward 0.50" in html and "reference response</h4>" not in html
