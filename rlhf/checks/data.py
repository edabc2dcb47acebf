"""Rules for tasks, environments and folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf.checks.models import tokenizer_in, tokenizer_of
from rlhf.checks.rules import RULES, Allowed, When, doubt, is_set, must, rule, training_rule
from rlhf.config.algorithms import Data, Trains
from rlhf.config.environments import TurnsConfig
from rlhf.config.root import Config
from rlhf.config.tasks import PREFERENCE_COLUMNS, ChatConfig, Need, QuestionsConfig
from rlhf.core import machine
from rlhf.core.errors import UserError, setting
from rlhf.memory.sizes import models
from rlhf.models.folder import is_local
from rlhf.runs.lock import cannot_write, mib, nearest, unwritable
from rlhf.tasks.files import HUB_NAME, LocalFiles, different_forms, folder_problems, has_dialogues
from rlhf.text.chat import ROLE_MARK, no_template

# Rules between the task and the rest of the config: data, preference pairs and dialogues.


def chat_by_default(cfg: DictConfig) -> bool:
    """Return the default of `task.chat` for own files (conf/task/local.yaml).

    Prompts that are texts are messages of the user if the model has a chat template, unless the first prompt
    begins with a mark of the template: it is formatted then.
    """
    base = OmegaConf.get_type(cfg.algo).trains is Trains.base  # type: ignore[union-attr]
    name = cfg.model.tokenizer or (cfg.model.base if base else cfg.model.policy) or cfg.gold.get("path")
    prompt: str | None = None
    with suppress(UserError):  # the checks of the data report it
        columns: Any = OmegaConf.to_object(cfg.task.columns)
        prompt = cfg.task.path and LocalFiles(cfg.task.path, columns).first_prompt
    if prompt is None or name is None:
        return False
    tokenizer = tokenizer_in(name if is_local(name) else str(machine.tokenizer_folder(name)))
    template = cfg.model.chat_template or (tokenizer and tokenizer.template)
    mark = ROLE_MARK.match(prompt.lstrip())
    formatted = mark and (mark[0] in str(template) or (tokenizer and mark[0] in tokenizer.ids))
    return bool(template and not formatted)


def _needs(cfg: Config) -> Iterator[Need]:
    return cfg.task.needs(cfg.reads_pairs, cfg.algo.trains is Trains.policy)


@rule
def data_folders(cfg: Config) -> Iterator[str]:
    """Yield an error for each data folder that is missing, or lacks a split, column or row of the run."""
    for key, path, columns, splits, reason in _needs(cfg):
        hub_key = "preferences_name" if tuple(columns) == PREFERENCE_COLUMNS else "prompts_name"
        of_hub = HUB_NAME.fullmatch(path) is not None and not Path(path).parent.is_dir()
        if of_hub and hub_key in {each.name for each in fields(cfg.task)}:
            yield (
                f"{key} must name a local folder ({reason}), got {path} (no such folder, but the form of a "
                f"name on the hub); for a data set of the hub set {setting(f'task.{hub_key}', path)} "
                f"instead of {key}"
            )
        else:
            yield from folder_problems(key, path, columns, splits, reason)


@rule
def data_of_tasks(cfg: Config) -> Iterator[str]:
    """Yield an error for each problem of the user's files, and for missing pairs, also of parts."""
    evaluated = Data.prompts if cfg.algo.trains is Trains.policy else None
    for name, task in (cfg.task.parts or {"": cfg.task}).items():
        elsewhere = cfg.reads_pairs and task.preferences_path is not None  # the pairs are in another folder
        content = evaluated if elsewhere else cfg.data
        found: list[str] = []
        if content is not None and task.own_files is not None:
            try:
                found += LocalFiles(*task.own_files).problems(content)
            except UserError as error:
                found += error.problems
        pairs = not isinstance(task, ChatConfig) or task.preferences_path or task.preferences_name
        if pairs is None and cfg.reads_pairs and not cfg.stand_ins:
            found.append(
                f"task.preferences_path must name a folder of preference pairs for task={task.name} (No "
                "Robots has none), got null; set task.preferences_path=<folder> or "
                "task.preferences_name=<hub name>"
            )
        yield from (cfg.task.own_key(name, text) for text in found)


@rule
def _parts_have_one_form(cfg: Config) -> Iterator[str]:
    dialogues: dict[bool, str] = {}  # whether the prompts are dialogues -> name of the last such part
    for name, part in cfg.task.parts.items():
        if (form := has_dialogues(part)) is not None:
            dialogues[form] = name
    if len(dialogues) > 1:
        yield different_forms(dialogues[True], dialogues[False])


@rule
def _dialogues_have_a_template(cfg: Config) -> Iterator[str]:
    _, path = tokenizer_of(cfg)
    if path is None or cfg.model.chat_template is not None:
        return
    tokenizer = tokenizer_in(path)
    if tokenizer is not None and tokenizer.template is None and has_dialogues(cfg.task):
        yield no_template(path)


