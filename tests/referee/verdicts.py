"""Dump optimizer steps of TRL's trainers or verl's functions, and print the verdicts of `rlhf audit`.

    python -m tests.referee.verdicts trl [case ...]     needs make .venv-bench/.installed
    python -m tests.referee.verdicts verl [case ...]    needs make .venv-audit/.installed

Exit code: 1 if a verdict is not the one that is expected.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from rlhf import audit

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"trl": ".venv-bench", "verl": ".venv-audit"}
SHOWN = "online_sigmoid_2"  # the case whose whole output is printed


def python(framework: str) -> Path:
    """Return the Python that has the framework."""
    return ROOT / ENVIRONMENTS[framework] / "bin" / "python"


def versions(framework: str) -> str:
    """Return the versions of the framework and its libraries."""
    folders = map(str, (ROOT / ENVIRONMENTS[framework]).glob("lib/python*/site-packages"))
    found = {each.name: each.version for each in distributions(path=list(folders))}
    return ", ".join(f"{name} {found[name]}" for name in (framework, "torch", "transformers"))


def dump(framework: str, folder: Path, *cases: str) -> dict[str, Any]:
    """Dump the cases in the environment of the framework; return what is expected of each."""
    command = [python(framework), Path(__file__).with_name(f"{framework}_batches.py"), folder, *cases]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    assert done.returncode == 0, (folder / "log.txt").read_text()[-3000:]
    return json.loads((folder / "expected.json").read_text())


def audited(*words: str) -> tuple[int, str]:
    """Return exit code and output of `rlhf audit`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            audit.main(list(words))
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


def files(folder: Path, model: bool) -> list[list[str]]:
    """Return the arguments of `rlhf audit` for each dumped step of a case."""
    found = sorted(folder.glob("step-*.safetensors"))
    return [
        [str(path), *(["--model", str(path.with_name(path.stem.replace("step", "model")))] if model else [])]
        for path in found
    ]


def findings(words: list[str]) -> tuple[int, list[dict[str, str]]]:
    """Return the exit code and the findings of `rlhf audit`."""
    code, out = audited(*words, "--json")
    return code, json.loads(out)


def verdict(words: list[str]) -> str:
    """Return the first wrong term of a step with its words, or `agrees`."""
    wrong = [each for each in findings(words)[1] if each["state"] == "wrong"]
    return f"{wrong[0]['term']}: {wrong[0]['text']}" if wrong else "agrees"


def expects(case: dict[str, Any], found: str) -> bool:
    """Return whether a verdict is the expected one."""
    if case["term"] is None:
        return found == "agrees"
    return found.startswith(f"{case['term']}: ") and case["word"] in found


def main() -> int:
    """Print versions, a line for each case, and the output of a case; return the exit code."""
    torch.set_num_threads(1)
    framework, *cases = sys.argv[1:]
    folder = ROOT / "build" / "audit" / framework
    other = 0
    print(versions(framework))
    expected = dump(framework, folder, *cases)
    for name, case in expected.items():
        seen: dict[str, list[str]] = {}
        for words in files(folder / name, case["model"]):
            seen.setdefault(verdict(words), []).append(Path(words[0]).stem.partition("-")[2])
        for found, steps in seen.items():
            fits = expects(case, found)
            other += not fits
            print(f"  {name:20}steps {', '.join(steps)}  {found}{'' if fits else '  (not expected)'}")
    if SHOWN in expected:
        words = files(folder / SHOWN, False)[0]
        print(f"\n$ rlhf audit {Path(words[0]).relative_to(ROOT)}\n{audited(*words)[1]}", end="")
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main())
