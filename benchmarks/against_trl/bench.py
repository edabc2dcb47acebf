"""Measure this project and TRL in turn on the same work, and print ratios: above 1 this project does better.

    make bench                                        the default parts
    make bench ARGS="--minutes 60"                    the same, as far as an hour goes
    make bench ARGS="--resume"                        on from where it was interrupted
    make bench ARGS="--part tldr-14m --threads 2"     a piece; what else the file of runs holds stays
    make bench ARGS="--part tldr-14m --side ours"     our side again, against TRL's figures of before
    make bench LOCK=gpu ARGS=--gpu                    on a GPU: CUDA, bfloat16, models of 410M parameters
    make bench ARGS=--smoke                           whether it works: a minute or two

Every run is a process of its own. All cases are run once, then all once more; sides take turns, and who
begins changes with every repeat. A run is made again where the machine's host gave cores to others, also by
--resume. A case and side that is measured again replaces its runs of before. All sides must be seen to do the
same: episodes, tokens, micro-batches and optimizer steps are counted on each, and a difference ends the
benchmark. Runs go to a file of lines, the results of all to a .json beside it.
"""

from __future__ import annotations

import argparse
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
from rlhf.runs.environment import environment

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # of one run
STOLEN = 0.05  # of a run's CPU time; above it, the run is made again
TRIES = 3
THEIRS = {"bench": "theirs", "bench-ppo": "theirs_ppo"}  # the module of TRL's side, by environment


def main() -> None:
    """Read the command line, measure, print."""
    words = parse()
    materials = words.out.parent / "materials"
    make_materials(words.cases, materials)
    if os.getloadavg()[0] > 0.7:
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f}): seconds will be off, and ratios of them")
    runs, where = read(words.out), origin(words.gpu)
    began, again = time.monotonic(), set()  # those whose runs of before are gone
    for repeat in range(words.repeats):
        for case in words.cases:
            chosen = sides(case, words.side)[:: 1 if repeat % 2 == 0 else -1]
            if words.resume:
                chosen = [side for side in chosen if not measured(runs, case, side, repeat)]
            if not chosen:
                continue
            left_s = 60 * words.minutes - (time.monotonic() - began)
            if expected_s(case, chosen, runs) >= left_s:
                print(f"{case.name}: repeat {repeat + 1} left out, {max(left_s, 0):.0f} s remain")
                continue
            print(f"{case.name}: {case.measured} updates of", told(replace(case, measured=1).counts()))
            for side in chosen:
                load, start = os.getloadavg()[0], time.monotonic()
                found = quietest(case, side, words.environments, materials)
                took_s = time.monotonic() - start
                print(
                    f"  {side:12}  {found['cpu_s']:.2f} CPU-s  {found['wall_s']:.2f} s  "
                    f"{found['memory']['above_mib']:.0f} MiB",
                    flush=True,
                )
                kept = [
                    run["repeat"] != repeat if words.resume else (case.name, side) in again for run in runs
                ]
                runs = [run for run, keep in zip(runs, kept, strict=True) if keep or not of(run, case, side)]
                again.add((case.name, side))
                run = {"case": asdict(case), "side": side, "repeat": repeat, "figures": found}
                runs.append({**run, "took_s": took_s, "load": load, **where})
                words.out.write_text("".join(json.dumps(each) + "\n" for each in runs))
                write_json(words.out.with_suffix(".json"), results(runs))
    show(runs, markdown=False)
    print(f"for the docs: python -m benchmarks.against_trl.table --markdown {words.out}")


