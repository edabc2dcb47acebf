"""What training takes for each parameter, and where it lies: the arithmetic of the memory plan, one of each
backend.

AdamW keeps two moments a parameter, 8 bytes. DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054) shares
optimizer states (stage 1), gradients too (2) and weights too (3) among the ranks, and offloads to RAM (Ren et
al., arXiv 2101.06840). Its own figures, for bfloat16, are in `estimate_zero2_model_states_mem_needs` and
`estimate_zero3_model_states_mem_needs`.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes a parameter, all ranks' shares together where `sharded` names it.

    `gradients`, `optimizer` and `step` are of parameters that are trained alone; `step` is what the optimizer
    step needs for its time, on a GPU: updates of all tensors at once, or float32 gradients. `gathered`: the
    largest layer is brought together, weights and gradients, where weights are sharded or offloaded.
    """

    weights: float = 4
    gradients: float = 4
    optimizer: float = 8
    step: float = 4
    sharded: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    @property
    def gathered(self) -> bool:
        """Whether the weights are not all on each device."""
        return "weights" in self.sharded | self.offloaded

    def on_device(self, kind: str, parameters: int, ranks: int) -> float:
        """Bytes of `kind` on the device of one rank."""
        return 0 if kind in self.offloaded else self.share(kind, parameters, ranks)

    def in_ram(self, kind: str, parameters: int, ranks: int) -> float:
        """Bytes of `kind` that one rank has in RAM."""
        return self.share(kind, parameters, ranks) if kind in self.offloaded else 0

    def share(self, kind: str, parameters: int, ranks: int) -> float:
        """Bytes of `kind` that one of `ranks` ranks has."""
        each: float = getattr(self, kind)
        return each * parameters / (ranks if kind in self.sharded else 1)


def zero(stage: int, offload: bool, bfloat16: bool) -> Footprint:
    """DeepSpeed's ZeRO at `stage` (0 to 3); `offload` is of the optimizer, at stage 3 of the weights too.

    From stage 1 on a float32 copy of the weights is the optimizer's, whatever the weights are; an offloaded
    optimizer has float32 gradients beside it.
    """
    sharded = {0: (), 1: ("optimizer",), 2: ("gradients", "optimizer"), 3: KINDS}[stage]
    offloaded = {2: ("gradients", "optimizer"), 3: KINDS}.get(stage, ()) if offload else ()
    each = 2 if bfloat16 else 4
    return Footprint(
        weights=each,
        gradients=4 if offloaded else each,
        optimizer=12 if bfloat16 or stage > 0 else 8,
        sharded=frozenset(sharded),
        offloaded=frozenset(offloaded),
    )
