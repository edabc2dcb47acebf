"""Experiments in Python: compose a config, check it, run it, and read its results.

    from rlhf import Experiment

    experiment = Experiment("algo=dpo", "task=tldr_mini", "seed=3")  # overrides of the command line
    experiment.validate()  # one error with all problems
    experiment.run()  # starts or resumes the run; returns at once if the run is finished
    experiment.metrics()  # a pandas.DataFrame
    experiment.sample(["Summarize: ..."])

    Experiment("algo=rloo", "model.policy=<model>", dataset=rows, reward=brief)  # objects

The command `python -m rlhf.train` creates objects of this class and calls the same methods. Importing this
module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rlhf.checks import check
from rlhf.checks.settings import recipes_of_other_commands
from rlhf.config.algorithms import Trains
from rlhf.config.root import Config, set_environment
from rlhf.config.run import LRSchedule, Resume
from rlhf.core.errors import UserError, override, setting
from rlhf.core.files import component, read_lines, whole, write_atomically
from rlhf.core.formatting import shortened
from rlhf.core.launched import is_first_rank
from rlhf.loggers.logger import Hook
from rlhf.runs.folder import RunFolder, complete_checkpoints
from rlhf.runs.lock import Claim, claimed, creating
from rlhf.runs.resuming import LENGTH, earlier_name, folder_of, length_key, length_value, prepare, shorter_run
from rlhf.stages.evaluation import changed, check_sampling, evaluate, run_folder
from rlhf.stages.prerequisites import push_run
from rlhf.terminal.console import say, say_loading
from rlhf.usercode.address import Function, GivenFunctions
from rlhf.words import catalogue
from rlhf.words.compose import key_of, load_config, not_in_name, overridden
from rlhf.words.mistakes import listed, readable, repeated

if TYPE_CHECKING:
    import pandas


class Experiment:
    """A run: its config, its folder, and its results.

    Args:
        overrides: overrides as on the command line, such as "algo=dpo", "optim.lr=1e-5"; also in lists.
        config_dir: a folder laid out like conf/ with further options, as `--config-dir`.
        hooks: objects whose methods the run calls, in addition to the classes that the key `hooks` names.
        dataset: the data as an object, in place of `task.path`: a `datasets.Dataset`, a
            `datasets.DatasetDict`, or a list of dicts. It is written to `cache_dir` and read by `task=local`.
        reward: the reward as a function or a list of functions, in place of `scorer.path` (see
            `rlhf.usercode.address`).
        loop: the training loop as a function, in place of the key `loop` (see `rlhf.training.session`).

    Attributes:
        config: the composed config, as an object of section objects.
        overrides: the overrides.

    Raises:
        UserError: an override names no key or option, or has a value of the wrong type; the data set, the
            reward or the loop cannot be used.
    """

    config: Config
    overrides: list[str]
    hooks: Sequence[Hook]
    functions = GivenFunctions()  # those that are given as objects

    def __init__(
        self,
        *overrides: str | Sequence[str],
        config_dir: str | Path | None = None,
        hooks: Sequence[Hook] = (),
        dataset: object = None,
        reward: Function | Sequence[Function] | None = None,
        loop: Function | None = None,
    ) -> None:
        words = readable(listed(overrides))
        with catalogue.also(config_dir):
            if any(given is not None for given in (dataset, reward, loop)):
                words, self.functions = _with_objects(words, dataset, reward, loop)
            self.set_up(check.composed(words), words, hooks=hooks)

    def set_up(
        self, config: Config, overrides: Sequence[str], folder: Path | None = None, hooks: Sequence[Hook] = ()
    ) -> None:
        """Set the attributes; the default of `folder` is the folder of the run in `config.output_dir`."""
        self.config, self.overrides, self.hooks = config, list(overrides), hooks
        self.files = RunFolder(folder or folder_of(config))

    @classmethod
    def open(cls, folder: str | Path, hooks: Sequence[Hook] = ()) -> Self:
        """Return the run in an existing run folder.

        Args:
            folder: the run folder.
            hooks: objects whose methods the run calls if it is resumed.

        Raises:
            UserError: the folder is not a run folder, or its config.yaml is damaged.
        """
        files = run_folder(str(folder))
        opened = cls.__new__(cls)
        opened.set_up(load_config(files.config), [], files.path, hooks)
        return opened

    @classmethod
    def composed(cls, node: DictConfig, overrides: Sequence[str], folder: Path | None = None) -> Self:
        """Return the run of a config that Hydra composed.

        Args:
            node: the composed config.
            overrides: the overrides of the command line.
            folder: the run folder; None: the folder of the run in `output_dir`.

        Raises:
            UserError: a key is unknown, is not set, or has a value of the wrong type.
        """
        made = cls.__new__(cls)
        made.set_up(check.as_objects(node, overrides), overrides, folder)
        return made

    def __repr__(self) -> str:
        return f"Experiment({str(self.folder)!r}, {self.status})"

    # -- before the run ----------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The run folder, which exists once the run has started."""
        return self.files.path

    @property
    def yaml(self) -> str:
        """The resolved config as YAML."""
        return OmegaConf.to_yaml(OmegaConf.structured(self.config), resolve=True)

    def problems(self) -> list[str]:
        """Return a message for every problem of the config; no model and no data set is loaded."""
        self.functions.provide()
        return [*recipes_of_other_commands(self.overrides), *check.problems(self.config)]

    def warnings(self) -> list[str]:
        """Return a message for each setting that has no effect or is doubtful."""
        return [*repeated(self.overrides), *check.warnings(self.config), *self.functions.warnings()]

    def validate(self) -> None:
        """Check the config.

        Raises:
            UserError: the config is invalid; `problems` of the error has one message for each problem.
        """
        if found := self.problems():
            raise UserError(*found)

    def notes(self) -> list[str]:
        """Return notes about run folders of earlier versions and of shorter runs with the same settings."""
        found = (earlier_name(self.folder, self.config), shorter_run(self.files, self.config))
        return [note for note in found if note is not None]

    # -- the run -----------------------------------------------------------------------------------

    def run(self) -> dict[str, float]:
        """Check the run, start or resume it, and return the metrics of its last evaluation.

        A finished run returns its metrics at once, unless `resume=never`.

        Raises:
            UserError: the config is invalid, or an item that the config names cannot be used.
            RunError: the run had to stop, for example because a loss is not finite.
            Interrupted: a signal stopped the run; the same call resumes it.
        """
        self.validate()
        check.warn(self.warnings())
        if self.prepare() is None:
            self.execute()
        else:
            self.push()
        return self.result

    def resume(self) -> dict[str, float]:
        """Resume the run from its last checkpoint; otherwise as `run`.

        Raises:
            UserError: the run has no complete checkpoint and is not finished.
        """
        own = self.config
        try:
            self.config = own.with_({"resume": Resume.must})
            return self.run()
        finally:
            self.config = own

    def extend(self, *overrides: str | Sequence[str]) -> dict[str, float]:
        """Train the run longer, in its folder, and return the metrics of its last evaluation.

        Args:
            overrides: `schedule.total_episodes=<n>` or `schedule.total_epochs=<n>`, and settings that do not
                change results.

        Raises:
            UserError: an override is not allowed, or there is no valid checkpoint.
            RunError, Interrupted: see `run`.
        """
        words = listed(overrides)
        set_environment()
        self.functions.provide()
        # The other ranks of a run would find the lock of its first rank.
        with claimed(self.folder) if is_first_rank() else nullcontext():
            self.config = _extended(self.files, words, self.hooks)
        self.push()
        return self.result

    def prepare(self, wait: bool = False) -> dict[str, Any] | None:
        """Check the machine and the run folder; with `resume=never`, move an existing run aside.

        Args:
            wait: wait for another process that runs in the folder.

        Returns:
            The content of trainer_state.json if the run is finished and does not have to run again.

        Raises:
            UserError: the machine lacks something, or the folder cannot be used.
        """
        if self.config.resume is Resume.never or self.files.finished() is None:
            check.check_machine(self.config)
        return prepare(self.files, self.config, wait=wait)

    def execute(self, claim: Claim = claimed) -> float | None:
        """Carry out the run after `validate` and `prepare`; return the value of its objective metric.

        Args:
            claim: locks the run folder on the first rank.

        Raises:
            UserError, RunError, Interrupted: see `run`.
        """
        self.functions.provide()
        hooks = [*check.check_job(self.config), *self.hooks]
        set_environment()
        say_loading()
        from rlhf.stages.run import run

        value = run(self.config, self.files, check=False, claim=claim, hooks=hooks)
        self.push()
        return value

    def push(self) -> None:
        """Upload the final model of a finished run to `push_to`, if set; files that are there are skipped.

        Raises:
            UserError: the token is missing, or the model is missing or damaged.
            RunError: the upload failed.
        """
        if self.config.push_to is not None and is_first_rank() and self.files.finished() is not None:
            check.check_push(self.config.push_to)
            push_run(self.files, self.config.push_to)

    # -- results -----------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """Whether the run is "finished", "unfinished", or "not started"."""
        if self.files.finished() is not None:
            return "finished"
        return "unfinished" if self.files.config.is_file() else "not started"

    @property
    def result(self) -> dict[str, float]:
        """The metrics of the last evaluation of a finished run; empty if the run is not finished."""
        state = self.files.finished()
        return {} if state is None else dict(state["result"])

    @property
    def model(self) -> Path:
        """The folder of the final model, in Hugging Face format.

        Raises:
            UserError: the run is not finished, or a file of the model is missing or damaged.
        """
        if self.status != "finished":
            raise UserError(
                f"the run must be finished (only then it has a final model), got {self.status} in "
                f"{self.folder}; call run()"
            )
        return self.files.final_model()

    def metrics(self) -> pandas.DataFrame:
        """Return the rows of metrics.jsonl: metrics of training and of evaluations.

        The index is the number of trained updates, an integer named `update`: row 0 is the evaluation before
        training, the last row has the end of the run. An update has one row, with the metrics of both its
        training row and its evaluation; NaN stands for a metric that was not measured at that update.
        `metrics().loc[10]` is update 10, `metrics()["eval/kl"].dropna()` the KL at all evaluations.
        """
        rows = _frame(read_lines(self.files.metrics, ["update"]))
        if rows.empty:
            return rows
        # the row of an update and that of its evaluation
        return rows.astype({"update": int}).groupby("update").last()

    def completions(self) -> pandas.DataFrame:
        """Return the completions of all evaluations, one row per held-out example and evaluation."""
        return _frame(read_lines(self.files.completions, ["update"]))

    def evaluations(self) -> pandas.DataFrame:
        """Return the rows of evaluations.jsonl, one per evaluated model (see `evaluate`)."""
        return _frame(read_lines(self.files.evaluations, ["model"]))

    def evaluate(
        self,
        *overrides: str | Sequence[str],
        models: Sequence[str] = (),
        split: str = "validation",
        only: Sequence[str] = (),
    ) -> pandas.DataFrame:
        """Evaluate the checkpoints and the final model of the run, as `python -m rlhf.evaluate run=...`.

        Args:
            overrides: settings that differ from those of the run, such as "eval.prompts=1000".
            models: further models, folders or hub names.
            split: the held-out split, "validation" or "test".
            only: names of the run's models to evaluate, such as "model"; empty: all.

        Returns:
            One row per model.

        Raises:
            UserError: the run has no model, or an argument is invalid.
        """
        words = listed(overrides)
        self.functions.provide()
        files = run_folder(str(self.folder))
        set_environment()
        return _frame(evaluate(changed(files, words), files, split, only, models))

    def sample(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, str]]],
        samples: int = 1,
        temperature: float | None = None,
        response_length: int | None = None,
        seed: int = 0,
    ) -> pandas.DataFrame:
        """Sample responses of the final model.

        Args:
            prompts: texts that are continued as they are, or conversations (lists of messages with "role" and
                "content"), which the chat template of the model formats.
            samples: responses per prompt.
            temperature: sampling temperature (0.01: almost greedy); None: `generator.temperature` of the run.
            response_length: limit in tokens; None: `generator.response_length` of the run.
            seed: seed of the samples.

        Returns:
            One row per response: `prompt` (its place in `prompts`), `text`, `response`, and `ended` (whether
            the response ends with the end token).

        Raises:
            UserError: the run is not finished, its model is a reward model, or an argument is invalid.
        """
        model, settings = self.model, self.config.generator
        temperature = settings.temperature if temperature is None else temperature
        length = settings.response_length if response_length is None else response_length
        check_sampling(samples, temperature, length)
        if not prompts or isinstance(prompts, str):
            raise UserError(f"prompts must be a list of at least one prompt, got {prompts!r}; write [prompt]")
        set_environment()
        from rlhf.stages.inspection import Sampler

        sampler = Sampler(self.config, str(model), seed)
        return _frame(sampler(prompts, samples=samples, temperature=temperature, response_length=length))


