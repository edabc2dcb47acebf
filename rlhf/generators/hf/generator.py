"""Generators that sample with a Hugging Face model.

The model is the trained model in the trainer's process, or a copy of the model in a separate process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from rlhf.config.generators import HFConfig
from rlhf.config.models import Dtype
from rlhf.core.batch import Prompts, Rollouts, Sampling, moved_to
from rlhf.core.errors import UserError
from rlhf.core.launched import derive, local_rank
from rlhf.environments.environment import EnvironmentFactory
from rlhf.environments.episodes import Episodes
from rlhf.generators.generator import Generator, GeneratorContext, Update, finished
from rlhf.generators.hf import decoding
from rlhf.generators.hf.decoding import can_record
from rlhf.generators.process import start
from rlhf.generators.weights import Manifest, TransferError, checksum, read
from rlhf.models import folder, forward
from rlhf.models.modules import absent_ids, set_head
from rlhf.processes.worker import environment
from rlhf.terminal.console import Phases
from rlhf.text.encoding import pad_prompts

CPU_CHUNK, GPU_CHUNK = 2**20, 2**24  # probabilities per step of `choose`; on a CPU a step fits in cache
_BLOCK = 128  # token ids per block in `_pick`


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSettings:
    """The settings of sampling with a Hugging Face model that are the same for all requests.

    Args:
        stop_ids: ids of the tokens that end a response.
        pad_id: id of the pad token.
        batch_size: sequences decoded in parallel.
        seed: the seed of the run.
        cached: whether sampling uses a cache of keys and values; see `sample`.
        noise: standard deviation of the noise on the logits of training samples; see `choose`.
        environment: makes the environments that answer replies; None: a response is one reply.
        compile: whether the blocks of the model run compiled code on a GPU; see `compiled` of `sample`.
    """

    stop_ids: list[int]
    pad_id: int
    batch_size: int
    seed: int
    cached: bool = True
    noise: float = 0.0
    environment: EnvironmentFactory | None = None
    compile: bool = False


def build(config: HFConfig, context: GeneratorContext) -> Generator:
    """Return a generator that samples with the trained model, or with a copy in a separate process.

    Raises:
        UserError: `generator.compile` is set, and the model has no blocks that can be compiled.
    """
    if config.compile:
        try:
            forward.compiled_blocks(context.policy)
        except forward.NoBlocks as fault:
            raise UserError(
                f"generator.compile must be false ({fault}), got true; set generator.compile=false"
            ) from None
    settings = HFSettings(
        stop_ids=list(context.stop_ids),
        pad_id=context.tokenizer.pad_token_id,
        batch_size=config.batch_size,
        seed=context.seed,
        cached=context.cached,
        noise=config.noise,
        environment=context.environment,
        compile=config.compile,
    )
    if not config.has_worker(context.max_lag):
        return HFGenerator(context.borrow, settings, context.phases)
    model = context.policy
    factory = HFSamplerFactory(
        config=model.config.to_json_string(use_diff=False),
        attention=context.model.loaded_attention,
        remote=model.config.name_or_path if context.model.trust_remote_code else None,
        device=model.device.type,
        dtype=context.model.dtype,
        float32_head=context.model.float32_head,
        absent_ids=absent_ids(model),
        settings=settings,
    )
    first = local_rank() if config.per_rank else 0
    variables = [environment(context.threads, model.device, first + i) for i in range(config.replicas)]
    return start(config, context, factory, variables)


@dataclass(eq=False)
class HFGenerator(Generator):
    """A generator that samples with the trained model in the trainer's process.

    `submit` samples a request before it returns, with the current weights. So requests and loads are
    processed first in, first out, and `load` copies nothing.

    Args:
        borrow: returns a context that yields the trained model (`engine.borrow_policy`).
        settings: the settings of sampling.
        phases: the phases of the run, for its progress display.
    """

    borrow: Callable[[], AbstractContextManager[PreTrainedModel]]
    settings: HFSettings
    phases: Phases = field(default_factory=Phases)
    version = 0

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Sample K responses to each prompt, and return a finished future."""
        start = time.perf_counter()
        with self.borrow() as model:
            rollouts = respond(model, prompts, sampling, self.settings, phases=self.phases)
        seconds = time.perf_counter() - start
        return finished(replace(rollouts, version=self.version, generate_s=seconds))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Record the version of the borrowed weights."""
        self.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSamplerFactory:
    """A factory that creates a sampler with its own model, inside the sampler's process.

    The model has random weights until the first load.

    Args:
        config: the config of the model, as JSON.
        attention: the attention implementation (`model.attention`).
        remote: hub name or folder with the code of the model; None: transformers has the code.
        device: the type of the device, "cpu" or "cuda".
        dtype: the dtype of forward passes; bfloat16 is autocast over the float32 weights.
        float32_head: whether logits are computed in float32, also with a 16-bit dtype.
        settings: the settings of sampling.
        absent_ids: ids of the model that no token has; they are not sampled.
    """

    config: str
    attention: str
    remote: str | None
    device: str
    dtype: Dtype
    settings: HFSettings
    float32_head: bool = False
    absent_ids: list[int] = field(default_factory=list)

    def build(self) -> HFSampler:
        """Return the sampler, with a model of random weights."""
        kind = {"attn_implementation": self.attention, "trust_remote_code": self.remote is not None}
        if self.remote is not None:
            config = AutoConfig.from_pretrained(self.remote, trust_remote_code=True)
        else:
            values = json.loads(self.config)
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kind)
        if self.float32_head or self.absent_ids:
            rows = range(model.get_output_embeddings().out_features)
            set_head(model, self.float32_head, tokens=set(rows) - set(self.absent_ids))
        return HFSampler(forward.place(model, torch.device(self.device)).eval(), self)


@dataclass(frozen=True)
class HFSampler:
    """A sampler with its own copy of the model; equal weights sample the same tokens as in `HFGenerator`."""

    model: PreTrainedModel
    made_by: HFSamplerFactory

    def sample(self, prompts: Prompts, sampling: Sampling, update: Update | None = None) -> Rollouts:
        """Return K responses to each prompt; `update` may load weights before each forward pass."""
        # Autocast caches 16-bit copies of weights that require a gradient. Weights that change during a
        # request must not be cached.
        self.model.requires_grad_(update is None)
        with forward.autocast(self.model.device, self.made_by.dtype):
            return respond(self.model, prompts, sampling, self.made_by.settings, update)

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Copy the weights of a manifest into the model; return the checksums of the model's tensors.

        Raises:
            TransferError: the weights changed during the transfer, or belong to another model.
        """
        own = self.model.state_dict()
        if unlike := own.keys() ^ manifest.checksums().keys():
            raise TransferError(
                f"version {manifest.version} must have the tensors of the generator's model, and only one of "
                f"the two has {min(unlike)}"
            )
        for name, tensor in read(manifest):
            own[name].copy_(tensor)
        return {name: checksum(tensor) for name, tensor in own.items()}

    def close(self) -> None:
        """Do nothing: the model is freed with the process."""


