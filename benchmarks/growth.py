"""Measure how the CPU cost of an update grows with batch size, lengths and model size.

    python -m benchmarks.growth                             measure all axes: some minutes on one core
    python -m benchmarks.growth --axis samples response     measure some axes again, keep the others
    python -m benchmarks.growth --draw                      draw chart and table from earlier measurements

One size is varied at a time around `BASE`. An update is RLOO with a reference and a reward model of the
policy's shape, one optimizer step and one thread, as in benchmarks/against_trl. Each point runs in its own
process. Its value is the minimum over some updates, after a warm-up update, of the CPU-seconds (user and
system) of each phase.

For comparison the table gives the work of each phase, in multiply-adds (`work`). An exponent is a slope in
log-log. `FLAG` marks a phase whose exponent is higher than the exponent of its work. Fixed costs of small
updates reduce the exponents. Expected growth: linear in prompts and layers; slightly less than linear in
samples, because a prompt is encoded once; between linear and quadratic in lengths and width; linear in the
vocabulary, except for the reward model, which has no output head over it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from benchmarks.against_trl.meter import PHASES, Meter  # noqa: E402

FIGURES = Path(__file__).parents[1] / "docs/figures"
FLAG, TOLERANCE = "**", 0.15  # TOLERANCE: excess of an exponent over that of the work
UPDATES = 4  # measured updates, after one warm-up update


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The size of an update."""

    prompts: int = 8  # N
    samples: int = 4  # K
    prompt: int = 64  # tokens per prompt
    response: int = 32  # tokens per response; the models never sample the end token
    vocabulary: int = 4096  # tokens in the vocabulary
    hidden_size: int = 128  # head size 32
    layers: int = 4


BASE = Point()
AXES = {  # field of Point -> label, and values
    "prompts": ("prompts (N)", (4, 8, 16, 32, 64)),
    "samples": ("samples per prompt (K)", (2, 4, 8, 16, 32, 64, 128)),
    "prompt": ("tokens per prompt", (32, 64, 128, 256, 512)),
    "response": ("tokens per response", (16, 32, 64, 128, 256)),
    "vocabulary": ("vocabulary size", (1024, 4096, 16384, 65536)),
    "hidden_size": ("model width", (64, 128, 256, 512)),
    "layers": ("layers", (2, 4, 8, 16)),
}


def work(point: Point) -> dict[str, float]:
    """Return the multiply-adds of each phase.

    A prompt is encoded once for its K samples. Not counted: selection of tokens, norms and activations, which
    are linear in the number of tokens and in vocabulary or width.
    """
    N, K, P, T = point.prompts, point.samples, point.prompt, point.response
    d, V, L = point.hidden_size, point.vocabulary, point.layers
    weights = 12 * d * d * L  # per token: queries, keys, values, output, feed-forward layer of width 4 d

    def attention(queries: float, keys: float) -> float:
        return 2 * d * L * queries * keys

    prompts = N * (P * weights + attention(P, P))
    responses = N * K * (T * weights + attention(T, P + T))
    steps = N * K * (T * weights + attention(T, P + T / 2))
    head = N * K * T * d * V
    optimizer = 10 * (weights + 2 * d * V)  # AdamW: about 10 operations per parameter
    return {
        "generate": prompts + steps + head,
        "score": prompts + responses,
        "reference": prompts + responses + head,
        "train": 3 * (prompts + responses) + 4 * head + optimizer,  # the logits are computed twice
    }


# -- measuring ---------------------------------------------------------------------------------------


class Updates(Meter):
    """A meter that records the cumulative CPU-seconds of each phase after every update."""

    def __init__(self) -> None:
        super().__init__(warmup=1)
        self.totals: list[dict[str, float]] = []

    def update_ended(self) -> None:
        """Record the CPU-seconds so far, then continue as `Meter`."""
        super().update_ended()
        self.totals.append({phase: cpu for phase, (cpu, _) in self.spent.items()})

    def least(self) -> dict[str, float]:
        """Return the CPU-seconds of each phase, minimum over the measured updates."""
        steps = list(zip(self.totals, self.totals[1:], strict=False))  # the first entry: end of the warm-up
        return {phase: min(after[phase] - before[phase] for before, after in steps) for phase in PHASES}


