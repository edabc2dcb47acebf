"""Rules for models, data, environments and folders."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf.checks import rules
from rlhf.checks.rules import Allowed, When, chosen, doubt, rule, training_rule
from rlhf.config.algorithms import Data, Trains
from rlhf.config.environments import TurnsConfig
from rlhf.config.models import Device, paths_in
from rlhf.config.root import Config
from rlhf.config.schema import ABSENT, missing_package, value_at
from rlhf.config.scorers import scorers
from rlhf.config.tasks import PREFERENCE_COLUMNS, ChatConfig, Need
from rlhf.core import machine
from rlhf.core.errors import UserError, setting
from rlhf.core.machine import this_machine
from rlhf.memory.sizes import models
from rlhf.models import folder, headers
from rlhf.models.folder import context_problem, folder_problem, is_local, on_this_machine
from rlhf.runs.lock import cannot_write, mib, nearest, unwritable
from rlhf.tasks.files import HUB_NAME, LocalFiles, different_forms, folder_problems, has_dialogues
from rlhf.text.chat import ROLE_MARK, no_template
from rlhf.words import catalogue

# Rows about models, backends and environments.


def _value_model_has_no_start(cfg: Config) -> bool:
    made = cfg.makes_models and cfg.scorer.reads_reward
    return chosen(cfg, "algo.value_from") == "reward" and not made and cfg.value_reward is None


def _makes_pairs(cfg: Config) -> bool:
    return cfg.reads_pairs or (cfg.task.embedded and cfg.scorer.reads_reward and not cfg.model.reward)


def _makes_members(cfg: Config) -> bool:
    return cfg.task.embedded and cfg.scorer.reads_reward and not isinstance(cfg.model.reward, str)


NO_GPU = When("without a GPU", lambda cfg: cfg.backend.device is Device.cpu or not this_machine().gpus)
GPU = When("with a GPU", lambda cfg: bool(this_machine().gpus))
GATHERED = When("with backend={backend}", lambda cfg: cfg.backend.footprint().gathered)
SFT = When("for algo={algo}", lambda cfg: cfg.algo.trains is Trains.base)
NO_START = When("for algo.value_from=reward", _value_model_has_no_start)
PAIRS = When("with algo={algo} and generator={generator}", _makes_pairs)
NO_MEMBERS = When("without reward models to make", lambda cfg: not _makes_members(cfg))

_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
UNREAD_PAIRS = When("", lambda cfg: all(key != "task.preferences_path" for key, *_ in _needs(cfg)))

NO_FLASH = Allowed("not be flash attention", lambda name: name not in _FLASH_PACKAGES)
TRANSFORMERS = Allowed("sample with transformers", lambda generator: not generator.packages)
REWARDING = Allowed("be a class or a library", lambda section: section.rewards)

rules.add_rows("inputs", globals())


# Rules for models: which must be named, packages, local folders, context length.


@rule
def _packages_of_kernels(cfg: Config) -> Iterator[str]:
    if NO_GPU.holds(cfg):
        return
    package = _FLASH_PACKAGES.get(cfg.model.attention)
    if package and not any(map(importlib.util.find_spec, (package, "kernels"))):
        install = "run: pip install flash-attn --no-build-isolation, or " if package == "flash_attn" else ""
        rule, reason = "be an installed implementation", f"Python finds no package {package}"
        remedy = f"{install}set model.attention=auto"
        yield cfg.model.refused("model", "attention", rule, reason, remedy=remedy)
    if cfg.model.fused_head:
        otherwise = "set model.fused_head=null"
        yield from missing_package("model.fused_head=true", "liger_kernel", "liger", "Liger", otherwise)


@rule
def _models_are_named(cfg: Config) -> Iterator[str]:
    if cfg.makes_models:
        return
    model = cfg.model
    wanted = {"base": model.base} if cfg.algo.trains is Trains.base else {"policy": model.policy}
    if cfg.scorer.reads_reward and not cfg.algo.supervised:
        wanted["reward"] = model.reward
    for key, value in wanted.items():
        if value is None:
            other = {"base": model.policy, "policy": model.base}.get(key)  # probably meant for this algorithm
            rule, reason = f"name a model for task={cfg.task.name}", "only embedded tasks make their own"
            remedy = f"set {setting(f'model.{key}', other)}" if other else ""
            yield model.refused("model", key, rule, reason, "<hub name or folder>", remedy)


@rule
def _ensembles(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        several = len(scorer.reward_models(at, cfg.model.reward) or range(cfg.stages.members)) > 1
        if value_at(scorer, "combine") not in (ABSENT, None) and not several:
            remedy = f"set {at}.combine=null, or name several: '{at}.path=[<folder>,<folder>]'"
            yield scorer.refused(at, "combine", "be null for one reward model", remedy=remedy)


@rule
def _models(cfg: Config) -> Iterator[str]:
    contexts = []
    for key, path in _named_models(cfg):
        if problem := folder_problem(key, path):
            yield problem
        elif is_local(path) and (found := on_this_machine(path)) is not None:
            contexts.append(found.context)
    tokenizer = cfg.model.tokenizer
    if tokenizer is not None and is_local(tokenizer) and not Path(tokenizer).expanduser().is_dir():
        file = Path(tokenizer).expanduser().is_file()
        close = str(Path(tokenizer).parent) if file else folder.similar_folder(tokenizer)
        rule, reason = "name a tokenizer on the hub or its folder", f"there is no folder {tokenizer!r}"
        remedy = f"did you mean model.tokenizer={close}?" if close else ""
        yield cfg.model.refused("model", "tokenizer", rule, reason, "<hub name or folder>", remedy)
    made = not cfg.stand_ins and cfg.model.policy is None and cfg.model.base is None
    if made and not contexts:
        contexts.append(cfg.model.context)
    context = min((c for c in contexts if c is not None), default=None)
    lengths = cfg.task.max_prompt_tokens, cfg.generator.response_length
    if problem := context_problem(context, *lengths):
        yield problem
    for _, path, model in _sound(cfg):
        if is_local(path) and (problem := context_problem(None, *lengths, model.original_context)):
            yield problem
            return


def _named_models(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the config key and the value (hub name or folder) of every model that the config names."""
    served = "reference" if cfg.algo.teacher_url else None  # a server has this model
    for name in ("base", "policy", "reference", "reward"):
        yield from ((f"model.{name}", path) for path in paths_in(getattr(cfg.model, name)) if name != served)
    yield from _reward_models(cfg, None)


