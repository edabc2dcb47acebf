"""Print how much time asynchronous training saves, as a Markdown table of finished runs.

    python -m rlhf.train -m generator=hf,vllm schedule.max_lag=0,1 seed=1
    python -m rlhf.train generator=hf backend.threads=1 output_dir=outputs/one-core
    python -m rlhf.train generator=vllm backend.threads=1 generator.threads=1 output_dir=outputs/one-core
    python benchmarks/asynchrony.py outputs/tldr_mini-pythia-dpo-* outputs/one-core/*

The runs may differ in generator, lag, number of threads and seed. Seconds are sums over the updates of a run,
averaged over seeds. With lag 0, trainer and generator take turns on the given number of cores; with a larger
lag each has half of the cores.

vs. all cores     time divided by the time of the synchronous run on all cores
vs. equal cores   time divided by the time of the synchronous run with `backend.threads=1`
ideal             the best possible value of the previous column: max(g, t) / (g + t), from the synchronous
                  run with one thread; g: generating and, with an annotator process, scoring and annotating;
                  t: the rest
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev

from rlhf.report.runs import Run, read_run
from rlhf.runs.folder import RunFolder

KEYS = "generator.name", "schedule.max_lag", "backend.threads"
COLUMNS = (
    *("generator", "max_lag", "cores", "seeds", "win rate", "KL", "updates, s", "waiting, s"),
    *("generating, s", "annotating ahead, s", "rest, s", "vs. all cores", "vs. equal cores", "ideal"),
)


def main(folders: list[str]) -> None:
    """Print the table of the finished runs among `folders`."""
    runs: dict[tuple[str, int, int | None], list[dict[str, float]]] = {}  # by KEYS
    for folder in map(Path, folders):
        if RunFolder(folder).finished():
            run = read_run(folder)
            key = tuple(
                run.config[name] for name in ("generator.name", "schedule.max_lag", "backend.threads")
            )
            runs.setdefault(key, []).append({**seconds(run), **run.state["result"]})
    print("|", " | ".join(COLUMNS), "|")
    print("|---" * len(COLUMNS) + "|")
    order = sorted(runs.items(), key=lambda item: tuple(map(str, item[0])))
    for (generator, lag, threads), found in order:
        took = means(found)
        wins = [run["eval/win_rate"] for run in found]
        spread = f" ± {stdev(wins):.3f}" if len(wins) > 1 else ""
        cores = "half each" if lag else f"{threads or 'all'} in turn"
        cells = [f"`{generator}`", str(lag), cores, str(len(found)), f"{took['eval/win_rate']:.3f}{spread}"]
        cells.append(f"{took['eval/kl']:.2f}")
        cells += [f"{took[name]:.1f}" for name in ("update", "wait", "generate", "annotate_ahead", "rest")]
        every, equal = (
            (means(runs.get((generator, 0, cores), [])) for cores in (None, 1)) if lag else ({}, {})
        )
        cells.append(f"{took['update'] / every['update']:.2f}" if every else "")
        cells.append(f"{took['update'] / equal['update']:.2f}" if equal else "")
        cells.append(f"{ideal(equal, took['annotate_ahead'] > 0):.2f}" if equal else "")
        print("|", " | ".join(cells), "|")


def means(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each value over runs; empty if there is no run."""
    return {name: mean(run[name] for run in runs) for name in runs[0]} if runs else {}


def ideal(synchronous: dict[str, float], ahead: bool) -> float:
    """Return the share of a synchronous run's time that remains with perfect overlap.

    Args:
        synchronous: seconds of the synchronous run.
        ahead: whether scoring and annotating run in parallel with training.
    """
    moved = synchronous["score"] + synchronous["annotate"] if ahead else 0.0
    parts = synchronous["wait"] + moved, synchronous["rest"] - moved
    return max(parts) / sum(parts)


def seconds(run: Run) -> dict[str, float]:
    """Return the seconds of all updates of a run by phase; `rest`: the trainer does not wait."""
    names = ("update", "wait", "generate", "score", "annotate", "annotate_ahead")
    total = {name: run.seconds(name) for name in names}
    return {**total, "rest": total["update"] - total["wait"]}


if __name__ == "__main__":
    main(sys.argv[1:])
