"""The trial of Liger's kernel for the heads of policies (`model.fused_head`).

The weight of the head and random hidden states of one micro-batch give log-probs and gradients, by the tiles
of `rlhf.models.logprobs` and by Liger (`rlhf.models.logprobs`).

With `model.fused_head=null`, only a GPU uses Liger, and only where Liger is installed and faster.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.model import Dtype
from rlhf.core.console import say_row
from rlhf.memory.plan import with_token_limit
from rlhf.memory.sizes import with_gradient
from rlhf.models.logprobs import fused_logprobs, token_outputs
from rlhf.models.modules import LogprobHead, described
from rlhf.models.placement import autocast
from rlhf.trials.trial import Trial, fastest, largest_difference, parts, reject, timed

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine

_LIGER = "liger_kernel"  # the package
# Largest difference of a log-prob, relative to 1 + |log-prob|, and of a gradient, relative to its norm. Older
# versions of Liger give gradients of tokens with different weights that differ by about their norm.
_LIMITS = (5e-2, 5e-2)

_Logprobs = Callable[[Tensor, Tensor, Tensor | None, Tensor, float], Tensor]


def choose_head(engine: Engine, cfg: Config) -> None:
    """Let the heads of the engine's policies use Liger if `model.fused_head` and a trial allow.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.

    Raises:
        UserError: `model.fused_head=true`, and Liger fails or gives wrong results.
    """
    asked, ranks = cfg.model.fused_head, engine.ranks
    heads = parts(engine, LogprobHead)
    if not heads or not (asked or (asked is None and may_pay_off(cfg, ranks.device))):
        return
    rows = with_gradient(with_token_limit(cfg)) * cfg.generator.response_length
    with timed(ranks.device):
        trial = compare(heads[0], rows, cfg.generator.temperature, ranks.device, engine.settings.dtype)
    trial = ranks.gather(trial)[0]  # the result of the first rank counts
    if (found := fault(trial)) is not None:
        reject("model.fused_head", asked, found, "the head uses tiles")
    elif asked or trial.pays_off():
        for head in heads:
            head.fused = True
        say_row("head", f"Liger; {summary(trial)}")
    else:
        say_row("head", f"tiles, Liger is not faster: {summary(trial)}")


def may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `model.fused_head=null` starts a trial."""
    return (
        device.type == "cuda"
        and cfg.model.dtype is not Dtype.float32
        and not cfg.model.float32_head
        and not cfg.backend.footprint().gathered
        and importlib.util.find_spec(_LIGER) is not None
    )


def compare(head: LogprobHead, rows: int, temperature: float, device: torch.device, dtype: Dtype) -> Trial:
    """Return times and differences of log-probs and gradients of `rows` rows with tiles and with Liger."""
    draw = torch.Generator(device).manual_seed(0)
    size, width = head.weight.shape
    states = torch.randn(rows, width, generator=draw, device=device)
    targets = torch.randint(0, size, (rows,), generator=draw, device=device)
    if head.absent is not None:  # the log-prob of an id without a token is -inf
        known = (~head.absent).nonzero()[:, 0].to(device)
        targets = known[targets % len(known)]
    slopes = torch.randn(rows, generator=draw, device=device)  # as advantages: a different one for each row

    def run(logprobs: _Logprobs) -> tuple[list[Tensor], float]:
        def step() -> list[Tensor]:
            weight = head.weight.detach().requires_grad_(head.weight.requires_grad)
            hidden = states.detach().requires_grad_()
            with autocast(device, dtype):
                output = logprobs(hidden, weight, head.offset(), targets, temperature)
            output.backward(slopes)
            return [x for x in (output.detach(), hidden.grad, weight.grad) if x is not None]

        return fastest(step, device)

    expected, tiles_s = run(lambda *given: token_outputs(*given).logprobs)
    try:
        found, fused_s = run(fused_logprobs)
    except Exception as error:  # Triton and the code of Liger may raise anything
        return Trial(error=described(error))
    changes = [(a - b).norm() / b.norm() for a, b in zip(found[1:], expected[1:], strict=True)]
    return Trial(
        usual_s=tiles_s,
        faster_s=fused_s,
        outputs=largest_difference(found[:1], expected[:1]),
        gradients=float(torch.stack(changes).max().nan_to_num(torch.inf)),
    )


def fault(trial: Trial) -> str | None:
    """Return why Liger cannot be used; None: it can."""
    if trial.error:
        return f"Liger fails: {trial.error}"
    return None if trial.right(_LIMITS) else f"Liger gives wrong results: {summary(trial)}"


def summary(trial: Trial) -> str:
    """Return the measured differences and times as text."""
    return f"{trial.differences('log-prob')}; {trial.times()}"