def _reward_models(cfg: Config, default: str | None) -> Iterator[tuple[str, str]]:
    """Yield the config key and the value of the model of each scorer; `default` is that of model.reward."""
    for at, scorer in scorers(cfg):
        yield from scorer.reward_models(at, default)


# Rules for the content of model folders: kind of model, vocabulary, tokenizer, special tokens, adapters.
#
# The rules read config.json, tokenizer files and the headers of weights, never the weights. They cover local
# folders and downloaded hub models; other hub models are checked when they are loaded. A local folder that
# `_models` refuses is skipped here.


_CAUSAL = ("model.base", "model.policy", "model.reference")  # keys of causal language models


def _sound(cfg: Config, *paths: str | None) -> Iterator[tuple[str, str, headers.ModelFolder]]:
    """Yield key, value and files of each model on this machine whose folder has no evident defect.

    Args:
        cfg: the config, which names the models.
        paths: values to look at; none: those of all models that the config names.
    """
    for key, path in [("", path) for path in paths if path] if paths else _named_models(cfg):
        found = on_this_machine(path)
        if found is not None and not (is_local(path) and folder_problem(key, path)):
            yield key, path, found


def _tokenizer_in(path: str | None) -> headers.TokenizerHeader | None:
    """Return the tokenizer of the model `path`, or None if its files do not show it."""
    found = None if path is None else on_this_machine(path)
    return None if found is None else found.tokenizer


@rule
def _kinds_of_models(cfg: Config) -> Iterator[str]:
    # transformers may learn further types of models from model folders or from plugins
    learns = cfg.model.trust_remote_code or bool(entry_points(group=catalogue.GROUP))
    for key, path, model in _sound(cfg):
        if (kind := model.unknown_type) is not None and not learns:
            remedy = "correct model_type in its config.json, or run: pip install -U transformers"
            if "auto_map" in model.config:  # the model comes with code of its own
                remedy = "set model.trust_remote_code=true to run the code in its folder"
            yield (
                f"{key} must name a model that the installed transformers knows, got {path!r} of type "
                f"{kind!r}; {remedy}"
            )
        elif "quantization_config" in model.config:
            yield (
                f"{key} must name a model with float weights, got {path!r}, whose config.json has a "
                f"quantization_config; set {key}=<the model before quantization>"
            )
        elif key not in _CAUSAL:
            if (found := model.not_reward()) is not None:
                yield (
                    f"{key} must name a reward model (a sequence classifier with one label and a head named "
                    f"score), got {path!r}, {found}; train one with algo=reward model.policy=<model>"
                )
        elif (found := model.not_causal()) is not None:
            if cfg.algo.trains is Trains.reward and model.is_classifier:
                continue  # a reward model may start from a classifier: see `_new_head`
            yield (
                f"{key} must name a causal language model (it predicts the next token), got {path!r}, "
                f"{found}; set {key}=<hub name or folder>"
            )