def measure(point: Point) -> dict[str, float]:
    """Return the CPU-seconds of each phase. The process must not have measured another point before."""
    import torch

    from benchmarks.against_trl.ours import carry_out

    torch.set_num_threads(1)
    meter = Updates()
    with tempfile.TemporaryDirectory() as folder:
        make(point, Path(folder))
        carry_out(overrides(point, Path(folder)), point.samples, meter)
    expected = point.prompts * point.samples * point.response * UPDATES
    assert meter.counts["response_tokens"] == expected, "a response does not have full length"
    return meter.least()


def make(point: Point, folder: Path) -> None:
    """Write models with random weights, and the prompts of one update, to `folder`."""
    import torch
    import transformers

    from benchmarks.against_trl.materials import SPECIAL, new_policy, new_reward, new_tokenizer
    from benchmarks.against_trl.work import Shape

    shape = Shape(
        layers=point.layers,
        hidden_size=point.hidden_size,
        heads=point.hidden_size // 32,
        vocabulary=point.vocabulary,
        context=point.prompt + point.response,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = new_tokenizer(shape)
    for name, model in (("policy", new_policy(shape)), ("reward", new_reward(shape))):
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)
    draw, ids = Random(0), range(len(SPECIAL), shape.vocabulary)
    texts = [" ".join(f"w{i}" for i in draw.choices(ids, k=point.prompt)) + " " for _ in range(point.prompts)]
    rows = [json.dumps({"query": text, "reference_response": ""}) + "\n" for text in texts]
    (folder / "data").mkdir()
    for split in ("train", "validation"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(rows))


def overrides(point: Point, folder: Path) -> list[str]:
    """Return the command-line arguments of the run."""
    episodes = point.prompts * point.samples
    return [
        *("algo=rloo", f"algo.samples_per_prompt={point.samples}", "model=pythia"),
        *(f"model.policy={folder / 'policy'}", f"model.reward={folder / 'reward'}"),
        *("task=tldr", f"task.path={folder / 'data'}", f"task.max_prompt_tokens={point.prompt}"),
        *("scorer=reward_model", "scorer.missing_eos_score=null", "scorer@gold=none", "generator=hf"),
        *(f"generator.response_length={point.response}", "generator.temperature=1"),
        *("backend=torch", "backend.device=cpu", "backend.threads=1"),
        f"backend.micro_batch={max(32, point.samples)}",
        *("optim.lr=1e-6", "optim.schedule=constant", f"schedule.prompts_per_update={point.prompts}"),
        f"schedule.total_episodes={episodes * (UPDATES + 1)}",
        *("schedule.eval_every=0", "schedule.save_every=0", "progress=off"),
    ]


