"""Flash attention by the packages that transformers uses: which one is installed, and which models use it.

These kernels take no mask. For a batch with padding, transformers removes the padding of queries and keys
(`_upad_input` in transformers) and attends from the last queries to all keys of a row, so padding may also be
between a prompt and its response. A row then contains one sample (`rlhf.models.shared_prefix`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from rlhf.config.model import Dtype

_PREFIX = "flash_attention"  # of the names of these implementations in transformers
_SDPA = "sdpa"


def installed(device: torch.device, dtype: Dtype) -> str | None:
    """Return the newest installed flash attention for forwards in `dtype` on `device`, or None."""
    if device.type != "cuda" or dtype is Dtype.float32:
        return None
    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


@contextmanager
def with_sdpa(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which a model with flash attention uses sdpa instead, which takes any mask."""
    if not str(model.config._attn_implementation).startswith(_PREFIX):
        yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(_SDPA)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