@doubt
def _new_head(cfg: Config) -> Iterator[str]:
    path = cfg.model.policy
    model = on_this_machine(path) if cfg.algo.trains is Trains.reward and path is not None else None
    if model is not None and model.is_classifier:
        yield f"the head of model.policy={path} (a sequence classifier) is replaced by a random head"


@rule
def _tokenizers_are_readable(cfg: Config) -> Iterator[str]:
    own, path = tokenizer_of(cfg)
    wanted = [] if path is None else [(own, path, "set model.tokenizer=<hub name or folder>")]
    copy = "copy the files of its tokenizer into the folder"
    wanted += [(key, name, copy) for key, name in _reward_models(cfg, cfg.model.reward)]
    for key, name, remedy in wanted:
        found = on_this_machine(name) if is_local(name) else None
        if found is None or (key != "model.tokenizer" and folder_problem(key, name)):
            continue
        if (defect := found.tokenizer_defect) is not None:
            yield f"{key} must come with its tokenizer (tokenizer.json), got {name!r} with {defect}; {remedy}"


@rule
def _special_tokens(cfg: Config) -> Iterator[str]:
    key, path = tokenizer_of(cfg)
    tokenizer = _tokenizer_in(path)
    if path is None or tokenizer is None:
        return
    special, wanted = tokenizer.special, cfg.model.pad_token
    end, pad = special.get("eos_token"), special.get("pad_token")
    if "eos_token" in special and end is None:
        yield (
            f"{key} must have a tokenizer with an end token (the model ends a response with it), got "
            f"{path!r} without one; set eos_token in its tokenizer_config.json"
        )
        return
    # The chat template may end a turn of a dialogue with another token.
    has_template = tokenizer.template is not None or cfg.model.chat_template is not None
    dialogues = has_template and (cfg.reads_pairs or has_dialogues(cfg.task) is not False)
    known = None if dialogues else end
    if wanted is None and "pad_token" in special and pad in (None, known):
        models = (on_this_machine(each) for each in (path, cfg.start) if each is not None)
        files = (model.path / name for model in models if model is not None for name in headers.ENDS)
        template = tokenizer.template if cfg.model.chat_template is None else None
        used = {known, *headers.end_ids(*files)}
        pad = headers.choose_pad_token(tokenizer.ids, used, special.get("bos_token"), template or "") or pad
    if wanted is not None or "pad_token" in special:
        end = known if wanted or pad else end
        problem = headers.pad_problem("model.pad_token", wanted, path, tokenizer.ids, pad, end)
        yield from filter(None, [problem])


@doubt
def _pad_token_of_texts(cfg: Config) -> Iterator[str]:
    pad, (_, path) = cfg.model.pad_token, tokenizer_of(cfg)
    tokenizer = None if pad is None else _tokenizer_in(path)
    if tokenizer is not None and pad in tokenizer.ids and not headers.LOOKS_SPECIAL.fullmatch(str(pad)):
        remedy = headers.pad_remedy("model.pad_token", tokenizer.ids, tokenizer.special.get("eos_token"))
        yield f"model.pad_token={pad} is a token of ordinary texts, and texts must not contain it; {remedy}"


