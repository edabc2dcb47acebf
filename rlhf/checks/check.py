"""Check of a config and of this machine before a run starts; the generator that this machine selects."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf.checks import inputs as inputs  # registers its rules
from rlhf.checks import settings
from rlhf.checks.rules import DOUBTS, RULES, TRAINING_RULES, chosen, training_rule
from rlhf.config.environments import default_scorer
from rlhf.config.generators import Transfer
from rlhf.config.models import Device
from rlhf.config.root import SELECTED, Config, best_generator, candidates, selecting, to_config
from rlhf.config.schema import sections
from rlhf.config.scorers import scorers
from rlhf.core import launched, machine
from rlhf.core.errors import UserError, report
from rlhf.core.launched import is_first_rank, local_world_size, missing_variables, rank, world_size
from rlhf.core.machine import this_machine, torch_has_cuda
from rlhf.loggers.logger import Hook, load_hooks
from rlhf.memory import plan
from rlhf.memory.sizes import models
from rlhf.models.folder import is_local, offline_problem
from rlhf.terminal.console import print_error
from rlhf.usercode.address import class_problem, function_problem
from rlhf.words import catalogue
from rlhf.words.compose import compose_node
from rlhf.words.mistakes import CONFIG_ERRORS, explain, explained, unknown_keys

# Check of a config before a run starts: find every problem of the run, and report all problems together.
#
# Each section checks its own fields (`Section.problems`); rules over several sections are in the other
# modules of this folder. The check loads no models and no data, and this package imports no torch.


_FIRST_RANK_S = 5.0  # seconds that the first rank has to report a problem, before another rank does


def problems(cfg: Config, training: bool = True) -> list[str]:
    """Return an error message for every problem of the config, without duplicates.

    Args:
        cfg: the config of a run.
        training: whether the run trains; False: the model of the run is only evaluated.
    """
    return _found("problems", cfg, [*RULES, *(TRAINING_RULES if training else ())])


def warnings(cfg: Config) -> list[str]:
    """Return a warning for each setting that has no effect or is doubtful, without duplicates."""
    return _found("warnings", cfg, DOUBTS)


def _found(kind: str, cfg: Config, rules: Iterable[Callable[[Config], Iterator[str]]]) -> list[str]:
    """Return what the sections (their `problems` or `warnings`) and rules say, without duplicates."""
    own = (text for key, section in sections(cfg) for text in getattr(section, kind)(key))
    return list(dict.fromkeys(chain(own, *(rule(cfg) for rule in rules))))


def checked(cfg: Config, training: bool = True) -> Config:
    """Return a config unchanged, after all checks (see `problems`).

    Raises:
        UserError: the config is invalid; the error contains every problem.
    """
    if found := problems(cfg, training):
        raise UserError(*found)
    return cfg


def as_objects(config: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Return a composed config as an object of section objects, without checks of the values.

    Raises:
        UserError: a key is unknown, is not set, or has a value of the wrong type.
    """
    config = config.copy()
    if "hydra" in config:
        with read_write(config), open_dict(config):
            del config["hydra"]
    found = unknown_keys(config, overrides)
    found += [*settings.typed_problems(overrides), *catalogue.hidden()]
    try:
        unset = sorted(OmegaConf.missing_keys(config))
        found += [f"{key} must be set (it has no default), got ???; set {key}=<value>" for key in unset]
        if found:
            raise UserError(*found)
        return to_config(config if "scorer=reward_model" in overrides else default_scorer(config))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, overrides)) from None


def overrides_of(overrides: Any) -> list[str]:
    """Return the overrides of the command line as typed, with unresolved interpolations.

    Args:
        overrides: `hydra.overrides` of the config.
    """
    return list(OmegaConf.to_container(overrides.task, resolve=False))  # type: ignore[arg-type]


def warn(doubts: Sequence[str]) -> None:
    """Print warnings to stderr, on rank 0."""
    if is_first_rank():
        for doubt in doubts:
            print_error(f"warning: {doubt}")


def refuse(problems: Sequence[str]) -> NoReturn:
    """Print problems to stderr, and end the command.

    Another rank than the first waits before it prints: the end of the first rank, if that has the same
    problems, ends it before.

    Raises:
        SystemExit: always, with exit code 2.
    """
    if is_first_rank():
        print_error(report(list(problems)))
    else:
        time.sleep(_FIRST_RANK_S)
        print_error(f"rank {rank()}: {report(list(problems))}")
    raise SystemExit(2)


# Checks in the process of a job, which may run on another machine than the command.
#
# This module imports no torch; the user's reward functions and hooks may.


