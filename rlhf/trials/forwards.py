"""Trials of the forwards of a module: flash attention, and prompts that are encoded once for their responses.

    rows of prompt and response, padded         --+
    each prompt encoded once for its responses  --+-- same outputs as -- each sequence alone, without padding

The rows of prompt and response are the usual way: if their outputs are wrong, the model is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.model import AUTO
from rlhf.core.batch import Rollouts
from rlhf.core.errors import UserError
from rlhf.models import forward
from rlhf.models.folder import first_line
from rlhf.models.loading import check_context
from rlhf.models.modules import RolloutModule, described
from rlhf.trials.agreement import is_exact, once, why_not

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks

log = logging.getLogger(__name__)

M = TypeVar("M", bound=RolloutModule)


def compared(module: M, cfg: Config, ranks: Ranks) -> M:
    """Return `module`, with flash attention if `model.attention=auto` finds it and its outputs are right.

    If the module cannot encode a prompt once for its responses, turn this off and warn.

    Args:
        module: a module whose model is on the device of the rank, whole or divided over the ranks.
        cfg: the config of the run.
        ranks: the ranks of the run, which all call this function.

    Raises:
        UserError: the model cannot be used, or prompts and responses are too long for it.
    """
    model = module.model
    too_long = check_context(model.config, cfg.task.max_prompt_tokens, cfg.generator.response_length)
    if too_long:
        raise UserError(too_long)
    if cfg.model.attention == AUTO:
        _use_flash(module, cfg, ranks)
    fault, new = once("sharing", model, cfg, ranks, lambda _, batch: sharing_fault(module, batch))
    if module.shared_prefix and fault is not None:
        module.shared_prefix = False
        if new:
            log.warning(
                f"model.shared_prefix is turned off for a {model.config.model_type} model ({fault}): each "
                "prompt is encoded again for every response, which is slower; set model.shared_prefix=false "
                "to hide this message"
            )
    return module


def _use_flash(module: RolloutModule, cfg: Config, ranks: Ranks) -> None:
    """Switch a module to the installed flash attention; if its outputs are wrong, warn and use sdpa."""
    model, kind = module.model, forward.installed(ranks.device, cfg.model.dtype)
    if kind is None:
        return

    def measure(_: PreTrainedModel, batch: Rollouts) -> str | None:
        try:
            return sharing_fault(module, batch)
        except UserError as error:
            return str(error)

    try:
        model.set_attn_implementation(kind)
        fault, new = once("attention", model, cfg, ranks, measure)
    except (ValueError, ImportError) as error:  # transformers has no flash attention for this model
        fault, new = first_line(error), True
    if fault is not None:
        model.set_attn_implementation("sdpa")
        if new:
            log.warning(
                f"model.attention=auto uses sdpa instead of {kind} for a {model.config.model_type} model "
                f"({fault}); set model.attention=sdpa to hide this message"
            )


def sharing_fault(module: RolloutModule, batch: Rollouts) -> str | None:
    """Return why the outputs of `module` are wrong if each prompt is encoded once; None: they are right.

    Args:
        module: the module.
        batch: rollouts on the device of the module, for example from `ragged_example`.

    Raises:
        UserError: the forward of a sequence alone fails, or a batch with padding has other outputs.
    """
    exact = is_exact(module.model)
    try:
        expected = {(i, j): _output(module, part, False)[0, 0] for i, j, part in _sequences(batch)}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UserError(_unusable(module.model, f"the forward fails ({described(error)})")) from None

    def pairs(shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
        found = _output(module, batch, shared)
        for (i, j), alone in expected.items():
            yield found[i, j].reshape(-1)[: alone.numel()], alone.reshape(-1)

    if (fault := why_not(pairs(False), exact)) is not None:
        raise UserError(_unusable(module.model, fault))
    return why_not(pairs(True), exact)


def _unusable(model: PreTrainedModel, fault: str) -> str:
    return (
        "models must compute each output from the earlier tokens of the same sequence only, also in a batch "
        f"with padding, got a {model.config.model_type} model, in which {fault}; choose another model"
    )


def _output(module: RolloutModule, batch: Rollouts, shared: bool) -> Tensor:
    """Return log-probs [N, K, T], rewards [N, K] or values [N, K, T+1], with or without shared prompts."""
    before = module.shared_prefix, module.always_apart
    module.shared_prefix = module.always_apart = shared
    try:
        outputs = module(batch)
    finally:
        module.shared_prefix, module.always_apart = before
    found = next(x for x in (outputs.logprobs, outputs.rewards, outputs.values) if x is not None)
    assert isinstance(found, Tensor)
    return found


def _sequences(batch: Rollouts) -> Iterator[tuple[int, int, Rollouts]]:
    """Yield the number of each prompt and sample, and the prompt with this sample alone, without padding."""
    for i, j in product(*map(range, batch.response_ids.shape[:2])):
        one = batch.select(torch.tensor([i]))
        prompt, response, messages = one.prompt_mask[0], one.real[0, j], one.environment_mask
        alone = replace(
            one,
            prompt_ids=one.prompt_ids[:, prompt],
            prompt_mask=one.prompt_mask[:, prompt],
            response_ids=one.response_ids[:, j : j + 1, response],
            response_mask=one.response_mask[:, j : j + 1, response],
            environment_mask=None if messages is None else messages[:, j : j + 1, response],
            ended=one.ended[:, j : j + 1],
        )
        yield i, j, alone
