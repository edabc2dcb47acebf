"""Measure this project and TRL on the same work and print ratios. Above 1: this project is better.

    make bench                                        all CPU cases
    make bench ARGS="--minutes 60"                    only the runs that fit into an hour
    make bench ARGS="--resume"                        continue an interrupted benchmark
    make bench ARGS="--part tldr-14m --threads 2"     some cases; other runs in the file are kept
    make bench ARGS="--part tldr-14m --side ours"     this project only; the runs of TRL are kept
    make bench LOCK=gpu ARGS=--gpu                    on a GPU: CUDA, bfloat16, models with 410M parameters
    make bench LOCK=gpu ARGS="--gpu --vllm"           the same, and both sides sample with vLLM (not PPO)
    make bench ARGS=--smoke                           check the set-up: a minute or two

Asynchronous GRPO needs two GPUs and vLLM on both sides, and is skipped elsewhere (theirs_async.py).

Each run is a separate process. All cases run once before any case is repeated. The two sides take turns, and
the side that starts changes with every repeat. If the host of a virtual machine takes more than 5 % of the
CPU time of a run, the run is repeated. New runs of a case and side replace the old ones. Episodes, tokens,
micro-batches and optimizer steps are counted on both sides; the benchmark stops if they differ. Runs are
written to a JSON-lines file, and the results of all runs to a .json file next to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_trl.table import GPU_RUNS, RUNS, read, results, show
from benchmarks.against_trl.work import (
    CPU_PARTS,
    GPU_PARTS,
    GPU_THREADS,
    LENGTHS,
    SAMPLES,
    SIDES,
    TUNED,
    Case,
    cases,
)
from rlhf.core.files import write_json
from rlhf.runs.folder import environment

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # time limit of one run
STOLEN = 0.05  # share of the CPU time of a run above which the run is repeated
TRIES = 3  # runs at most, if the host takes CPU time
WITHOUT_VLLM = ("ppo", "async_grpo")  # TRL's PPO samples without vLLM; asynchronous GRPO always with it
THEIRS = {
    "bench": "theirs",
    "bench-ppo": "theirs_ppo",
    "bench-async": "theirs_async",
}  # module by environment


def main() -> None:
    """Parse the command line, measure all cases and print the tables."""
    args = parse()
    materials = args.out.parent / "materials"
    make_materials(args.cases, materials)
    if os.getloadavg()[0] > 0.7:
        print(f"warning: load {os.getloadavg()[0]:.1f}: wall-clock times and their ratios will be inaccurate")
    runs, where = read(args.out), origin(args.gpu)
    began, again = time.monotonic(), set()  # cases and sides whose old runs were replaced
    for repeat in range(args.repeats):
        for case in args.cases:
            chosen = sides(case, args.side)[:: 1 if repeat % 2 == 0 else -1]
            if args.resume:
                chosen = [side for side in chosen if not measured(runs, case, side, repeat)]
            if not chosen:
                continue
            left_s = 60 * args.minutes - (time.monotonic() - began)
            if expected_s(case, chosen, runs) >= left_s:
                print(f"{case.name}: repeat {repeat + 1} skipped, {max(left_s, 0):.0f} s remain")
                continue
            print(f"{case.name}: {case.measured} updates of", as_text(replace(case, measured=1).counts()))
            for side in chosen:
                load, start = os.getloadavg()[0], time.monotonic()
                found = quietest(case, side, args.environments, materials)
                took_s = time.monotonic() - start
                used = side if side == "ours" else f"{side} {found['versions']['trl']}"
                print(
                    f"  {used:20}  {found['cpu_s']:.2f} CPU-s  {found['wall_s']:.2f} s  "
                    f"{found['memory']['above_mib']:.0f} MiB",
                    flush=True,
                )
                kept = [
                    run["repeat"] != repeat if args.resume else (case.name, side) in again for run in runs
                ]
                runs = [run for run, keep in zip(runs, kept, strict=True) if keep or not of(run, case, side)]
                again.add((case.name, side))
                run = {"case": asdict(case), "side": side, "repeat": repeat, "figures": found}
                runs.append({**run, "took_s": took_s, "load": load, **where})
                args.out.write_text("".join(json.dumps(each) + "\n" for each in runs))
                write_json(args.out.with_suffix(".json"), results(runs))
    show(runs, markdown=False)
    print(f"Markdown: python -m benchmarks.against_trl.table --markdown {args.out}")


def parse() -> argparse.Namespace:
    """Parse the command line. The result has the selected cases as `cases`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--part",
        nargs="+",
        choices=LENGTHS,
        help=f"work and model; default: {' '.join(CPU_PARTS)}, with --gpu {' '.join(GPU_PARTS)}",
    )
    parser.add_argument("--algo", nargs="+", choices=SAMPLES, default=list(SAMPLES), help="default: all")
    parser.add_argument(
        "--threads", nargs="+", type=int, help=f"CPU threads; default: 1 2, with --gpu {GPU_THREADS}"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="measure on a GPU: CUDA, bfloat16 over float32 weights"
    )
    parser.add_argument("--vllm", action="store_true", help="both sides sample with vLLM; needs --gpu")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES[:2]), help="default: ours trl")
    parser.add_argument("--repeats", type=int, default=3, help="runs per case and side (default 3)")
    parser.add_argument(
        "--resume", action="store_true", help="make only missing or disturbed runs, keep all others"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="skip runs that would end later, judged by earlier runs",
    )
    parser.add_argument("--smoke", action="store_true", help="one short run per environment of TRL")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"file of runs; default: {RUNS}, with --gpu {GPU_RUNS.name}, with --smoke smoke.jsonl",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT,
        help="folder with the environments of TRL that make bench creates",
    )
    args = parser.parse_args()
    usual = RUNS.with_name("smoke.jsonl") if args.smoke else GPU_RUNS if args.gpu else RUNS
    args.out = (args.out or ROOT / usual).absolute()
    if args.minutes <= 0:
        parser.error(f"--minutes must be > 0 (time for all runs), got {args.minutes:g}; omit --minutes")
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a GPU that torch can use (there is none); omit --gpu")
    if args.vllm and not args.gpu:
        parser.error("--vllm needs --gpu (vLLM shares the GPU of the trainer); add --gpu, or omit --vllm")
    parts = args.part or (GPU_PARTS if args.gpu else CPU_PARTS)
    threads = args.threads or ([GPU_THREADS] if args.gpu else [1, 2])
    rivals = args.environments if set(args.side) != {"ours"} else None
    sampler = "vllm" if args.vllm else "hf"
    args.cases = runnable(cases(parts, args.algo, threads, args.gpu, sampler), rivals, parser)
    if args.smoke:
        args.repeats = 1
        first = {case.environment: case for case in reversed(args.cases)}
        args.cases = [replace(first[name], warmup=1, measured=1) for name in THEIRS if name in first]
    for case in args.cases if rivals else ():
        if not python(args.environments, case).exists():
            parser.error(
                f"--environments must be a folder with .venv-{case.environment} (TRL runs there, from "
                f"requirements/{case.environment}.txt), got {args.environments}; run make bench, or set "
                "--side ours"
            )
    return args


