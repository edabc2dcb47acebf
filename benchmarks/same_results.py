"""Check that two checkouts of the project give bit-identical results on the CPU.

    python -m benchmarks.same_results --before ../old --after .                    all runs in both checkouts
    python -m benchmarks.same_results --before ../old --after . --only dpo vllm    two of them
    python -m benchmarks.same_results --before ../old --keep same                  the baseline alone
    python -m benchmarks.same_results --before ../old --after . --keep same        compare with the baseline

Each run of `RUNS` is a training run of a few updates in a process of its own. Both checkouts run with this
Python interpreter, with the checkout as PYTHONPATH, and with the same relative output_dir and cache_dir.

The command compares the name of the run folder, metrics.jsonl without times, throughputs and memory,
completions.jsonl byte for byte, and each tensor of model/ and adapter/ bit for bit. It also runs tests/golden
in both checkouts and reports the results without a comparison. Metrics that only --after has are named; they
are no difference.

--keep resumes: finished runs are kept, and all runs of a checkout start again if its code or conf/ changed.
Exit code: 0 if all compared runs are the same, 1 if a run differs or fails, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

TINY = ("debug=tiny", "task.train_size=128", "task.validation_size=32", "task.test_size=8", "progress=off")
SCORED = ("scorer.missing_eos_score=null",)  # tiny models rarely end a response: nearly all scores would tie
FOUR = ("algo.samples_per_prompt=4", "scorer=facts", *SCORED)
OFF_POLICY = ("schedule.minibatches=2", "schedule.epochs=2")  # ratios differ from 1, so clipping matters
LAG = ("schedule.max_lag=1", "schedule.total_episodes=96")  # three updates: the last two have lag 1
VARIES = ("time/", "throughput/", "memory/")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",  # write nothing into a checkout
}
LIMIT_S = 1800  # of one run
GOLDEN = "golden"
CHECK_IMPORT = """import rlhf, sys
if not rlhf.__file__.startswith(sys.argv[1]):
    sys.exit(f"rlhf must be imported from {sys.argv[1]}, got {rlhf.__file__}")
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Overrides of a training run, the number of its ranks, and a package that the run requires."""

    overrides: tuple[str, ...]
    ranks: int = 1
    requires: str = "torch"


RUNS = {
    "dpo": Run(("algo=dpo", *SCORED)),
    "ppo": Run(("algo=ppo", *SCORED, *OFF_POLICY)),
    "rloo": Run(("algo=rloo", *FOUR)),
    "bok": Run(("algo=bok", *FOUR)),
    "grpo": Run(("algo=grpo", *FOUR, *OFF_POLICY)),
    "dr_grpo": Run(("algo=dr_grpo", *FOUR)),
    "dapo": Run(("algo=dapo", *FOUR, *OFF_POLICY)),
    "gspo": Run(("algo=gspo", *FOUR, *OFF_POLICY)),
    "cispo": Run(("algo=cispo", *FOUR, *OFF_POLICY)),
    "sft": Run(("algo=sft",)),
    "reward": Run(("algo=reward",)),
    "offline_dpo": Run(("algo=dpo", "generator=dataset")),
    "arithmetic": Run(("task=arithmetic", "algo=grpo", "scorer.missing_eos_score=-1")),
    "lag": Run(("algo=dpo", *FOUR, *LAG)),
    "lora": Run(("algo=dpo", *SCORED, "model.lora.rank=4", "optim.lr=1e-2"), requires="peft"),
    "vllm": Run(("algo=rloo", "generator=vllm", *FOUR, *LAG), requires="vllm"),
    "two_ranks": Run(("algo=ppo", *SCORED), ranks=2),
    "zero2": Run(("algo=dpo", *SCORED, "backend=zero2"), ranks=2, requires="deepspeed"),
}


class Failed(Exception):
    """A process ended with an exit code other than 0, or was not finished after `LIMIT_S` seconds."""


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout, and the folder with its runs, cache and logs."""

    checkout: Path
    folder: Path

    def prepare(self, fresh: bool) -> None:
        """Make the folder; first delete the runs of other code, or all runs if `fresh`."""
        stamp, code = self.folder / "code.txt", hash_of_code(self.checkout)
        if stamp.exists() and (fresh or stamp.read_text() != code):
            shutil.rmtree(self.folder)
        for folder in ("done", "logs", "runs"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        stamp.write_text(code)
        self.execute("import", ["-c", CHECK_IMPORT, str(self.checkout / "rlhf")], self.folder)

    def execute(self, name: str, arguments: list[str], cwd: Path) -> str:
        """Run this Python interpreter and return its output, which is also in logs/<name>.log."""
        log = self.folder / "logs" / f"{name}.log"
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self.checkout)}
        command = [sys.executable, *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # a run then ends its ranks and worker processes
                raise Failed(f"not finished after {LIMIT_S} s, see {log}") from None
        if code:
            raise Failed(f"exit code {code}, see {log}")
        return log.read_text()

    def train(self, name: str) -> tuple[Path, float]:
        """Return the folder and the wall time in seconds of the run `name`; train unless it is finished."""
        run, done, runs = RUNS[name], self.folder / "done" / f"{name}.json", self.folder / "runs" / name
        overrides = [*TINY, *run.overrides, f"output_dir=runs/{name}", "cache_dir=cache"]
        if not done.exists() or json.loads(done.read_text())["overrides"] != overrides:
            shutil.rmtree(runs, ignore_errors=True)
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks), "-m"]
            start = time.monotonic()
            launcher = torchrun if run.ranks > 1 else []
            self.execute(name, ["-m", *launcher, "rlhf.train", *overrides], self.folder)
            done.write_text(json.dumps({"overrides": overrides, "seconds": time.monotonic() - start}))
        (metrics,) = runs.glob("*/metrics.jsonl")
        return metrics.parent, json.loads(done.read_text())["seconds"]

    def golden(self) -> str:
        """Return the last line that pytest prints for tests/golden."""
        if not (self.checkout / "tests" / "golden").is_dir():
            return "no tests/golden"
        try:
            pytest = ["-m", "pytest", "tests/golden", "-p", "no:cacheprovider", "-o", "addopts="]
            return self.execute(GOLDEN, pytest, self.checkout).splitlines()[-1].strip("= ")
        except Failed as problem:
            return str(problem)


