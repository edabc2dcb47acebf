"""The comparison of a model's forwards before the run uses the model, and the settings that follow from it.

The result of a comparison is stored in `cache_dir/agreement/`, so a model with the same config is compared
once. The measurements are in `rlhf.models.agreement` and `rlhf.generators.hf.agreement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from transformers import PreTrainedModel

from rlhf.config.model import AUTO
from rlhf.core.errors import UserError
from rlhf.core.files import write_json
from rlhf.generators.hf.agreement import sampling_fault
from rlhf.models import flash_attention
from rlhf.models.agreement import comparing, example, fingerprint, sharing_fault
from rlhf.models.fetching import first_line
from rlhf.models.headers import DamagedFile, read_object
from rlhf.models.loading import check_context
from rlhf.models.modules import RolloutModule

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks

log = logging.getLogger(__name__)

M = TypeVar("M", bound=RolloutModule)

KNOWN: dict[str, str | None] = {}  # results of this process (a fault, or None), by fingerprint


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

    def measure() -> str | None:
        batch = example(model, longest(cfg), ranks.device)
        with comparing(model, ranks.device, cfg.model.dtype):
            return sharing_fault(module, batch)

    if cfg.model.attention == AUTO:
        _use_flash(model, cfg, ranks, measure)
    fault, new = once(cfg, ranks, model, "sharing", measure)
    if module.shared_prefix and fault is not None:
        module.shared_prefix = False
        if new:
            log.warning(
                f"model.shared_prefix is turned off for a {model.config.model_type} model ({fault}): each "
                "prompt is encoded again for every response, which is slower; set model.shared_prefix=false "
                "to hide this message"
            )
    return module


def _use_flash(model: PreTrainedModel, cfg: Config, ranks: Ranks, measure: Callable[[], str | None]) -> None:
    """Switch a model to the installed flash attention; if its outputs are wrong, warn and use sdpa.

    Args:
        model: the model, on the device of the rank.
        cfg: the config of the run.
        ranks: the ranks of the run, which all call this function.
        measure: compares the forwards of the model; returns a fault, or None.
    """
    kind = flash_attention.installed(ranks.device, cfg.model.dtype)
    if kind is None:
        return

    def try_it() -> str | None:
        try:
            return measure()
        except UserError as error:
            return str(error)

    try:
        model.set_attn_implementation(kind)
        fault, new = once(cfg, ranks, model, "attention", try_it)
    except (ValueError, ImportError) as error:  # transformers has no flash attention for this model
        fault, new = first_line(error), True
    if fault is not None:
        model.set_attn_implementation("sdpa")
        if new:
            log.warning(
                f"model.attention=auto uses sdpa instead of {kind} for a {model.config.model_type} model "
                f"({fault}); set model.attention=sdpa to hide this message"
            )


def samples_with_cache(
    model: PreTrainedModel,
    borrow: Callable[[], AbstractContextManager[PreTrainedModel]],
    cfg: Config,
    ranks: Ranks,
) -> bool:
    """Return whether the Hugging Face sampler can use a cache with a causal LM; if not, warn.

    Args:
        model: the causal LM, whole or divided over the ranks.
        borrow: returns a context that yields this model, whole and on the device of the rank.
        cfg: the config of the run.
        ranks: the ranks of the run, which all call this function.
    """

    def measure() -> str | None:
        batch = example(model, longest(cfg), ranks.device)
        with borrow() as whole, comparing(whole, ranks.device, cfg.model.dtype):
            return sampling_fault(whole, batch)

    fault, new = once(cfg, ranks, model, "sampling", measure)
    if fault is not None and new:
        log.warning(
            f"sampling from a {model.config.model_type} model uses no cache ({fault}): every token takes a "
            "forward of the whole sequence, which is slow; generator=vllm is faster if vLLM has this model"
        )
    return fault is None


def once(
    cfg: Config, ranks: Ranks, model: PreTrainedModel, subject: str, measure: Callable[[], str | None]
) -> tuple[str | None, bool]:
    """Return the fault that a comparison finds, and whether this process did not have the result before.

    The result comes from this process, from `cache_dir`, or from `measure`, which all ranks call together.
    The result of the first rank counts.
    """
    name = fingerprint(
        model,
        subject=subject,
        longest=longest(cfg),
        device=ranks.device.type,
        dtype=cfg.model.dtype.value,
    )
    new, file = name not in KNOWN, Path(cfg.cache_dir) / "agreement" / f"{name}.json"
    # The first rank may know more results than the others, because it runs the stages before the run alone.
    result = ranks.from_first(lambda: stored(file) if new else {"fault": KNOWN[name]})
    if result is None:
        own = measure()
        result = ranks.from_first(lambda: {"fault": own})
        if ranks.first:
            store(file, {"subject": subject, "model": model.config.model_type, **result})
    KNOWN[name] = result["fault"]
    return result["fault"], new


def longest(cfg: Config) -> int:
    """Return the largest number of tokens of a prompt and its response."""
    return cfg.task.max_prompt_tokens + cfg.generator.response_length


def stored(file: Path) -> dict[str, str | None] | None:
    """Return the result in `file`, or None if the file is missing or damaged."""
    try:
        result = read_object(file)
    except DamagedFile:
        return None
    return result if "fault" in result else None


def store(file: Path, result: dict[str, str | None]) -> None:
    """Write a result, if the folder can be written; otherwise the next run compares again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    except OSError as error:
        log.debug("the comparison of the model is not stored: %s", error)
