"""Comparison of the forwards of a module with a forward of each sequence alone.

    rows of prompt and response, padded         --+
    each prompt encoded once for its responses  --+-- same outputs as -- each sequence alone, without padding

Architectures differ in how they use positions, masks and caches, and neither the class nor the config of a
model shows all differences. ALiBi may count the slots of a cache instead of positions; a layer may attend to
a window although its cache stores everything; the encoding of positions may depend on the longest sequence of
the batch. So the outputs are measured, on sequences as long as the longest of the run (`LONGEST`).

If the model can compute in float32, the largest difference counts. In 16 bits, rounding changes single
outputs, and the median of a sequence counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.model import Dtype
from rlhf.core.batch import Rollouts
from rlhf.core.errors import UserError
from rlhf.core.files import digest
from rlhf.models.modules import RolloutModule, backbone, described, token_ids
from rlhf.models.precision import autocast
from rlhf.models.shared_prefix import NoSharedPrefix

TOKENS = 8  # compared tokens of the longest response
# Largest sequence of a comparison in tokens, by device; on both, a comparison is shorter than an update.
LONGEST = {"cpu": 1024, "cuda": 8192}
# Largest difference relative to 1 + |output|. Faults that were found changed log-probs by 0.1 to 7.
EXACT, ROUNDED = 1e-3, 3e-2
# Settings of a config that do not change the states of a model.
_LABELS = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "num_labels", "pad_token_id", "problem_type", "reward_offset", "tie_word_embeddings",
    "transformers_version", "use_cache",
)  # fmt: skip


def example(model: PreTrainedModel, longest: int, device: torch.device) -> Rollouts:
    """Return 2 prompts with 2 responses each, of random tokens from the middle of the vocabulary.

    The first prompt with its first response has `longest` tokens, but at most `LONGEST`. The second prompt is
    a third as long. The random numbers have their own generator.
    """
    known = token_ids(model)
    longest = min(longest, LONGEST[device.type])
    tokens = max(1, min(TOKENS, longest // 2))
    length = max(1, longest - tokens)
    starts = torch.tensor([[0], [length - max(1, length // 3)]])
    ends = torch.tensor([[[tokens], [max(1, tokens - 3)]], [[max(1, tokens // 2)], [tokens]]])
    prompt_mask, response_mask = torch.arange(length) >= starts, torch.arange(tokens) < ends
    draw = torch.Generator().manual_seed(0)
    bounds = len(known) // 8, max(len(known) // 2, len(known) // 8 + 1)
    return Rollouts(
        index=torch.arange(2),
        texts=[""] * 2,
        references=[""] * 2,
        prompt_ids=known[torch.randint(*bounds, prompt_mask.shape, generator=draw)] * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=known[torch.randint(*bounds, response_mask.shape, generator=draw)] * response_mask,
        response_mask=response_mask,
        ended=torch.zeros(2, 2, dtype=torch.bool),
    ).to(device)


def sharing_fault(module: RolloutModule, batch: Rollouts) -> str | None:
    """Return why the outputs of `module` are wrong if each prompt is encoded once; None: they are right.

    Args:
        module: the module.
        batch: rollouts on the device of the module, for example from `example`.

    Raises:
        UserError: the forward of a sequence alone fails, or a batch with padding has other outputs.
    """
    exact = is_exact(module.model)
    try:
        with sharing(module, False):
            expected = {(i, j): output(module, part)[0, 0] for i, j, part in sequences(batch)}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UserError(_unusable(module.model, f"the forward fails ({described(error)})")) from error

    def pairs(shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
        with sharing(module, shared):
            found = output(module, batch)
        for (i, j), alone in expected.items():
            yield found[i, j].reshape(-1)[: alone.numel()], alone.reshape(-1)

    if (fault := why_not(partial(pairs, False), exact)) is not None:
        raise UserError(_unusable(module.model, fault))
    return why_not(partial(pairs, True), exact)


def _unusable(model: PreTrainedModel, fault: str) -> str:
    """Return the error message for a model whose forwards have the fault `fault`."""
    return (
        "models must compute each output from the earlier tokens of the same sequence only, also in a batch "
        f"with padding, got a {model.config.model_type} model, in which {fault}; choose another model"
    )


def why_not(pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]], exact: bool) -> str | None:
    """Return why computed outputs are wrong, or None if they are right.

    Args:
        pairs: computes and yields the outputs of each sequence: found and expected.
        exact: whether the largest difference counts; otherwise the median of a sequence counts.
    """
    wrong, largest = False, 0.0
    try:
        for found, expected in pairs():
            gap = (found.float() - expected.float()).abs()
            relative = gap / (1 + expected.float().abs())
            counts = relative.max() if exact else relative.median()
            wrong |= not bool(counts <= (EXACT if exact else ROUNDED))  # a NaN is wrong
            largest = max(largest, float(gap.nan_to_num(torch.inf).max()))
    except torch.OutOfMemoryError:
        raise
    except NoSharedPrefix as error:
        return error.fault
    except Exception as error:  # the code of a model may raise anything
        return f"the forward fails ({described(error)})"
    return f"outputs differ by up to {largest:.2g} from those of each sequence alone" if wrong else None


def output(module: RolloutModule, batch: Rollouts) -> Tensor:
    """Return the output of `module`: log-probs [N, K, T], rewards [N, K] or values [N, K, T+1]."""
    outputs = module(batch)
    found = next(x for x in (outputs.logprobs, outputs.rewards, outputs.values) if x is not None)
    assert isinstance(found, Tensor)
    return found


def sequences(batch: Rollouts) -> Iterator[tuple[int, int, Rollouts]]:
    """Yield the number of each prompt and sample, and the prompt with this sample alone, without padding."""
    for i in range(len(batch)):
        one = batch.select(torch.tensor([i]))
        prompt = one.prompt_mask[0]
        for j in range(batch.response_ids.shape[1]):
            response = one.response_mask[0, j]
            yield (
                i,
                j,
                replace(
                    one,
                    prompt_ids=one.prompt_ids[:, prompt],
                    prompt_mask=one.prompt_mask[:, prompt],
                    response_ids=one.response_ids[:, j : j + 1, response],
                    response_mask=one.response_mask[:, j : j + 1, response],
                    ended=one.ended[:, j : j + 1],
                ),
            )


@contextmanager
def sharing(module: RolloutModule, shared: bool) -> Iterator[None]:
    """Return a context in which `module` always, or never, encodes prompts apart from their responses."""
    before = module.shared_prefix, module.always_apart
    module.shared_prefix = module.always_apart = shared
    try:
        yield
    finally:
        module.shared_prefix, module.always_apart = before


def is_exact(model: PreTrainedModel) -> bool:
    """Return True if the model can compute in float32; other implementations of attention need 16 bits."""
    return model.config._attn_implementation in ("sdpa", "eager") and all(
        parameter.dtype == torch.float32 for parameter in model.parameters()
    )


@contextmanager
def comparing(model: PreTrainedModel, device: torch.device, dtype: Dtype) -> Iterator[None]:
    """Return a context for a comparison: no gradients, no random numbers of the run, exact if possible.

    Args:
        model: the model that is compared.
        device: device of the forwards.
        dtype: dtype of the forwards of the run, for a model that cannot compute in float32.
    """
    exact = is_exact(model)
    precision = torch.autocast(device.type, enabled=False) if exact else autocast(device, dtype)
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []), torch.no_grad(), precision:
        yield
    if cuda:
        torch.cuda.empty_cache()


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
