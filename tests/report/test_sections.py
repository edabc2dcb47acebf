"""Sections of a report: kinds of runs, labels, scales, lines of a figure, sentences, tables, legends."""

import warnings
from datetime import datetime

import pytest
from rich.console import Console

from rlhf.report import figures
from rlhf.report.__main__ import main
from rlhf.report.drawing import HEIGHT, SERIES, STYLE, WIDTH, Chart, Key, Panel, axes_at, lines
from rlhf.report.figures import charts, panels_of, times_of
from rlhf.report.groups import LINES, LONGEST_LABEL, differing, labels
from rlhf.report.runs import METRICS, duration, find_runs, number
from rlhf.report.tables import TERMINAL_ROWS, for_terminal, not_drawn, remarks, result, results, settings
from tests.report.test_report import read, write_run

SFT = {"algo.name": "sft", "generator.name": "dataset"}
REWARD = {"algo.name": "reward", "generator.name": "dataset"}
OFFLINE = {"algo.name": "dpo", "generator.name": "dataset"}


def config(**keys):
    return {"task.name": "t", **{key.replace("__", "."): value for key, value in keys.items()}}


def curves(section, name):
    """Return the groups of each panel that shows the metric `name` over updates, by drawing the panels."""
    from matplotlib.figure import Figure

    panels, _ = panels_of(section.drawn, METRICS[name], "update", "updates")
    shown = []
    for panel in panels:
        axes = Figure().subplots()
        panel.draw(axes)
        shown.append({line.get_gid() for line in axes.lines})
    return shown


# -- kinds, data sets, labels ------------------------------------------------------------------------------


def test_each_kind_of_run_has_a_section_and_runs_of_other_data_have_another(tmp_path):
    write_run(tmp_path / "a", **SFT)
    write_run(tmp_path / "b", **REWARD)
    write_run(tmp_path / "c", **OFFLINE)
    write_run(tmp_path / "d")
    write_run(tmp_path / "e", **{"task.path": "/data/mine/prompts.jsonl"})
    assert [(section.title, section.name) for section in read(tmp_path)] == [
        ("RL on tldr_mini", "rl_tldr_mini"),
        ("RL on tldr_mini (prompts.jsonl)", "rl_tldr_mini_prompts.jsonl"),
        ("Offline training of the policy on tldr_mini", "offline_tldr_mini"),
        ("Reward model on tldr_mini", "reward_tldr_mini"),
        ("SFT on tldr_mini", "sft_tldr_mini"),
    ]


def test_data_in_folders_of_the_same_name_have_their_own_sections(tmp_path):
    for name in ("mine", "yours"):
        write_run(tmp_path / name, **{"task.path": f"/data/{name}/pairs"})
    assert [section.data for section in read(tmp_path)] == [
        "tldr_mini (mine/pairs)",
        "tldr_mini (yours/pairs)",
    ]


def test_a_label_names_the_key_of_each_value_and_the_algorithm_first():
    made = labels(
        [
            config(algo__name="dpo", optim__lr=1e-3, schedule__max_lag=0),
            config(algo__name="dpo", optim__lr=1e-4, schedule__max_lag=0),
            config(algo__name="rloo", optim__lr=3e-4, schedule__max_lag=0),
        ]
    )
    assert made == ["algo=dpo lr=0.001", "algo=dpo lr=0.0001", "algo=rloo lr=0.0003"]


def test_a_run_of_an_earlier_version_without_a_key_does_not_differ_from_a_run_with_its_default():
    earlier, new = config(algo__name="dpo"), config(algo__name="dpo", schedule__replay=1)
    assert differing([earlier, new]) == []
    assert differing([earlier, config(algo__name="dpo", schedule__replay=2)]) == ["schedule.replay"]


def test_settings_that_need_more_than_three_pairs_are_numbered():
    keys = ("algo__beta", "optim__lr", "optim__eps", "eval__prompts")
    configs = [
        config(algo__name="dpo", **{key: i >> place & 1 for place, key in enumerate(keys)}) for i in range(16)
    ]
    assert labels(configs) == [f"run {place}" for place in range(1, 17)]
    assert labels(configs[:8])[0] == "beta=0 lr=0 eps=0"


def test_long_values_are_not_part_of_a_label():
    configs = [config(algo__name="dpo", stages__sft=["x" * 40, i]) for i in range(2)]
    assert labels(configs) == ["run 1", "run 2"]
    assert max(map(len, labels([config(algo__name="x" * 28, model__name="y" * 28)] * 1))) <= LONGEST_LABEL