def respond(
    model: PreTrainedModel,
    prompts: Prompts,
    sampling: Sampling,
    settings: HFSettings,
    update: Update | None = None,
    phases: Phases | None = None,
) -> Rollouts:
    """Sample K responses to each prompt, in chunks of `batch_size` sequences, the longest prompts first.

    `update` is called before each forward pass; it may change the model's weights, and returns their version.
    The phase in `phases` counts the finished sequences. With an environment, responses are episodes.
    """
    length, numbers, most = sampling.response_length, sampling.numbers, sampling.most
    if numbers is None:
        purpose = derive(settings.seed, "sample", sampling.purpose)
        numbers = uniforms(purpose, sampling.request, prompts.index, sampling.samples, length)
    if settings.environment is not None:
        one_reply = replace(settings, environment=None)

        def reply(asked: Prompts, request: Sampling) -> Rollouts:
            return respond(model, asked, request, one_reply, update, phases)

        stop_ids, seed = settings.stop_ids, settings.seed
        with Episodes(prompts, sampling, settings.environment, stop_ids, seed) as episodes:
            _converse(episodes, numbers, reply)
            return episodes.rollouts(settings.pad_id, in_flight=update is not None)
    chunk = max(1, settings.batch_size // sampling.samples)
    if most is not None:
        length = int(most.max())
        numbers = numbers[..., :length]
    begun = sampling.begun or []
    if any(each.ids for each in begun):
        heads = zip(prompts.prompt_ids, prompts.prompt_mask, begun, strict=True)
        ids, mask = pad_prompts([head[real].tolist() + own.ids for head, real, own in heads], settings.pad_id)
        prompts = replace(prompts, prompt_ids=ids, prompt_mask=mask)
    phases = phases or Phases()
    parts, versions = [], []
    held: list[int] = []  # the version of the weights for each response token of a chunk
    order = prompts.prompt_mask.sum(1).argsort(descending=True, stable=True)
    with phases("sampling", len(prompts) * sampling.samples) as done:
        for rows in order.split(chunk):
            held.clear()
            with phases("token", length) as next_token:
                part = sample(
                    model,
                    moved_to(model.device, prompts.prompt_ids[rows]),
                    moved_to(model.device, prompts.prompt_mask[rows]),
                    samples_per_prompt=sampling.samples,
                    response_length=length,
                    temperature=sampling.temperature,
                    uniforms=numbers[rows.cpu()],
                    stop_ids=settings.stop_ids,
                    pad_id=settings.pad_id,
                    before_forward=None if update is None else lambda: held.append(update()),
                    after_token=next_token,
                    cached=settings.cached,
                    most=None if most is None else most[rows.cpu()],
                    noise=settings.noise if sampling.purpose == "train" else 0.0,
                    compiled=settings.compile and update is None,
                )
            parts.append(part)
            done(len(rows) * sampling.samples)
            if update is not None:
                versions.append(_pad_to(torch.tensor(held) * part[1].cpu(), length, 0))
    home, fill, back = prompts.prompt_ids.device, (settings.pad_id, False, 0.0), order.argsort()
    ids, mask, logprobs = (
        torch.cat([_pad_to(part[i], length, fill[i]) for part in parts]).to(home)[back] for i in range(3)
    )
    return prompts.extend(
        Rollouts,
        response_ids=ids,
        response_mask=mask,
        behaviour_logprobs=logprobs,
        ended=torch.cat([part[3] for part in parts]).to(home)[back],
        token_versions=torch.cat(versions).to(home)[back] if versions else None,
    )


def _converse(episodes: Episodes, numbers: Tensor, reply: Callable[[Prompts, Sampling], Rollouts]) -> None:
    """Sample episodes turn by turn; `reply` samples the replies to histories.

    Token t of an episode has the random number t of its sample, whatever the turn. The first replies to a
    prompt share its encoding. Later, the history of each running episode is a prompt.
    """
    prompts, sampling = episodes.prompts, episodes.sampling
    K, numbers = sampling.samples, numbers.flatten(0, 1)
    while running := episodes.running():
        begun = [episodes.begun(i) for i in running]
        shared = not any(each.ids for each in begun)
        asked, samples = (prompts, K) if shared else (prompts.select(torch.tensor(running) // K), 1)
        room = [episodes.room(i) for i in running]
        uniform = torch.zeros(len(running), max(room), dtype=torch.float64)
        for row, i, most in zip(uniform, running, room, strict=True):
            row[:most] = numbers[i, episodes.added(i) :][:most]
        request = replace(
            sampling,
            samples=samples,
            response_length=max(room),
            numbers=uniform.view(len(asked), samples, -1),
            most=torch.tensor(room).view(len(asked), samples),
            begun=begun,
        )
        found = reply(asked, request)
        parts = (found.response_ids, found.behaviour_logprobs, found.token_versions)
        rows = zip(*(x.flatten(0, 1).tolist() for x in parts if x is not None), strict=True)
        lengths = found.response_mask.sum(-1).flatten().tolist()
        for i, length, values in zip(running, lengths, rows, strict=True):
            episodes.reply(i, *(each[:length] for each in values))


def _pad_to(x: Tensor, length: int, value: float) -> Tensor:
    """Pad `x` [..., T] on the right with `value` to [..., length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=value)


# Sampling: the decode loop and the choice of tokens.
#
# A token is chosen by inverting the cumulative distribution at one uniform number per token. So the tokens of
# a sample depend only on the sample's own uniform numbers. They do not depend on the other rows of the batch,
# on the order of the rows or on the rank that decodes the sample (up to float rounding of the logits).


def uniforms(seed: int, request: int, index: Tensor, samples: int, length: int) -> Tensor:
    """Return uniform numbers in [0, 1) for a request: [N, samples, length] float64, on the CPU.

    The numbers of an example depend only on seed, request, index and length. They come from a counter-based
    random number generator (Philox, Salmon et al. 2011). The key of the generator is derived from seed and
    request, and the counter starts at the index of the example. So an example gets the same numbers in any
    slice of the examples and on any rank. With more samples, the numbers of the first samples do not change.

    Args:
        seed: number derived from the seed of the run and the purpose of the request.
        request: number of the request.
        index: [N] int64, row of each example in the task's data set.
        samples: samples per example, K.
        length: numbers per sample, one per token.
    """
    key = derive(seed, "sampling", request)
    rows = [
        np.random.Generator(np.random.Philox(key=key, counter=[0, i, 0, 0])).random((samples, length))
        for i in index.tolist()
    ]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, samples, length, dtype=torch.float64)


def sample(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    samples_per_prompt: int,
    response_length: int,
    temperature: float,
    uniforms: Tensor,
    stop_ids: Iterable[int] | Tensor,
    pad_id: int,
    before_forward: Callable[[], object] | None = None,
    after_token: Callable[[], object] | None = None,
    cached: bool = True,
    most: Tensor | None = None,
    noise: float = 0.0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample K responses for each prompt.

    Each prompt is encoded once. If attention accepts any mask (sdpa), several samples of a prompt share a row
    of the batch (`rlhf.models.folder`) and read one copy of the prompt's keys and values; otherwise
    the prompt's keys and values are repeated for each sample. Rows whose samples have all ended are removed
    from the batch. On a GPU a step runs as a CUDA graph (`rlhf.generators.hf.decoding`), unless
    `before_forward` is set.

    Args:
        model: the causal LM.
        prompt_ids: [N, P] int64, padded left.
        prompt_mask: [N, P] bool.
        samples_per_prompt: K.
        response_length: maximum number of tokens of a response.
        temperature: sampling temperature.
        uniforms: uniform numbers [N, K, response_length], one per token.
        stop_ids: token ids that end a response; the stop token belongs to the response.
        pad_id: token id of padding.
        before_forward: function that is called before the forward passes of each response token, once per
            token. It may change the model's weights; keys and values of earlier tokens are not recomputed.
        after_token: function that is called after each response token of all samples. On a GPU the token may
            not be computed yet.
        cached: False: read each sequence again for every token, without a cache. This is slow, and right for
            every model (`rlhf.trials.trials`).
        most: largest number of tokens of each sample, [N, K]; None: `response_length`.
        noise: standard deviation of the noise on the logits; see `choose`.
        compiled: whether the blocks of the model run compiled code in steps that are CUDA graphs. The first
            such step of a process takes the time of the compilation. If it fails, the steps run as usual,
            without graphs, after a warning. Not with a `before_forward` that changes the weights.

    Raises:
        NoBlocks: `compiled` is set, and the model has no blocks that can be compiled.

    Returns:
        response_ids [N, K, T] int64, padded right with `pad_id`; response_mask [N, K, T] bool; log-probs
        [N, K, T] float32 at `temperature`, 0 at padding; ended [N, K] bool, True if a stop token was sampled.
        T is the longest response. The tensors may be inference tensors, which autograd cannot save for a
        backward pass; copies of them can be saved.
    """
    # Inference mode makes small operations faster. Under autocast it would copy the weights in every forward
    # pass, but with `no_grad`, autocast caches their 16-bit copies. A model with flash attention samples with
    # sdpa, which several samples in a row and CUDA graphs need. Compiled code gets the weights in the dtype
    # of autocast
    low = torch.is_autocast_enabled(model.device.type)
    weights = forward.converted_weights(model) if compiled else nullcontext()
    with torch.no_grad() if low else torch.inference_mode(), forward.with_sdpa(model), weights:
        n, k, device = len(prompt_ids), samples_per_prompt, prompt_ids.device
        stops = torch.as_tensor(list(stop_ids), device=device)
        longest = int(prompt_mask.sum(1).max())
        seen = prompt_mask[:, -longest:]
        ids = prompt_ids[:, -longest:].masked_fill(~seen, 0)
        recorded = can_record(device) and before_forward is None
        pick_next = partial(choose, temperature=temperature, noise=noise)
        if before_forward is not None:
            before_forward()
        step, logits, place, movable = _begin(
            model, ids, seen, k, response_length, pick_next, cached=cached, recorded=recorded
        )
        if compiled and isinstance(step, decoding.GraphStep):
            step.blocks = partial(decoding.compiled, model)
        shape = (*place.shape, response_length)  # [N*K/G, G, T] with G samples per row
        numbers = uniforms.reshape(shape).to(device)
        tokens = torch.full(shape, pad_id, device=device)
        logprobs = torch.zeros(shape, device=device)
        real = torch.zeros(shape, dtype=torch.bool, device=device)
        rows = torch.arange(len(place), device=device)  # output rows that are still being decoded
        running = torch.ones(shape[:2], dtype=torch.bool, device=device)
        most = None if most is None else most.reshape(shape[:2]).to(device)
        steps: list[tuple[Tensor, Tensor, Tensor]] = []  # results for `rows` that are not in the outputs yet
        token, logprob = pick_next(logits.expand(-1, shape[1], -1), numbers=numbers[..., 0])
        del logits
        with decoding.grouped(model):
            for t in range(response_length):
                steps.append((token, logprob, running))
                running = running & ~torch.isin(token, stops)
                if most is not None:
                    running = running & (t + 1 < most[rows])
                done = t + 1 == response_length
                if done or step.looks(t):
                    active = running.any(1)
                    left = int(active.sum())
                    done, fewer = done or not left, movable and step.settled and left < len(rows)
                    if done or fewer:
                        for whole, parts in zip(
                            (tokens, logprobs, real), zip(*steps, strict=True), strict=True
                        ):
                            whole[rows, :, t + 1 - len(steps) : t + 1] = torch.stack(parts, -1)
                        steps.clear()
                    if done:
                        break
                    if fewer:
                        # active rows at the end of the batch take the positions of inactive rows in front
                        kept = torch.arange(left, device=device)
                        kept[~active[:left]] = left + active[left:].nonzero()[:, 0]
                        step.keep(kept)
                        rows, token, running, place = (x[kept] for x in (rows, token, running, place))
                if after_token is not None:
                    after_token()
                place = place + 1
                if before_forward is not None:
                    before_forward()
                token, logprob = step(token, place, numbers[rows, :, t + 1])
        length = int(real.any(0).any(0).sum())
        tokens.masked_fill_(~real, pad_id)
        logprobs.masked_fill_(~real, 0.0)
        ended = (real & torch.isin(tokens, stops)).any(-1)
        ids, mask, chosen = (x[..., :length].reshape(n, k, length) for x in (tokens, real, logprobs))
        return ids, mask, chosen, ended.view(n, k)


def _begin(
    model: PreTrainedModel,
    ids: Tensor,
    seen: Tensor,
    samples: int,
    response_length: int,
    choose: decoding.Choose,
    *,
    cached: bool,
    recorded: bool,
) -> tuple[decoding.Step, Tensor, Tensor, bool]:
    """Encode prompts [N, P], into a cache unless `cached` is False, for K samples of each prompt.

    Returns:
        the decoding step; the logits [B, 1, V] of the first response token; the positions [B, G] of the last
        prompt tokens; whether rows of the batch can be removed. B rows with G samples each, B * G = N * K.
    """
    if not cached:
        ids, seen = ids.repeat_interleave(samples, 0), seen.repeat_interleave(samples, 0)
        rereading = decoding.RereadingStep(model, ids, seen, response_length, choose)
        place = forward.positions(seen)[:, -1:]
        return rereading, rereading.read(place), place, True
    cache: Cache = (kinds := DynamicCache(config=model.config))
    movable = forward.plain(kinds)  # rows of such a cache can be repeated and removed
    masked = movable and forward.takes_any_mask(model)
    n, longest = ids.shape
    group = folder.in_decoding(samples, longest, response_length) if masked else 1
    recorded = recorded and masked
    room = group * response_length
    if recorded:
        room += -(longest + room) % forward.ALIGNED
    if movable:
        layers = [decoding.RoomyLayer(n * samples // group, longest, room) for _ in kinds.layers]
        logits = decoding.encode(model, ids, seen, layers, samples // group)
        cache, seen = Cache(layers=list(layers)), seen.repeat_interleave(samples // group, 0)
    else:
        seen = seen.repeat_interleave(samples, 0)
        logits = model(
            input_ids=ids.repeat_interleave(samples, 0),
            attention_mask=seen,
            position_ids=forward.positions(seen),
            **forward.cache_argument(model, cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits
    if masked:
        mask = forward.additive(model, decoding.attention(seen, group, room))
    else:
        mask = torch.cat([seen, seen.new_ones(len(seen), response_length)], 1)
    kind = decoding.GraphStep if recorded else decoding.Step
    place = forward.positions(seen)[:, -1:].expand(-1, group)
    return kind(model, cache, mask, group, longest, choose), logits, place, movable


def choose(logits: Tensor, temperature: float, numbers: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Choose tokens from `softmax((logits + noise) / temperature)` and return them with their log-probs.

    Args:
        logits: [..., V].
        temperature: sampling temperature.
        numbers: quantiles in [0, 1) at which the tokens are chosen, [...] float64.
        noise: standard deviation of Gaussian noise on the logits. The noise of a token is a function of its
            number in `numbers`, so it does not depend on the other tokens of the batch.

    Returns:
        tokens [...] int64 and their log-probs [...] float32.
    """
    most = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    chunk = max(1, (most // 4 if noise else most) // logits.shape[-1])  # noise: 3 more numbers per logit
    tokens, chosen = [], []
    for some, own in zip(logits.flatten(0, -2).split(chunk), numbers.flatten().split(chunk), strict=True):
        some = some.float()
        if noise:
            some = some + noise * _gaussians(own, some.shape[-1])
        probs = torch.softmax(some if temperature == 1 else some / temperature, -1)
        tokens.append(_pick(probs, own))
        chosen.append(probs.gather(-1, tokens[-1]))
    return torch.cat(tokens).view_as(numbers), torch.cat(chosen).log_().view_as(numbers)


def _gaussians(numbers: Tensor, count: int) -> Tensor:
    """Return standard normal numbers [B, count] float32 that are a function of random `numbers` [B] float64.

    The bits of a number and the column are hashed with the multiplications of MurmurHash3's 32-bit finaliser.
    24 bits of the hash give a uniform number, which the inverse of the normal distribution transforms.
    """
    bits = numbers.view(torch.int64)[:, None]
    hashed = torch.arange(count, dtype=torch.int32, device=numbers.device) * -0x61C88647 + bits.int()
    for shift, factor, key in ((16, -0x7A143595, (bits >> 32).int()), (13, -0x3D4D51CB, 0)):
        hashed = (hashed ^ (hashed >> shift & (1 << 32 - shift) - 1)) * factor ^ key
    uniform = (hashed >> 8).float().add_(0.5).div_(2**23)  # odd multiples of 2^-24 in (-1, 1)
    return uniform.erfinv_().mul_(2**0.5)


def _pick(probs: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens [B, 1] at the quantiles `numbers` [B] of the distributions `probs` [B, V].

    In a large vocabulary, the search first finds a block of token ids and then a token of the block. So the
    running sums in float64 are short: one over the blocks, and one over the token ids of a block. A float32
    running sum over 50k token ids would be too imprecise for the last token ids.
    """
    vocabulary = probs.shape[-1]
    if vocabulary <= 8 * _BLOCK:
        return _quantile(probs, numbers)[0]
    whole = vocabulary - vocabulary % _BLOCK
    sums = probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    weights = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], -1)
    block, target, until = _quantile(weights, numbers)
    own = weights.gather(-1, block)
    part = (target - until.gather(-1, block) + own) / own  # the quantile within the block
    places = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    inside = probs.gather(-1, places.clamp(max=vocabulary - 1)).masked_fill_(places >= vocabulary, 0.0)
    within = _quantile(inside, part[:, 0].clamp(0, 1 - 2**-53))[0]
    return (block * _BLOCK + within).clamp_(max=vocabulary - 1)


def _quantile(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the quantiles `numbers` [B] of the weights [B, S].

    Returns:
        the index [B, 1] at which the running sum passes the quantile, never an index with weight 0; the
        running sum's value at the quantile [B, 1]; the running sum [B, S]. The last two are float64.
    """
    until = weights.cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * until[:, -1:]
    index = torch.searchsorted(until, target, right=True)
    return index.clamp_(max=weights.shape[1] - 1), target, until  # clamp: NaN weights give an index of S