@training_rule
def hooks_exist(cfg: Config) -> Iterator[str]:
    """Yield an error for each hook whose class is not found."""
    yield from filter(None, (class_problem("hooks", path) for path in cfg.hooks))


@training_rule
def loop_exists(cfg: Config) -> Iterator[str]:
    """Yield an error for a loop that is not found, or that cannot be called with a session."""
    if cfg.loop is not None and (problem := function_problem("loop", cfg.loop, ("session",))):
        yield problem


def check_job(cfg: Config) -> list[Hook]:
    """Import the user's code, connect to services and trackers, and return the hooks of this rank.

    Raises:
        UserError: the code cannot be imported or called, or a service refuses connections.
    """
    if cfg.backend.portable:  # before the user's code, or the protection from it, computes with torch
        os.environ.update(launched.PORTABLE)
    found = [problem for key, section in sections(cfg) for problem in section.job_problems(key)]
    if found := [*found, *loop_exists(cfg)]:
        raise UserError(*found)
    return load_hooks(cfg.hooks) if is_first_rank() else []


def check_services(cfg: Config) -> None:
    """Check the services that score, for a command that does not train.

    Raises:
        UserError: a service refuses connections or the token, or has another model.
    """
    asked = ((at, each) for at, each in scorers(cfg) if each.asks_service and not each.parts)
    if found := [problem for at, each in asked for problem in each.job_problems(at)]:
        raise UserError(*found)


# Check of what this machine has: processes, GPUs, memory, downloaded models, a token. No torch.


TOKEN = "HF_TOKEN"  # the environment variable with the token of the Hugging Face hub


def check_machine(cfg: Config) -> None:
    """Check whether this machine has the processes, the GPUs, the models and the memory of the run `cfg`.

    Call this function in the process of the job, because a sweep may start jobs on other machines.

    Raises:
        UserError: the machine lacks processes, GPUs, memory, a model that it cannot download, or the token
            for `push_to`.
    """
    if found := [
        *process_problems(cfg),
        *expandable_segments(cfg),
        *downloads(cfg),
        *push_problems(cfg.push_to),
    ]:
        raise UserError(*found)
    check_memory(cfg)


def check_memory(cfg: Config) -> None:
    """Check the memory of this machine for a run, and warn of devices that may have too little memory.

    Call this function in the process of the job, because a sweep may start jobs on other machines.

    Raises:
        UserError: a device certainly has too little memory.
    """
    if found := plan.problems(cfg):
        raise UserError(*found)
    warn(plan.warnings(cfg))


def process_problems(cfg: Config) -> Iterator[str]:
    """Yield an error for missing GPUs, and for processes that no launcher or another number started."""
    wanted, started = cfg.backend.ranks, world_size()
    if missing := missing_variables():
        yield (
            f"WORLD_SIZE must be 1 or not set without {', '.join(missing)}, got {started}; start it with "
            f"torchrun --nproc-per-node {started} -m rlhf.train, or run: unset WORLD_SIZE RANK LOCAL_RANK"
        )
    if wanted is not None and wanted != started:
        command = "python" if wanted == 1 else f"torchrun --nproc-per-node {wanted}"
        rule, reason = "be the number of processes that train together", f"{started} started"
        remedy = f"start it with {command} -m rlhf.train, or set backend.ranks={started}"
        yield cfg.backend.refused("backend", "ranks", rule, reason, remedy=remedy)
    if cfg.backend.device is not Device.cuda:
        return
    if not torch_has_cuda():
        remedy = "install torch with CUDA (make setup LOCK=gpu), or try the run with debug=tiny"
        rule = "be cpu or auto with a torch that was built without CUDA"
        yield cfg.backend.refused("backend", "device", rule, remedy=remedy)
        return
    found = len(this_machine().gpus)
    trainer = local_world_size() if started > 1 else wanted or 1
    generator = 0 if cfg.generator.shares_gpu else len(cfg.generator.reserved_gpus(local_world_size()))
    if 0 < found < trainer + generator:  # 0: the number of GPUs is unknown
        yield (
            f"the run must have {trainer + generator} GPUs here ({trainer} to train, {generator} to sample), "
            f"got {found}; use a machine with enough GPUs, or choose another hardware= option (see --help)"
        )


def expandable_segments(cfg: Config) -> Iterator[str]:
    """Yield an error if torch allocates memory that cannot be sent to vLLM by CUDA IPC."""
    by_ipc = cfg.generator.route(gpus=True) is Transfer.ipc
    if not by_ipc or cfg.backend.device is Device.cpu or not this_machine().gpus:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        options = [option.strip() for option in value.split(",")]
        others = [each for each in options if each.replace(" ", "").lower() != "expandable_segments:true"]
        if len(others) < len(options):
            command = f"export {name}={shlex.quote(','.join(others))}" if others else f"unset {name}"
            yield (
                f"{name} must not contain expandable_segments:True with generator={cfg.generator.name} and "
                f"generator.transfer={chosen(cfg, 'generator.transfer')} (another process may not map such "
                f"memory by CUDA IPC), got {value}; run: {command}, or set generator.transfer=shared_memory"
            )