def measured(axes: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Measure the points of some axes, each in a process forked from one that has done the imports."""
    import rlhf.stages.run  # noqa: F401
    from benchmarks.against_trl import materials, ours  # noqa: F401

    seen: dict[Point, dict[str, float]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for axis in axes:
            found[axis] = []
            for value in AXES[axis][1]:
                point = replace(BASE, **{axis: value})
                if point not in seen:
                    seen[point] = pool.apply(quietly, (point,))
                spent = " ".join(f"{phase} {seen[point][phase]:.3f}" for phase in PHASES)
                print(f"{axis} {value}: {spent} CPU-s", flush=True)
                found[axis].append({"value": value, "cpu_s": seen[point], "work": work(point)})
    return found


def quietly(point: Point) -> dict[str, float]:
    """Return `measure(point)` without the output of the run."""
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()):
        return measure(point)


# -- results -------------------------------------------------------------------------------------------


def slope(points: list[tuple[float, float]]) -> float:
    """Return the exponent e of y ~ x^e, by least squares of the logarithms."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


@dataclass(frozen=True, slots=True)
class Exponent:
    """Exponents of a phase and of its work along an axis: over all values, and over the last two."""

    all: float
    end: float
    work_all: float
    work_end: float

    @staticmethod
    def of(points: list[dict[str, Any]], phase: str) -> Exponent:
        """Return the exponents of `phase` from the points of an axis."""
        spent, done = ([(p["value"], p[name][phase]) for p in points] for name in ("cpu_s", "work"))
        return Exponent(slope(spent), slope(spent[-2:]), slope(done), slope(done[-2:]))

    @property
    def too_fast(self) -> bool:
        """Whether the phase grows faster than its work between the two largest values."""
        return self.end > self.work_end + TOLERANCE

    def __str__(self) -> str:
        mark = FLAG if self.too_fast else ""
        return f"{mark}{self.all:.2f}, {self.end:.2f}{mark} ({self.work_all:.2f}, {self.work_end:.2f})"


def table(axes: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table of exponents over all values and the last two (work in parentheses)."""
    lines = [f"| | from | to | {' | '.join(PHASES)} |", "|---|--:|--:|" + "--:|" * len(PHASES)]
    for axis, (name, _) in AXES.items():
        if points := axes.get(axis):
            cells = [str(Exponent.of(points, phase)) for phase in PHASES]
            ends = f"{points[0]['value']:,} | {points[-1]['value']:,}"
            lines.append(f"| {name} | {ends} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(axes: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw one chart per axis: CPU-seconds of the phases; dotted: their work, scaled to the last point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    figure, places = plt.subplots(2, 4, figsize=(15, 7), layout="constrained")
    for place, (axis, (name, _)) in zip(places.flat, AXES.items(), strict=False):
        if not (points := axes.get(axis)):
            continue
        values = [point["value"] for point in points]
        for phase in PHASES:
            spent, done = ([point[kind][phase] for point in points] for kind in ("cpu_s", "work"))
            (line,) = place.plot(values, spent, marker="o", markersize=4, label=phase)
            scaled = [spent[-1] * each / done[-1] for each in done]
            place.plot(values, scaled, linestyle=":", color=line.get_color())
        place.set(xscale="log", yscale="log", xlabel=name, ylabel="CPU-seconds per update")
        place.xaxis.set_major_formatter(ScalarFormatter())
        place.xaxis.set_minor_formatter(NullFormatter())
        place.xaxis.set_minor_locator(NullLocator())
        place.set_xticks(values, [f"{value:,}" for value in values])
        place.grid(alpha=0.3)
    last = places.flat[-1]
    last.axis("off")
    handles, names = places.flat[min(map(list(AXES).index, axes))].get_legend_handles_labels()
    last.legend(handles, names, loc="upper left", title="phase")
    base = "\n".join(f"{name}: {getattr(BASE, axis):,}" for axis, (name, _) in AXES.items())
    last.text(
        0,
        0.45,
        f"fixed sizes:\n{base}\n\ndotted: growth of the work",
        va="top",
        transform=last.transAxes,
    )
    figure.savefig(file, dpi=100)


def main() -> None:
    """Parse the command line, measure, and draw the chart."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES), help="default: all")
    parser.add_argument("--draw", action="store_true", help="draw earlier measurements, measure nothing")
    parser.add_argument(
        "--out",
        type=Path,
        default=FIGURES / "growth.json",
        help="JSON file of the measurements; the chart is written next to it",
    )
    args = parser.parse_args()
    kept = json.loads(args.out.read_text()) if args.out.exists() else {"axes": {}}
    if not args.draw:
        import torch

        axes = {**kept["axes"], **measured(args.axis)}
        about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
        kept = {"unit": "CPU-seconds of an update", "base": asdict(BASE), **about, "axes": axes}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(kept["axes"]))
    draw(kept["axes"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