def test_a_label_has_no_folders_of_a_path_unless_they_distinguish():
    paths = ("/models/small", "/models/large")
    assert labels([config(algo__name="dpo", model__policy=path) for path in paths]) == [
        "policy=small",
        "policy=large",
    ]
    paths = ("outputs/a/model", "outputs/b/model")
    assert labels([config(algo__name="dpo", model__policy=path) for path in paths]) == [
        "policy=a/model",
        "policy=b/model",
    ]


@pytest.mark.parametrize("seconds", [0.2, 0.00025, 20.0])
def test_the_label_of_a_tick_at_the_right_edge_is_inside_of_the_panel(tmp_path, seconds):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    took = seconds / 1.14  # with the margin of the figure, its axis ends at `seconds`
    write_run(tmp_path / "a", training={"time/update_s": took, "time/train_s": took, "time/wait_s": 0.0})
    made = figures.time_per_phase(read(tmp_path)[0])
    (panel,) = made.panels
    with rc_context(STYLE):
        drawing = Figure(figsize=(WIDTH, panel.height))
        axes = axes_at(drawing, 0.0, 0.0, panel.height)
        panel.draw(axes)
        drawing.draw_without_rendering()
    assert axes.get_xlim()[1] == pytest.approx(seconds)
    last = (
        axes.get_xticklabels()[-1]
        if axes.get_xticks()[-1] <= 1.0001 * seconds
        else axes.get_xticklabels()[-2]
    )
    assert last.get_text() == f"{seconds:g}"
    assert last.get_window_extent().x1 <= drawing.bbox.x1


# -- scales and lines --------------------------------------------------------------------------------------


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


def test_the_best_setting_of_each_judge_is_drawn(tmp_path):
    for place in range(10):
        write_run(tmp_path / f"a{place}", won=0.01 * place, **{"optim.lr": place, "gold.name": "strict"})
    write_run(tmp_path / "b", won=0.0, **{"optim.lr": 0, "gold.name": "mild"})
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


# -- legend ------------------------------------------------------------------------------------------------


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


# -- sentences and tables ----------------------------------------------------------------------------------


def test_the_first_sentence_states_change_range_kl_and_time(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", seed=seed, won=0.1 * seed)
    assert result(read(tmp_path)[0]) == (
        "Win rate vs. reference responses from 0.000 to 0.600 (2 seeds: 0.400 to 0.800), KL 2.00, "
        "8.0 s of training."
    )
    write_run(tmp_path / "b", won=0.01, **{"optim.lr": 1e-4})
    assert result(read(tmp_path)[0]).endswith("worst setting 0.040.")


def test_a_lower_loss_is_better(tmp_path):
    for lr, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        write_run(tmp_path / f"a{lr}", evaluation={"eval/loss": loss}, **SFT, **{"optim.lr": lr})
    (section,) = read(tmp_path)
    assert [group.label for group in section.groups] == ["lr=2", "lr=1", "lr=3"]
    assert result(section).startswith("Best of 3 settings: lr=2, held-out loss (nats) from 1.000 to 1.000")
    assert result(section).endswith("worst setting 3.000.")


def test_a_run_with_one_evaluation_has_no_change_and_no_curve(tmp_path):
    write_run(tmp_path / "a", updates=1, finished=False, evaluation={"eval/score": -0.13, "eval/kl": 0.0})
    (section,) = read(tmp_path)
    assert result(section).startswith("Reward on held-out prompts -0.13, KL 0.00")
    assert str(results(section).rows[0][1][0]) == "-0.13"
    drawn, remarks = figures.charts(section)
    assert not {"win_rate_against_kl", "win_rate_against_time", "learning_curves"} & {c.name for c in drawn}
    assert any(text.startswith("eval/score (a single value: ") and "-0.13" in text for text in remarks)


def test_equal_settings_tie_and_none_of_them_is_the_best(tmp_path):
    for lr, score in ((1, 0.375), (2, 0.375), (3, 0.1)):
        write_run(tmp_path / f"a{lr}", evaluation={"eval/score": score}, **{"optim.lr": lr})
    (section,) = read(tmp_path / "a1", tmp_path / "a2")
    assert result(section).startswith("2 of 2 settings tie: lr=1, lr=2, ") and "worst" not in result(section)
    (section,) = read(tmp_path)
    assert result(section).startswith("2 of 3 settings tie: lr=1, lr=2, ")
    assert result(section).endswith("worst setting 0.10.")


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


def test_each_scorer_has_its_own_result(tmp_path):
    for name in ("function", "http"):
        evaluation = {"eval/score": 1.0, "eval/kl": 0.1}
        write_run(tmp_path / name, evaluation=evaluation, **{"scorer.name": name})
    assert result(read(tmp_path)[0]) == (
        "scorer=function: Reward on held-out prompts from 1.00 to 1.00, KL 0.10, 8.0 s of training. "
        "scorer=http: Reward on held-out prompts from 1.00 to 1.00, KL 0.10, 8.0 s of training."
    )


def test_without_evaluations_the_training_reward_is_the_result(tmp_path):
    folder = write_run(tmp_path / "a")
    rows = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "eval/" not in line]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert result(read(folder)[0]) == (
        "Training reward from 1.00 to 4.00, 8.0 s of training. There are no evaluations on held-out data."
    )


