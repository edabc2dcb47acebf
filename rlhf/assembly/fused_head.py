"""The decision whether the heads of policies use Liger's kernel, from a trial before the first update.

    random hidden states of one micro-batch  --+-- tiles (`rlhf.models.logprobs`)      --+-- differences of
    and the weight of the head                 +-- Liger (`rlhf.models.fused_head`)    --+-- results, seconds

With `model.fused_head=null`, only a GPU uses Liger, and only where Liger is installed and faster.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.assembly.compilation import fastest, undisturbed
from rlhf.config.model import Dtype
from rlhf.core.console import say_row
from rlhf.core.errors import UserError
from rlhf.memory.plan import with_token_limit
from rlhf.memory.tokens import with_gradient
from rlhf.models.fused_head import fused_logprobs
from rlhf.models.logprobs import token_outputs
from rlhf.models.modules import LogprobHead, described
from rlhf.models.precision import autocast

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine

log = logging.getLogger(__name__)

_LIGER = "liger_kernel"  # the package
# Largest difference of a log-prob, relative to 1 + |log-prob|, and of a gradient, relative to its norm. Older
# versions of Liger give gradients of tokens with different weights that differ by about their norm.
LIMITS = (5e-2, 5e-2)

_Logprobs = Callable[[Tensor, Tensor, Tensor | None, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of a trial."""

    tiles_s: float = 0.0  # seconds of a micro-batch with tiles
    fused_s: float = 0.0  # seconds of a micro-batch with Liger
    outputs: float = 0.0  # largest difference of log-probs, relative to 1 + |log-prob|
    gradients: float = 0.0  # largest difference of a gradient, relative to its norm
    error: str = ""  # the error of Liger; empty: none

    @property
    def fault(self) -> str | None:
        """Return why Liger cannot be used; None: it can."""
        if self.error:
            return f"Liger fails: {self.error}"
        right = self.outputs <= LIMITS[0] and self.gradients <= LIMITS[1]  # NaN: False
        return None if right else f"Liger gives wrong results: {self}"

    def __str__(self) -> str:
        return (
            f"log-probs differ by at most {self.outputs:.1e} of 1 + |log-prob|, gradients by "
            f"{self.gradients:.1e} of their norm; {self.fused_s:.3g} s per micro-batch instead of "
            f"{self.tiles_s:.3g} s"
        )


def choose_head(engine: Engine, cfg: Config) -> None:
    """Let the heads of the engine's policies use Liger if `model.fused_head` and a trial allow.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.

    Raises:
        UserError: `model.fused_head=true`, and Liger fails or gives wrong results.
    """
    asked, ranks = cfg.model.fused_head, engine.ranks
    found = heads(engine)
    if not found or not (asked or (asked is None and may_pay_off(cfg, ranks.device))):
        return
    rows = with_gradient(with_token_limit(cfg)) * cfg.generator.response_length
    with undisturbed(ranks.device):
        trial = compare(found[0], rows, cfg.generator.temperature, ranks.device, engine.settings.dtype)
    trial = ranks.gather(trial)[0]  # the result of the first rank counts
    if asked and trial.fault is not None:
        refused = UserError(
            f"model.fused_head must be false ({trial.fault}), got true; set model.fused_head=false"
        )
        refused.everywhere = True
        raise refused
    if trial.fault is not None:
        log.warning(f"{trial.fault}; the head uses tiles (set model.fused_head=false to hide this message)")
    elif asked or trial.fused_s < trial.tiles_s:
        for head in found:
            head.fused = True
        say_row("head", f"Liger; {trial}")
    else:
        say_row("head", f"tiles, Liger is not faster: {trial}")


def may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `model.fused_head=null` starts a trial."""
    return (
        device.type == "cuda"
        and cfg.model.dtype is not Dtype.float32
        and not cfg.model.float32_head
        and not cfg.backend.footprint().gathered
        and importlib.util.find_spec(_LIGER) is not None
    )


def heads(engine: Engine) -> list[LogprobHead]:
    """Return the heads of the trained policy and of the reference."""
    roots = [engine.module] if engine.reference is None else [engine.module, engine.reference]
    found = [part for root in roots for part in root.modules() if isinstance(part, LogprobHead)]
    return list(dict.fromkeys(found))


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
    outputs, *gradients = zip(found, expected, strict=True)
    gap = (outputs[0] - outputs[1]).abs() / (1 + outputs[1].abs())
    changes = [(one - other).norm() / other.norm() for one, other in gradients]
    return Trial(
        tiles_s=tiles_s,
        fused_s=fused_s,
        outputs=float(gap.max().nan_to_num(torch.inf)),
        gradients=float(torch.stack(changes).max().nan_to_num(torch.inf)),
    )