def runnable(chosen: list[Case], environments: Path | None, parser: argparse.ArgumentParser) -> list[Case]:
    """Return the cases that can run here and print why others cannot; it is an error if there are none.

    Args:
        chosen: the cases.
        environments: folder with the environments of TRL; None: only this project is measured.
        parser: reports the error.
    """
    found = [case for case in chosen if obstacle(case, environments) is None]
    skipped = [case for case in chosen if case not in found]
    if not found:
        parser.error(f"{obstacle(skipped[0], environments)}; choose another --algo")
    if skipped:
        print(f"{skipped[0].algo}: skipped: {obstacle(skipped[0], environments)}")
    return found


def obstacle(case: Case, environments: Path | None) -> str | None:
    """Return why an asynchronous case cannot run here; None if the case can run, or is not asynchronous."""
    if case.sampler == "vllm" and case.algo in WITHOUT_VLLM:
        return f"{case.algo} has no case with --vllm"
    if not case.asynchronous:
        return None
    gpus = torch.cuda.device_count() if case.gpu else 0
    if gpus < 2:
        return f"asynchronous GRPO needs --gpu and two GPUs, one of them for vLLM (found {gpus})"
    if importlib.util.find_spec("vllm") is None:
        return "asynchronous GRPO needs vLLM; run make setup LOCK=gpu"
    if environments and not python(environments, case).exists():
        return f"{environments} has no .venv-{case.environment}; theirs_async.py says how to make it"
    return None