@doubt
def _questions_as_text(cfg: Config) -> Iterator[str]:
    _, path = tokenizer_of(cfg)
    tokenizer = tokenizer_in(path) if path is not None else None
    texts = isinstance(cfg.task, QuestionsConfig) and not cfg.task.chat
    if texts and tokenizer is not None and tokenizer.template is not None:
        yield (
            "task.chat=false asks the questions as texts, in a form for base models, but the tokenizer of "
            f"{path} has a chat template; if it is a chat model, set task.chat=true"
        )


@doubt
def _settings_of_data(cfg: Config) -> Iterator[str]:
    template, pairs = cfg.model.chat_template, cfg.task.preferences_path
    if template is not None and is_set(cfg, "task.turn"):
        yield (
            f"model.chat_template does not format the prompts (task.turn does), got {template}; set "
            "task.turn=null task.reply=null"
        )
    if pairs is not None and "task.preferences_path" not in {key for key, *_ in _needs(cfg)}:
        yield (
            f"task.preferences_path has no effect with algo={cfg.algo.name} and "
            f"generator={cfg.generator.name} (no preference pairs are read), got {pairs}; leave it out"
        )


# Rules for the environment that answers the replies of the policy.


_SHORT = 64  # tokens of a short message
_ONE_REPLY_TASK = When(
    "with environment={environment} and task={task}",
    lambda cfg: cfg.environment.answers and cfg.task.embedded and not cfg.task.dialogues,
)
_PAIRS = When(
    "with algo={algo} and generator={generator}",
    lambda cfg: cfg.reads_pairs or (cfg.task.embedded and cfg.scorer.reads_reward and not cfg.model.reward),
)

_OF_ENVIRONMENT = When("with task=environment", lambda cfg: cfg.task.name == "environment")
_REWARDING = Allowed("be a class or a library", lambda section: section.rewards)
_ANY = "environment=python, gymnasium or openenv"
_TEXTS = "its prompts are texts, without the marks of a dialogue"

RULES += [
    must("environment", "none", _PAIRS, "pairs consist of single replies"),
    must("environment", _REWARDING, _OF_ENVIRONMENT, "its first messages are the prompts", fix=_ANY),
    must("environment", "none", _ONE_REPLY_TASK, _TEXTS, fix="environment=none, or task=calculator"),
]


@doubt
def _room_for_every_turn(cfg: Config) -> Iterator[str]:
    section, length = cfg.environment, cfg.generator.response_length
    if not isinstance(section, TurnsConfig) or (reply := section.reply_tokens) is None:
        return
    turns, message = section.max_turns, section.message_tokens
    if turns * reply + (turns - 1) * message <= length:
        return
    shorter = min(message, max(_SHORT, (length - turns * reply) // max(1, turns - 1)))
    remedy, most = f"environment.message_tokens={shorter}", max(1, (length + shorter) // (reply + shorter))
    if most < turns:
        remedy += f" environment.max_turns={most}, or a larger generator.response_length"
    yield (
        f"environment.message_tokens={message} leaves no room for the longest messages between {turns} "
        f"replies of {reply} tokens in generator.response_length={length}; for these set {remedy}"
    )


# Rules for the folders that a run writes: whether files can be created, and whether the disk has room.


_MODEL_BYTES = 4  # per parameter: the trained model is saved in float32
_CHECKPOINT_BYTES = 12  # per trained parameter: weights and two moments of AdamW, in float32


@training_rule
def _folders_can_be_written(cfg: Config) -> Iterator[str]:
    folders = {"output_dir": cfg.output_dir}
    if cfg.task.embedded:
        folders["cache_dir"] = cfg.cache_dir
    if cfg.logger.trackio is not None and cfg.logger.trackio.dir is not None:
        folders["logger.trackio.dir"] = cfg.logger.trackio.dir
    for key, folder in folders.items():
        if not folder.strip():
            yield f"{key} must name a folder (the run writes files there), got {folder!r}; set {key}=outputs"
        elif folder.startswith("~/"):
            yield (
                f"{key} must be a path without ~ (only a shell replaces it), got {folder}; "
                f"set {setting(key, Path(folder).expanduser())}"
            )
        elif reason := unwritable(Path(folder)):
            yield cannot_write(key, Path(folder), reason)


@doubt
def _disk_has_room(cfg: Config) -> Iterator[str]:
    trained = [model for model in models(cfg) if model.trained]
    if cfg.stand_ins or any(model.size is None for model in trained):
        return
    folder = Path(cfg.output_dir)
    free = shutil.disk_usage(nearest(folder)).free
    model = _MODEL_BYTES * trained[0].counted.parameters
    checkpoint = _CHECKPOINT_BYTES * sum(each.trainable for each in trained)
    if free < model + checkpoint:
        lost = "neither can be saved" if free < model else "checkpoints may not be saved"
        yield (
            f"output_dir has {mib(free)} of free space, and the model needs about {mib(model)}, a checkpoint "
            f"{mib(checkpoint)}: {lost}, got {folder}; free some space, or set output_dir=<folder of another "
            "disk>"
        )
