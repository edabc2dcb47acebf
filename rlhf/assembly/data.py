"""Construction of the data and the counters of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.assembly.parts import make
from rlhf.core.state import SupervisedState, TrainState
from rlhf.tasks.task import Task

if TYPE_CHECKING:
    from rlhf.config.algo import Data
    from rlhf.config.root import Config


def build_task(cfg: Config, tokenizer: PreTrainedTokenizerFast, data: Data, prompts_per_update: int) -> Task:
    """Return the tokenized data of the run.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's tokenizer.
        data: the content of a training example.
        prompts_per_update: prompts of one batch over all ranks.
    """
    return Task(
        make(cfg.task),
        tokenizer,
        data=data,
        prompts_per_update=prompts_per_update,
        max_prompt_tokens=cfg.task.max_prompt_tokens,
        seed=cfg.seed,
        shares=cfg.task.shares,
    )


def build_state(cfg: Config, task: Task) -> TrainState:
    """Return the counters of a new run: epochs for supervised algorithms, otherwise episodes and lag."""
    num_updates = cfg.num_updates(len(task))
    if cfg.algo.supervised:
        return SupervisedState(num_updates=num_updates, data_size=len(task))
    return TrainState(num_updates=num_updates)