def origin(gpu: bool) -> dict[str, Any]:
    """Return the machine, the commit and the command, which are stored with every run."""
    here = environment([torch.cuda.get_device_name()] if gpu else ["cpu"])
    command = ["python", "-m", "benchmarks.against_trl.bench", *here["command"][1:]]
    return {
        "machine": {
            **{name: here[name] for name in ("processor", "cores", "memory_gib", "platform", "python")},
            **({"gpu": here["devices"][0]} if gpu else {}),
        },
        "git": here["git"],
        "command": shlex.join(command),
    }


def of(run: dict[str, Any], case: Case, side: str) -> bool:
    """Whether `run` belongs to this case and side."""
    return Case(**run["case"]).name == case.name and run["side"] == side


def measured(runs: list[dict[str, Any]], case: Case, side: str, repeat: int) -> bool:
    """Whether `runs` contain this repeat of the case and side, undisturbed."""
    own = [run for run in runs if of(run, case, side) and run["repeat"] == repeat]
    return any(run["figures"].get("stolen", 0.0) <= STOLEN for run in own)


def expected_s(case: Case, chosen: list[str], runs: list[dict[str, Any]]) -> float:
    """Return the expected seconds of the case, from the longest earlier run; 0 if there is none."""
    return sum(max((run["took_s"] for run in runs if of(run, case, side)), default=0.0) for side in chosen)


def python(environments: Path, case: Case) -> Path:
    """Return the Python interpreter of the TRL environment of a case."""
    return environments / f".venv-{case.environment}/bin/python"


def make_materials(chosen: list[Case], folder: Path) -> None:
    """Create missing models and prompts of the cases."""
    from benchmarks.against_trl.materials import make

    for case in chosen:
        make(case, folder)


def sides(case: Case, chosen: list[str]) -> list[str]:
    """Return the sides of `chosen` that exist for the case."""
    return [side for side in chosen if side != "trl-released" or case.algo in TUNED]


def quietest(case: Case, side: str, environments: Path, materials: Path) -> dict[str, Any]:
    """Return the figures of the first undisturbed run, or of the least disturbed of `TRIES` runs."""
    tries: list[dict[str, Any]] = []
    for _ in range(TRIES):
        tries.append(measure(case, side, environments, materials))
        stolen = tries[-1]["stolen"]
        if stolen <= STOLEN:
            return tries[-1]
        print(
            f"  {side:12}  {tries[-1]['cpu_s']:.2f} CPU-s, disturbed: the host took {stolen:.0%}", flush=True
        )
    return min(tries, key=lambda found: found["stolen"])


def measure(case: Case, side: str, environments: Path, materials: Path) -> dict[str, Any]:
    """Make one run in a separate process and return its figures; stop the benchmark if the run fails."""
    own = os.environ.get("PYTHONPATH") if side == "ours" else None  # not for the environments of TRL
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([own] if own else [])]),
        "OMP_NUM_THREADS": str(case.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # asynchronous GRPO of TRL loads its attention kernel from the Hub
        "HF_HUB_OFFLINE": "0" if case.asynchronous else "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        ours = side == "ours"
        module = "ours" if ours else THEIRS[case.environment]
        command = [
            sys.executable if ours else str(python(environments, case)),
            "-m",
            f"{__package__}.{module}",
        ]
        command += [case.dump(), str(materials), str(out)]
        command += ["--released"] if side == "trl-released" else []
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode:
            output = done.stdout[-2000:] + done.stderr[-4000:]
            sys.exit(f"{output}\nerror: {case.name} failed ({side}; its output is above)")
        found: dict[str, Any] = json.loads(out.read_text())
    if not same_work(case, found["counts"]):
        sys.exit(
            f"error: {case.name} must have {as_text(case.counts())}, "
            f"got {as_text(found['counts'])} from {side}"
        )
    return found


def same_work(case: Case, counts: dict[str, int]) -> bool:
    """Whether the counts are those of the case.

    Asynchronous samples of TRL come in the order of their completion, so the prompts of the measured updates,
    and the number of their tokens, differ a little.
    """
    free = {"prompt_tokens"} if case.asynchronous else set()
    return all(counts.get(name) == count for name, count in case.counts().items() if name not in free)


def as_text(counts: dict[str, int]) -> str:
    """Return counts as text, for example "64 episodes, 1 optimizer steps"."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


if __name__ == "__main__":
    main()
