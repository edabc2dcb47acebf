"""Comparison of computed outputs with those of a forward of each sequence alone, without padding and cache.

Architectures differ in how they use positions, masks and caches, and neither the class nor the config of a
model shows all differences. ALiBi may count the slots of a cache instead of positions; a layer may attend to
a window although its cache stores everything; the encoding of positions may depend on the longest sequence of
the batch. So the outputs are measured, on sequences as long as the longest of the run (`LONGEST`).

If the model can compute in float32, the largest difference counts. In 16 bits, rounding changes single
outputs, and the median of a sequence counts.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.model import Dtype
from rlhf.core.batch import Rollouts
from rlhf.core.files import digest, write_json
from rlhf.memory.sizes import longest
from rlhf.models.forward import NoSharedPrefix
from rlhf.models.headers import DamagedFile, read_object
from rlhf.models.modules import backbone, described, token_ids
from rlhf.models.placement import autocast
from rlhf.trials.trial import example, undisturbed

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks

log = logging.getLogger(__name__)

_TOKENS = 8  # compared tokens of the longest response
# Largest sequence of a comparison in tokens, by device; on both, a comparison is shorter than an update.
LONGEST = {"cpu": 1024, "cuda": 8192}
# Largest difference relative to 1 + |output|. Faults that were found changed log-probs by 0.1 to 7.
_EXACT, _ROUNDED = 1e-3, 3e-2
KNOWN: dict[str, str | None] = {}  # results of this process (a fault, or None), by fingerprint
# Settings of a config that do not change the states of a model.
_LABELS = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "num_labels", "pad_token_id", "problem_type", "reward_offset", "tie_word_embeddings",
    "transformers_version", "use_cache",
)  # fmt: skip


def ragged_example(model: PreTrainedModel, longest: int, device: torch.device) -> Rollouts:
    """Return 2 prompts with 2 responses each, of random tokens from the middle of the vocabulary.

    The first prompt with its first response has `longest` tokens, but at most `LONGEST`. The second prompt is
    a third as long.
    """
    longest = min(longest, LONGEST[device.type])
    tokens = max(1, min(_TOKENS, longest // 2))
    length = max(1, longest - tokens)
    starts = torch.tensor([[0], [length - max(1, length // 3)]])
    ends = torch.tensor([[[tokens], [max(1, tokens - 3)]], [[max(1, tokens // 2)], [tokens]]])
    size = len(token_ids(model))
    middle = slice(size // 8, max(size // 2, size // 8 + 1))
    return example(model, torch.arange(length) >= starts, torch.arange(tokens) < ends, device, middle)


def why_not(pairs: Iterable[tuple[Tensor, Tensor]], exact: bool) -> str | None:
    """Return why computed outputs are wrong, or None if they are right.

    Args:
        pairs: computes and yields the outputs of each sequence: found and expected.
        exact: whether the largest difference counts; otherwise the median of a sequence counts.
    """
    wrong, largest = False, 0.0
    try:
        for found, expected in pairs:
            gap = (found.float() - expected.float()).abs()
            relative = gap / (1 + expected.float().abs())
            counts = relative.max() if exact else relative.median()
            wrong |= not bool(counts <= (_EXACT if exact else _ROUNDED))  # a NaN is wrong
            largest = max(largest, float(gap.nan_to_num(torch.inf).max()))
    except torch.OutOfMemoryError:
        raise
    except NoSharedPrefix as error:
        return error.fault
    except Exception as error:  # the code of a model may raise anything
        return f"the forward fails ({described(error)})"
    return f"outputs differ by up to {largest:.2g} from those of each sequence alone" if wrong else None


def is_exact(model: PreTrainedModel) -> bool:
    """Return True if the model can compute in float32; other implementations of attention need 16 bits."""
    return model.config._attn_implementation in ("sdpa", "eager") and all(
        parameter.dtype == torch.float32 for parameter in model.parameters()
    )


@contextmanager
def comparing(model: PreTrainedModel, device: torch.device, dtype: Dtype) -> Iterator[None]:
    """Return an `undisturbed` context for forwards without gradients, exact if possible, else in `dtype`."""
    precision = torch.autocast(device.type, enabled=False) if is_exact(model) else autocast(device, dtype)
    with undisturbed(device), torch.no_grad(), precision:
        yield


def once(
    subject: str,
    model: PreTrainedModel,
    cfg: Config,
    ranks: Ranks,
    measure: Callable[[PreTrainedModel, Rollouts], str | None],
    borrow: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
) -> tuple[str | None, bool]:
    """Return the fault that a comparison finds, and whether this process did not have the result before.

    The result comes from this process, from `cache_dir/agreement/`, or from `measure`, which all ranks call
    together. The result of the first rank counts.

    Args:
        subject: what is compared.
        model: the model, whole or divided over the ranks.
        cfg: the config of the run.
        ranks: the ranks of the run.
        measure: returns the fault of a model for rollouts on the device of the rank; None: there is none.
        borrow: returns a context that yields the model for `measure`; None: `model` itself is measured.
    """
    name = fingerprint(
        model, subject=subject, longest=longest(cfg), device=ranks.device.type, dtype=cfg.model.dtype.value
    )
    new, file = name not in KNOWN, Path(cfg.cache_dir) / "agreement" / f"{name}.json"
    # The first rank may know more results than the others, because it runs the stages before the run alone.
    result = ranks.from_first(lambda: _stored(file) if new else {"fault": KNOWN[name]})
    if result is None:
        batch = ragged_example(model, longest(cfg), ranks.device)
        lent = nullcontext(model) if borrow is None else borrow()
        with lent as whole, comparing(whole, ranks.device, cfg.model.dtype):
            own = measure(whole, batch)
        result = ranks.from_first(lambda: {"fault": own})
        if ranks.first:
            _store(file, {"subject": subject, "model": model.config.model_type, **result})
    KNOWN[name] = result["fault"]
    return result["fault"], new


def fingerprint(model: PreTrainedModel, **settings: str | int) -> str:
    """Return 8 hex digits that determine the result of a comparison, whatever the weights of the model.

    They depend on the config of the model, on the code of its class, on the versions of torch and
    transformers, and on `settings`.
    """
    config = model.config.to_dict()
    source = Path(inspect.getfile(type(backbone(model)))).read_text(encoding="utf-8")
    return digest(
        {
            **settings,
            "config": repr(sorted((k, v) for k, v in config.items() if k not in _LABELS)),
            "code": digest(source),
            "exact": is_exact(model),
            "attention": model.config._attn_implementation,
            "versions": [torch.__version__, transformers.__version__],
        }
    )


def _stored(file: Path) -> dict[str, str | None] | None:
    """Return the result in `file`, or None if the file is missing or damaged."""
    try:
        result = read_object(file)
    except DamagedFile:
        return None
    return result if "fault" in result else None


def _store(file: Path, result: dict[str, str | None]) -> None:
    """Write a result, if the folder can be written; otherwise the next run compares again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    except OSError as error:
        log.debug("the comparison of the model is not stored: %s", error)
