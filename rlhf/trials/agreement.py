"""Trials before a run: faster forwards, and sampling with a cache, must compute the same."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.models import AUTO, Dtype
from rlhf.core.batch import Rollouts
from rlhf.core.errors import UserError
from rlhf.core.files import digest, write_json
from rlhf.generators.hf.generator import sample
from rlhf.memory.sizes import longest
from rlhf.models import forward
from rlhf.models.folder import context_problem, first_line
from rlhf.models.forward import NoSharedPrefix, autocast
from rlhf.models.headers import DamagedFile, ModelFacts, read_object
from rlhf.models.modules import RolloutModule, backbone, described, logit_scale, token_ids
from rlhf.trials.trial import example, undisturbed

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks


# Comparison of computed outputs with those of a forward of each sequence alone, without padding and cache.
#
# Architectures differ in how they use positions, masks and caches, and neither the class nor the config of a
# model shows all differences. ALiBi may count the slots of a cache instead of positions; a layer may attend
# to a window although its cache stores everything; the encoding of positions may depend on the longest
# sequence of the batch. So the outputs are measured, on sequences as long as the longest of the run
# (`LONGEST`).
#
# If the model can compute in float32, the largest difference counts. In 16 bits, rounding changes single
# outputs, and the median of a sequence counts.


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


def _once(
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
    if "fault" not in result:
        batch = ragged_example(model, longest(cfg), ranks.device)
        lent = nullcontext(model) if borrow is None else borrow()
        with lent as whole, comparing(whole, ranks.device, cfg.model.dtype):
            own = measure(whole, batch)
        result = ranks.from_first(lambda: {"fault": own})
        if ranks.first:
            with suppress(OSError):  # the next run compares again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"subject": subject, "model": model.config.model_type, **result})
    KNOWN[name] = result["fault"]
    return result["fault"], new


def _stored(file: Path) -> dict[str, Any]:
    """Return the result in `file`; empty if the file is missing or damaged."""
    try:
        return read_object(file)
    except DamagedFile:
        return {}


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


# Trials of the forwards of a module: flash attention, and prompts that are encoded once for their responses.
#
#     rows of prompt and response, padded         --+ each prompt encoded once for its responses  --+-- same
#     outputs as -- each sequence alone, without padding
#
# The rows of prompt and response are the usual way: if their outputs are wrong, the model is refused.


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
    facts = ModelFacts(model.config.to_dict())
    lengths = cfg.task.max_prompt_tokens, cfg.generator.response_length
    if problem := context_problem(facts.context, *lengths, facts.original_context):
        raise UserError(problem)
    if cfg.model.attention == AUTO:
        _use_flash(module, cfg, ranks)
    fault, new = _once("sharing", model, cfg, ranks, lambda _, batch: sharing_fault(module, batch))
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
        fault, new = _once("attention", model, cfg, ranks, measure)
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
    exact, expected = is_exact(module.model), {}
    try:
        for i, j in product(*map(range, batch.response_ids.shape[:2])):
            one = batch.select(torch.tensor([i]))
            prompt, response, messages = one.prompt_mask[0], one.real[0, j], one.environment_mask
            alone = replace(  # this sample of the prompt without padding
                one,
                prompt_ids=one.prompt_ids[:, prompt],
                prompt_mask=one.prompt_mask[:, prompt],
                response_ids=one.response_ids[:, j : j + 1, response],
                response_mask=one.response_mask[:, j : j + 1, response],
                environment_mask=None if messages is None else messages[:, j : j + 1, response],
                ended=one.ended[:, j : j + 1],
            )
            expected[i, j] = _output(module, alone, False)[0, 0]
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


# The trial of sampling with a cache (`generator=hf`), by the log-probs of the sampled tokens.
#
# The log-probs that `sample` returns come from a batch with padding, from a cache, and on a GPU from a CUDA
# graph. They are compared with a plain forward of each sequence alone, which has none of these.


def samples_with_cache(
    model: PreTrainedModel,
    cfg: Config,
    ranks: Ranks,
    borrow: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
) -> bool:
    """Return whether the Hugging Face sampler can use a cache with a causal LM; if not, warn.

    Args:
        model: the causal LM, whole or divided over the ranks.
        cfg: the config of the run.
        ranks: the ranks of the run, which all call this function.
        borrow: returns a context that yields this model, whole and on the device of the rank; None: it is.
    """
    fault, new = _once("sampling", model, cfg, ranks, sampling_fault, borrow)
    if fault is not None and new:
        log.warning(
            f"sampling from a {model.config.model_type} model uses no cache ({fault}): every token takes a "
            "forward of the whole sequence, which is slow; generator=vllm is faster if vLLM has this model"
        )
    return fault is None


def sampling_fault(model: PreTrainedModel, batch: Rollouts, cached: bool = True) -> str | None:
    """Return why the log-probs of sampled tokens are wrong, or None if they are right.

    Args:
        model: the causal LM, whose forward of a sequence alone works.
        batch: prompts, and responses whose number and length are used.
        cached: the argument of `sample`.
    """
    _, count, length = batch.response_ids.shape
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(batch.response_ids.shape, dtype=torch.float64, generator=draw)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        ids, _, logprobs, _ = sample(
            model,
            batch.prompt_ids,
            batch.prompt_mask,
            samples_per_prompt=count,
            response_length=length,
            temperature=1.0,
            uniforms=numbers,
            stop_ids=[],
            pad_id=0,
            cached=cached,
        )
        for i, j in product(range(len(ids)), range(count)):
            whole = torch.cat([batch.prompt_ids[i][batch.prompt_mask[i]], ids[i, j]])
            states = backbone(model)(input_ids=whole[None], use_cache=False).last_hidden_state[
                :, -length - 1 : -1
            ]
            logits = model.get_output_embeddings()(states) * logit_scale(model)
            yield logprobs[i, j], logits[0].float().log_softmax(-1).gather(-1, ids[i, j][:, None])[:, 0]

    return why_not(pairs(), is_exact(model))
