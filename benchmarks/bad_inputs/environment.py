"""Rows about the environment: encodings, folders that cannot be written, missing libraries, the network."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bad_inputs.row import RL, Row

EVALUATED = RL.replace("schedule.eval_every=0", "schedule.eval_every=1")


def run(name: str, env: dict[str, str | None], *says: str, **others: object) -> Row:
    """Return a row of an RL run with evaluations and other environment variables."""
    shown = " ".join(f"{key}={value}" for key, value in env.items())
    others = {"code": 0, "keeps": True, "shown": f"`{shown}`", "base": EVALUATED, **others}
    return Row(f"f_{name}", "seed=1", says, env=env, **{"alone": True, **others})  # type: ignore[arg-type]


def key(name: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row of a run with other settings."""
    return Row(f"f_{name}", typed, says, **{"base": RL, "alone": True, **others})  # type: ignore[arg-type]


def shell(name: str, shown: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row that is a command line of bash."""
    return Row(f"f_{name}", typed, says, shown=shown, shell=True, **others)  # type: ignore[arg-type]


def without_vllm(folder: Path) -> None:
    """Write a start file of Python in the folder `hidden` that hides vLLM."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text(HIDES_VLLM)


HIDES_VLLM = """
import sys
from importlib.machinery import PathFinder

class Hides(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "vllm" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hides if finder is PathFinder else finder for finder in sys.meta_path]
"""
TRAIN = f"$PYTHON -m rlhf.train {EVALUATED}"
STARTED = "until ls outputs/*/metrics.jsonl 2>/dev/null; do sleep 0.1; done"

ROWS = (
    # the rows of the first table
    run("ascii_stdout", {"PYTHONIOENCODING": "ascii"}),
    run("dumb", {"TERM": "dumb", "NO_COLOR": "1"}, never=("\\x1b",)),
    shell(
        "head",
        "`... | head -3`",
        f"{TRAIN} | head -3; sleep 12; ls outputs/*/model",
        "model.safetensors",
        code=0,
        keeps=True,
    ),
    run("home_tmp", {"HOME": "/proc", "TMPDIR": "/nowhere"}),
    run(
        "lang_umlaut",
        {"LANG": "C", "LC_ALL": None},
        code=0,
        base=EVALUATED.replace("data/pairs", "'\"data/my dätä\"'"),
        shown="`LANG=C`, path with umlaut",
    ),
    run("lang_c_ascii", {"LC_ALL": "C", "PYTHONUTF8": "0"}),
    run("lang_c", {"LC_ALL": "C"}),
    key(
        "wandb",
        "logger=wandb",
        "wandb",
        env={"WANDB_API_KEY": None, "WANDB_MODE": None, "HOME": "/tmp/nobody"},
        code=None,
        keeps=True,
        shown="`logger=wandb` without login",
    ),
    key("hub_recipe", "experiment=tldr_410m_dpo", "network", shown="hub recipe without network", base=""),
    run("omp_abc", {"OMP_NUM_THREADS": "abc"}),
    key(
        "no_vllm",
        "generator=vllm",
        "pip install -e '.[vllm]'",
        prepare=without_vllm,
        env={"PYTHONPATH": "hidden"},
        shown="`generator=vllm` without vLLM",
    ),
    # further rows
    run("columns_20", {"COLUMNS": "20"}),
    run("no_columns", {"COLUMNS": None, "TERM": None}),
    run(
        "warnings_as_errors", {"PYTHONWARNINGS": "error"}, code=None, remark="not supported by the libraries"
    ),
    run("tmp_missing", {"TMPDIR": "/nowhere"}, code=None),
    run("cuda_variable", {"CUDA_VISIBLE_DEVICES": "7"}),
    run(
        "world_size", {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "MASTER_ADDR", code=2, keeps=False
    ),
    shell("closed_stdin", "standard input closed", f"{TRAIN} <&-", code=0, keeps=True),
    shell("closed_stdout", "standard output closed", f"{TRAIN} >&-", code=None, keeps=True),
    shell(
        "devfull",
        "`> /dev/full`",
        f"{TRAIN} > /dev/full; code=$?; ls outputs/*/model; exit $code",
        "model.safetensors",
        code=None,
        keeps=True,
    ),
    shell(
        "sigterm",
        "SIGTERM during the run",
        f"{TRAIN} schedule.total_episodes=6400 & pid=$!; {STARTED}; kill $pid; wait $pid",
        "resumes",
        code=75,
        keeps=True,
    ),
    shell(
        "other_folder",
        "started in a folder below",
        f"mkdir below && cd below && {TRAIN}",
        "no module 'my_rewards'",
        "run the command in the folder that contains it",
        code=2,
    ),
)
