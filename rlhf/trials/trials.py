"""Trials before a run: faster forwards, and sampling with a cache, must compute the same, and save time.

    usual way   --+-- differences of the results  --+-- right, and saves time: the faster way is used
    faster way  --+-- seconds of both ways        --+-- wrong: a warning, an error if the config asks for it

A trial changes no weights, no optimizer and no random numbers of the run.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config.models import AUTO, Dtype
from rlhf.config.root import Config
from rlhf.config.schema import data_file
from rlhf.core.batch import Batch, Rollouts
from rlhf.core.errors import UserError
from rlhf.core.files import digest, write_json
from rlhf.engines.engine import Engine, trained
from rlhf.generators.hf.generator import sample
from rlhf.memory.plan import with_token_limit
from rlhf.memory.sizes import longest, most_sequences
from rlhf.models import forward
from rlhf.models.folder import context_problem, first_line
from rlhf.models.forward import NoSharedPrefix, autocast, raise_errors, shared_copies
from rlhf.models.headers import DamagedFile, ModelFacts, read_object
from rlhf.models.logprobs import fused_logprobs, token_outputs
from rlhf.models.modules import LogprobHead, RolloutModule, backbone, described, logit_scale, token_ids
from rlhf.processes.ranks import Ranks
from rlhf.terminal.console import say_row

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
_LABELS: list[str] = data_file("rlhf.trials", "labels.yaml")


def example(
    model: PreTrainedModel,
    prompt_mask: Tensor,  # [N, P] bool
    response_mask: Tensor,  # [N, K, T] bool
    device: torch.device,
    drawn: slice = slice(None),  # of the model's token ids
) -> Rollouts:
    """Return rollouts of random tokens; the random numbers have their own generator."""
    known, draw = token_ids(model)[drawn], torch.Generator().manual_seed(0)
    texts = [""] * len(prompt_mask)
    prompts, responses = (
        known[torch.randint(len(known), mask.shape, generator=draw)] * mask
        for mask in (prompt_mask, response_mask)
    )
    return Rollouts(
        index=torch.arange(len(texts)),
        texts=texts,
        references=texts,
        prompt_ids=prompts,
        prompt_mask=prompt_mask,
        response_ids=responses,
        response_mask=response_mask,
        ended=torch.zeros(response_mask.shape[:2], dtype=torch.bool),
    ).to(device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Return a context for a trial; afterwards, random numbers are as before, GPU caches are empty."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        yield
    if cuda:
        torch.cuda.empty_cache()


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
    whole = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return whole and model.config._attn_implementation in ("sdpa", "eager")


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
    def known() -> dict[str, Any]:
        with suppress(DamagedFile):  # or there is none
            return read_object(file) if new else {"fault": KNOWN[name]}
        return {}

    result = ranks.from_first(known)
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


def fingerprint(model: PreTrainedModel, **settings: str | int) -> str:
    """Return 8 hex digits that determine the result of a comparison, whatever the weights of the model.

    They depend on the config of the model, on the code of its class, on the versions of torch and
    transformers, and on `settings`.
    """
    config = model.config.to_dict()
    source = Path(inspect.getfile(type(backbone(model)))).read_text(encoding="utf-8")
    counted = {
        **settings,
        "config": repr(sorted((k, v) for k, v in config.items() if k not in _LABELS)),
        "code": digest(source),
        "exact": is_exact(model),
        "attention": model.config._attn_implementation,
        "versions": [torch.__version__, transformers.__version__],
    }
    return digest(counted)


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
            said = f"model.shared_prefix is turned off for a {model.config.model_type} model ({fault})"
            so = "each prompt is encoded again for every response, which is slower"
            log.warning(f"{said}: {so}; set model.shared_prefix=false to hide this message")
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
            family = model.config.model_type
            said = f"model.attention=auto uses sdpa instead of {kind} for a {family} model ({fault})"
            log.warning(f"{said}; set model.attention=sdpa to hide this message")


def sharing_fault(module: RolloutModule, batch: Rollouts) -> str | None:
    """Return why the outputs of `module` are wrong if each prompt is encoded once; None: they are right.

    Args:
        module: the module.
        batch: rollouts on the device of the module, for example from `ragged_example`.

    Raises:
        UserError: the forward of a sequence alone fails, or a batch with padding has other outputs.
    """

    @cache
    def alone(i: int, j: int) -> Tensor:
        """Return the output of a sample of a prompt without padding."""
        one = batch.select(torch.tensor([i]))
        prompt, response, messages = one.prompt_mask[0], one.real[0, j], one.environment_mask
        unpadded = replace(
            one,
            prompt_ids=one.prompt_ids[:, prompt],
            prompt_mask=one.prompt_mask[:, prompt],
            response_ids=one.response_ids[:, j : j + 1, response],
            response_mask=one.response_mask[:, j : j + 1, response],
            environment_mask=None if messages is None else messages[:, j : j + 1, response],
            ended=one.ended[:, j : j + 1],
        )
        return _output(module, unpadded, False)[0, 0].reshape(-1)

    def pairs(shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
        expected = {(i, j): alone(i, j) for i, j in product(*map(range, batch.response_ids.shape[:2]))}
        found = _output(module, batch, shared)
        yield from ((found[at].reshape(-1)[: each.numel()], each) for at, each in expected.items())

    exact = is_exact(module.model)
    if (fault := why_not(pairs(False), exact)) is not None:
        rule = "models must compute outputs from earlier tokens of the same sequence only, also with padding"
        kind = module.model.config.model_type
        raise UserError(f"{rule}, got a {kind} model, in which {fault}; choose another model")
    return why_not(pairs(True), exact)


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
        said = f"sampling from a {model.config.model_type} model uses no cache ({fault})"
        so = "every token takes a forward of the whole sequence, which is slow"
        log.warning(f"{said}: {so}; generator=vllm is faster if vLLM has this model")
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
        prompts, mask = batch.prompt_ids, batch.prompt_mask
        ids, _, logprobs, _ = sample(model, prompts, mask, count, length, 1.0, numbers, [], 0, cached=cached)
        for i, j in product(range(len(ids)), range(count)):
            whole = torch.cat([batch.prompt_ids[i][batch.prompt_mask[i]], ids[i, j]])
            states = backbone(model)(input_ids=whole[None], use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(states[:, -length - 1 : -1]) * logit_scale(model)
            yield logprobs[i, j], logits[0].float().log_softmax(-1).gather(-1, ids[i, j][:, None])[:, 0]

    return why_not(pairs(), is_exact(model))


# Trials that measure seconds, too: compiled blocks, and Liger's kernel for the heads of policies.


N = TypeVar("N", bound=nn.Module)
T = TypeVar("T")

_REPEATS = 3  # runs of a micro-batch; the fastest counts


class Measured(NamedTuple):
    """What one way to compute a micro-batch gives."""

    outputs: list[Tensor]
    gradients: list[list[Tensor]]  # groups of tensors; the difference of a group is relative to its norm
    seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial that measures differences and seconds."""

    usual_s: float = 0.0  # seconds of a micro-batch in the usual way
    faster_s: float = 0.0  # seconds of a micro-batch in the faster way
    preparation_s: float = 0.0  # seconds before the first micro-batch, for example of a compilation
    outputs: float = 0.0  # largest difference of an output, relative to 1 + |output|
    gradients: float = 0.0  # largest difference of the gradients of a group, relative to their norm
    error: str = ""  # the error of the faster way; empty: none

    @classmethod
    def of(
        cls, usual: Callable[[], Measured], faster: Callable[[], Measured], *errors: type[Exception]
    ) -> Trial:
        """Return the result of a trial of two ways; `errors` of the faster way become the result."""
        expected, start = usual(), time.perf_counter()
        try:
            found = faster()
        except errors as error:
            return cls(usual_s=expected.seconds, error=described(error))
        preparation_s = max(0.0, time.perf_counter() - start - _REPEATS * found.seconds)
        gaps = [((a - b).abs() / (1 + b.abs())).max() for a, b in zip(found[0], expected[0], strict=True)]
        changes = [
            torch.stack([(a - b).norm() for a, b in zip(own, usual, strict=True)]).norm()
            / torch.stack([each.norm() for each in usual]).norm()
            for own, usual in zip(found.gradients, expected.gradients, strict=True)
        ]
        outputs, gradients = (float(torch.stack(x).max().nan_to_num(math.inf)) for x in (gaps, changes))
        return cls(expected.seconds, found.seconds, preparation_s, outputs, gradients)

    @property
    def differences(self) -> str:
        """The measured differences as text."""
        outputs = f"outputs differ by at most {self.outputs:.1e} of 1 + |output|"
        return f"{outputs}, gradients by {self.gradients:.1e} of their norm"

    def pays_off(self, uses: float) -> bool:
        """Return whether the faster way saves more time in `uses` micro-batches than its preparation took."""
        return (self.usual_s - self.faster_s) * uses > self.preparation_s


