"""Compositions of configs that the tests of a session share.

Hydra reads and merges 30 files for a composition, which takes 0.2 seconds. With this plugin Hydra does so
once for each choice of options, such as `algo=ppo task=chat`. Values, such as `algo.beta=0.1`, are still set
by Hydra, in a copy. Compositions that read options outside conf/ are not shared.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Hashable
from typing import Any

from hydra._internal import config_loader_impl as loader
from hydra._internal import defaults_list as lists
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from rlhf.config.root import SELECTED
from rlhf.words.catalogue import conf_dir, conf_dirs

OWN = ["pkg://hydra.conf", f"file://{conf_dir()}", "structured://"]  # Hydra's options, conf/ and the schemas
compose_from_defaults = loader.ConfigLoaderImpl._compose_config_from_defaults_list
create_defaults_list = lists.create_defaults_list
create_interpolation_map = lists._create_interpolation_map
load_config = ConfigRepository.load_config
register = ConfigStore.store

shared: dict[Hashable, DefaultsList] = {}
files: dict[str, bytes] = {}  # pickled


class Defaults(list):
    """The files of a composition, with the pickled config that they make."""

    config: bytes | None = None


def reads_only_own(repo: IConfigRepository) -> bool:
    """Return whether a composition reads no options outside conf/."""
    return [f"{each.scheme()}://{each.path}" for each in repo.get_sources()] == OWN and len(conf_dirs()) == 1


def shared_defaults_list(
    repo: IConfigRepository,
    config_name: str | None,
    overrides_list: list[Override],
    prepend_hydra: bool,
    skip_missing: bool,
) -> DefaultsList:
    """Return the files of a composition; those of an earlier composition if the same options are chosen."""
    call = dict(config_name=config_name, prepend_hydra=prepend_hydra, skip_missing=skip_missing)
    if not reads_only_own(repo):
        return create_defaults_list(repo=repo, overrides_list=overrides_list, **call)
    values = Overrides(repo, overrides_list).config_overrides
    options = [each for each in overrides_list if each not in values]
    key = (*call.values(), os.environ.get(SELECTED), *(each.input_line for each in options))
    if key not in shared:
        made = create_defaults_list(repo=repo, overrides_list=options, **call)
        made.defaults = Defaults(made.defaults)
        shared[key] = made
    made = shared[key]
    return DefaultsList(made.defaults, made.defaults_tree, values, made.overrides)


def shared_config(self: loader.ConfigLoaderImpl, defaults: list[Any], repo: IConfigRepository) -> DictConfig:
    """Return the config that `defaults` make."""
    if not isinstance(defaults, Defaults):
        return compose_from_defaults(self, defaults, repo)
    if defaults.config is None:
        defaults.config = pickle.dumps(compose_from_defaults(self, defaults, repo))
    return pickle.loads(defaults.config)


def shared_file(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Return the content of a file or schema, which is read once."""
    if not reads_only_own(self):
        return load_config(self, config_path)
    if config_path not in files:
        files[config_path] = pickle.dumps(load_config(self, config_path))
    return pickle.loads(files[config_path])


def interpolation_map(
    overrides: Overrides, defaults_list: list[InputDefault], self_added: bool
) -> DictConfig | None:
    """Return the chosen options for the interpolations of a defaults list, if it has any."""
    if not any(each.is_interpolation() for each in defaults_list):
        return None
    return create_interpolation_map(overrides, defaults_list, self_added)


def register_anew(self: ConfigStore, *args: Any, **named: Any) -> None:
    """Register an option, which may replace one of a shared composition."""
    shared.clear()
    files.clear()
    register(self, *args, **named)


def pytest_configure() -> None:
    lists._create_interpolation_map = interpolation_map
    loader.create_defaults_list = shared_defaults_list
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = shared_config
    ConfigRepository.load_config = shared_file
    ConfigStore.store = register_anew
    ConfigStore.__deepcopy__ = lambda self, memo: self  # Hydra copies all options for each composition
