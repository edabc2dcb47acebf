"""Test the parts that need a GPU, in stages: one GPU, no network, at most 10 minutes.

    python -m tests.gpu                        all stages
    python -m tests.gpu --stages 0 3 5         some stages
    python -m tests.gpu --device cpu           miniature form, which tests the stages themselves
    python -m tests.gpu --limit-s 1800         all stages on a slow machine: each has its own time limit
    python -m tests.gpu --show                 print the table of the last results, and run nothing

Each stage is a process with its own time limit. Every result is written to build/gpu.json at once. Stages
that are not selected keep their last results there. The output of a stage is in build/gpu/stage-<number>.log.

Exit code: 0 if no check failed, 1 if a check failed or a stage crashed or took too long, 2 for wrong
arguments, 130 after Ctrl-C or SIGTERM. Figures, such as tokens per second, never fail.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rlhf.core.machine import this_machine
from tests.gpu.results import FAILED, INTERRUPTED, Results, markdown, show
from tests.gpu.runner import Stage, run_stages

STAGES = tuple(
    Stage(number, title, f"tests.gpu.stage_{name}:run", limit_s)
    for number, (name, title, limit_s) in enumerate(
        (
            ("machine", "machine and rates", 90),
            ("forward", "forward passes and decoding", 120),
            ("training", "training steps and memory", 200),
            ("vllm", "vLLM", 240),
            ("colocated", "colocated vLLM", 240),
            ("nccl", "weights by NCCL", 120),
            ("runs", "complete runs", 300),
            ("rates", "performance figures", 400),
        )
    )
)


def main(arguments: list[str] | None = None) -> int:
    """Run the selected stages, print their table and return the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__, formatter_class=form)
    numbers = [stage.number for stage in STAGES]
    parser.add_argument("--stages", type=int, nargs="+", choices=numbers, default=numbers, metavar="N")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="time limit of all stages together (default: 600)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"), help="file of the results")
    parser.add_argument("--show", action="store_true", help="print the table of the file, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="with --show: print Markdown")
    given = parser.parse_args(arguments)
    if given.limit_s <= 0:
        parser.error(f"--limit-s must be above 0, got {given.limit_s:g}")
    results = Results(given.out)
    if given.show:
        if not results.stages:
            parser.error(f"{given.out} has no results; run: make test-gpu")
        found = [results.stages[number] for number in given.stages if number in results.stages]
        print(markdown(found)) if given.markdown else show(found)
        return 0
    device = given.device or chosen_device()
    return carry_out([STAGES[number] for number in sorted(set(given.stages))], results, device, given.limit_s)


def chosen_device() -> str:
    """Return "cuda" if there is a GPU that torch can use, otherwise "cpu" with a message."""
    if this_machine().gpus:
        return "cuda"
    print("no GPU: the stages run in miniature form on the CPU, and say what they cannot test")
    return "cpu"


def carry_out(stages: list[Stage], results: Results, device: str, limit_s: float) -> int:
    """Run stages, print the table, also after Ctrl-C or SIGTERM, and return the exit code."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        found = run_stages(stages, results, device, results.file.with_suffix(""), limit_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    show(found)
    print(f"results: {results.file}")
    states = {stage.status for stage in found}
    return 130 if INTERRUPTED in states else int(FAILED in states)


if __name__ == "__main__":
    sys.exit(main())
