"""Construction of the scorers of a run: the training scorer and the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import loaded
from rlhf.assembly.parts import build_source, make, part
from rlhf.config.algo import Trains
from rlhf.config.scorer import scorers
from rlhf.core.control import unquoted
from rlhf.core.dialogues import Dialogues
from rlhf.core.errors import UserError
from rlhf.scorers.reward_model import read_own, reads_tokens_of
from rlhf.scorers.scorer import Scorer, ScorerContext
from rlhf.tasks.formats import TOOLS
from rlhf.trials.agreement import compared

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.config.scorer import ScorerConfig
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.models.modules import RewardModel
    from rlhf.processes.ranks import Ranks
    from rlhf.tasks.task import Task

_CHECKED = 200  # largest number of dialogues that are written in the format of a reward model before a run
TEXT = "This is an example of a response."  # for data without reference responses


def build_scorer(cfg: Config, at: str, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer | None:
    """Return the scorer of the section `at` ("scorer" or "gold"); None with `scorer@gold=none`."""
    conversational = build_source(cfg).conversational
    environment: EnvironmentFactory | None = make(cfg.environment, tokenizer)

    def place(load: Callable[[], RewardModel]) -> RewardModel:
        placed: RewardModel = part(cfg.backend).place(cfg.backend, loaded(load, cfg, ranks), ranks)
        return compared(placed, cfg, ranks)

    def build(section: ScorerConfig, key: str) -> Scorer | None:
        context = ScorerContext(
            at=key,
            tokenizer=tokenizer,
            ranks=ranks,
            model=cfg.model,
            place=place,
            build=build,
            conversational=conversational,
            turns=environment.turns if environment else None,
            parts=tuple(cfg.task.shares),
            tie_tolerance=cfg.tie_tolerance(section),
        )
        scorer: Scorer | None = make(section, context)
        return scorer

    return build(cfg.scorer if at == "scorer" else cfg.gold, at)


def build_training_scorer(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
    """Return the scorer whose scores are used for training."""
    scorer = build_scorer(cfg, "scorer", tokenizer, ranks)
    assert scorer is not None, "validated: training needs a scorer"
    return scorer


def check_formats(
    cfg: Config, task: Task, tokenizer: PreTrainedTokenizerFast, split: str = "train", judge: bool = False
) -> Iterator[str]:
    """Yield a sentence for each kind of content of the dialogues that a reward model does not read.

    A reward model with a chat template of its own reads the dialogues in its format. No model is loaded.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        tokenizer: the policy's tokenizer.
        split: the split with the dialogues. Their answers are the reference responses, or else a short text.
        judge: whether the judge scores, although the config trains a reward model.

    Raises:
        UserError: the chat template of a reward model does not format a dialogue.
    """
    rows = task.examples(split)
    if "messages" not in rows.column_names:
        return
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), _CHECKED)).astype(int)]
    some.setdefault(TOOLS, [None] * len(some["messages"]))
    judge = judge or cfg.algo.trains is not Trains.reward
    for at, section in scorers(cfg):
        used = judge if at.startswith("gold") else cfg.scores_completions
        named = section.reward_model(at, cfg.model.reward)
        if not used or named is None:
            continue
        try:
            own = read_own(*named, cfg.model, conversational=True)
            if not own.chat_template or reads_tokens_of(own, tokenizer, dialogues=True):
                continue
            format = Dialogues(own)
            for messages, reference, place, tools in zip(
                some["messages"], some["reference"], some["place"], some[TOOLS], strict=True
            ):
                answer = [{"role": "assistant", "content": unquoted(reference) or TEXT}]
                format.write(messages, [answer], place, tools, prompt_only=True)
        except UserError as error:
            problem = error.problems[0].rpartition("; ")[0]  # its remedy concerns the template of the policy
            raise UserError(
                f"the chat template of the reward model at {at} must format the dialogues ({problem}); name "
                "another reward model, or correct its chat template"
            ) from None
        yield from (f"{'='.join(named)}: {warning}" for warning in format.warnings())
