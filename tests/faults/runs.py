"""The commands into which faults are injected, and the results by which two runs are compared.

All paths are relative to the folder of a trial, so that a copy of a folder is the same run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUT, CACHE, PAIRS = "out", "cache", "pairs"  # folders of a trial
SERVICE = "SERVICE"  # in arguments: the address of the scoring service
RUN = "RUN"  # in arguments: the only run folder in OUT

TINY = ("debug=tiny", "task.train_size=128", "task.validation_size=32", "task.test_size=8", "progress=off")
FOLDERS = (f"cache_dir={CACHE}", f"output_dir={OUT}")
UPDATES = 5
LENGTH = ("schedule.total_episodes=80", "schedule.save_every=1", "schedule.eval_every=2", "algo.ties=keep")
LAG = (*LENGTH, "schedule.max_lag=1")
FOUR = ("schedule.total_episodes=160", *LENGTH[1:3])  # five updates of four samples per prompt
JUDGED = ("algo=grpo", "scorer=facts", "scorer.missing_eos_score=null")
HTTP = (
    *("scorer=http", f"scorer.url={SERVICE}", "scorer.timeout_s=2", "scorer.retries=2"),
    *("scorer.concurrency=2", f"hydra.run.dir={OUT}/run"),
)
# With a constant learning rate, and without fractions of the length, a run does not depend on its length.
CONSTANT = ("schedule.eval_every=1", "schedule.save_every=1", "optim.schedule=constant")


@dataclass(frozen=True, slots=True)
class Run:
    """A command of a few seconds.

    Args:
        words: arguments, in addition to those of every run.
        title: the command in the table of results.md.
        module: the command.
        ranks: number of ranks that torchrun starts; 0: no launcher.
        sweep: the command is a sweep.
        base: the run whose finished folder the command works on.
        artefacts: whether `cache_dir` contains the models of the embedded task before the command starts.
        exact: whether two uninterrupted runs have equal results.
        limit_s: maximum duration of one session.
        needs: a requirement (see `entry.Entry`).
    """

    words: tuple[str, ...]
    title: str
    module: str = "rlhf.train"
    ranks: int = 0
    sweep: bool = False
    base: str = ""
    artefacts: bool = True
    exact: bool = True
    limit_s: float = 120.0
    needs: str = ""

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command."""
        if self.module in ("rlhf.evaluate", "rlhf.extend"):  # the config is the config of the run
            return [*self.words, "progress=off"]
        folders = FOLDERS[:1] if self.module == "rlhf.relabel" else FOLDERS
        keys = {word.partition("=")[0] for word in self.words}
        tiny = [word for word in TINY if word.partition("=")[0] not in keys]
        return [*(["-m"] if self.sweep else []), *tiny, *folders, *self.words]