@rule
def _pad_tokens_of_reward_models(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        for _, path in scorer.reward_models(at, cfg.model.reward):
            if (pad := scorer.pad_token) is not None and (tokenizer := _tokenizer_in(path)) is not None:
                found = headers.pad_problem(f"{at}.pad_token", pad, path, tokenizer.ids, pad, None)
                yield from filter(None, [found])


@rule
def _vocabularies(cfg: Config) -> Iterator[str]:
    """Yield an error for each model that lacks embeddings for tokens of the tokenizer that encodes its texts.

    A reward model has its own tokenizer. If this is the tokenizer of the policy, the reward model reads the
    ids that the policy samples, and only ids of tokens are sampled.
    """
    key, path = tokenizer_of(cfg)
    tokenizer, start = _tokenizer_in(path), cfg.start_key
    for own, name, model in _sound(cfg):
        rows, header = model.vocabulary, model.tokenizer
        if own not in _CAUSAL and rows is not None and header is not None and header.largest_id >= rows:
            yield (
                f"{own} must have an embedding for every token of its tokenizer, got ids up to "
                f"{header.largest_id} in the tokenizer of {name!r} and {rows} embeddings; set "
                f"{own}=<a folder with the tokenizer of the model>"
            )
        if tokenizer is None or own not in (start, "model.reference"):
            continue
        reference = own == "model.reference"
        if rows is not None and tokenizer.largest_id >= rows:
            kind = "a model with the vocabulary of the policy" if reference else "the tokenizer of the model"
            yield (
                f"{own if reference else key} must fit the model (every token id needs an embedding), got "
                f"ids up to {tokenizer.largest_id} in the tokenizer of {path!r} and {rows} embeddings in "
                f"{name!r}; set {own if reference else 'model.tokenizer'}=<{kind}>"
            )
        elif reference and header is not None:
            ids = header.ids  # tokens of only one tokenizer do not count
            other = next((each for each, id in tokenizer.ids.items() if ids.get(each, id) != id), None)
            if other is not None:
                yield (
                    "model.reference must have the vocabulary of the policy (both read the same token ids), "
                    f"got {name!r}, in which {other!r} has another id than in {path!r}; set "
                    "model.reference=<a model with the vocabulary of the policy>"
                )


@training_rule
def _layers_with_adapters(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    if lora.rank < 1 or not lora.targets:
        return
    for _, _, model in _sound(cfg, cfg.start):
        if layers := model.linear_layers():
            yield from folder.target_problems(layers, lora.targets)


@doubt
def _large_adapters(cfg: Config) -> Iterator[str]:
    rank = cfg.model.lora.rank
    for _, _, model in _sound(cfg, cfg.start):
        width = model.config.get("hidden_size")
        if isinstance(width, int) and rank > width:
            yield (
                f"model.lora.rank={rank} is more than the width of the model ({width}), so the adapters are "
                "larger than its weights; set model.lora.rank=16"
            )


def tokenizer_of(cfg: Config) -> tuple[str, str | None]:
    """Return the key and the value that name the tokenizer of the trained model; None: the run makes it."""
    if cfg.model.tokenizer is not None:
        return "model.tokenizer", cfg.model.tokenizer
    return cfg.start_key, cfg.start


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
    tokenizer = _tokenizer_in(name if is_local(name) else str(machine.tokenizer_folder(name)))
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
            rule = f"name a folder of preference pairs for task={task.name}"
            remedy = "set task.preferences_path=<folder> or task.preferences_name=<hub name>"
            found.append(task.refused("task", "preferences_path", rule, "No Robots has none", remedy=remedy))
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
    tokenizer, own = _tokenizer_in(path), cfg.model.chat_template
    if path and tokenizer and tokenizer.template is None and own is None and has_dialogues(cfg.task):
        yield no_template(path)


@doubt
def _questions_as_text(cfg: Config) -> Iterator[str]:
    _, path = tokenizer_of(cfg)
    tokenizer = _tokenizer_in(path)
    as_texts = cfg.task.dialogues is False and value_at(cfg, "task.chat") is False
    if as_texts and tokenizer is not None and tokenizer.template is not None:
        yield (
            "task.chat=false asks the questions as texts, in a form for base models, but the tokenizer of "
            f"{path} has a chat template; if it is a chat model, set task.chat=true"
        )


# Rules for the environment that answers the replies of the policy.


_SHORT = 64  # tokens of a short message


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
    written = {"output_dir": cfg.output_dir}
    if cfg.task.embedded:
        written["cache_dir"] = cfg.cache_dir
    if cfg.logger.trackio is not None and cfg.logger.trackio.dir is not None:
        written["logger.trackio.dir"] = cfg.logger.trackio.dir
    for key, path in written.items():
        if not path.strip():
            yield f"{key} must name a folder (the run writes files there), got {path!r}; set {key}=outputs"
        elif path.startswith("~/"):
            remedy = f"set {setting(key, Path(path).expanduser())}"
            yield cfg.refused("", key, "be a path without ~", "only a shell replaces it", remedy=remedy)
        elif reason := unwritable(Path(path)):
            yield cannot_write(key, Path(path), reason)


@doubt
def _disk_has_room(cfg: Config) -> Iterator[str]:
    trained = [model for model in models(cfg) if model.trained]
    if cfg.stand_ins or any(model.size is None for model in trained):
        return
    output = Path(cfg.output_dir)
    free = shutil.disk_usage(nearest(output)).free
    model = _MODEL_BYTES * trained[0].counted.parameters
    checkpoint = _CHECKPOINT_BYTES * sum(each.trainable for each in trained)
    if free < model + checkpoint:
        lost = "neither can be saved" if free < model else "checkpoints may not be saved"
        yield (
            f"output_dir has {mib(free)} of free space, and the model needs about {mib(model)}, a checkpoint "
            f"{mib(checkpoint)}: {lost}, got {output}; free some space, or set output_dir=<another disk>"
        )
