"""Tests of the benchmark against TRL: the work of both sides, the order of runs, and the result tables."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.against_trl import bench, meter
from benchmarks.against_trl.materials import make, new_tokenizer, texts
from benchmarks.against_trl.meter import PHASES, Meter
from benchmarks.against_trl.ours import overrides
from benchmarks.against_trl.roofline import decoding_gb
from benchmarks.against_trl.table import described, figures, origin, pairs, results, sheets
from benchmarks.against_trl.work import LENGTHS, SAMPLES, SHAPES, Case, cases
from rlhf.checks.check import problems
from rlhf.config.algorithms import ValueFrom
from rlhf.words.compose import compose

ROOT = Path(__file__).parents[2]
MACHINE = {"processor": "Abacus", "cores": 2, "memory_gib": 1.0, "platform": "Linux", "python": "3.11.7"}


def run(side: str, cpu_s: float, repeat: int = 0, algo: str = "rloo") -> dict:
    case = Case(work="tldr", model="14m", algo=algo, threads=1, warmup=1, measured=1)
    return {
        "case": asdict(case),
        "side": side,
        "repeat": repeat,
        "figures": measured(case, side, cpu_s),
        "took_s": 10 * cpu_s,
        "load": 0.1 * repeat,
        "machine": MACHINE,
        "git": {"commit": "0123456789", "changed": False},
        "command": "python -m benchmarks.against_trl.bench",
    }


def measured(case: Case, side: str, cpu_s: float) -> dict:
    trl = {"trl": "1.12.0" if case.algo == "ppo" else "1.16.0"} if side != "ours" else {}
    return {
        "cpu_s": cpu_s,
        "wall_s": cpu_s / 2,
        "phases": {phase: {"cpu_s": cpu_s / len(PHASES), "wall_s": cpu_s / 8} for phase in PHASES},
        "each": [{"cpu_s": cpu_s * x, "wall_s": cpu_s * x / 2} for x in (0.9, 1.1)],
        "stolen": 0.01 * cpu_s,
        "memory": {"above_mib": 100 * cpu_s},
        "counts": case.counts(),
        "versions": {"torch": "2.13.0", **trl},
    }


def test_trl_environments_differ_only_in_trl_and_use_the_libraries_of_this_project():
    ours, trl, ppo = (
        dict(line.split("==") for line in (ROOT / f"requirements/{lock}.txt").read_text().split())
        for lock in ("cpu", "bench", "bench-ppo")
    )
    assert (trl.pop("trl"), ppo.pop("trl")) == ("1.16.0", "1.12.0")
    assert trl == ppo
    for name in ("torch", "transformers", "tokenizers", "accelerate", "datasets"):
        assert trl[name] == ours[name]


def test_gpu_cases_do_the_same_work_in_bfloat16_and_report_no_cpu_seconds():
    parts = ["tldr-410m"]
    (case,) = cases(parts, ["dpo"], [8], gpu=True)
    assert case.name == "tldr-410m-dpo-gpu"
    (on_cpu,) = (replace(each, measured=case.measured) for each in cases(["tldr-14m"], ["dpo"], [8]))
    assert case.counts() == on_cpu.counts()
    assert {"backend.device=cuda", "model.dtype=bfloat16"} <= set(overrides(case, Path("materials")))
    assert decoding_gb(case) == pytest.approx(
        2 * 52 * (24 * 12 * 1024**2 + 50304 * 1024) / 1e9  # weights
        + 2 * (52 * 32 * 256 + 64 * 52 * 53 / 2) * 2 * 24 * 1024 / 1e9,  # keys and values
    )
    runs = [{**run(side, s), "case": asdict(case)} for side, s in (("ours", 1.0), ("trl", 3.0))]
    found = list(sheets(runs))
    assert not any("CPU" in word for sheet in found for word in (sheet.title, *sheet.columns))
    own = ["episodes/s", "tokens/s", "memory", *PHASES]
    assert found[0].columns == ["case", "runs", *own]
    assert found[0].rows == [["`tldr-410m-dpo-gpu`", "1", *["3.00"] * len(own)]]


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """Return a function that runs the benchmark without real work.

    Each measurement reports one CPU-second. The function returns the runs and the order of the measurements.
    """
    order: list[tuple[str, str]] = []

    def measure(case, side, *_):
        order.append((case.name, side))
        return measured(case, side, 1.0)

    def go(*words: str) -> tuple[list[dict], list[tuple[str, str]]]:
        order.clear()
        out = tmp_path / "runs.jsonl"
        monkeypatch.setattr("sys.argv", ["bench", "--out", str(out), "--part", "short-nano", *words])
        bench.main()
        return [json.loads(line) for line in out.read_text().splitlines()], list(order)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "make_materials", lambda *_: None)
    monkeypatch.setattr(bench, "python", lambda *_: Path(sys.executable))
    return go


def test_each_case_runs_once_before_any_case_is_repeated_and_sides_alternate(benchmark):
    _, order = benchmark("--algo", "dpo", "ppo", "--threads", "1", "--repeats", "2")
    dpo, ppo = "short-nano-dpo-1", "short-nano-ppo-1"
    assert order[:4] == [(dpo, "ours"), (dpo, "trl"), (ppo, "ours"), (ppo, "trl")]
    assert order[4:] == [(dpo, "trl"), (dpo, "ours"), (ppo, "trl"), (ppo, "ours")]


def test_measuring_a_side_again_replaces_only_the_runs_of_that_side(benchmark, tmp_path):
    benchmark("--algo", "dpo", "ppo", "--threads", "1", "--repeats", "2")
    runs, _ = benchmark("--algo", "ppo", "--threads", "1", "--side", "ours", "--repeats", "1")
    found = [(run["case"]["algo"], run["side"]) for run in runs]
    dpo, ppo = ("ours", "ours", "trl", "trl"), ("ours", "trl", "trl")
    assert sorted(found) == [*(("dpo", side) for side in dpo), *(("ppo", side) for side in ppo)]
    assert {"git", "load"} <= runs[0].keys() and runs[0]["machine"]["cores"] > 0
    assert "--algo ppo" in runs[-1]["command"]
    assert json.loads((tmp_path / "runs.json").read_text()) == results(runs)


def test_an_interrupted_benchmark_resumes_with_the_missing_runs(benchmark, tmp_path):
    words = ("--algo", "dpo", "--threads", "1", "2", "--repeats", "2")
    whole, order = benchmark(*words)
    done = whole[:3]  # both sides of the first case, `ours` of the second case
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in done))
    runs, after = benchmark(*words, "--resume")
    assert after == order[3:] and runs[:3] == done
    assert [run["repeat"] for run in runs] == [run["repeat"] for run in whole]
    assert benchmark(*words, "--resume") == (runs, [])
    whole[2]["figures"]["stolen"] = 0.4  # a disturbed run is repeated
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in whole))
    runs, after = benchmark(*words, "--resume")
    assert after == order[2:3] and runs[:-1] == [each for each in whole if each is not whole[2]]
    assert runs[-1]["figures"]["stolen"] == 0.01


def test_a_case_that_would_exceed_the_time_limit_is_skipped_and_keeps_its_runs(benchmark, tmp_path, capsys):
    runs, _ = benchmark("--algo", "dpo", "--threads", "1", "2", "--repeats", "1")
    for each in runs:
        each["took_s"] = 100.0 if each["case"]["threads"] == 1 else 10.0
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in runs))
    runs, order = benchmark("--algo", "dpo", "--threads", "1", "2", "--repeats", "1", "--minutes", "1")
    assert [name for name, _ in order] == ["short-nano-dpo-2"] * 2
    assert len(runs) == 4
    assert "short-nano-dpo-1: repeat 1 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stolen", "kept"), [([0.01], 0.01), ([0.4, 0.02], 0.02), ([0.4, 0.2, 0.3], 0.2)], ids=str
)
def test_a_disturbed_run_is_repeated_and_the_try_with_the_least_steal_time_is_kept(
    stolen, kept, benchmark, monkeypatch, capsys
):
    left = list(stolen)
    monkeypatch.setattr(
        bench, "measure", lambda case, side, *_: {**measured(case, side, 1.0), "stolen": left.pop(0)}
    )
    runs, _ = benchmark("--algo", "dpo", "--threads", "1", "--side", "ours", "--repeats", "1")
    assert left == [] and [each["figures"]["stolen"] for each in runs] == [kept]
    assert capsys.readouterr().out.count("disturbed: the host took 40%") == (len(stolen) > 1)


def test_steal_time_is_reported_as_a_share_of_the_time_that_cores_had_work(monkeypatch):
    clock = iter([(0.0, 0.0), (1.0, 1.0), (1.0, 1.0), (5.0, 5.0)])  # pairs of CPU-seconds and seconds
    taken = iter([10.0, 12.0, 13.0])  # seconds; two of them are in the warm-up
    monkeypatch.setattr(meter, "used", lambda: next(clock))
    monkeypatch.setattr(meter, "stolen_s", lambda: next(taken))
    side = Meter(warmup=1)
    side.begin()
    side.update_ended()
    side.update_ended()
    figures = side.figures()
    assert figures["cpu_s"] == 4 and figures["stolen"] == 1 / 5


def test_the_time_of_a_phase_excludes_nested_phases():
    side = Meter(warmup=1)
    side.begin()
    for _ in range(3):
        with side.charge("score"):
            sum(range(200_000))
            with side.charge("generate"):
                sum(range(2_000_000))
        side.counts["episodes"] += 64
        side.update_ended()
    figures = side.figures()
    assert figures["updates"] == 2 and figures["counts"] == {"episodes": 128}
    assert figures["phases"]["generate"]["cpu_s"] > 3 * figures["phases"]["score"]["cpu_s"] > 0


def test_ratios_compare_medians_and_their_bounds_extremes_and_are_above_1_if_this_project_is_better():
    runs = [run("ours", x, i) for i, x in enumerate((1.0, 2.0, 4.0))]
    runs += [run("trl", x, i) for i, x in enumerate((6.0, 8.0, 5.0))]
    (pair,) = pairs(runs)
    found = pair.ratio("cpu_s")
    assert (found.median, found.low, found.high) == (3.0, 5 / 4, 8.0)
    assert all(pair.ratio(name).median == pytest.approx(3.0) for name in pair.ours)
    assert pair.ours["episodes_per_cpu_s"].median == 32
    assert pair.ours["tokens_per_s"].median == 64 * 53 / 0.25
    costs = list(sheets(runs))[2].markdown()
    assert "| 3 | 2.00 (1.00–4.00) | 6.00 (5.00–8.00) | **3.00** (1.25–8.00) |" in costs


def test_the_fastest_update_of_each_side_is_compared_over_all_runs():
    runs = [run("ours", x) for x in (2.0, 4.0)] + [run("trl", x) for x in (8.0, 6.0)]
    (least,) = (sheet for sheet in sheets(runs) if "least" in sheet.title)
    assert least.columns == ["case", "least, ours", "least, TRL", "least, ratio"]
    assert least.rows == [["`tldr-14m-rloo-1`", "1.800", "5.400", "**3.00**"]]
    assert next(sheet for sheet in sheets(runs[:2]) if "least" in sheet.title).rows == []
    (pair,) = pairs(runs[:1])  # a side that was not measured leaves its cells empty
    assert (pair.compared("cpu_s", ".1f"), pair.repeats) == (["2.0", "", ""], "1, 0")


def test_tables_contain_every_figure_of_both_sides_with_their_ratio():
    ratios, *rest = sheets([run("ours", 1.0), run("trl", 2.0)])
    heads = [head for sheet in rest for head in sheet.columns]
    kinds = ["episodes/CPU-s", "episodes/s", "tokens/s", "CPU-s", "seconds", "MiB", *PHASES, *PHASES]
    assert [head for head in heads if head not in ("case", "runs") and "least" not in head] == [
        f"{kind}, {side}" for kind in kinds for side in ("ours", "TRL", "ratio")
    ]
    assert len(kinds) == len(figures(run("ours", 1.0)))
    own = ["episodes/CPU-s", "episodes/s", "tokens/s", "memory", *PHASES]
    assert ratios.columns == ["case", "runs", *own]
    assert ratios.rows == [["`tldr-14m-rloo-1`", "1", *["2.00"] * len(own)]]


def test_cases_are_sorted_by_work_and_algorithm_for_any_order_of_runs():
    runs = [
        {**run("ours", 1.0), "case": asdict(case)} for case in cases(list(LENGTHS), list(SAMPLES), [1, 2])
    ]
    assert [pair.case for pair in pairs(runs[5:] + runs[:5])] == [Case(**run["case"]).name for run in runs]


def test_trl_as_released_has_a_separate_row():
    runs = [run("ours", 1.0), run("trl", 3.0), run("trl-released", 2.0)]
    assert [pair.name for pair in pairs(runs)] == ["`tldr-14m-rloo-1`", "`tldr-14m-rloo-1`, as released"]
    case = results(runs)["cases"]["tldr-14m-rloo-1"]
    assert list(case["sides"]) == ["ours", "trl", "trl-released"]
    ratios = {rival: found["cpu_s"]["median"] for rival, found in case["ratios"].items()}
    assert ratios == {"trl": 3.0, "trl-released": 2.0}


def test_an_origin_names_machine_versions_commands_and_the_trl_version_of_ppo():
    runs = [run("ours", 1.0), run("trl", 3.0, 1), run("trl", 3.0, 2, algo="ppo")]
    assert described(origin(runs)) == (
        "Abacus, 2 cores, 1.0 GiB, Python 3.11.7; torch 2.13.0, trl 1.16.0, trl for ppo 1.12.0; "
        "commit 0123456; load before a run at most 0.2, steal at most 3% of a run; commands:\n"
        "\n    python -m benchmarks.against_trl.bench\n"
    )


def test_the_ppo_value_model_starts_from_the_reward_model_as_in_trl(tmp_path):
    (case,) = cases(["tldr-nano"], ["ppo"], [1])
    cfg = compose(overrides(case, tmp_path))
    assert cfg.value_starts_as is ValueFrom.reward
    assert cfg.value_reward == str(case.reward(tmp_path))


@pytest.mark.parametrize("algo", SAMPLES)
def test_a_case_gives_a_valid_config_and_prompts_of_its_lengths(algo, tmp_path):
    (case,) = cases(["tldr-nano"], [algo], [1])
    make(case, tmp_path)
    assert problems(compose(overrides(case, tmp_path))) == []
    tokenizer = AutoTokenizer.from_pretrained(case.policy(tmp_path))
    rows = [json.loads(line)["query"] for line in (case.data(tmp_path) / "train.jsonl").open()]
    lengths = sorted(len(ids) for ids in tokenizer(rows)["input_ids"])
    assert lengths == case.lengths
    assert case.samples * sum(lengths) == case.counts()["prompt_tokens"] / case.measured
    assert (lengths[0], lengths[-1]) == (128, 384)


def test_a_response_keeps_its_token_ids_after_decoding_and_encoding():
    tokenizer = new_tokenizer(SHAPES["nano"])
    text, ids = texts(*cases(["short-nano"], ["dpo"], [1]), SHAPES["nano"])[0], [17, 3, 371]
    whole = tokenizer(text + tokenizer.decode(ids))["input_ids"]
    assert whole == tokenizer(text)["input_ids"] + ids
