"""Composition of a config from overrides or from a saved config.yaml, and the identity of a run. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config import schema
from rlhf.config.algorithms import Trains
from rlhf.config.environments import default_scorer
from rlhf.config.models import AUTO
from rlhf.config.root import Config, to_config
from rlhf.config.schema import SCHEMAS, Affects, Section, fact, sections
from rlhf.core import files
from rlhf.core.errors import UserError, override
from rlhf.core.files import flat, read_document
from rlhf.words import catalogue
from rlhf.words.catalogue import chosen_by, declared_keys, option_name, until_another_option
from rlhf.words.mistakes import CONFIG_ERRORS, explained

# Composition of a config from overrides, as on the command line.


OmegaConf.register_new_resolver("length_of", catalogue.length_of, replace=True)  # conf/config.yaml
OmegaConf.register_new_resolver("tuned_of", catalogue.tuned_of, replace=True)


def _chat_by_default(*, _root_: DictConfig) -> bool:
    """Return the default of `task.chat`; the module that reads files and models is above this one."""
    return bool(import_module("rlhf.checks.inputs").chat_by_default(_root_))


OmegaConf.register_new_resolver("chat_by_default", _chat_by_default, replace=True)  # conf/task/local.yaml


def compose(overrides: list[str]) -> Config:
    """Return the config of `python -m rlhf.train <overrides>`, without the checks of its values."""
    return to_config(default_scorer(compose_node(overrides)))


def compose_node(overrides: list[str]) -> DictConfig:
    """Return the config of `python -m rlhf.train <overrides>` as an OmegaConf node.

    Required values may be missing. During a run, Hydra's search path is used, which includes `--config-dir`.
    Otherwise `--config-dir` is read from the command line of this process.
    """
    if GlobalHydra.instance().is_initialized():
        return hydra.compose("config", overrides)
    with initialized() as search:
        return hydra.compose("config", [*search, *overrides])


@contextmanager
def initialized() -> Iterator[list[str]]:
    """Initialize Hydra with the folder conf/ during the block.

    Yields:
        Overrides that add the folders of `catalogue.conf_dirs` to the search path.
    """
    catalogue.load_plugins()
    own = [f"file://{folder.resolve()}" for folder in catalogue.conf_dirs()[1:]]
    with hydra.initialize_config_dir(str(catalogue.conf_dir()), version_base="1.3"):
        yield [override("hydra.searchpath", own)] if own else []


# Loading of the config.yaml that a run saved.


def load_config(file: Path) -> Config:
    """Return the config in a file that `RunFolder.write_config` wrote, with the section classes of the run.

    Raises:
        UserError: the file is damaged, or has an option of a package that is not installed.
    """
    node = _load_node(file)
    try:
        return to_config(node)
    except OmegaConfBaseException as error:
        raise _damaged(file, error) from None


def _load_node(file: Path) -> DictConfig:
    """Return the config in a file that `RunFolder.write_config` wrote, as a typed node that can be changed.

    Raises:
        UserError: the file is damaged, or has an option of a package that is not installed.
    """
    typed = OmegaConf.structured(Config)
    try:
        saved = read_document(file)
        chosen = [
            pair for entry in saved.pop("defaults") if isinstance(entry, DictConfig) for pair in entry.items()
        ]
        for key, option in chosen:
            group, _, section = str(key).partition("@")
            stored = f"{group}/{option}"
            if stored not in SCHEMAS:
                raise UserError(
                    f"{section} must be an option that is installed here ({file} was written with an option "
                    f"of another package), got {option}; install that package"
                )
            OmegaConf.update(typed, section, SCHEMAS[stored])
        merged = OmegaConf.merge(typed, saved)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise _damaged(file, error) from None
    assert isinstance(merged, DictConfig)
    return merged


def overridden(
    file: Path, overrides: Sequence[str], why_one: str, apply: Callable[[DictConfig, list[Override]], None]
) -> Config:
    """Return the config in a file that `RunFolder.write_config` wrote, changed by overrides.

    Args:
        file: the file.
        overrides: overrides of the command line, each `key=value`.
        why_one: text with `{}` for the override, about a key that is not set to one value.
        apply: function that applies the parsed overrides to the config, or raises UserError.

    Raises:
        UserError: an override is invalid or is refused, or the file is damaged.
    """
    node = _load_node(file)
    OmegaConf.set_struct(node, True)
    with explained(overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for each in parsed:
            if str(each.input_line).startswith(("+", "~")) or each.is_sweep_override():
                raise UserError(f"{key_of(each)} must be set to one value{why_one.format(each.input_line)}")
        apply(node, parsed)
        return to_config(node)


def key_of(override: Override) -> str:
    """Return the key of a parsed override, with the package after `@`."""
    return str(override.input_line).partition("=")[0]


def _damaged(file: Path, error: Exception) -> UserError:
    """Return the error about a config.yaml that is not what a run wrote."""
    reason = " ".join(str(error).split("full_key:")[0].split())
    return UserError(
        f"{file} must be the config that a run wrote, got a file that cannot be read ({reason}); restore the "
        "file (environment.json beside it has the command of the run), or start the run again with "
        "resume=never"
    )


# Identity of a run: its name, and the digest of the settings that its result depends on.


_LONGEST_NAME = 80  # characters of a run name
_RUN_NAME = re.compile(r"[^-]+-(?P<model>.+)-(?P<algo>[^-]+)-[^-]+-lag\d+-seed\d+-[0-9a-f]{8}")
MODEL_FOLDERS = ("model", "adapter")  # folders of a run that contain a model


@until_another_option
def affecting(*what: Affects) -> tuple[str, ...]:
    """Return the dotted keys that affect only these things; `*` stands for the name of a part."""
    found = (each.key for each in declared_keys() if fact(each.section, each.name, "affects") in what)
    return tuple(dict.fromkeys(found))


def not_in_name() -> tuple[str, ...]:
    """Return the dotted keys that are not part of the name of a run: its result does not depend on them."""
    return "hydra", *affecting(Affects.nothing, Affects.speed)


@until_another_option
def added_later() -> Mapping[str, Any]:
    """Return the dotted keys that earlier versions lack, with the values that describe what they do."""
    added = [each for each in declared_keys() if fact(each.section, each.name, "added")]
    facts = {each.key: fact(each.section, each.name, "declared") for each in added}
    return {key: schema.content(value, floats=False) for key, value in facts.items()}


def digest(cfg: Config | DictConfig) -> str:
    """Return eight hex digits of the settings that the result of a run depends on."""
    return files.digest(what_counts(cfg))


def what_counts(cfg: Config | DictConfig) -> dict[str, Any]:
    """Return the settings that the result of a run depends on, resolved, as nested dictionaries."""
    kept = _in_name(cfg)
    if kept.get("model", {}).get("attention") == AUTO:  # sdpa, or another kernel for the same function
        kept["model"]["attention"] = "sdpa"
    for dotted, value in added_later().items():
        _leave_out(kept, dotted, only=(value,))
    return kept


def _in_name(cfg: Config | DictConfig) -> dict[str, Any]:
    """Return the settings except `not_in_name`, resolved, as nested dictionaries."""
    if isinstance(cfg, Section):
        kept = schema.values(cfg)
    else:  # other settings, such as Hydra's, may not resolve
        names = [str(key) for key in cfg if key not in not_in_name()]
        node = OmegaConf.masked_copy(default_scorer(cfg), names)
        kept = OmegaConf.to_container(node, resolve=True, enum_to_str=True)  # type: ignore[assignment]
    for dotted in not_in_name():
        _leave_out(kept, dotted)
    return kept


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings of `what_counts` that differ between two configs: dotted key -> both values."""
    both = [dict(flat(what_counts(cfg))) for cfg in (one, other)]
    keys = dict.fromkeys([*both[0], *both[1]])
    values = {key: (both[0].get(key), both[1].get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def _leave_out(tree: dict[str, Any], dotted: str, only: tuple[object, ...] | None = None) -> None:
    """Remove the key `dotted` from nested dictionaries, if present; `*` in the key matches every name.

    With `only`, other values than these are kept, and a dictionary without other values is removed.
    """
    name, _, rest = dotted.partition(".")
    for key in list(tree) if name == "*" else [name]:
        if not rest:
            if only is None or tree.get(key) in only:
                tree.pop(key, None)
        elif isinstance(tree.get(key), dict):
            _leave_out(tree[key], rest, only)
            if only is not None and not tree[key]:
                del tree[key]


def run_name(cfg: Config | DictConfig) -> str:
    """Return the name of a run, of at most 80 characters that are safe in file names.

    Equal configs give equal names, so the same command finds an earlier run.
    """
    before, after = cfg.task.name, f"{cfg.algo.name}-{cfg.generator.name}-lag{cfg.schedule.max_lag}"
    after = f"{after}-seed{cfg.seed}-{digest(cfg)}"
    room = max(8, _LONGEST_NAME - len(f"{before}--{after}"))
    model = re.sub(r"[^A-Za-z0-9._]+", "_", model_label(cfg))[:room].strip("._") or cfg.model.name
    return files.component(f"{before}-{model}-{after}")


def model_label(cfg: Config | DictConfig) -> str:
    """Return a short name of the model that training starts from.

    The label is the last part of `model.policy` (for SFT, `model.base`); for the model of another run, the
    model and the algorithm of that run. Without such a model, or with one that an embedded task made, the
    label is the option of `model`.
    """
    algo: Any = OmegaConf.get_type(cfg.algo) if isinstance(cfg, DictConfig) else type(cfg.algo)
    start = cfg.model.base if algo.trains is Trains.base else cfg.model.policy
    return start_label(start, cfg.model.name, cfg.cache_dir)


def start_label(start: str | None, option: str, cache_dir: str) -> str:
    """Return the label of a run (see `model_label`).

    Args:
        start: `model.policy`, or for SFT `model.base`.
        option: the option of `model`.
        cache_dir: folder of the models that embedded tasks make.
    """
    if start is None or Path(cache_dir) in Path(start).parents:
        return option
    path = Path(start)
    if path.name in MODEL_FOLDERS or path.name.startswith("checkpoint-"):
        path = path.parent
    if run := _RUN_NAME.fullmatch(path.name):
        return f"{run['model']}_{run['algo']}"
    return path.name or option


# The command line of a run: the options of the groups, then the settings that differ from their values.
#
# The command is derived from the config, so that it is complete for every run: of a recipe, a sweep, a
# stage of a pipeline, or a longer run of `rlhf.extend`.


GROUPS = ("algo", "task", "model", "generator", "backend", "scorer", "gold")
_ROUNDS = 3  # a setting may follow another one (`${...}`), so that it differs only after the other is set


def settings(cfg: Config) -> dict[str, Any] | None:
    """Return overrides that compose `cfg`, by key: options, then settings; None if it cannot be composed.

    Settings that do not change the result (`not_in_name`) are left out. A config that was made in Python may
    have sections of no option, and cannot be composed.
    """
    found: dict[str, Any] = dict(options(cfg))
    wanted = values(cfg)
    if not found.keys() >= set(map(chosen_by, GROUPS)):
        return None
    try:
        node = compose_node([override(key, value) for key, value in found.items()])
        for _ in range(_ROUNDS):
            now = values(node)
            if now == wanted:
                return found
            for key, value in wanted.items():
                if key not in now or now[key] != value:
                    found[key if key in now else f"+{key}"] = value
                    OmegaConf.update(node, key, value, force_add=True)
    except CONFIG_ERRORS:
        return None
    return None


def options(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each override that selects an option, in the order of `GROUPS`."""
    parts = dict(sections(cfg))
    for key in GROUPS:
        option = cfg.model.name if key == "model" else option_name(type(parts[key]))
        if option is not None:
            yield chosen_by(key), option
    for key, part in parts.items():
        if ".parts." in key and (option := option_name(type(part))) is not None:
            yield f"+{chosen_by(key)}", option


def values(cfg: Config | DictConfig) -> dict[str, Any]:
    """Return the settings that change the result of a run: dotted key -> value."""
    return {key: value for key, value in flat(_in_name(cfg)) if not key.endswith(".name")}