def _frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return rows as a pandas.DataFrame."""
    import pandas

    return pandas.DataFrame(list(rows))


# Extension of a run: the run continues in its folder, from its last checkpoint, until a new length.
#
# The settings are those of the run's config.yaml. Only the length may change, and settings that do not change
# results. Before the run continues, config.yaml gets the new length, and trainer_state.json marks the run as
# unfinished. So an interrupted extension is resumed by the same command.


# Settings that an extension cannot change, although they do not affect the result: files, loggers
_KEPT = ("hydra", "logger", "resume", "output_dir")


def _extended(folder: RunFolder, overrides: Sequence[str], hooks: Sequence[Hook]) -> Config:
    """Train the run in the locked `folder` until its new length, and return its config with the overrides.

    Args:
        folder: the run folder.
        overrides: `schedule.total_episodes=<n>` or `schedule.total_epochs=<n>`, and settings that do not
            affect the result. Without a length, an unfinished run is resumed.
        hooks: the user's code that the run calls, in addition to the classes that the key `hooks` names.

    Raises:
        UserError: an override is not allowed, the new length is too small, or there is no valid checkpoint.
        RunError, Interrupted: see `rlhf.stages.run.run`.
    """
    before = load_config(folder.config)
    key = length_key(before)
    change = partial(_change, length_key=key)
    cfg = overridden(folder.config, overrides, f", got {{}}; set {key}=<number>", change)
    old, new = length_value(before), length_value(cfg)
    state = folder.read_state() or {}
    finished = state.get("finished") is True
    if finished and new == old and any(override.startswith(f"{key}=") for override in overrides):
        say(f"finished already: {folder.path} ({key}={new})")
        return cfg
    if new < old or (finished and new == old):
        raise UserError(
            f"{key} must be above {old} (the length of the run so far), got "
            f"{new if new < old else 'no new length'}; set {key}={2 * old}"
        )
    check.checked(cfg)
    check.check_machine(cfg)
    hooks = [*check.check_job(cfg), *hooks]
    say_loading()
    from rlhf.stages.run import run
    from rlhf.training.checkpoint import damage

    undamaged = (path for path in reversed(complete_checkpoints(folder.path)) if not damage(path))
    last = next(undamaged, None)
    if last is None and new > old:
        start = f"model.{'base' if cfg.algo.trains is Trains.base else 'policy'}"
        raise UserError(
            f"run= must have a valid checkpoint to continue from (a final model has no optimizer state), got "
            f"{folder.path} with none; start a new run from its model: python -m rlhf.train "
            f"{setting(start, folder.model)} <settings of the run>"
        )
    check.warn(check.warnings(cfg))
    if not is_first_rank():
        run(cfg, folder, check=False, claim=nullcontext)
        return cfg
    if last is not None and new > old:
        _say_extension(cfg, folder, state.get("update", 0), last, f"{key}={old} -> {new}")
    saved = {file: file.read_text() for file in (folder.config, folder.state) if file.exists()}
    rows = folder.metrics.stat() if folder.metrics.exists() else None
    try:
        if finished:
            folder.write_state({**state, "finished": False})
        folder.write_config(cfg)
        run(cfg, folder, check=False, claim=nullcontext, hooks=hooks)
    except UserError:  # before any row was removed: the run stays as it was
        if rows is None or folder.metrics.stat().st_mtime_ns == rows.st_mtime_ns:
            for file, content in saved.items():
                write_atomically(file, content)
        raise
    return cfg


def _change(node: DictConfig, overrides: Sequence[Override], length_key: str) -> None:
    """Apply the overrides of an extension to the config `node`, whose length `length_key` sets.

    Raises:
        UserError: an override changes a setting that an extension cannot change.
    """
    for each in overrides:
        key, text = key_of(each), str(each.input_line)
        free = key == length_key or any(fnmatch(key, name) for name in not_in_name() if name not in _KEPT)
        parent, _, leaf = key.rpartition(".")
        section = OmegaConf.select(node, parent) if parent else node
        known = isinstance(section, DictConfig) and leaf in section
        if key in LENGTH and not free:
            raise UserError(
                f"the length of this run must be set by {length_key} (its config.yaml has it in this unit), "
                f"got {text}; set {length_key}=<number>"
            )
        if ("@" in key or known) and not free:  # `update` refuses other keys, with a suggestion
            raise UserError(
                f"{key} must stay as it is (an extension changes only the length, {length_key}), got {text}; "
                "leave it out, or start a new run from the model of the run (python -m rlhf.train)"
            )
        OmegaConf.update(node, key, each.value())


def _say_extension(cfg: Config, folder: RunFolder, end: int, last: Path, change: str) -> None:
    """Print the new length of a run, its first update, and what depends on the length.

    Args:
        cfg: the config with the new length.
        folder: the run folder.
        end: updates of the run so far.
        last: the checkpoint that the run continues from.
        change: the old and the new length.
    """
    at, again = json.loads((last / "counters.json").read_text())["state"]["update"], ""
    if end > at:
        first = f"updates {at + 1:,} to {end:,} are" if end > at + 1 else f"update {end:,} is"
        again = f"; {first} trained again"
    say(f"extending {folder.path}: {change}")
    say(f"  continues from {last.name} (update {at:,}){again}")
    schedule = cfg.optim.schedule
    if schedule is not LRSchedule.constant:
        say(f"  learning rate: {schedule.value} schedule of the new length, so it rises at first")
    names = ("eval_every", "save_every", "log_every")
    if found := [f"schedule.{name}" for name in names if 0 < getattr(cfg.schedule, name) < 1]:
        say(f"  fractions of the new length: {', '.join(found)}")


# Data sets and functions that are given to `Experiment` as objects.


def _with_objects(
    overrides: Sequence[str],
    dataset: object,
    reward: Function | Sequence[Function] | None,
    loop: Function | None,
) -> tuple[list[str], GivenFunctions]:
    """Store a data set in `cache_dir`, and return the overrides with its address and those of functions.

    Args:
        overrides: the other overrides.
        dataset: see `Experiment`; None: the overrides name the data.
        reward: see `Experiment`; None: the overrides name the scorer.
        loop: see `Experiment`; None: the overrides name the loop, if any.

    Returns:
        The overrides, and the functions.

    Raises:
        UserError: the overrides name other data or another scorer, an object cannot be used, or `cache_dir`
            cannot be written.
    """
    words = list(overrides)
    for argument, given, option, path in (
        ("dataset", dataset, "task=local", "task.path"),
        ("reward", reward, "scorer=function", "scorer.path"),
        ("loop", loop, "", "loop"),
    ):
        if given is None:
            continue
        for word in overrides:
            if word != option and word.startswith((f"{path}=", f"{option.partition('=')[0]}=")):
                raise UserError(
                    f"{argument} must not be given together with {word} (both name the {argument}), got an "
                    f"object of type {type(given).__name__}; leave {word} out"
                )
        words = [*words, *([] if option in ("", *words) else [option])]
    cache = Path(check.composed(words).cache_dir)
    with creating(cache, "cache_dir"):
        if dataset is not None:
            words.append(override("task.path", written(dataset, cache / "given_data")))
        functions = GivenFunctions(reward, loop)
    paths = functions.paths[0] if len(functions.paths) == 1 else functions.paths
    named = {"scorer.path": paths, "loop": functions.loop}
    return [*words, *(override(key, value) for key, value in named.items() if value)], functions


# Data sets that are given as objects in Python: they are written as files, which `task=local` reads.
#
# The path of the files depends on their content only, so equal data give the same run, and a changed data
# set another one.


_ERRORS = (TypeError, ValueError, RecursionError)
_RULE = "dataset must be a datasets.Dataset, a datasets.DatasetDict or a list of dicts"


def written(dataset: object, folder: Path) -> Path:
    """Write a data set as one JSON-lines file per split, and return their folder.

    Files that are there already, with the same content, are not written again.

    Args:
        dataset: a `datasets.Dataset` or a list of rows (dicts), which is the split `train`; or a
            `datasets.DatasetDict` or a dict of lists of rows, by the name of the split.
        folder: the folder in which the folder of the data set is made.

    Raises:
        UserError: the object is no data set, a split has no rows, or a value cannot be written as JSON.
    """
    splits = _splits_of(dataset)
    digests = {}
    for name, rows in splits.items():
        hasher = hashlib.sha256()
        for line in _lines(name, rows):
            hasher.update(line)
        digests[name] = hasher.hexdigest()
    place = folder / hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]
    for name, rows in splits.items():
        file = place / f"{name}.jsonl"
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digests[name]:
            continue
        place.mkdir(parents=True, exist_ok=True)
        with whole(file, private=True, durable=True) as scratch, scratch.open("wb") as out:
            out.writelines(_lines(name, rows))
    return place


def _splits_of(dataset: object) -> dict[str, Any]:
    """Return the rows of each split of a data set.

    Raises:
        UserError: the object is no data set, or a split has no rows.
    """
    given: Mapping[Any, Any] = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    datasets = sys.modules.get("datasets")
    found: dict[str, Any] = {}
    for name, split in given.items():
        stored = datasets is not None and isinstance(split, datasets.Dataset)
        if not (stored or isinstance(split, list | tuple)) or str(name) != component(str(name)):
            what = f"an object of type {type(dataset).__name__}"
            if isinstance(dataset, Mapping):
                what = f"a dict whose value {name!r} is an object of type {type(split).__name__}"
            raise UserError(f"{_RULE}, got {what}; {_remedy(split)}")
        if len(split) == 0:
            raise UserError(f"dataset must have rows, got none in the split {name}; add rows")
        found[str(name)] = split
    if not found:
        raise UserError("dataset must have the split train, got no split; add rows")
    return found


def _remedy(rows: Any) -> str:
    """Return what to write in place of an object that is no split."""
    if isinstance(rows, str | Path):
        return "for files set task=local task.path=<file or folder>"
    lists = {
        "DataFrame": "dataset=frame.to_dict('records')",
        "IterableDataset": "datasets.Dataset.from_list(list(dataset))",
    }
    return "write " + lists.get(type(rows).__name__, "[{'prompt': '...'}, ...]")


def _lines(split: str, rows: Any) -> Iterator[bytes]:
    """Yield the rows of a split, a list or a `datasets.Dataset`, as lines of JSON.

    Raises:
        UserError: a row is no dict, or a value cannot be written as JSON.
    """
    if not isinstance(rows, list | tuple):
        from rlhf.tasks.source import numbered

        rows = (row for _, row in numbered(rows, split))
    for number, row in enumerate(rows, 1):
        place = f"row {number} of {split}"
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise UserError(
                f"{_RULE} with texts as keys, got {place} with {shortened(repr(row), 60)}; write "
                "{'prompt': '...'}"
            )
        try:
            yield _as_json(dict(row)) + b"\n"
        except _ERRORS:
            for name, value in row.items():
                try:
                    _as_json(value)
                except _ERRORS as reason:
                    raise UserError(
                        "dataset must have texts, numbers, lists and dicts (its rows are stored as JSON), "
                        f"got {place} with {shortened(repr(value), 60)} in the column {name} ({reason}); "
                        "convert the values, or remove the column"
                    ) from None
            raise


def _as_json(value: object) -> bytes:
    """Return a value as JSON in UTF-8; values of numpy as those of Python.

    Raises:
        TypeError, ValueError, RecursionError: the value has no form in JSON.
    """

    def plain(value: object) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} has no form in JSON")

    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain).encode()
