"""Common parts of the commands: arguments, completion, SLURM's variables, private parts of Hydra."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from omegaconf import DictConfig

from rlhf.checks.check import overrides_of
from rlhf.checks.rules import check_arguments
from rlhf.config.root import set_environment
from rlhf.config.schema import data_file
from rlhf.core.errors import Interrupted, RunError, UserError, report, setting
from rlhf.core.launched import is_first_rank, rank
from rlhf.processes.signals import interruptible
from rlhf.terminal.console import prepare_output, print_error
from rlhf.words import catalogue
from rlhf.words.compose import compose_node, load_config, settings
from rlhf.words.help import WIDTH, row
from rlhf.words.mistakes import CONFIG_ERRORS, flag_problem, readable, texts

# Common parts of the commands: arguments, `--help`, and exit codes, which `rlhf.train` lists.


_FLAGS = {"--help": False, "--config-dir": True, "-cd": True}  # of the commands other than rlhf.train
_CONFIG_DIR, _CONFIG_NAME = ("--config-dir", "-cd"), ("--config-name", "-cn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with arguments of its own (such as `run=<folder>`) in addition to overrides of the config.

    Attributes:
        name: module of the command, rlhf.<name>.
        usage: arguments after the name, for `--help`.
        does: description for `--help`.
        own: the command's own arguments: name -> meaning.
        lists: names of own arguments that are lists of texts; `rlhf.words.mistakes.texts` reads them.
    """

    name: str
    usage: str
    does: str
    own: dict[str, str] = field(default_factory=dict)
    lists: tuple[str, ...] = ()

    def run(self, carry_out: Callable[[dict[str, str], list[str]], None]) -> None:
        """Parse the command line, and call `carry_out` with the command's own arguments and the overrides.

        Raises:
            SystemExit: the command failed or was interrupted; see `exit_codes`.
        """
        prepare_output()
        arguments = sys.argv[1:]
        if "--help" in arguments or "-h" in arguments:
            print(self.help())
            return
        set_environment()
        name_rank()
        with exit_codes():
            catalogue.load_plugins()
            carry_out(*self.split(arguments))

    def help(self) -> str:
        """Return the text of `--help`."""
        command = f"Usage: python -m {self.name} "
        words = re.findall(r"\[[^\]]*\]|\S+", self.usage)  # never break the line within brackets
        usage = textwrap.wrap(
            " ".join(word.replace(" ", "\0") for word in words),
            WIDTH,
            initial_indent=command,
            subsequent_indent=" " * len(command),
            break_on_hyphens=False,
        )
        rows = [line for name, meaning in self.own.items() for line in row(f"{name}=", meaning, 12)]
        usage = [line.replace("\0", " ") for line in usage]
        more = "Groups, options and keys: python -m rlhf.train --help"
        return "\n".join([*usage, "", self.does, "", *rows, *([""] if rows else []), more])

    def split(self, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
        """Return the command's own arguments (name -> value) and the overrides.

        `--config-dir` is not in the result, because `rlhf.words.catalogue` reads it from the command line.

        Raises:
            UserError: a flag or the folder of `--config-dir` does not exist, or one of the command's own
                arguments is repeated or empty.
        """
        own: dict[str, str] = {}
        overrides: list[str] = []
        for argument in _divided(arguments, _FLAGS, self.own)[0]:
            name, _, value = argument.partition("=")
            if name not in self.own:
                overrides += readable([argument])
                continue
            if not value or name in own:
                wrong = "given once" if name in own else "followed by a value"
                raise UserError(f"{name}= must be {wrong} ({self.own[name]}), got {argument}; see --help")
            quoted = value[0] == value[-1] == '"' and name not in self.lists
            own[name] = texts(value)[0] if quoted else value
        return own, overrides

    def required(self, own: dict[str, str], name: str, overrides: list[str]) -> str:
        """Return the value of a required argument.

        Raises:
            UserError: the argument is missing; the message suggests the override with the closest name.
        """
        if name in own:
            return own[name]
        for word in overrides:
            if "=" not in word and Path(word).is_dir():
                rule = f"{name}= is required ({self.own[name]})"
                raise UserError(f"{rule}, got {word}; set {setting(name, word)}")
        close = get_close_matches(name, [override.partition("=")[0] for override in overrides], n=1)
        guess = f"did you mean {name}= instead of {close[0]}=?" if close else f"add {name}=<...>"
        raise UserError(f"{name}= is required ({self.own[name]}), got no {name}=; {guess}")


def help_topics(arguments: Sequence[str]) -> list[str] | None:
    """Return the words after `--help` that are no overrides and no flags; None: there is no `--help`."""
    for place, argument in enumerate(arguments):
        flag, _, topic = argument.partition("=")
        if flag in ("--help", "-h"):
            words = [topic] if topic else arguments[place + 1 :]
            return [word for word in words if "=" not in word and not word.startswith("-")]
    return None


def checked_arguments(arguments: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a command as Hydra reads them: overrides first, some values in quotes.

    Args:
        arguments: the command line without the name of the command.
        flags: the flags of the command, and whether a value follows each flag.

    Raises:
        UserError: the arguments contain another flag, a secret, or the path of a run or of its config.
    """
    named = ("config", "config_file", "config-file", "run", "experiment")  # no settings, for a saved config
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=")
        if before in (*_CONFIG_DIR, *_CONFIG_NAME) or (equals and name.lstrip("-") not in named):
            continue
        if command := _saved_command(Path(value if equals else argument)):
            rule = f"{argument} must be settings, as key=value or group=option"
            raise UserError(f"{rule}, got the config of a run; to run its config: {command}")
    overrides, others = _divided(arguments, flags)
    return [*readable(overrides), *others]


def _divided(
    arguments: Sequence[str], flags: Mapping[str, bool], own: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the words of a command line that are no flags, and the flags with their values.

    Args:
        arguments: the command line without the name of the command.
        flags: the flags of the command, and whether a value follows each flag.
        own: names of the command's own arguments.

    Raises:
        UserError: the arguments have another flag, a secret, a folder of `--config-dir` without options, or
            the name of a file in this folder.
    """
    if problem := flag_problem(arguments, flags, own):
        raise UserError(problem)
    check_arguments(arguments)
    words: list[str] = []
    others: list[str] = []
    before = folder = ""
    for argument in [*arguments, ""]:
        flag, equals, value = argument.partition("=")
        if is_value := flags.get(before, False) and not argument.startswith("-"):
            flag, equals, value = before, "=", argument
        if equals and flag in _CONFIG_DIR:
            _check_config_dir(folder := value)
        file = Path(folder) / f"{value.removesuffix('.yaml')}.yaml"
        if equals and flag in _CONFIG_NAME and folder and file.is_file():
            rule = f"--config-name must be left out, got {value}"
            raise UserError(f"{rule}; name options in {folder}, as algo=mine")
        is_flag = re.match("--?[A-Za-z]", argument)
        (others if is_value or is_flag else words).append(argument)
        before = argument
    return [each for each in words if each], [each for each in others if each]


def _check_config_dir(folder: str) -> None:
    """Raise UserError if the folder of `--config-dir` does not exist, has no options, or is that of a run."""
    path = Path(folder)
    own = path.is_dir() and any((path / group.name).is_dir() for group in catalogue.conf_dir().iterdir())
    saved = next(filter(None, map(_saved_command, [path, *(() if own else path.glob("*.yaml"))])), None)
    if own and not saved:
        return
    why = "with the config of a run (its settings would not be used)" if saved else ""
    why = why or ("without a folder of options" if path.is_dir() else "which does not exist")
    rule = "a folder laid out like conf/ (with option files such as algo/mine.yaml)"
    remedy = f"to run its config: {saved}" if saved else "fix the path"
    raise UserError(f"--config-dir must name {rule}, got {folder} {why}; {remedy}")


def _saved_command(path: Path) -> str | None:
    """Return the command that runs a saved config: a run folder or its config.yaml; None: it is neither."""
    try:
        file = path / "config.yaml" if path.is_dir() else path
        found = settings(load_config(file)) if file.suffix == ".yaml" and file.is_file() else None
    except (UserError, OSError, ValueError):
        return None
    if found is None:
        return None
    return " ".join(["python -m rlhf.train", *(setting(key, value) for key, value in found.items())])


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors and signals of the block into a message and an exit code.

    Raises:
        SystemExit: with code 2 after a UserError, 1 after a RunError, 130 after Ctrl-C, 75 after another
            signal.
    """
    try:
        with interruptible() as interruption:
            try:
                Path.cwd()
            except FileNotFoundError:
                raise UserError(
                    "the current folder must exist (paths begin there), got a folder that was deleted; "
                    "change to an existing folder: cd <folder>"
                ) from None
            try:
                yield
            except Exception:
                if interruption.raised:  # a library, such as numpy's import, made an error of the signal
                    interruption.check()
                raise
    except (UserError, RunError) as error:
        stop(error)
    except (Interrupted, KeyboardInterrupt) as reason:
        received = getattr(reason, "received", signal.SIGINT)
        if is_first_rank():
            ctrl_c = "interrupted by Ctrl-C; the same command resumes from the last checkpoint, if any"
            print_error(str(reason) or ctrl_c)
        raise SystemExit(128 + signal.SIGINT if received is signal.SIGINT else os.EX_TEMPFAIL) from None


@contextmanager
def with_flags(command: str, given: Sequence[str] | None) -> Iterator[Namespace]:
    """Parse the flags of a command of flags.yaml, and turn errors of the block into exit codes.

    Args:
        command: the command, a module of this package.
        given: the arguments; None: those of the command line.
    """
    prepare_output()
    table = data_file("rlhf.launch", "flags.yaml")[command]
    parser = ArgumentParser(prog=f"python -m rlhf.{command}", description=table["does"], allow_abbrev=False)
    parser.register("type", "path", Path)
    parser.register("type", "int", int)
    for name, options in table["arguments"].items():
        parser.add_argument(name, **options)
    parsed = parser.parse_args(given)
    set_environment()
    with exit_codes():
        catalogue.load_plugins()
        yield parsed


def stop(error: RunError | UserError) -> NoReturn:
    """Print an error and end the command: exit code 2 for a UserError, 1 for a RunError.

    Rank 0 prints every error. Another rank prints an error that only this rank raised.
    """
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    if is_first_rank():
        print_error(report(problems))
    elif not error.everywhere:
        print_error(f"rank {rank()}: {report(problems)}")
    raise SystemExit(2 if isinstance(error, UserError) else 1)


# Tab completion of the command `rlhf` in bash.
#
# The script completion.bash calls `rlhf --complete <words>` with the words up to the cursor, and gets the
# candidates for the last word, one per line. Where there are none, the shell completes names of files.


_HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")


def candidates(words: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """Return the arguments that can stand in place of the last word of a command line.

    Args:
        words: the arguments of a command up to the cursor. The last word is unfinished, and may be empty.
            The option `--config-dir` among them is read from the command line of this process.
        own: the command's own arguments, which are no overrides, such as `run` of `run=<folder>`.
    """
    *before, word = words
    if word.startswith("-"):
        return [flag for flag in _FLAGS if flag.startswith(word)]
    if before and before[-1] in _CONFIG_DIR:
        return []  # the shell completes names of folders
    overrides = [  # without swept values (a,b), which only Hydra's sweeper reads
        each for each in before if re.fullmatch(r"[^-=][^=]*=[^,]*", each) and each.split("=")[0] not in own
    ]
    group, equals, value = word.partition("=")
    # scorer@gold= has the options of scorer=
    if found := catalogue.options(group.partition("@")[0]) if equals else {}:
        return [f"{group}={option}" for option in found if option.startswith(value)]
    try:
        keys = CompletionPlugin._get_matches(compose_node(overrides), word)  # `<key>=`: with its value
    except CONFIG_ERRORS:  # of the words before; the command explains them
        keys = []
    return [
        *(f"{name}=" for name in (*own, *catalogue.groups(), *_HYDRA_GROUPS) if name.startswith(word)),
        *(key for key in keys if not key.endswith(".name=")),
    ]


# SLURM tasks as ranks, and requeueing of SLURM jobs that were stopped.
#
# The same functions serve jobs that submitit runs on this machine (`hydra/launcher=local`).


PORTS = range(16384, 32768)  # below the ports that operating systems assign automatically


def name_rank() -> None:
    """Set RANK, WORLD_SIZE and the related variables of torchrun, if this process is one of several tasks.

    If RANK is already set, for example by torchrun, no variable is changed. Existing values of MASTER_ADDR
    and MASTER_PORT are never changed.
    """
    if "RANK" not in os.environ:
        given = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
        os.environ.update(rank_environment(os.environ) | given)


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task; empty if the process is the only task.

    The function reads SLURM's variables of the step (`SLURM_STEP_...`), which exist only in processes that
    srun started. Variables of the job also exist in the batch script, which is a single process.
    """
    of_submitit = environ.get("SUBMITIT_EXECUTOR") == "local"
    tasks = int(environ.get("SUBMITIT_LOCAL_NTASKS" if of_submitit else "SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:
        return {}
    if of_submitit:
        rank = local = environ["SUBMITIT_LOCAL_GLOBALID"]
        on_this_machine, host, job = tasks, "127.0.0.1", int(environ["SUBMITIT_LOCAL_JOB_ID"])
    else:
        rank, local = environ["SLURM_PROCID"], environ["SLURM_LOCALID"]
        counts: list[int] = []  # of each node: 4(x2),3 stands for 4, 4, 3
        for part in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
            count, _, times = part.rstrip(")").partition("(x")
            counts += [int(count)] * int(times or "1")
        on_this_machine = counts[int(environ["SLURM_NODEID"])]
        nodes = re.sub(r"\[(\w+)[^\]]*\]", r"\1", environ["SLURM_STEP_NODELIST"])  # rack[1-2]node[08-10,12],a
        host = nodes.partition(",")[0]
        job = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
    if environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal():
        local = "0"  # each task sees one GPU (--gpus-per-task), and LOCAL_RANK indexes the visible GPUs
    return {
        "RANK": rank,
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(on_this_machine),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(PORTS[job % len(PORTS)]),
    }


def requeue(reason: Interrupted) -> None:
    """Requeue this submitit job after the checkpoint of a stopped run is written.

    The function calls submitit's handler of SIGUSR2, which counts the sessions that reached the time limit
    (`hydra.launcher.max_num_timeout`) and asks SLURM to requeue the job. The function returns if the job must
    not be requeued: if a user cancelled it. SLURM would requeue such a job, too, so it is asked for the
    reason.

    Args:
        reason: the exception that stopped the run.

    Raises:
        SystemExit: the job is requeued.
        submitit's UncompletedJobError: the job reached its time limit too often.
    """
    submitit_handler = signal.getsignal(signal.SIGUSR2)
    if not callable(submitit_handler):
        return
    preempted = reason.received is not signal.SIGTERM
    if os.environ.get("SUBMITIT_EXECUTOR") != "local":
        job = os.environ["SLURM_JOB_ID"]
        if "SLURM_ARRAY_TASK_ID" in os.environ:  # the id of the last element is that of the whole array
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        state, _, why = answer.stdout.strip().partition(" ")
        preempted = state == "RUNNING" or why in ("TimeLimit", "Preempted")
    if preempted:
        # SLURM ends the processes of a job that it requeues, also the one that asks for it (scontrol).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        submitit_handler(signal.SIGUSR2, None)  # ends the process of the first rank
        raise SystemExit(os.EX_TEMPFAIL)


# Private parts of Hydra and of its submitit launcher that this project depends on.
#
# Hydra has no public interface for these uses, so tests/launch/test_hydra_internals.py fails after an
# incompatible upgrade. `rlhf.launch.sweep` calls submitit's launcher, and changes the settings of joblib's.


def uses_basic_sweeper(config: DictConfig) -> bool:
    """Return whether the sweeper is Hydra's own, which runs every combination of the given values."""
    return bool(config.hydra.sweeper._target_.endswith(".BasicSweeper"))


def combinations(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each job that Hydra's own sweeper makes from the swept overrides."""
    parsed = parsed_overrides(config, config.hydra.sweeper.params)
    return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


def parsed_overrides(config: DictConfig, params: Mapping[str, Any] | None = None) -> list[Override]:
    """Return the overrides of a sweep: `params`, which are those of its recipe, then the command line."""
    words = [f"{key}={value}" for key, value in (params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides([*words, *overrides_of(config.hydra.overrides)])


def flags() -> dict[str, bool]:
    """Return the flags of Hydra's command line, such as `--cfg`, and whether a value follows each flag."""
    actions = get_args_parser()._actions
    return {flag: action.nargs != 0 for action in actions for flag in action.option_strings}


@contextmanager
def launchers_inside(outer: Any) -> Iterator[None]:
    """Replace the launcher of a sweep by `outer`, a launcher that gets the replaced one as its `launcher`.

    Hydra has no hook between sweeper and launcher.
    """
    original = Plugins.instantiate_launcher

    def instantiate(plugins: Plugins, *, config: DictConfig, **others: Any) -> Launcher:
        outer.launcher = original(plugins, config=config, **others)
        outer.setup(config=config, **others)
        return outer

    Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = original  # type: ignore[method-assign]


def submitit_executor(launcher: Launcher) -> str | None:
    """Return the executor of a submitit launcher, "slurm" or "local"; None for another launcher."""
    return getattr(launcher, "_EXECUTOR", None)


def multirun_config(overrides: list[str]) -> DictConfig:
    """Return the config of the sweep `python -m rlhf.train -m <overrides>`. Hydra must be initialized."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "inside hydra.initialize_config_dir"
    return hydra.compose_config(
        config_name="config", overrides=overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=False
    )