def test_numbers_have_no_negative_zero_and_durations_have_the_fitting_unit():
    assert [number(-1e-9, 3), number(-0.1, 1), number(1234.5, 0)] == ["0.000", "-0.1", "1,234"]
    assert list(map(duration, (9.94, 43, 600, 7500))) == ["9.9 s", "43 s", "10 min", "2 h 5 min"]


def test_settings_are_those_in_which_runs_differ_and_the_usual_ones_that_they_share(tmp_path):
    common = {"optim.lr": 0.001, "model.policy": "/models/smol", "clock.name": "virtual"}
    write_run(tmp_path / "a", **common, **{"algo.beta": 0.1, "eval.prompts": 8, "algo.name": "dpo"})
    write_run(tmp_path / "b", **common, **{"algo.vf_coef": 1, "eval.prompts": 9, "algo.name": "ppo"})
    found = settings(read(tmp_path)[0])
    assert found.shared == ["policy=smol", "lr=0.001", "clock=virtual"]
    assert found.headings == [
        "algo",
        "beta",
        "prompts",
    ]  # vf_coef has one value, and follows from the algorithm
    assert [row for _, row in found.rows] == [["dpo", "0.1", "8"], ["ppo", None, "9"]]


def test_a_run_of_an_own_model_is_shown_with_the_name_of_that_model(tmp_path):
    write_run(tmp_path / "a", **{"model.name": "pythia", "model.policy": "models/smol"})
    write_run(tmp_path / "b", seed=2, **{"model.name": "pythia", "model.policy": None})
    labels = {run.config["seed"]: run.config["model.name"] for run in find_runs([str(tmp_path)]).runs}
    assert labels == {1: "smol", 2: "pythia"}


def test_settings_that_the_labels_contain_are_not_repeated(tmp_path):
    for beta in (0.1, 0.5):
        write_run(tmp_path / f"{beta}", **{"algo.beta": beta})
    assert settings(read(tmp_path)[0]).keys == []


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


# -- page --------------------------------------------------------------------------------------------------


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


def test_a_run_without_metrics_and_damaged_runs_are_in_the_table_of_runs(tmp_path):
    write_run(tmp_path / "runs" / "a")
    empty, damaged = write_run(tmp_path / "runs" / "b", finished=False), write_run(tmp_path / "runs" / "c")
    (empty / "metrics.jsonl").write_text("")
    (damaged / "metrics.jsonl").write_text("garbage\n")
    html = page(tmp_path).partition('<section id="runs">')[2]
    assert "unfinished, no metrics" in html
    assert "damaged</span>: metrics.jsonl, line 1: not valid JSON" in html and "<code>c</code>" in html


def test_damaged_completions_are_reported_and_prompts_without_reference_are_shown(tmp_path):
    answer = {"update": 4, "prompt": "Why?", "response": "Because.", "score": 0.5}
    write_run(tmp_path / "runs" / "a", completions=(answer,), **{"optim.lr": 1})
    other = write_run(tmp_path / "runs" / "b", **{"optim.lr": 2})
    (other / "completions.jsonl").write_text("[]\n")
    html = page(tmp_path)
    assert "The completions of b are not shown (completions.jsonl, line 1: not a row with " in html
    assert "Because." in html and "reward 0.50" in html and "reference response</h4>" not in html