def parse() -> argparse.Namespace:
    """The command line, and the cases that it asks for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--part",
        nargs="+",
        choices=LENGTHS,
        help=f"work and model; default: {' '.join(CPU_PARTS)}, with --gpu {' '.join(GPU_PARTS)}",
    )
    parser.add_argument("--algo", nargs="+", choices=SAMPLES, default=list(SAMPLES))
    parser.add_argument(
        "--threads", nargs="+", type=int, help=f"of the CPU; default: 1 2, with --gpu {GPU_THREADS}"
    )
    parser.add_argument("--gpu", action="store_true", help="CUDA, bfloat16 over float32 weights")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES[:2]))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--resume", action="store_true", help="make the runs that are missing or disturbed, keep all others"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="leave out what would end later, by its runs so far"
    )
    parser.add_argument("--smoke", action="store_true", help="one short run for each environment of TRL")
    parser.add_argument(
        "--out", type=Path, help=f"file of runs; {RUNS}, with --gpu {GPU_RUNS.name}, with --smoke smoke.jsonl"
    )
    parser.add_argument(
        "--environments", type=Path, default=ROOT, help="folder of TRL's, as make bench made them"
    )
    words = parser.parse_args()
    usual = RUNS.with_name("smoke.jsonl") if words.smoke else GPU_RUNS if words.gpu else RUNS
    words.out = (words.out or ROOT / usual).absolute()
    if words.minutes <= 0:
        parser.error(
            f"--minutes must be > 0 (it is the time for all runs), got {words.minutes:g}; leave it out"
        )
    if words.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a GPU that torch can use, and there is none; leave it out")
    parts = words.part or (GPU_PARTS if words.gpu else CPU_PARTS)
    threads = words.threads or ([GPU_THREADS] if words.gpu else [1, 2])
    words.cases = cases(parts, words.algo, threads, words.gpu)
    if words.smoke:
        words.repeats = 1
        first = {case.environment: case for case in reversed(words.cases)}
        words.cases = [replace(first[name], warmup=1, measured=1) for name in THEIRS if name in first]
    for case in words.cases if set(words.side) != {"ours"} else ():
        if not python(words.environments, case).exists():
            parser.error(
                f"--environments must be a folder with .venv-{case.environment} (there TRL runs, from "
                f"requirements/{case.environment}.txt), got {words.environments}; run make bench, or set "
                "--side ours"
            )
    return words


def origin(gpu: bool) -> dict[str, Any]:
    """The machine, the code and the command, for every run."""
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
    """Whether `run` is one of this case and side."""
    return Case(**run["case"]).name == case.name and run["side"] == side


def measured(runs: list[dict[str, Any]], case: Case, side: str, repeat: int) -> bool:
    """Whether `runs` have that repeat of this case and side, undisturbed."""
    own = [run for run in runs if of(run, case, side) and run["repeat"] == repeat]
    return any(run["figures"].get("stolen", 0.0) <= STOLEN for run in own)


def expected_s(case: Case, chosen: list[str], runs: list[dict[str, Any]]) -> float:
    """How long the case will take, by the longest of its runs so far; 0 where there are none."""
    return sum(max((run["took_s"] for run in runs if of(run, case, side)), default=0.0) for side in chosen)


def python(environments: Path, case: Case) -> Path:
    """The Python of TRL's side."""
    return environments / f".venv-{case.environment}/bin/python"


def make_materials(chosen: list[Case], folder: Path) -> None:
    """Models and prompts, made once."""
    from benchmarks.against_trl.materials import make

    for case in chosen:
        make(case, folder)


def sides(case: Case, chosen: list[str]) -> list[str]:
    """Those of `chosen` that the case has."""
    return [side for side in chosen if side != "trl-released" or case.algo in TUNED]


def quietest(case: Case, side: str, environments: Path, materials: Path) -> dict[str, Any]:
    """The figures of the first run that the host left alone, or else of the one it disturbed least."""
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
    """One run in a process of its own; returns its figures, or ends the benchmark."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(case.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
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
            said = done.stdout[-2000:] + done.stderr[-4000:]
            sys.exit(f"{said}\nerror: {case.name} failed ({side}; what it said is above)")
        found: dict[str, Any] = json.loads(out.read_text())
    if found["counts"] != case.counts():
        sys.exit(f"error: {case.name} must be {told(case.counts())}; {side} did {told(found['counts'])}")
    return found


def told(counts: dict[str, int]) -> str:
    """Counts in words."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


if __name__ == "__main__":
    main()