RUNS: Mapping[str, Run] = {
    "hf": Run(LENGTH, "synchronous run"),
    "lag": Run(LAG, "run with generator and annotator process"),
    "grpo": Run((*JUDGED, *FOUR, "schedule.max_lag=1"), "run with generator process and judge"),
    "in_flight": Run(
        (*JUDGED, *FOUR, "schedule.max_lag=1", "schedule.update=in_flight", "generator.batch_size=4"),
        "in-flight updates",
        exact=False,
    ),
    "replicas": Run((*LENGTH, "schedule.max_lag=2", "generator.replicas=2"), "two generator replicas"),
    "ppo": Run(("algo=ppo", *LENGTH[:3], "schedule.log_every=3"), "PPO"),
    "lora": Run((*LENGTH, "model.lora.rank=4", "optim.lr=1e-2"), "LoRA"),
    "sft": Run(
        ("algo=sft", "schedule.total_episodes=80", "schedule.save_every=1", "schedule.eval_every=2"), "SFT"
    ),
    "reward": Run(
        ("algo=reward", "schedule.total_episodes=80", "schedule.save_every=1", "schedule.eval_every=2"),
        "reward model",
    ),
    "rollouts": Run((*LENGTH, "save_generations=true"), "run that saves its rollouts"),
    "stages": Run(LENGTH, "run that makes its SFT model, pairs and reward model", artefacts=False),
    "http": Run(("algo=rloo", *FOUR, *HTTP), "run with a scoring service"),
    "http_lag": Run(("algo=rloo", *FOUR, "schedule.max_lag=1", *HTTP), "annotator with a scoring service"),
    "ranks": Run(LENGTH, "two ranks, backend=torch", ranks=2),
    "zero2": Run((*LENGTH, "backend=zero2"), "two ranks, backend=zero2", ranks=2, needs="deepspeed"),
    "zero3": Run((*LENGTH, "backend=zero3"), "two ranks, backend=zero3", ranks=2, needs="deepspeed"),
    "ranks_lag": Run(LAG, "two ranks, generator processes", ranks=2),
    "vllm": Run(
        (*LENGTH, "generator=vllm", "schedule.max_lag=1"), "generator=vllm", limit_s=300.0, needs="vllm"
    ),
    "sweep": Run((*LENGTH[:3], "seed=1,2"), "sweep", sweep=True),
    "sweep_local": Run((*LENGTH[:3], "seed=1,2", "hydra/launcher=local"), "sweep of local jobs", sweep=True),
    "sweep_joblib": Run(
        (*LENGTH[:3], "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        "sweep of joblib jobs",
        sweep=True,
    ),
    "pipeline": Run(
        (*LENGTH[:3], 'stages.sft=["debug=tiny","schedule.save_every=1"]', "eval.samples=0"),
        "rlhf.pipeline",
        module="rlhf.pipeline",
        artefacts=False,
    ),
    "relabel": Run(
        (f"task.preferences_path={PAIRS}", f"output={OUT}/relabelled"), "rlhf.relabel", module="rlhf.relabel"
    ),
    "evaluate": Run((f"run={RUN}",), "rlhf.evaluate", module="rlhf.evaluate", base="hf"),
    "short": Run((*CONSTANT, "schedule.total_episodes=48"), "short run"),
    "extend": Run(
        (f"run={RUN}", "schedule.total_episodes=96"), "rlhf.extend", module="rlhf.extend", base="short"
    ),
}

# -- results ---------------------------------------------------------------------------------------

VARIES = ("time/", "throughput/", "memory/", "generator/restarts", "annotator/restarts")
MOMENTS = (
    "starts",
    "ends",
    "ready",
    "taken",
    "waited",
)  # of groups.jsonl, in seconds of the clock on the wall
ROWS = ("metrics.jsonl", "evaluations.jsonl")


@dataclass(slots=True)
class Results:
    """The results in the folders of a trial: by path, values that equal runs have in common."""

    values: dict[str, Any] = field(default_factory=dict)

    def differences(self, reference: Results) -> list[str]:
        """Return a line for each difference from the results of an uninterrupted run."""
        found = []
        for name in sorted(self.values.keys() | reference.values.keys()):
            if name not in self.values:
                found.append(f"{name} is missing")
            elif name not in reference.values:
                found.append(f"{name} is unexpected")
            elif self.values[name] != reference.values[name]:
                found.append(difference(name, self.values[name], reference.values[name]))
        return found


def difference(name: str, value: Any, expected: Any) -> str:
    """Return a line about two different values."""
    if not isinstance(value, list):
        return f"{name} differs" + (f": {value} instead of {expected}" if len(str(expected)) < 100 else "")
    if len(value) != len(expected):
        return f"{name} has {len(value)} rows instead of {len(expected)}"
    number = next(i for i, pair in enumerate(zip(value, expected, strict=True)) if pair[0] != pair[1])
    one, other = value[number], expected[number]
    keys = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
    shown = ", ".join(f"{key} {one.get(key)!s:.40} instead of {other.get(key)!s:.40}" for key in keys[:2])
    return f"{name}: row {number + 1} of {len(value)} differs: {shown}"


def results(folder: Path, exact: bool = True) -> Results:
    """Return the results in the folders OUT and CACHE of a trial; without values if they are not exact."""
    found = Results()
    for top in (OUT, CACHE):
        for file in sorted((folder / top).rglob("*")):
            name = str(file.relative_to(folder))
            hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
            cached = file.name.startswith("cache-")  # by the library datasets
            if hidden or cached or ".old-" in name or "checkpoint-" in name or not file.is_file():
                continue
            value = value_of(file, exact)
            if value is not None:
                found.values[name] = value
    return found


def value_of(file: Path, exact: bool) -> Any:
    """Return what equal runs have in common in a file; None for files without results."""
    if file.name == "trainer_state.json":
        return state_of(file, exact)
    if file.name in ROWS:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        if not exact:
            return [{"update": row["update"]} for row in rows]
        return [{key: value for key, value in row.items() if not key.startswith(VARIES)} for row in rows]
    if file.name == "groups.jsonl" and exact:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [{key: value for key, value in row.items() if key not in MOMENTS} for row in rows]
    if file.suffix == ".safetensors":
        return hashlib.sha256(file.read_bytes()).hexdigest() if exact else "weights"
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()] if exact else "rows"
    if file.suffix == ".arrow":
        import pyarrow

        with pyarrow.memory_map(str(file)) as stream:
            return pyarrow.ipc.open_stream(stream).read_all().to_pylist()
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(file).to_pylist() if exact else "rows"
    return None


def state_of(file: Path, exact: bool) -> dict[str, Any]:
    """Return what equal runs have in common in trainer_state.json."""
    state = json.loads(file.read_text())
    result = {key: value for key, value in state.get("result", {}).items() if not key.startswith(VARIES)}
    return {
        "finished": state.get("finished"),
        "update": state.get("update"),
        "result": result if exact else None,
    }
