"""Reports of small run folders that the tests write: reading, grouping, means, tables, figures, page."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlhf.core.errors import UserError
from rlhf.report import figures, tables
from rlhf.report.__main__ import main
from rlhf.report.figures import POINTS, curve, lines
from rlhf.report.runs import METRICS, find_runs, read_run
from rlhf.report.tables import results, samples, sections
from rlhf.training.recorder import PHASES

PROMPT = "TITLE: one\n\nTL;DR:"


def write_run(
    folder: Path,
    updates: int = 4,
    finished: bool = True,
    completions: tuple = (),
    evaluation: dict | None = None,
    training: dict | None = None,
    **settings,
) -> Path:
    """Write a run of 4 updates with evaluations at 0, 2 and 4; the win rate at update u is `won * u`.

    Args:
        folder: the run folder.
        updates: number of rows of training.
        finished: whether the run is finished.
        completions: rows of completions.jsonl.
        evaluation: values of the evaluation rows, in place of win rate and KL.
        training: more values of the training rows.
        settings: `won`, and keys of the config.
    """
    settings = {"seed": 1, "algo.name": "dpo", "schedule.max_lag": 0, **settings}
    config = OmegaConf.create(
        {"task": {"name": "tldr_mini"}, "cache_dir": "made/artefacts", "output_dir": "made"}
    )
    won = settings.pop("won", 0.1)
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    folder.mkdir(parents=True)
    OmegaConf.save(config, folder / "config.yaml")
    (folder / "environment.json").write_text(
        json.dumps({"command": ["train.py", "-m", "x=[1, 2]"], "git": {"commit": "c" * 40, "changed": True}})
    )
    rows = []
    for update in range(updates + 1):
        place = {"update": update, "episode": 8 * update}
        if update:
            times = {"time/update_s": 2.0, "time/train_s": 1.5, "time/wait_s": 0.5}
            scores = {"lag": 0, "lr": 0.1, "objective/scores": float(update)}
            rows.append({**place, **scores, **times, **(training or {})})
        if update % 2 == 0:
            rows.append({**place, **(evaluation or {"eval/win_rate": won * update, "eval/kl": 0.5 * update})})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions))
    state = {"num_updates": 4, "update": updates, "episode": 8 * updates, "finished": finished}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def read(*folders):
    """Return the sections of a report of `folders`."""
    return sections(find_runs([str(folder) for folder in folders]).runs)


def grouped(*folders):
    """Return the groups of a report of `folders`, whose runs are of one kind and task."""
    (section,) = read(*folders)
    return section.groups


def test_runs_that_differ_only_in_the_seed_are_one_group_labelled_by_its_settings(tmp_path):
    for seed in (2, 1):
        beta = {"algo.beta": 0.1, "optim.lr": 1e-3, "schedule.prompts_per_update": 64}
        write_run(tmp_path / f"a{seed}", seed=seed, **beta)
        write_run(tmp_path / f"b{seed}", seed=seed, **{**beta, "algo.beta": 0.05})
        other = {"algo.name": "rloo", "optim.lr": 1e-4, "schedule.prompts_per_update": 32}
        write_run(tmp_path / f"c{seed}", seed=seed, **other)
    groups = grouped(tmp_path)
    assert [group.label for group in groups] == ["algo=dpo beta=0.1", "algo=dpo beta=0.05", "algo=rloo"]
    assert [[run.seed for run in group.runs] for group in groups] == [[1, 2]] * 3


def test_groups_differ_in_settings_that_change_times_but_not_in_logging_and_saving(tmp_path):
    write_run(tmp_path / "a", **{"progress": "off", "schedule.save_every": 1, "logger.wandb": None})
    write_run(
        tmp_path / "b", **{"progress": "live", "schedule.save_every": 2, "logger.wandb.mode": "offline"}
    )
    assert [group.label for group in grouped(tmp_path)] == ["algo=dpo"]
    write_run(tmp_path / "c", **{"generator.annotate": False})
    write_run(tmp_path / "d", **{"generator.annotate": True})
    labels = [group.label for group in grouped(tmp_path / "c", tmp_path / "d")]
    assert labels == ["annotate=false", "annotate=true"]


def test_means_and_ranges_are_over_seeds_by_update(tmp_path):
    write_run(tmp_path / "a", seed=1, won=0.1)
    write_run(tmp_path / "b", seed=2, won=0.2)
    (group,) = grouped(tmp_path)
    last = curve(group.finished, "eval/kl", METRICS["eval/win_rate"]).iloc[-1]
    assert (last.x, last.y, last.low, last.high) == pytest.approx((2.0, 0.6, 0.4, 0.8))
    assert len(curve(group.finished, "episode", METRICS["objective/scores"])) == 4
    table = results(read(tmp_path)[0])
    (_, cells), *_ = table.rows
    shown = dict(zip(table.columns, map(str, cells), strict=True))
    assert shown["win rate"] == "0.000 → 0.600 (0.400 to 0.800)"
    assert shown["time"] == "8.0 s" and shown["episodes/s"] == "4.0"  # 4 updates of 2 s; 32 episodes


def test_wall_clock_is_the_sum_of_update_times_and_is_interpolated_between_rows(tmp_path):
    run = find_runs([str(write_run(tmp_path / "a"))]).runs[0]
    assert list(curve([run], "seconds", METRICS["eval/win_rate"]).x) == [0.0, 4.0, 8.0]
    second = next(row for row in run.trained if row["update"] == 2)
    rows = [{"update": 1, "eval/kl": 0.1}, {**second, "time/update_s": 6.0}]
    assert list(replace(run, rows=rows).frame["seconds"]) == pytest.approx([3.0, 6.0])


def test_the_mean_of_a_group_is_over_the_runs_that_have_the_metric(tmp_path):
    for seed, accuracy in ((1, 0.5), (2, 0.75), (3, None)):
        evaluation = {"eval/score": float(seed)} | ({} if accuracy is None else {"eval/accuracy": accuracy})
        write_run(tmp_path / f"a{seed}", seed=seed, evaluation=evaluation)
    (section,) = read(tmp_path)
    (group,) = section.groups
    assert group.value(METRICS["eval/accuracy"]) == 0.625 and group.value(METRICS["eval/score"]) == 2
    assert group.value(METRICS["eval/loss"]) is None
    found = results(section)
    cell = dict(zip(found.columns, found.rows[0][1], strict=True))["accuracy"]
    assert str(cell) == "0.625 → 0.625 (0.500 to 0.750)"


ANSWERS = {"eval/win_rate": 0.0, "eval/win_rate_vs_initial": 0.7, "eval/accuracy": 0.6}


def test_the_accuracy_of_answers_is_the_result_of_a_run_and_no_win_rate_is_shown(tmp_path):
    write_run(tmp_path / "a", evaluation={**ANSWERS, "eval/gold_score": 0.6, "eval/kl": 1.0})
    (section,) = read(tmp_path)
    assert section.main.name == "eval/accuracy" and results(section).columns[0] == "accuracy"
    made, _ = figures.charts(section)
    texts = " ".join(f"{chart.title} {chart.caption}" for chart in made).lower()
    assert "accuracy vs. kl" in texts and "win rate" not in texts
    assert read_run(tmp_path / "a").last("eval/win_rate") == 0, "studies keep all metrics"


def test_the_win_rate_stays_the_result_of_offline_training_with_an_accuracy_of_pairs(tmp_path):
    pairs = {**ANSWERS, "eval/gold_score": 3.0, "eval/margin": 0.1}
    write_run(tmp_path / "a", evaluation=pairs, **{"generator.name": "dataset"})
    (section,) = read(tmp_path)
    assert section.main.name == "eval/win_rate"


def test_a_long_curve_is_thinned_to_means_of_neighbours(tmp_path):
    run = find_runs([str(write_run(tmp_path / "a"))]).runs[0]
    run = replace(run, rows=[{"update": i, "lr": float(i)} for i in range(10 * POINTS)])
    points = curve([run], "update", METRICS["lr"])
    assert len(points) == POINTS and points.y.iloc[0] == points.x.iloc[0] == 4.5


def test_an_unfinished_run_is_marked_as_unfinished_and_excluded_from_means(tmp_path):
    write_run(tmp_path / "a", seed=1, won=0.1)
    write_run(tmp_path / "b", seed=2, won=9.0, updates=2, finished=False)
    (group,) = grouped(tmp_path)
    assert group.seeds == "1; seed 2 unfinished, update 2 of 4"
    (_, cells), *_ = results(read(tmp_path)[0]).rows
    assert cells[0].after == pytest.approx(0.4) and cells[0].spread == ""
    drawn = list(lines(group, "episode", METRICS["eval/win_rate"]))
    assert [finished for _, finished in drawn] == [True, False]


@pytest.mark.parametrize(
    ("file", "content", "progress"),
    [
        ("failed_batch.json", {"update": 2}, "failed, update 2 of 4"),
        ("failed_batch.json", {"update": 1}, "unfinished, update 2 of 4"),  # it passed the failed update
        ("trainer_state.json", {"num_updates": 4, "update": 2, "stopped": "pruned"}, "pruned, update 2 of 4"),
        ("trainer_state.json", {"num_updates": 4, "update": 2}, "unfinished, update 2 of 4"),
        ("metrics.jsonl", None, "unfinished, no metrics"),
    ],
)
def test_the_files_of_a_run_show_its_progress_on_the_page(tmp_path, file, content, progress):
    folder = write_run(tmp_path / "a", updates=2, finished=False)
    (folder / file).write_text("" if content is None else json.dumps(content))
    write_run(tmp_path / "b", seed=2)
    (run, _) = find_runs([str(tmp_path)]).runs
    assert run.progress == progress
    main([str(tmp_path), "--out", str(tmp_path / "report")])
    html = (tmp_path / "report" / "index.html").read_text()
    assert f"2 runs (1 {progress.partition(',')[0]}, 1 finished)" in html and progress in html
    assert ("No metrics yet: a (see Runs)." in html) == (content is None)


def test_stages_and_runs_moved_aside_are_skipped_unless_they_are_named(tmp_path):
    made = tmp_path / "made"
    kept = write_run(made / "run")
    stage = write_run(made / "artefacts" / "sft", **{"algo.name": "sft"})
    aside = write_run(made / "run.old-1")
    found = find_runs([str(made)])
    assert [run.folder for run in found.runs] == [kept]
    assert [text.rpartition(" (")[2] for text in found.left_out] == [
        "a stage of other runs)",
        "moved aside by resume=never)",
    ]
    assert [run.folder for run in find_runs([str(stage.parent), str(aside)]).runs] == [stage, aside]


def test_a_pattern_reads_each_run_once_and_skips_other_files_and_folders(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "multirun.yaml").touch()
    own = tmp_path / "report"
    own.mkdir()
    found = find_runs([str(tmp_path / "*"), str(folders[0])], own=own)
    assert [run.folder for run in found.runs] == folders
    assert len(found.left_out) == 2


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["no", "folder", "file"])
def test_a_folder_that_is_no_run_is_an_error_with_exit_code_2(tmp_path, capsys, make):
    make(path := tmp_path / "x")
    with pytest.raises(SystemExit, match="2"):
        main([str(path)])
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path} must be a run folder") and said.count("\n") == 1


DAMAGE = [  # file, content, reason
    ("config.yaml", "", "the file is empty"),
    ("config.yaml", "algo:\n  name: dpo\n: : [\n", ", line 3: not a config of a run"),
    ("config.yaml", "algo: {name: dpo}\n", "no key seed"),
    ("config.yaml", "{seed: x, algo: {name: d}, task: {name: t}}\n", "seed is 'x', not a whole number"),
    ("metrics.jsonl", '{"update": 1}\n\x00garbage\n', ", line 2: not a row with update"),
    ("metrics.jsonl", "3\n", ", line 1: not a row with update"),
    ("metrics.jsonl", '{"update": "x"}\n', ", line 1: update is 'x', not a number"),
    ("trainer_state.json", "{", "not valid JSON"),
    ("trainer_state.json", '{"episode": "many"}', 'episode is "many", not a number'),
    ("trainer_state.json", '{"lost_rows": [1]}', "lost_rows is [1], not a list of file names"),
    ("environment.json", '{"command": ["train.py", 1]}', "command is not a list of texts"),
    ("environment.json", '{"git": {"commit": "0"}}', "git is not an object with a commit and with changed"),
    ("failed_batch.json", "{}", "update is not a number"),
    ("environment.json", None, "No such file or directory"),
]


@pytest.mark.parametrize(("name", "content", "reason"), DAMAGE)
def test_a_damaged_run_is_listed_with_the_reason_and_other_runs_are_read(tmp_path, name, content, reason):
    kept, damaged = write_run(tmp_path / "a"), write_run(tmp_path / "b", finished=False)
    (damaged / name).unlink(missing_ok=True)
    if content is not None:
        (damaged / name).write_text(content)
    reason = f"{name}{reason}" if reason.startswith(",") else f"{name}: {reason}"
    found = find_runs([str(tmp_path)])
    assert [run.folder for run in found.runs] == [kept] and found.broken == {damaged: reason}
    assert tables.remarks(sections(found.runs), found) == [f"Damaged run folders, not shown: b ({reason})."]
    with pytest.raises(UserError, match="b must contain undamaged files .* got: " + re.escape(reason)):
        find_runs([str(damaged)])


def test_an_incomplete_last_line_is_skipped(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"update": 1}\n{"upd')  # as in a running or killed run
    assert len(find_runs([str(folder)]).runs[0].rows) == 1


def test_an_output_folder_that_cannot_be_written_is_an_error_with_exit_code_2(tmp_path, capsys):
    folder, file = write_run(tmp_path / "a"), tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--out", str(file)])
    assert "--out must be a folder that can be written " in capsys.readouterr().err


def test_without_matplotlib_the_error_names_the_extra_and_the_table_still_works(
    tmp_path, monkeypatch, capsys
):
    folder = write_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--out", str(tmp_path / "report")])
    assert "pip install -e '.[report]'" in capsys.readouterr().err
    other = write_run(tmp_path / "b", **{"schedule.max_lag": 1})
    main([str(folder), str(other), "--markdown"])
    head, rule, *rows = (line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert head.count("|") == rule.count("|") == rows[0].count("|")
    assert rows[0].startswith("| `max_lag=0` | 1 | 0.000 → 0.400 |") and len(rows) == 2


def answer(update, prompt, response, gold):
    judged = {"score": 0.5, "gold_score": gold, "reference_gold_score": 1.0}
    return {"update": update, "prompt": prompt, "response": response, "reference": "the reference", **judged}


def test_completions_come_from_the_last_evaluation_of_the_lowest_seed(tmp_path):
    def texts(name):
        return (
            answer(0, PROMPT, "before", 0.0),
            answer(4, "A, by " + name, "x", 0.0),
            answer(4, PROMPT, name, 2.0),
        )

    write_run(tmp_path / "a2", seed=2, completions=texts("dpo 2"))
    write_run(tmp_path / "a1", seed=1, completions=texts("dpo 1"))
    write_run(tmp_path / "b1", completions=texts("rloo"), **{"algo.name": "rloo"})
    (sample,), _ = samples(read(tmp_path)[0], 1)
    assert sample.prompt == PROMPT, "the prompt that both have answered comes first"
    assert [each.row["response"] for each in sample.answers] == ["dpo 1", "rloo"]
    assert sample.before["response"] == "before"


def test_the_page_loads_no_external_resources_and_escapes_text(tmp_path):
    bad = "<script>alert(1) $x_1$ &amp;"
    write_run(tmp_path / "a", completions=(answer(4, bad, bad, 2.0),), **{"model.name": bad})
    write_run(tmp_path / "b", **{"model.name": "other"})
    out = tmp_path / "report"
    main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)])
    html = (out / "index.html").read_text()
    assert html.count("<script>") == 1 and html.count("&lt;script&gt;alert(1) $x_1$ &amp;amp;") > 3
    assert "default-src 'none'" in html
    loads = [word for word in ("src=", "@import", "<link", "url(http", 'href="http') if word in html]
    assert loads == []
    assert "python -m rlhf.train -m &#39;x=[1, 2]&#39;" in html and "cccccccccc + changes" in html
    assert " · seed 1 · update 4</h4>" in html
    for name in ("win_rate_against_kl", "learning_curves", "win_rate_against_time", "time_per_phase"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
        assert f'<section id="{name}">' in html


def test_tasks_have_separate_sections_and_a_group_has_the_same_colour_in_all_figures(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", **{"task.name": "arithmetic"})
    first, second = read(tmp_path)
    assert [(group.index, group.place) for each in (first, second) for group in each.groups] == [
        (0, 0),
        (1, 0),
    ]
    for section, ours, theirs in ((first, 0, 1), (second, 1, 0)):
        for chart in figures.charts(section)[0]:
            svg = "".join(chart.svg())
            assert f'class="series series-{theirs}"' not in svg
            if chart.name != "time_per_phase":  # its colours are those of the phases
                assert f'class="series series-{ours}"' in svg and "var(--series-0)" in svg


def test_the_phases_of_the_figure_match_the_phases_of_an_update():
    assert tuple(figures.PHASES) == PHASES


@pytest.mark.process
def test_a_report_imports_no_torch(tmp_path):
    import subprocess

    folder, out = write_run(tmp_path / "a"), tmp_path / "report"
    code = (
        f"import sys; from rlhf.report.__main__ import main; main([{str(folder)!r}, '--out', {str(out)!r}])"
    )
    check = "; assert 'torch' not in sys.modules and 'matplotlib' in sys.modules"
    subprocess.run([sys.executable, "-c", code + check], check=True, env=os.environ, capture_output=True)


def test_lost_rows_are_named_in_a_remark(tmp_path):
    lost, cut, kept = (write_run(tmp_path / name) for name in ("lost", "cut", "kept"))
    state = json.loads((lost / "trainer_state.json").read_text())
    (lost / "trainer_state.json").write_text(json.dumps({**state, "lost_rows": ["metrics.jsonl"]}))
    rows = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(rows[:3]))
    found = find_runs([str(tmp_path)])
    assert {run.folder: run.lost for run in found.runs} == {
        lost: "rows of metrics.jsonl from before a resume",
        cut: "rows of metrics.jsonl after update 2 of 4",
        kept: None,
    }
    (note,) = [note for note in tables.remarks(sections(found.runs), found) if "lost:" in note]
    assert note.startswith("Rows are lost: cut (rows of metrics.jsonl after update 2 of 4), lost (rows of")
