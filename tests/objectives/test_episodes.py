"""Tests of all objectives on episodes: messages of an environment change nothing, whatever stands there."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.core.batch import Batch, Outputs
from tests.objectives.test_overflow import VARIANTS, objective_of, outputs_of, results, start

HOLE = 2  # tokens of the message after the first reply, which has one token


def places(batch: Batch) -> Tensor:
    """Return the position of each token and of the state after the last in the episode, [N, K, T+1]."""
    later = pad(batch.response_mask, (0, 1)) & (torch.arange(batch.response_ids.shape[-1] + 1) > 0)
    shift = HOLE * (batch.response_mask.sum(-1, keepdim=True) > 1)  # a response of one token has no message
    return torch.arange(later.shape[-1]) + shift * (later | (later.cumsum(-1) > 0))


def spread(x: Tensor, to: Tensor, states: bool, fill: float) -> Tensor:
    """Return `x` [N, K, T] (or T+1 `states`) at the positions `to` of an episode, and `fill` between them."""
    wide = torch.full((*x.shape[:2], x.shape[-1] + HOLE), fill, dtype=x.dtype)
    return wide.scatter(-1, to if states else to[..., :-1], x.detach())


def episodes(batch: Batch) -> Batch:
    """Return a batch with a message after the first token of each response of several tokens."""
    to, mask = places(batch), batch.response_mask
    model = spread(mask, to, False, False)
    length = to.gather(-1, mask.sum(-1, keepdim=True))
    real = torch.arange(model.shape[-1]) < length
    wide = {
        name: spread(getattr(batch, name), to, False, 1e6)
        for name in ("behaviour_logprobs", "ref_logprobs", "old_logprobs")
    }
    return replace(
        batch,
        response_ids=spread(batch.response_ids, to, False, 7),
        response_mask=model,
        environment_mask=real & ~model,
        values=spread(batch.values, to, True, 1e6),
        **wide,
    )


@pytest.mark.parametrize("lengths", [[[3, 2, 1], [2, 3, 3]], [[1, 3, 2], [3, 1, 2]]], ids=str)
@pytest.mark.parametrize(
    ("name", "settings"),
    [*VARIANTS.values(), ("ppo", {"end_state": False}), ("ppo", {"gamma": 0.9, "lam": 0.8})],
    ids=[*VARIANTS, "ppo, no end state", "ppo, discounted"],
)
def test_losses_gradients_and_metrics_of_episodes_are_those_without_their_messages(name, settings, lengths):
    objective, plain = start(name, settings)
    mask = torch.arange(3) < torch.tensor(lengths)[..., None]
    plain = replace(plain, response_mask=mask)
    turned = episodes(plain)
    assert turned.environment_mask.any() and not (turned.environment_mask & turned.response_mask).any()
    described = [objective_of(name, **settings).describe(each) for each in (plain, turned)]
    if name != "sft":  # which describes no samples
        assert 0 < described[1].pop("environment/token_share").value() < 1
    assert {k: v.value() for k, v in described[0].items()} == pytest.approx(
        {k: v.value() for k, v in described[1].items()}
    )
    plain, turned = objective.credit(plain), objective_of(name, **settings).credit(turned)
    out, to = outputs_of(plain), places(plain)
    wide = {
        field: spread(x, to, field == "values", 1e6).requires_grad_(x.requires_grad)
        for field, x in out._asdict().items()
        if x is not None
    }
    loss, gradients, figures = results(objective, plain, out)
    same, others, other_figures = results(objective, turned, Outputs(**wide))
    torch.testing.assert_close(loss, same)
    assert figures == pytest.approx(other_figures)
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            states = one.shape[-1] == to.shape[-1]
            torch.testing.assert_close(spread(one, to, states, 0.0), other)
