"""Bytes per parameter that training needs, on the device and in RAM; each backend states its own footprint.

AdamW stores two moments per parameter, 8 bytes in float32. DeepSpeed's ZeRO (Rajbhandari et al., arXiv
1910.02054) shards optimizer states (stage 1), gradients (stage 2) and weights (stage 3) over the ranks, and
offloads to RAM (Ren et al., arXiv 2101.06840). DeepSpeed's functions `estimate_zero2_model_states_mem_needs`
and `estimate_zero3_model_states_mem_needs` give the same numbers for bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("weights", "gradients", "optimizer")
_MESSAGE = 25_000_000  # gradients that ranks sum in one message, without ZeRO
REDUCE_BUCKET = 50_000_000  # the same with ZeRO: DeepSpeed's `reduce_bucket_size`


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes per parameter of each kind of memory: weights, gradients, optimizer (AdamW's states), step.

    If a kind is in `sharded`, the bytes are divided over the ranks; otherwise every rank stores all of them.

    Attributes:
        weights: bytes per parameter of the model.
        gradients: bytes per trained parameter.
        optimizer: bytes of optimizer state per trained parameter.
        step: temporary bytes per trained parameter during the optimizer step on a GPU. Without ZeRO: the
            float32 updates of all tensors at once. With ZeRO stages 1 to 3: float32 gradients,
            divided over the ranks like `optimizer`.
        bucket: largest number of gradients that ranks sum in one message.
        copies: copies of these gradients that exist while they are summed; with ZeRO from stage 1 on, one
            bucket is summed while the backward pass fills another.
        sharded: the kinds (of `KINDS`) that are divided over the ranks.
        offloaded: the kinds (of `KINDS`) that are stored in RAM instead of on the device.
    """

    weights: float = 4
    gradients: float = 4
    optimizer: float = 8
    step: float = 4
    bucket: int = _MESSAGE
    copies: int = 2
    sharded: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    @property
    def gathered(self) -> bool:
        """Whether weights are sharded or offloaded, so that each layer is gathered before its use."""
        return "weights" in self.sharded | self.offloaded

    def on_device(self, kind: str, parameters: int, ranks: int) -> float:
        """Return the bytes of `kind` on the device of one rank."""
        return 0 if kind in self.offloaded else self.share(kind, parameters, ranks)

    def in_ram(self, kind: str, parameters: int, ranks: int) -> float:
        """Return the bytes of `kind` that one rank stores in RAM."""
        return self.share(kind, parameters, ranks) if kind in self.offloaded else 0

    def share(self, kind: str, parameters: int, ranks: int) -> float:
        """Return the bytes of `kind` that one of `ranks` ranks stores, on the device or in RAM."""
        each: float = getattr(self, kind)
        return each * parameters / (ranks if kind in self.sharded else 1)


def zero(stage: int, offload: bool, bfloat16: bool) -> Footprint:
    """Return the footprint of DeepSpeed's ZeRO.

    From stage 1 on, the optimizer has a float32 copy of the weights, whatever the dtype of the weights. An
    offloaded optimizer also has float32 gradients.

    Args:
        stage: ZeRO stage, 0 to 3.
        offload: whether the optimizer is offloaded, and at stage 3 the weights as well.
        bfloat16: whether weights and gradients are bfloat16; otherwise float32.
    """
    sharded = {0: (), 1: ("optimizer",), 2: ("gradients", "optimizer"), 3: KINDS}[stage]
    offloaded = {2: ("gradients", "optimizer"), 3: KINDS}.get(stage, ()) if offload else ()
    each = 2 if bfloat16 else 4
    return Footprint(
        weights=each,
        gradients=4 if offloaded else each,
        optimizer=12 if bfloat16 or stage > 0 else 8,
        bucket=REDUCE_BUCKET if stage > 0 else _MESSAGE,
        sharded=frozenset(sharded),
        offloaded=frozenset(offloaded),
    )
