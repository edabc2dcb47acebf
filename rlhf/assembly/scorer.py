"""Construction of the scorers of a run: the training scorer and the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.assembly.agreement import compared
from rlhf.assembly.models import loaded
from rlhf.assembly.parts import make, part
from rlhf.scorers.scorer import Scorer, ScorerContext

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.config.scorer import ScorerConfig
    from rlhf.models.modules import RewardModel
    from rlhf.processes.ranks import Ranks


def build_scorer(cfg: Config, at: str, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer | None:
    """Return the scorer of the section `at` ("scorer" or "gold"); None with `scorer@gold=none`."""
    conversational = make(cfg.task).conversational

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