@dataclass(frozen=True, slots=True)
class Way:
    """A faster way, and how a trial decides about its use."""

    key: str  # of the config: true asks for the way, null for a decision
    name: str  # in messages
    limits: dict[Dtype, tuple[float, float]]  # largest right differences of outputs and of gradients

    def fault(self, trial: Trial, dtype: Dtype) -> str | None:
        """Return why the way cannot be used with forwards in `dtype`; None: it computes the same."""
        if trial.error:
            return f"error of {self.name}: {trial.error}"
        outputs, gradients = self.limits[dtype]
        right = trial.outputs <= outputs and trial.gradients <= gradients  # NaN: False
        return None if right else f"wrong results of {self.name}: {trial.differences}"

    def chosen(self, trial: Trial, dtype: Dtype, asked: bool | None, uses: float) -> bool:
        """Return whether the run uses the way, and report the decision.

        Args:
            trial: the result of the trial, the same on all ranks.
            dtype: the dtype of the forwards.
            asked: the value of the key; None: use the way if it saves time.
            uses: the micro-batches of the rest of the run.

        Raises:
            UserError: the config asks for the way, and it fails or gives wrong results.
        """
        if fault := self.fault(trial, dtype):
            if asked:
                refused = UserError(f"{self.key} must be false ({fault}), got true; set {self.key}=false")
                refused.everywhere = True
                raise refused
            log.warning(f"{fault}; the usual way is used (set {self.key}=false to hide this message)")
            return False
        used = bool(asked) or trial.pays_off(uses)
        answer = "yes" if used else "no, too little gain in the rest of the run"
        times = f"{trial.faster_s:.3g} s per micro-batch instead of {trial.usual_s:.3g} s"
        compilation = f"compiled in {trial.preparation_s:.0f} s"
        say_row(self.name, f"{answer}; {trial.differences}; {times}, {compilation}")
        return used


