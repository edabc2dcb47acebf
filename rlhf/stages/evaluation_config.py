"""The config of an evaluation: the config of a run changed by overrides, or the config of overrides alone.

This module imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import checked
from rlhf.checks.machine import composed, composed_node
from rlhf.config.algo import Trains
from rlhf.config.catalogue import options
from rlhf.config.mistakes import one_of
from rlhf.config.root import Config
from rlhf.config.saved import key_of, overridden
from rlhf.config.schedule import Update
from rlhf.config.scorer import NoScorerConfig
from rlhf.core.errors import UserError
from rlhf.core.pasting import setting
from rlhf.runs.folder import RunFolder
from rlhf.stages.candidates import named_models

SPLITS = ("validation", "test")
# Sections and other keys that an evaluation reads.
_SECTIONS = ("eval", "generator", "scorer", "gold", "backend", "model", "task")
KEYS = ("seed", "progress", "cache_dir")
# Key that selects an option -> its section.
_CHOICES = {"generator": "generator", "scorer": "scorer", "scorer@gold": "gold"}


def check_split(split: str) -> None:
    """Raise UserError if `split` is not a held-out split."""
    if split not in SPLITS:
        raise UserError(f"split= must be one of {', '.join(SPLITS)}, got {split}; set split=test")


def check_sampling(samples: int, temperature: float, response_length: int) -> None:
    """Raise UserError if a setting of a request for samples is out of range."""
    for name, value in (("samples", samples), ("response_length", response_length)):
        if value < 1:
            raise UserError(f"{name} must be >= 1, got {value}; set {name}=1")
    if not temperature > 0:
        raise UserError(f"temperature must be > 0, got {temperature:g}; set temperature=0.01 (almost greedy)")


def run_folder(path: str) -> RunFolder:
    """Return the run folder at `path`.

    Raises:
        UserError: `path` is not a run folder, or a folder is in place of one of its files.
    """
    folder = RunFolder(Path(path).expanduser())
    if not folder.config.is_file():
        state = "no config.yaml in it" if folder.path.is_dir() else "no such folder"
        remedy = "run=<output_dir>/<run name>"
        if (folder.path.parent / "config.yaml").is_file():
            remedy = setting("run", folder.path.parent)
        elif (folder.path / "config.json").is_file():
            remedy = setting("models", path)
        raise UserError(
            f"run= must be the folder of a run, with its config.yaml ({state}), got {path}; set {remedy}"
        )
    folder.check_files()
    return folder


def changed(folder: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the run in `folder`, changed by `overrides` and checked.

    Raises:
        UserError: an override is invalid, or changes a setting that an evaluation does not read.
    """
    cfg = overridden(folder.config, overrides, " (an evaluation has one), got {}; leave it out", change)
    checked(measuring(cfg), training=False)
    return cfg


def change(node: DictConfig, overrides: Sequence[Override]) -> None:
    """Apply overrides to the config `node`; an option is selected before its keys are set.

    Raises:
        UserError: an override changes a setting that an evaluation does not read.
    """
    for override in overrides:
        key, text = key_of(override), override.input_line
        first = key.partition(".")[0]
        if key not in _CHOICES and (first not in (*_SECTIONS, *KEYS) or key in _SECTIONS):
            remedy = f"set {shlex.quote(f'scorer@{text}')}" if key == "gold" else "leave it out"
            raise UserError(
                f"{key} must be something that an evaluation reads ({', '.join((*_SECTIONS, *KEYS))}; the "
                f"run is already trained), got {text}; {remedy}"
            )
    for override in sorted(overrides, key=lambda each: key_of(each) not in _CHOICES):
        if key_of(override) in _CHOICES:
            select(node, override)
        else:
            OmegaConf.update(node, key_of(override), override.value())


def select(node: DictConfig, override: Override) -> None:
    """Select an option in the config `node`; lengths and temperature of the run's generator are kept.

    Raises:
        UserError: the option cannot be composed, or samples nothing.
    """
    key = key_of(override)
    section = _CHOICES[key]
    chosen = composed_node([str(override.input_line)])[section]
    if section == "generator":
        if chosen.name == "dataset":
            samplers = [name for name in options("generator") if name != "dataset"]
            raise UserError(one_of(key, chosen.name, samplers))
        for kept in ("temperature", "response_length"):
            chosen[kept] = node.generator[kept]
    OmegaConf.update(node, section, chosen, merge=False)


def alone(models: Sequence[str], overrides: Sequence[str]) -> Config:
    """Return the config of `overrides`, checked, for an evaluation of models that no run names.

    The first of the models becomes the model that training starts from, unless an override names another, so
    KL and win rate compare the models with it. A reward model that no override names is not used.

    Raises:
        UserError: an override is invalid, or a model folder is not complete.
    """
    named_models(models)
    cfg = composed(list(overrides))
    if cfg.start is None and cfg.algo.trains is Trains.base:
        cfg = cfg.with_({"model.base": models[0]})
    elif cfg.start is None:
        cfg = cfg.with_({"model.policy": models[0]})
    if cfg.scorer.reads_reward and cfg.model.reward is None:
        cfg = cfg.with_({"scorer": NoScorerConfig()})
    checked(measuring(cfg), training=False)
    return cfg


def measuring(cfg: Config) -> Config:
    """Return `cfg` without settings that only training uses: lag, in-flight updates, annotator."""
    changes = {f"generator.{key}": None for key in cfg.generator.only_training}
    return cfg.with_({**changes, "schedule.max_lag": 0, "schedule.update": Update.between})