def downloads(cfg: Config) -> Iterator[str]:
    """Yield an error for each model that the run must download, if the hub cannot be reached from here."""
    if cfg.stand_ins:
        return
    loaded = {model.key: model.name for model in models(cfg)} | {"model.tokenizer": cfg.model.tokenizer}
    absent = {
        key: name
        for key, name in loaded.items()
        if name is not None and not is_local(name) and machine.cached_folder(name) is None
    }
    if absent and (reason := machine.unreachable()) is not None:
        for key, name in absent.items():
            yield offline_problem(key, name, reason)


def check_push(repository: str | None) -> None:
    """Check the name of the repository, the token and the access to the hub, before anything is computed.

    Args:
        repository: the value of `push_to`; None: nothing is uploaded.

    Raises:
        UserError: a check failed.
    """
    if found := list(push_problems(repository)):
        raise UserError(*found)


def push_problems(repository: str | None) -> Iterator[str]:
    """Yield an error for an invalid name, a missing token, and a hub that is turned off; see `check_push`."""
    if repository is None:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        reason = None if "/" in repository else "no owner"
    except HFValidationError as error:
        reason = str(error).partition(": ")[0].rstrip(".")
    if reason is not None:
        yield (
            f"push_to= must be <owner>/<name> (a repository on the hub; {reason}), got {repository}; "
            "set push_to=<owner>/<name>"
        )
    if get_token() is None:
        yield (
            f"push_to= needs a token that may write to {repository} ({TOKEN}, or a login), got none; run: "
            f"hf auth login, or: export {TOKEN}=<token>, or leave push_to out (rlhf.extend: push_to=null)"
        )
    if constants.is_offline_mode():
        yield (
            f"push_to= needs access to the hub, got HF_HUB_OFFLINE=1 and push_to={repository}; run: unset "
            "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE, or leave it out and repeat the finished run with it later"
        )


# Composition of a config with the generator that `generator=auto` selects for it.
#
# The selected generator is the first of `vllm`, `vllm_colocated` and `hf` that this machine can run and with
# which the config is valid. For example, `vllm_colocated` allows no lag, and the key `generator.batch_size`
# belongs to `hf` alone.


Job = tuple[DictConfig, Sequence[str]]  # composed config and overrides of a run


def composed(overrides: list[str]) -> Config:
    """Return the config of `python -m rlhf.train <overrides>`, without checks of the values.

    Raises:
        UserError: an override is invalid, a key is unknown or not set, or has a value of the wrong type.
    """
    return as_objects(composed_node(overrides), overrides)


def composed_node(overrides: list[str]) -> DictConfig:
    """Return the config of `python -m rlhf.train <overrides>` as an OmegaConf node (see `compose_node`).

    Raises:
        UserError: an override is invalid.
    """
    with selecting(generator_of(overrides)), explained(overrides):
        return compose_node(overrides)


def generator_of(overrides: list[str]) -> str:
    """Return the generator that `generator=auto` selects for a run, or that the sweep of a job selected."""
    if SELECTED in os.environ:
        return best_generator()
    return selected(candidates(), lambda: [(compose_node(overrides), overrides)])


def selected(names: Sequence[str], jobs: Callable[[], Iterable[Job]]) -> str:
    """Return the first of the generators `names` with which all jobs are valid; if there is none, the last.

    Args:
        names: options of the group `generator`.
        jobs: a function that composes the runs that must have the same generator.
    """
    *others, last = names
    for name in others:
        with selecting(name):
            try:
                if all(_suits(as_objects(node, overrides)) for node, overrides in jobs()):
                    return name
            except CONFIG_ERRORS:  # for example a key that this generator does not have
                continue
    return last


def _suits(cfg: Config) -> bool:
    """Return whether vLLM suits a run: a valid config, and a model of some size on a GPU with enough memory.

    The models of embedded tasks and stand-ins have few parameters; on a CPU, `hf` samples the embedded
    model faster. On a machine without GPUs, which submits jobs to others, the memory is not checked.
    """
    tiny = cfg.start is None or cfg.stand_ins
    if tiny or cfg.backend.device is Device.cpu or problems(cfg):
        return False
    return not this_machine().gpus or not [*expandable_segments(cfg), *plan.problems(cfg)]