def parts(engine: Engine, kind: type[N]) -> list[N]:
    """Return the parts of class `kind` in the trained module and in the reference of an engine."""
    roots = [each for each in (engine.module, engine.reference) if isinstance(each, RolloutModule)]
    found = [part for root in roots for part in root.modules() if isinstance(part, kind)]
    return list(dict.fromkeys(found))


@contextmanager
def timed(device: torch.device) -> Iterator[None]:
    """Return an `undisturbed` context without warnings, whose peak of GPU memory is forgotten afterwards."""
    with undisturbed(device), warnings.catch_warnings(action="ignore"):
        yield
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def fastest(step: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Call `step` `_REPEATS` times; return the last result, and the seconds of the fastest call."""
    seconds = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return result, seconds


# The trial of compiled blocks (`backend.compile`): a micro-batch of the longest sequences, and half of one.
#
# With `backend.compile=null`, only a GPU compiles, and only if the time that compiled blocks save in the run
# exceeds the time of the compilation.


WORTH_TRYING_S = 600.0  # seconds; a run that trains for less time starts no trial, which takes minutes
# In 16 bits, compiled blocks round less often. A wrong mask or layout changes gradients by about their norm.
_LIMITS = {Dtype.float32: (1e-3, 1e-3), Dtype.bfloat16: (1.0, 0.1), Dtype.float16: (0.3, 0.03)}
BLOCKS = Way("backend.compile", "compiled blocks", _LIMITS)


def compile_blocks(engine: Engine, cfg: Config, updates: int) -> None:
    """Compile the blocks of the models of `engine` if `backend.compile` and a trial allow; print the result.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.
        updates: updates of the whole run.

    Raises:
        UserError: `backend.compile=true`, and the blocks cannot be compiled or give wrong results.
    """
    asked, ranks = cfg.backend.compile, engine.ranks
    if not (asked or (asked is None and may_pay_off(cfg, ranks.device))):
        return
    prompts, left = work(cfg, ranks, updates)
    samples = cfg.algo.samples_per_prompt
    batches = []  # of random tokens, of the largest lengths of the run
    for count in (prompts, -(-prompts // 2)):
        asked_mask = torch.ones(count, cfg.task.max_prompt_tokens, dtype=torch.bool)
        answered = torch.ones(count, samples, cfg.generator.response_length, dtype=torch.bool)
        rollouts = example(engine.module.model, asked_mask, answered, ranks.device)
        batches.append(rollouts.extend(Batch, scores=torch.zeros(count, samples, device=ranks.device)))
    with timed(ranks.device):
        usual_s = max(ranks.gather(_trained(engine, batches[0]).seconds))
        if asked is None and usual_s * left < WORTH_TRYING_S:
            return
        raise_errors(True)
        trials = [compare(engine, batch) for batch in batches]
    # the largest value of each field; an error is larger than none
    trials = [each for own in ranks.gather(trials) for each in own]
    trial = Trial(**{each.name: max(getattr(x, each.name) for x in trials) for each in fields(Trial)})
    if BLOCKS.chosen(trial, engine.settings.dtype, asked, left):
        _use_compiled(engine, True)
        raise_errors(False)


def may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `backend.compile=null` starts a trial: on a GPU, if the backend can compile."""
    return device.type == "cuda" and cfg.backend.compiles


def work(cfg: Config, ranks: Ranks, updates: int) -> tuple[int, int]:
    """Return the prompts of a micro-batch of the longest sequences, and the micro-batches of `updates`."""
    share = -(-cfg.schedule.prompts_per_update // (cfg.schedule.minibatches * ranks.size))  # of a minibatch
    prompts = max(1, min(share, most_sequences(with_token_limit(cfg)) // cfg.algo.samples_per_prompt))
    return prompts, updates * cfg.schedule.epochs * cfg.schedule.minibatches * -(-share // prompts)


def compare(engine: Engine, batch: Batch) -> Trial:
    """Return times and differences of a micro-batch with the usual and with compiled blocks."""

    def compiled() -> Measured:
        try:
            _use_compiled(engine, True)
            return _trained(engine, batch)
        finally:
            _use_compiled(engine, False)
            engine.discard()

    # errors of the compiler, or of a program that it starts
    return Trial.of(lambda: _trained(engine, batch), compiled, RuntimeError, OSError, ImportError)


def _use_compiled(engine: Engine, compiled: bool) -> None:
    for module in parts(engine, RolloutModule):
        module.use_compiled(compiled)


def _trained(engine: Engine, batch: Batch) -> Measured:
    """Run the trained module forward and backward, and the reference forward; delete the gradients."""
    device, dtype = engine.ranks.device, engine.settings.dtype

    def train() -> list[Tensor]:
        outputs = [x for x in engine.forward(batch) if x is not None]
        # The root keeps gradients near 1 for any number of tokens: float16 neither overflows nor underflows.
        torch.stack([x.sum() / math.sqrt(x.numel()) for x in outputs]).sum().backward()
        return [x.detach() for x in outputs]

    def refer() -> list[Tensor]:
        if not isinstance(engine.reference, RolloutModule):
            return []
        with torch.no_grad(), autocast(device, dtype):
            return [x for x in engine.reference(batch) if x is not None]

    with shared_copies(device, dtype):
        outputs, seconds = fastest(train, device)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in trained(engine.module)]
    engine.module.zero_grad()
    more, more_s = fastest(refer, device)
    return Measured(outputs + more, [gradients], seconds + more_s)


# The trial of Liger's kernel for the heads of policies (`model.fused_head`).
#
# The weight of the head and random hidden states of one micro-batch give log-probs and gradients, by the
# tiles and by Liger (`rlhf.models.logprobs`).
#
# With `model.fused_head=null`, only a GPU uses Liger, and only where Liger is installed and faster.


# Older versions of Liger give gradients of tokens with different weights that differ by about their norm.
HEAD = Way("model.fused_head", "Liger's head", dict.fromkeys(Dtype, (5e-2, 5e-2)))

_Logprobs = Callable[[Tensor, Tensor, Tensor | None, Tensor, float], Tensor]


def choose_head(engine: Engine, cfg: Config) -> None:
    """Let the heads of the engine's policies use Liger if `model.fused_head` and a trial allow.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.

    Raises:
        UserError: `model.fused_head=true`, and Liger fails or gives wrong results.
    """
    asked, ranks, dtype = cfg.model.fused_head, engine.ranks, engine.settings.dtype
    heads = parts(engine, LogprobHead)
    if not heads or not (asked or (asked is None and head_may_pay_off(cfg, ranks.device))):
        return
    rows = most_sequences(with_token_limit(cfg)) * cfg.generator.response_length
    with timed(ranks.device):
        trial = compare_heads(heads[0], rows, cfg.generator.temperature, ranks.device, dtype)
    trial = ranks.gather(trial)[0]  # the result of the first rank counts
    if HEAD.chosen(trial, dtype, asked, math.inf):  # Liger compiles in seconds, whatever the run
        for head in heads:
            head.fused = True


def head_may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `model.fused_head=null` starts a trial."""
    return (
        device.type == "cuda"
        and cfg.model.dtype is not Dtype.float32
        and not cfg.model.float32_head
        and not cfg.backend.footprint().gathered
        and importlib.util.find_spec("liger_kernel") is not None
    )


def compare_heads(
    head: LogprobHead, rows: int, temperature: float, device: torch.device, dtype: Dtype
) -> Trial:
    """Return times and differences of log-probs and gradients of `rows` rows with tiles and with Liger."""
    draw = torch.Generator(device).manual_seed(0)
    size, width = head.weight.shape
    states = torch.randn(rows, width, generator=draw, device=device)
    targets = torch.randint(0, size, (rows,), generator=draw, device=device)
    if head.absent is not None:  # the log-prob of an id without a token is -inf
        known = (~head.absent).nonzero()[:, 0].to(device)
        targets = known[targets % len(known)]
    slopes = torch.randn(rows, generator=draw, device=device)  # as advantages: a different one for each row

    def run(logprobs: _Logprobs) -> Measured:
        def step() -> list[Tensor]:
            weight = head.weight.detach().requires_grad_(head.weight.requires_grad)
            hidden = states.detach().requires_grad_()
            with autocast(device, dtype):
                output = logprobs(hidden, weight, head.offset(), targets, temperature)
            output.backward(slopes)
            return [x for x in (output.detach(), hidden.grad, weight.grad) if x is not None]

        (output, *gradients), seconds = fastest(step, device)
        return Measured([output], [[x] for x in gradients], seconds)

    usual = partial(run, lambda *given: token_outputs(*given).logprobs)
    return Trial.of(usual, partial(run, fused_logprobs), Exception)  # Triton and Liger may raise anything
