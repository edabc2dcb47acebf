"""What asynchrony saves: a Markdown table of finished runs that differ in generator, lag and seed only.

    python -m rlhf.train -m algo=dpo generator=hf,vllm schedule.max_lag=0,1 seed=1,2,3
    python benchmarks/asynchrony.py outputs/tldr_mini-pythia-dpo-*

Seconds are sums over the updates of a run, means over seeds. `measured` is the time of the run over that of
the synchronous one with the same generator. `ideal` is max(generate, rest) / (generate + rest) by the
timings of the synchronous run: what is left of its time where the shorter part is hidden altogether.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev

import yaml


def main(folders: list[str]) -> None:
    """Print the table."""
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for folder in map(Path, folders):
        file = folder / "trainer_state.json"
        state = json.loads(file.read_text()) if file.exists() else {"finished": False}
        if state["finished"]:
            config = yaml.safe_load((folder / "config.yaml").read_text())
            key = config["generator"]["name"], config["schedule"]["max_lag"]
            runs.setdefault(key, []).append({**seconds(folder), **state["result"]})
    columns = ("generator", "max_lag", "seeds", "win-rate", "KL", "updates, s", "of it waiting", "generating")
    print("|", " | ".join((*columns, "rest", "measured", "ideal")), "|")
    print("|---" * (len(columns) + 3) + "|")
    for (generator, lag), found in sorted(runs.items()):
        took = {name: mean(run[name] for run in found) for name in found[0]}
        wins = [run["eval/win_rate"] for run in found]
        spread = f" ± {stdev(wins):.3f}" if len(wins) > 1 else ""
        cells = [f"`{generator}`", str(lag), str(len(found)), f"{took['eval/win_rate']:.3f}{spread}"]
        cells.append(f"{took['eval/kl']:.2f}")
        cells += [f"{took[name]:.1f}" for name in ("update", "wait", "generate", "rest")]
        if lag and (generator, 0) in runs:
            sync = {name: mean(run[name] for run in runs[generator, 0]) for name in took}
            parts = sync["wait"], sync["rest"]
            cells += [f"{took['update'] / sync['update']:.2f}", f"{max(parts) / sum(parts):.2f}"]
        else:
            cells += ["", ""]
        print("|", " | ".join(cells), "|")


def seconds(folder: Path) -> dict[str, float]:
    """Seconds of all updates of a run: whole, waiting for rollouts, generating them, and the rest."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "lr" in row]
    total = {name: sum(row[f"time/{name}_s"] for row in rows) for name in ("update", "wait", "generate")}
    return {**total, "rest": total["update"] - total["wait"]}


if __name__ == "__main__":
    main(sys.argv[1:])
