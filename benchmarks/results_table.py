"""A Markdown table of finished runs: one row a task and algorithm, means over seeds.

python benchmarks/results_table.py outputs/tldr_mini-* outputs/arithmetic-*
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

COLUMNS = (
    ("win-rate", "eval/win_rate", "{:.3f}"),
    ("gold score", "eval/gold_score", "{:.2f}"),
    ("KL", "eval/kl", "{:.2f}"),
    ("tokens", "eval/response_tokens", "{:.1f}"),
)


def main(folders: list[str]) -> None:
    """Print the table of the finished runs among `folders`."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for folder in map(Path, folders):
        if not (folder / "trainer_state.json").exists():
            continue
        state = json.loads((folder / "trainer_state.json").read_text())
        if not state["finished"]:
            continue
        config = yaml.safe_load((folder / "config.yaml").read_text())
        key = config["task"]["name"], config["algo"]["name"]
        groups.setdefault(key, []).append({"start": first(folder), "state": state, "folder": folder})
    names = [f"{name}, before → after" for name, *_ in COLUMNS]
    print("|", " | ".join(["task", "algorithm", "seeds", *names, "updates, s", "run, s"]), "|")
    print("|---" * (5 + len(COLUMNS)) + "|")
    for (task, algo), runs in sorted(groups.items(), reverse=True):
        cells = [task, f"`{algo}`", str(len(runs))]
        for _, name, form in COLUMNS:
            before = mean(run["start"][name] for run in runs)
            after = [run["state"]["result"][name] for run in runs]
            spread = f" ± {form.format(stdev(after))}" if len(after) > 1 else ""
            cells.append(f"{form.format(before)} → {form.format(mean(after))}{spread}")
        cells.append(f"{mean(run['state']['wall_s'] for run in runs):.0f}")
        cells.append(f"{mean(map(seconds, (run['folder'] for run in runs))):.0f}")
        print("|", " | ".join(cells), "|")


def first(folder: Path) -> dict[str, float]:
    """The evaluation before training."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return next(row for row in map(json.loads, lines) if "eval/win_rate" in row)


def seconds(folder: Path) -> float:
    """From the start of a run that was never interrupted to its end, evaluations and loading included."""
    start, end = (folder / name for name in ("environment.json", "trainer_state.json"))
    return end.stat().st_mtime - start.stat().st_mtime


if __name__ == "__main__":
    main(sys.argv[1:])
