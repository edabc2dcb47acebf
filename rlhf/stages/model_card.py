"""The model card (README.md) of a final model: data, algorithm, results, and the command of the run.

The card contains no path of this machine: local folders and files appear by name, addresses not at all.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from jinja2 import Environment, StrictUndefined

from rlhf.assembly.parts import part
from rlhf.config.algorithms import Trains
from rlhf.core import formatting
from rlhf.core.errors import setting
from rlhf.core.machine import cached_folder
from rlhf.loggers.display import shown
from rlhf.models.folder import CARD, HUB_NAME, is_local
from rlhf.runs.folder import DISTRIBUTION, git_commit, versions
from rlhf.stages.words import held_out, titles, trained
from rlhf.words.identity import MODEL_FOLDERS, settings

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.training.recorder import Recorder

UNKNOWN = "unknown"  # the hub's identifier of a license that is not known
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
URL = re.compile(r"\w+://\S+")
LICENSE = ("license", "license_name", "license_link")  # keys of a model card


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model that training started from.

    Attributes:
        name: hub name, or name of the local folder; None: random weights.
        ancestor: the hub name; for a folder, the base model that its card names, if that is on the hub.
        license: the license that the card of the model states, or `UNKNOWN`.
        license_name: name of a license that the hub does not list.
        license_link: web address of such a license.
    """

    name: str | None
    ancestor: str | None
    license: str
    license_name: str | None = None
    license_link: str | None = None


def model_card(
    cfg: Config, typed: Config, folder: Path, examples: int, recorder: Recorder, state: TrainState
) -> str:
    """Return the model card of a run: metadata as YAML, then Markdown.

    Args:
        cfg: the config of the run, with the models that the run made first.
        typed: the config before the run made these models; the command in the card gives this config.
        folder: the run folder, whose name is the title.
        examples: the size of the training data.
        recorder: the recorder, which has the first and the last evaluation.
        state: the counters of the run.
    """
    name, start = folder.absolute().name, origin(cfg.start)
    found = settings(typed)
    public = None if found is None else {key: public_value(value) for key, value in found.items()}
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = files("rlhf.stages").joinpath("model_card.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        cfg=cfg,
        name=name,
        distribution=DISTRIBUTION,
        start=start,
        metadata=metadata(cfg, name, start, recorder).to_yaml(),
        rewards=cfg.algo.trains is Trains.reward,
        algorithm=algorithm(cfg),
        data=_described_data(cfg, examples),
        reward=_reward(cfg),
        length=trained(state),
        held_out=held_out(cfg, recorder),
        judge=_judge(cfg),
        first=recorder.first,
        last=shown(recorder.evaluated),
        titles=titles(cfg),
        settings=None if public is None else [setting(key, value) for key, value in public.items()],
        hidden=public != found,
        packages=list(packages(cfg)),
        row=row,
        value=formatting.text,
    )


def row(*cells: object) -> str:
    """Return a row of a table in Markdown."""
    texts = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(texts)} |"


def metadata(cfg: Config, name: str, start: Origin, recorder: Recorder) -> ModelCardData:
    """Return the metadata of the card; names that are not on the hub are left out."""
    rewards = cfg.algo.trains is Trains.reward
    task = "text-classification" if rewards else "text-generation"
    _, datasets = data(cfg)
    last = shown(recorder.evaluated)
    results = [
        EvalResult(
            task_type=task,
            dataset_type=datasets[0] if len(datasets) == 1 else cfg.task.name,
            dataset_name=cfg.task.name,
            metric_type=metric.removeprefix("eval/"),
            metric_name=title,
            metric_value=last[metric],
        )
        for metric, title in titles(cfg).items()
        if math.isfinite(last.get(metric, math.nan))
    ]
    return ModelCardData(
        license=start.license,
        license_name=start.license_name,
        license_link=start.license_link,
        base_model=start.ancestor,
        datasets=datasets or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["rlhf", cfg.algo.name, *(["reward-model"] if rewards else [])],
        model_name=name,
        eval_results=results or None,
    )