def hash_of_code(checkout: Path) -> str:
    """Return a hash of the Python and YAML files in rlhf/ and conf/ of a checkout."""
    digest = hashlib.sha256()
    files = [file for folder in ("rlhf", "conf") for file in (checkout / folder).rglob("*")]
    for file in sorted(file for file in files if file.suffix in (".py", ".yaml")):
        digest.update(f"{file.relative_to(checkout)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.jsonl without `VARIES`; values are JSON text, so that NaN equals NaN."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: json.dumps(row[key]) for key in row if not key.startswith(VARIES)} for row in found]


def lines(file: Path) -> list[bytes]:
    """Return the lines of a file; none if there is no file."""
    return file.read_bytes().splitlines(keepends=True) if file.exists() else []


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yield each difference between two run folders."""
    if before.name != after.name:
        yield f"run folder {before.name} -> {after.name}"
    if not any((before / "model").glob("*.safetensors")):
        yield "no weights in model/ of the baseline"
    for index, (old, new) in enumerate(
        zip_longest(rows(before), rows(after), fillvalue=dict[str, str]()), start=1
    ):
        for key in old or new:  # a row that only one run has differs; a metric that only `after` has does not
            if old.get(key) != new.get(key):
                yield f"metrics.jsonl row {index}: {key} {old.get(key)} -> {new.get(key)}"
    texts = (lines(run / "completions.jsonl") for run in (before, after))
    for index, (line, other) in enumerate(zip_longest(*texts), start=1):
        if line != other:
            yield f"completions.jsonl line {index}"
    for folder in ("model", "adapter"):
        yield from different_tensors(before / folder, after / folder)


def new_metrics(before: Path, after: Path) -> list[str]:
    """Return the names of the metrics that only the run folder `after` has."""
    old, new = (set().union(*rows(run)) for run in (before, after))
    return sorted(new - old)


def tensors(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name; none if there is no file."""
    from safetensors.torch import load_file

    return load_file(file) if file.exists() else {}


def different_tensors(before: Path, after: Path) -> Iterator[str]:
    """Yield each difference between the safetensors files of two folders."""
    import torch

    for name in sorted({file.name for folder in (before, after) for file in folder.glob("*.safetensors")}):
        old, new = tensors(before / name), tensors(after / name)
        for key in sorted({**old, **new}):
            one, other = old.get(key), new.get(key)
            if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
                yield f"{before.name}/{name}: {key} is missing or has another shape or dtype"
            elif not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))):
                largest = (one.double() - other.double()).abs().max().item()
                yield f"{before.name}/{name}: {key} by up to {largest:.3g}"


def compare(name: str, sides: list[Side]) -> bool:
    """Train the run `name` on each side, print one line, and return whether the results are the same."""
    if find_spec(RUNS[name].requires) is None:
        print(f"{name:12} skipped: {RUNS[name].requires} is not installed", flush=True)
        return True
    try:
        folders, seconds = zip(*(side.train(name) for side in sides), strict=True)
    except Failed as problem:
        print(f"{name:12} FAILED: {problem}", flush=True)
        return False
    first = next(differences(folders[0], folders[-1]), None)
    added = new_metrics(folders[0], folders[-1])
    same = f"same; new: {', '.join(added)}" if added else "same"
    result = "done" if len(sides) == 1 else f"DIFFERENT: {first}" if first else same
    took = " and ".join(f"{each:.0f} s" for each in seconds)
    print(f"{name:12} {len(rows(folders[0])):2} rows  {took:14} {result}", flush=True)
    return first is None


def main() -> None:
    """Read the command line, run, compare."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--before", type=Path, required=True, help="checkout that gives the baseline")
    parser.add_argument("--after", type=Path, help="checkout to compare; default: run the baseline alone")
    every = [*RUNS, GOLDEN]
    parser.add_argument(
        "--only", nargs="+", choices=every, default=every, metavar="NAME", help=", ".join(every)
    )
    parser.add_argument("--keep", type=Path, help="folder for the outputs; default: one that is deleted")
    parser.add_argument("--fresh-after", action="store_true", help="delete the kept runs of --after first")
    given = parser.parse_args()
    checkouts = {name: path for name in ("before", "after") if (path := getattr(given, name)) is not None}
    for name, path in checkouts.items():
        if not (path / "rlhf").is_dir():
            parser.error(f"--{name} must be a checkout of this project (a folder with rlhf/), got {path}")
    with tempfile.TemporaryDirectory() as scratch:
        keep = (given.keep or Path(scratch)).resolve()
        sides = {name: Side(path.resolve(), keep / name) for name, path in checkouts.items()}
        try:
            for name, side in sides.items():
                side.prepare(fresh=name == "after" and given.fresh_after)
        except Failed as problem:
            raise SystemExit(f"error: {problem}") from None
        same = [compare(name, list(sides.values())) for name in RUNS if name in given.only]
        if GOLDEN in given.only:
            for name, side in sides.items():
                print(f"{GOLDEN:12} {name}: {side.golden()}", flush=True)
    raise SystemExit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
