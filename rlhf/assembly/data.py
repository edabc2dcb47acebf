"""Construction of the data and the counters of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.assembly.parts import build_source, make
from rlhf.assembly.tokenizer import build_tools, declared_tokens
from rlhf.config.address import load_function, signature_of
from rlhf.config.algo import Trains
from rlhf.config.parameters import Parameters, parameters_of
from rlhf.config.scorer import scorers
from rlhf.core.state import SupervisedState, TrainState
from rlhf.tasks.first_messages import FirstMessages
from rlhf.tasks.records import Wanted
from rlhf.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf.config.algo import Data
    from rlhf.config.root import Config
    from rlhf.config.scorer import FunctionScorerConfig, ScorerConfig


def build_task(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    data: Data,
    prompts_per_update: int,
    judge: bool = False,
) -> Task:
    """Return the tokenized data of the run.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's tokenizer.
        data: the content of a training example.
        prompts_per_update: prompts of one batch over all ranks.
        judge: whether the judge scores the examples, although the config trains a reward model.

    Raises:
        UserError: a reward function cannot be imported.
    """
    source = build_source(cfg)
    if isinstance(source, FirstMessages):
        source.factory = make(cfg.environment, tokenizer)
    return Task(
        source,
        tokenizer,
        data=data,
        prompts_per_update=prompts_per_update,
        max_prompt_tokens=cfg.task.max_prompt_tokens,
        seed=cfg.seed,
        shares=cfg.task.shares,
        wanted=_wanted_columns(cfg, judge),
        ends=declared_tokens(cfg, tokenizer),
        tools=build_tools(cfg),
    )


def build_state(cfg: Config, task: Task) -> TrainState:
    """Return the counters of a new run: epochs for supervised algorithms, otherwise episodes and lag."""
    num_updates = cfg.num_updates(len(task))
    if cfg.algo.supervised:
        return SupervisedState(num_updates=num_updates, data_size=len(task))
    return TrainState(num_updates=num_updates)


def reward_functions(cfg: Config, judge: bool = False) -> Iterator[tuple[str, FunctionScorerConfig]]:
    """Yield the key and the section of each reward function that the run calls, of lists one by one.

    Args:
        cfg: the config of the run.
        judge: whether the judge scores, although the config trains a reward model.
    """
    for at, section in _used_scorers(cfg, judge):
        yield from ((at, each) for each in section.functions().values())


def _used_scorers(cfg: Config, judge: bool) -> Iterator[tuple[str, ScorerConfig]]:
    judge = judge or cfg.algo.trains is not Trains.reward
    for at, section in scorers(cfg):
        if judge if at.startswith("gold") else cfg.scores_completions:
            yield at, section


def part_of(cfg: Config, at: str) -> str | None:
    """Return the part of a mixture of tasks whose responses the scorer at the key `at` scores; None: all."""
    whole, _, name = at.partition(".parts.")
    return name.partition(".")[0] if getattr(cfg, whole).of_mixture else None


def positions(asked: Parameters, key: str, path: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield each parameter that receives a value by position, with key, address and value."""
    for name, value in zip(asked.taken, asked.position, strict=False):
        if name != value:
            yield name, (key, path, value)


def _wanted_columns(cfg: Config, judge: bool = False) -> Wanted:
    """Return the columns of the data that the scorers of a run ask for; see `reward_functions`.

    Raises:
        UserError: a function cannot be imported.
    """
    parts = list(cfg.task.shares)
    found = {part: Wanted(rest=cfg.environment.answers) for part in parts or [""]}
    for at, section in reward_functions(cfg, judge):
        key, path = f"{at}.path", section.path
        asked = parameters_of(signature_of(load_function(key, path, section.arguments)))
        scored = part_of(cfg, at)
        for part in found if scored is None else [scored]:
            before = found[part]
            found[part] = Wanted(
                columns={**dict.fromkeys(asked.columns, (key, path)), **before.columns},
                optional=before.optional | set(asked.optional),
                rest=before.rest or asked.rest,
                positions={**dict(positions(asked, key, path)), **before.positions},
            )
    for at, scorer in _used_scorers(cfg, judge):
        if not scorer.columns:
            continue
        scored = part_of(cfg, at)
        for part in found if scored is None else [scored]:
            found[part] = replace(found[part], optional=found[part].optional | scorer.columns)
    return Wanted(parts=found) if parts else found[""]