def algorithm(cfg: Config) -> str:
    """Return the first two paragraphs of the documentation of the algorithm: its name and its source."""
    documented = inspect.getdoc(sys.modules[part(cfg.algo).__module__]) or cfg.algo.name
    text = " ".join(" ".join(paragraph.split()) for paragraph in documented.split("\n\n")[:2])
    return _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _described_data(cfg: Config, examples: int) -> str:
    """Return the sources of the training data, and the number of examples."""
    local, datasets = data(cfg)
    source = ", ".join([*datasets, *local]) or "generated by the task"
    return f"{source}: {examples:,} {'pairs' if cfg.reads_pairs else 'prompts'}"


def _reward(cfg: Config) -> str | None:
    """Return the reward of a policy that was trained on its own responses; None for other models."""
    if cfg.algo.trains is not Trains.policy or not cfg.generator.rollouts:
        return None
    reward = cfg.model.reward if cfg.scorer.reads_reward else cfg.scorer.described
    return public(reward or cfg.scorer.name)


def _judge(cfg: Config) -> str | None:
    """Return the judge of the evaluations of a policy, if any."""
    if cfg.algo.trains is Trains.reward or cfg.gold.name == "none":
        return None
    return public(cfg.gold.described)


def packages(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the name and the version of each library that the result depends on."""
    installed, code = versions(), git_commit()
    names = [DISTRIBUTION, "torch", "transformers", "tokenizers", "datasets"]
    names += [*cfg.generator.packages, *cfg.backend.packages]
    names += ["peft"] if cfg.model.lora.rank else []
    for name in names:
        if name in installed:
            commit = ""
            if name == DISTRIBUTION and code is not None:
                commit = f" (commit {code['commit'][:12]}{', with changes' if code['changed'] else ''})"
            yield name, installed[name] + commit
    yield "python", platform.python_version()


def data(cfg: Config) -> tuple[list[str], list[str]]:
    """Return the names of local training data, and the hub names of training data."""
    local, hub = [], []
    for task in (cfg.task.parts or {"": cfg.task}).values():  # the parts of a mixture
        path = (task.preferences_path if cfg.reads_pairs else None) or task.path
        name = getattr(task, "preferences_name" if cfg.reads_pairs else "prompts_name", None)
        if path is not None:
            local.append(public(path))
        elif name is not None:
            hub.append(name)
    return local, hub


def origin(start: str | None) -> Origin:
    """Return the model that training started from; its license is read from its card, if it has a card.

    Args:
        start: folder or hub name of the model; None: random weights.
    """
    if start is None:
        return Origin(name=None, ancestor=None, license=UNKNOWN)
    local = is_local(start)
    folder = Path(start).expanduser() if local else cached_folder(start)
    card = {} if folder is None else _card_of(folder)
    base = card.get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    if not local:
        base = start
    elif not isinstance(base, str) or is_local(base) or HUB_NAME.fullmatch(base) is None:
        base = None
    stated = {key: text for key in LICENSE if isinstance(text := card.get(key), str)}
    link = stated.get("license_link", "")
    return Origin(
        name=public(start) if local else start,
        ancestor=base,
        license=stated.get("license", UNKNOWN),
        license_name=stated.get("license_name"),
        license_link=link if link.startswith("https://") else None,  # no file of the base model's repository
    )


def _card_of(folder: Path) -> dict[str, Any]:
    """Return the metadata of the model card in a folder; empty if there is none that can be read."""
    try:
        return metadata_load(folder / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def public_value(value: Any) -> Any:
    """Return the value of a setting with the names of local folders and files instead of their paths."""
    if isinstance(value, list):
        return [public_value(each) for each in value]
    if not isinstance(value, str):
        return value
    key, equals, text = value.rpartition("=")  # a list may contain overrides, for example of a stage
    bare = text.strip("\"'")
    shown = public(bare)
    return value if shown == bare else f"{key}{equals}{shown}"


def public(text: str) -> str:
    """Return a text of the config with the name of a local folder or file instead of its path.

    An address of a service becomes `<url>`. Other texts, such as hub names, stay as they are.
    """
    if URL.fullmatch(text):
        return "<url>"
    place, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    local = place.startswith(("/", "~", "./", "../")) or ("/" in place and os.path.exists(place))
    if not local or "\n" in place:
        return text
    path = Path(place)
    inner = path.name in MODEL_FOLDERS or path.name.startswith("checkpoint-")
    return f"{path.parent.name}/{path.name}{colon}{function}" if inner else f"{path.name}{colon}{function}"
