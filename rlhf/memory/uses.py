"""The memory of a device as parts and phases: forward passes, ranks, generators, messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.algorithms import Trains
from rlhf.config.generators import Reserved, Transfer, most_versions, working_memory
from rlhf.config.models import Dtype, Footprint
from rlhf.config.root import Config
from rlhf.config.run import Optimizer
from rlhf.core.machine import worker_gpu
from rlhf.memory.sizes import (
    Model,
    ModelSize,
    adapter_parameters,
    linear_shapes,
    matrix_parameters,
    most_sequences,
)
from rlhf.models import folder

# The memory of a device as parts and phases, and how sizes are formatted.


GIB = 2**30
# Estimated activations may exceed real activations by this factor, because few sequences have full length.
_MARGIN = 2.0
HEAP = 1.5  # bytes of RAM per byte of temporary tensors; 1.4 to 1.7 were measured with glibc
NEARLY = 0.9  # warn above this fraction of the memory of a device
PROCESS = 0.6 * GIB  # RAM of a process with torch and transformers, measured on a CPU
LIBRARIES = "Python, torch, libraries"  # what a process consists of
_UNRELEASED = 0.25  # part of the largest phase that remains in segments with permanent tensors; not measured
CONTEXT = 0.6 * GIB  # GPU memory of CUDA for a process: a common value, not measured here


@dataclass(frozen=True, slots=True)
class Part:
    """An item that uses memory, for example the weights of the policy."""

    name: str
    bytes: float
    made_of: str = ""  # the factors of `bytes`, for the table
    estimated: bool = False  # True: upper bound, at maximum length; False: exact

    @classmethod
    def of_parameters(cls, name: str, count: int, size: float, estimated: bool = False) -> Part:
        """Return the part of `count` parameters that need `size` bytes together."""
        many = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
        return cls(name, size, f"{many} parameters x {size / max(1, count):.3g} bytes", estimated)

    def times(self, count: int, on_heap: bool = False) -> Part:
        """Return the part with the memory of `count` processes.

        Args:
            count: number of processes.
            on_heap: whether the memory is RAM: estimated parts then count `HEAP` times, because they are
                temporary tensors, and the C library does not return all their memory after they are freed.
        """
        made_of = self.made_of if count == 1 else f"{count} x {self.made_of}"
        factor = count * HEAP if on_heap and self.estimated else count
        return replace(self, bytes=self.bytes * factor, made_of=made_of)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of an update, for example training, with the parts that exist only during it."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        """The memory of all parts of the phase."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Use:
    """The memory that a run needs on a device."""

    device: str  # "RAM", or "GPU" with the numbers of the GPUs
    total: int | None  # bytes of the device; None: unknown
    parts: tuple[Part, ...]  # permanent parts: in memory during the whole run
    phases: tuple[Phase, ...] = ()  # phases run one after the other

    @property
    def largest(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.bytes, default=Phase("nothing else", ()))

    @property
    def bytes(self) -> float:
        """The peak memory: the permanent parts and the largest phase."""
        return sum(part.bytes for part in self.parts) + self.largest.bytes

    @property
    def least(self) -> float:
        """The lowest peak memory that is plausible: estimated parts divided by `_MARGIN`."""
        peaks = [self.parts + phase.parts for phase in self.phases or (self.largest,)]
        return max(sum(part.bytes / (_MARGIN if part.estimated else 1) for part in parts) for parts in peaks)

    @property
    def fits(self) -> bool:
        """Whether the device has at least `least` bytes of memory; True if its memory is unknown."""
        return self.total is None or self.least <= self.total

    @classmethod
    def of(cls, device: str, total: int | None, parts: Iterable[Part], phases: Iterable[Phase] = ()) -> Use:
        """Return the use of a device without the parts that need nothing."""
        return cls(device, total, tuple(part for part in parts if part.bytes), tuple(phases))


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory plan of a run."""

    uses: tuple[Use, ...]  # one per device; empty if a model is unknown
    unknown: dict[str, str]  # models that are not on this machine, by config key


def gib(amount: float) -> str:
    """Return an amount of memory as text, in MiB or GiB."""
    if amount < 0.1 * GIB:
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount / GIB:,.0f} GiB" if amount >= 99.5 * GIB else f"{amount / GIB:.1f} GiB"


# Peak memory, in bytes, of a training step, of a forward pass without gradients, and of sampling.
#
# The formulas count the bytes that autograd keeps per layer and token. h: hidden size; q: width of the
# queries; m: width inside the MLP; r: bytes per number of the residual stream; a: bytes per number of an
# operand of a matrix product. r and a are 4 and 4 in float32, 4 and 2 under bfloat16 autocast, 2 and 2 with
# bfloat16 weights.
#
#     two layer norms     inputs 2 r h (r h if attention and MLP read the same state), outputs 2 a h
#     two RMS norms       2 (2 r h + a h): the several operations of a norm also keep the normalised state
#     attention           2 a q: queries and output
#     keys and values     2 a q per token that is attended to, repeated for every head and sequence
#     mask                a per pair of tokens, if there is a mask; eager attention also keeps the
#                         probabilities of every head
#     MLP                 2 a m (before and after the activation function), 4 a m with a gate
#
# All layers share the mask of the responses if prompts have a separate pass.
# If prompts are encoded in a separate pass (`rlhf.models.folder`), their tokens count once and without
# a mask, and in the last layer only their keys and values count. Keys and values count once per row of
# responses that share them, otherwise once per response. Without gradients, only one layer at a time repeats
# keys and values (`rlhf.models.forward`). The output head needs tiles of logits
# (`rlhf.models.logprobs`) and the gradient of its weight. With gradient checkpointing, every layer keeps its
# input and the prompts' keys and values, and only the layer that is recomputed keeps all its activations.
#
# tests/memory/test_activations.py compares these formulas with the memory that torch allocates.


TILE_BYTES = {"cpu": 2**21, "cuda": 2**29}  # bytes of a tile of logits, as in rlhf.models.logprobs
PROMPT_TOKENS = {"cpu": 2**12, "cuda": 2**14}  # per forward pass, as in rlhf.generators.hf.decoding
CHOICE_CHUNK = {"cpu": 2**20, "cuda": 2**24}  # probabilities in a chunk, as in rlhf.generators.hf.generator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Precision:
    """The bytes per number in a forward pass."""

    residual: int  # for numbers of the residual stream
    product: int  # for operands of matrix products
    cache: int  # for cached keys and values, on average; under autocast, rotary positions make keys float32


FLOAT32 = _Precision(residual=4, product=4, cache=4)
AUTOCAST = _Precision(residual=4, product=2, cache=3)  # bfloat16 products over float32 weights
BFLOAT16 = _Precision(residual=2, product=2, cache=2)  # bfloat16 weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one forward pass; every sequence has the maximum length."""

    prompts: int
    samples: int  # per prompt
    prompt: int  # tokens of a prompt
    response: int  # tokens of a response
    apart: bool = True  # prompts are encoded in a separate pass; responses read its keys and values

    def __str__(self) -> str:
        """Return the number and length of the sequences, such as "8 x (256 + 64) tokens"."""
        return f"{self.sequences} x ({self.prompt} + {self.response}) tokens"

    @property
    def sequences(self) -> int:
        """The number of sequences: prompts times samples."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """The number of tokens of a sequence."""
        return self.prompt + self.response

    def a_row(self, eager: bool) -> int:
        """Return the number of responses in a row of a forward pass."""
        return 1 if eager else folder.in_forward(self.samples, self.prompt - 1, self.response)

    def decoded_a_row(self, eager: bool) -> int:
        """Return the number of responses in a row of the batch during sampling."""
        return 1 if eager else folder.in_decoding(self.samples, self.prompt, self.response)

    def passes(self, eager: bool) -> Iterator[tuple[int, int, int]]:
        """Yield the passes of a forward: one, or two if prompts have a separate pass.

        Yields:
            For each pass, the number of rows, of tokens encoded per row, and of attended tokens per row.
        """
        if self.apart:
            group = self.a_row(eager)
            yield self.prompts, self.prompt, self.prompt
            yield self.sequences // group, group * self.response, self.prompt + group * self.response
        else:
            yield self.sequences, self.length, self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward pass of a model, whose peak memory is estimated.

    Attributes:
        size: the model.
        tokens: the tokens of the pass; for training, those of a micro-batch.
        precision: bytes per number.
        eager: whether attention computes and, for training, keeps a matrix of probabilities.
        device: "cpu" or "cuda".
    """

    size: ModelSize
    tokens: Tokens
    precision: _Precision
    eager: bool = False
    device: str = "cpu"

    def training(self, checkpointing: bool = False) -> float:
        """Return the peak bytes of a forward and backward pass, besides weights and gradients.

        Args:
            checkpointing: whether blocks store only their inputs and are recomputed in the backward pass.
        """
        size, tokens, precision = self.size, self.tokens, self.precision
        passes = list(tokens.passes(self.eager))
        encoded = sum(rows * queries for rows, queries, _ in passes)
        layer = [self._kept(*each) for each in passes]
        prompts = self._cache_of_prompts()
        if checkpointing:
            kept = size.layers * encoded * size.hidden * precision.residual + prompts + sum(layer)
        else:
            kept = size.layers * sum(layer) - (layer[0] if tokens.apart else 0)
        normed = encoded - (tokens.prompts * tokens.prompt if tokens.apart else 0)  # after the last layer
        if tokens.apart and not self.eager:  # all layers share the mask of the responses
            rows, queries, keys = passes[-1]
            kept += rows * queries * keys * precision.product
        ends = (encoded + normed + 3 * tokens.sequences * tokens.response) * size.hidden * precision.residual
        copied = size.kv_heads < size.heads or precision.product < precision.cache
        on_top = max(
            prompts if copied else 0,  # otherwise the cache consists of tensors that autograd keeps
            self._head() + 4 * size.vocabulary * size.hidden,  # the gradient of the head's weight
            encoded * size.intermediate * precision.product,  # the first gradients of the backward pass
        )
        return kept + ends + on_top + self._autocast_copies()

    def inference(self) -> float:
        """Return the peak bytes of a forward pass without gradients, besides the weights."""
        tokens, precision, cache, largest = self.tokens, self.precision, self._cache_of_prompts(), 0.0
        for rows, queries, keys in tokens.passes(self.eager):
            copy = 2 * self.size.kv_width * rows * keys * precision.cache if keys > queries else 0
            largest = max(largest, cache + copy + self._one_layer(rows, queries, keys))
        states = 2 * tokens.sequences * tokens.response * self.size.hidden * precision.residual
        return max(largest, states + self._head()) + self._autocast_copies()

    def sampling(self) -> float:
        """Return the peak bytes of sampling all sequences in parallel, besides the weights.

        The formula follows `rlhf.generators.hf.generator`.
        """
        size, tokens, precision = self.size, self.tokens, self.precision
        rows = tokens.sequences // tokens.decoded_a_row(self.eager)
        cached = rows * tokens.prompt + tokens.sequences * tokens.response
        prompts = min(tokens.prompts, max(1, PROMPT_TOKENS[self.device] // tokens.prompt))
        prefill = self._one_layer(prompts, tokens.prompt, tokens.prompt)
        logits = tokens.sequences * size.vocabulary
        chunk = min(logits, max(CHOICE_CHUNK[self.device], size.vocabulary))
        choice = 4 * (logits + tokens.prompts * size.vocabulary + 2 * chunk)
        # A CUDA graph has a memory pool of its own: it cannot reuse the memory that the prefill has freed.
        most = prefill + choice if self.device == "cuda" else max(prefill, choice)
        return size.cache(cached, precision.product) + most + self._autocast_copies()

    def _cache_of_prompts(self) -> float:
        """Return the bytes of keys and values of the prompts that have a separate pass."""
        count = self.tokens.prompts * self.tokens.prompt if self.tokens.apart else 0
        return self.size.cache(count, self.precision.cache)

    def _kept(self, rows: int, queries: int, keys: int) -> float:
        """Return the bytes that autograd keeps of one pass through one layer; see `Tokens.passes`."""
        size, r, a, h = self.size, self.precision.residual, self.precision.product, self.size.hidden
        norms = 2 * (2 * r + a) * h if size.rms else ((1 if size.parallel else 2) * r + 2 * a) * h
        token = norms + (4 if size.gated else 2) * a * size.intermediate + 2 * a * size.query_width
        if size.fused and not self.tokens.apart:
            # The values are a view of the product of queries, keys and values, which is kept as a whole.
            token += 2 * a * size.query_width
        kept = rows * queries * token + rows * keys * 2 * a * size.query_width
        if self.eager:
            return kept + rows * queries * keys * size.heads * (4 + (a if a < 4 else 0))
        return kept + (0 if self.tokens.apart else rows * queries * keys * a)

    def _one_layer(self, rows: int, queries: int, keys: int) -> float:
        """Return the peak bytes of one layer without gradients: the larger value of its MLP and attention."""
        size, r, a, h = self.size, self.precision.residual, self.precision.product, self.size.hidden
        mlp = rows * queries * (2 * r * h + a * h + (3 if size.gated else 2) * a * size.intermediate)
        cast = r if a < r and size.kv_heads < size.heads else 0  # keys are repeated before the cast
        attended = (2 * a + cast) * size.query_width * rows * keys
        pairs = rows * queries * keys * (2 * 4 * size.heads if self.eager else 1 + a)
        attention = rows * queries * (r * h + a * h + 3 * a * size.query_width) + attended + pairs
        return max(mlp, attention)

    def _head(self) -> float:
        """Return the bytes of two tiles of float32 logits.

        With 16-bit matrix products, there is also a 16-bit copy of a tile. A compiled head, on a GPU, needs
        three 16-bit tiles and a copy of the weight instead.
        """
        logits = self.tokens.sequences * self.tokens.response * self.size.vocabulary * 4
        tile = min(logits, TILE_BYTES[self.device])
        if self.precision.product == 4:
            return 2 * tile
        weight = self.size.vocabulary * self.size.hidden
        return max(2.5 * tile, 1.5 * tile + 2 * weight) if self.device == "cuda" else 2.5 * tile

    def _autocast_copies(self) -> float:
        """Return the bytes of the copies of layers' weights in the product dtype, which autocast caches."""
        if self.precision.product == self.precision.residual:
            return 0
        layers = self.size.parameters - 2 * self.size.vocabulary * self.size.hidden
        return self.precision.product * max(0, layers)


# Memory of messages between ranks: buffers of NCCL, and the bucket of gradients that is summed at once.


_MIB = 2**20
_CHANNELS = 32  # largest number of NCCL's channels; fewer on GPUs without NVLink
_CONNECTION = 10 * _MIB  # buffers of a connection: 4 MiB (NCCL_BUFFSIZE), those of the two fast protocols
GROUP = _CHANNELS * 2 * _CONNECTION  # a ring has two connections per channel; 0.5 to 0.7 GiB were reported


def nccl(groups: int) -> Iterator[Part]:
    """Yield the buffers of NCCL on one GPU that is in `groups` groups of processes."""
    if groups:
        made_of = f"{_CHANNELS} channels x 2 connections x {_CONNECTION // _MIB} MiB"
        yield Part("NCCL", GROUP, made_of, estimated=True).times(groups)


# Memory of the processes of a run: a rank of the trainer, generators, annotators, and their messages.


_BLOCK = 256  # elements of a moment that have a common float32 scale
EIGHT_BIT = 2 * (1 + 4 / _BLOCK)  # bytes per parameter of two moments of 8 bits
_MOMENTUM = 4  # bytes per parameter of Muon's state
_ITERATION = 10  # bytes per element of a matrix during Muon's step: a float32 update, three bfloat16 copies


class Trainer:
    """The memory that one rank of the trainer needs: permanent parts, and the phases of an update.

    Args:
        cfg: the config of the run.
        models: the models that the rank loads, trained models first.
        ranks: number of ranks of the run.
        device: "cpu" or "cuda".

    Attributes:
        policy: the size of the first model: the policy, or the reward model of `algo=reward`.
        footprint: bytes per parameter of a trained model.
        gathers: whether weights are sharded or offloaded, so that all ranks run every forward pass together.
        frozen: bytes per number in forward passes of frozen models, whose weights have the dtype of the run.
        trained: bytes per number in forward passes of trained models.
    """

    def __init__(self, cfg: Config, models: tuple[Model, ...], ranks: int, device: str) -> None:
        self.cfg, self.models, self.ranks, self.device = cfg, models, ranks, device
        self.policy = models[0].counted
        self.footprint = cfg.backend.footprint()
        self.gathers = self.footprint.gathered
        self.frozen = FLOAT32 if cfg.model.dtype is Dtype.float32 else BFLOAT16
        self.trained = self.frozen if self.frozen is FLOAT32 or cfg.model.lora.rank else AUTOCAST
        self._how: dict[str, Any] = {"eager": cfg.model.attention == "eager", "device": device}

    def tokens(self, sequences: int, samples: int) -> Tokens:
        """Return the tokens of a forward pass with sequences of the maximum length.

        Args:
            sequences: the maximum number of sequences, but at least all samples of one prompt are included.
            samples: samples per prompt.
        """
        cfg = self.cfg
        share = -(-cfg.schedule.prompts_per_update // self.ranks)
        prompts = max(1, min(sequences // samples, share))
        return Tokens(
            prompts=prompts,
            samples=samples,
            prompt=cfg.task.max_prompt_tokens,
            response=cfg.generator.response_length,
            apart=cfg.model.shared_prefix
            and folder.prompt_apart(
                samples,
                prompts * cfg.task.max_prompt_tokens,
                layers=self.policy.layers,
                hidden=self.policy.hidden,
                gpu=self.device == "cuda",
                whole=self.gathers,
            ),
        )

    def weights(self, model: Model) -> tuple[int, Footprint]:
        """Return the number of parameters of a model without its adapters, and their footprint."""
        moving = self.cfg.model.moving.every is not None and model.role == "reference"
        whole = (model.trained and model.adapters is None) or moving
        footprint = self.footprint if whole else replace(self.footprint, weights=self.frozen.residual)
        return model.counted.parameters, footprint

    def stored(self) -> Iterator[tuple[Model, str, str, int, Footprint]]:
        """Yield everything that is stored of the models during the whole run.

        Yields:
            The model, the name of the part, its kind in a footprint, its number of parameters, its footprint.
        """
        for model in self.models:
            yield model, "weights", "weights", *self.weights(model)
            if model.role == "policy" and self.cfg.model.moving.decay is not None:
                yield model, "moving average", "weights", *self.weights(model)
            if model.adapters is not None:
                yield model, "adapters", "weights", model.adapters, self.footprint
            if model.trained:
                each = EIGHT_BIT  # `footprint` has the bytes of AdamW
                if self.cfg.optim.optimizer is not Optimizer.adamw_8bit:
                    share = self._updated_by_muon(model) / max(1, model.trainable)
                    each = _MOMENTUM * share + self.footprint.optimizer * (1 - share)
                states = replace(self.footprint, optimizer=each)
                yield model, "optimizer", "optimizer", model.trainable, states
                yield model, "gradients", "gradients", model.trainable, self.footprint

    def parts(self) -> Iterator[Part]:
        """Yield the permanent parts on the device: weights, adapters, optimizer states."""
        if self.device == "cpu":
            yield Part("process", PROCESS, LIBRARIES)
        for model, name, kind, count, footprint in self.stored():
            if kind != "gradients":
                size = footprint.on_device(kind, count, self.ranks)
                yield Part.of_parameters(f"{model.role}: {name}", count, size)

    def in_ram(self) -> Iterator[Part]:
        """Yield the parts that the backend offloads to RAM."""
        sizes: dict[str, float] = defaultdict(float)
        for model, _, kind, count, footprint in self.stored():
            sizes[model.role] += footprint.in_ram(kind, count, self.ranks)
        for model in self.models:
            count = model.counted.parameters
            yield Part.of_parameters(f"{model.role}: offloaded", count, sizes[model.role])

    def loading(self, local: int) -> Part:
        """Return the part of all models in RAM while `local` ranks load them, before they are on the GPU.

        As in `rlhf.assembly.models.loaded`, only rank 0 loads weights that are sharded, and hosts without
        rank 0 load no models.
        """
        alone = self.gathers and self.ranks > 1 and not self.cfg.model.trust_remote_code
        each = (count * stored.weights for count, stored in map(self.weights, self.models))
        return Part("models", sum(each), "before they are moved to the GPU").times(1 if alone else local)

    def gradients(self) -> Iterator[Part]:
        """Yield gradients on the device, the largest gathered layer, and the gradients in a message."""
        trained = 0
        for model, _, kind, count, footprint in self.stored():
            if kind != "gradients":
                continue
            trained += count
            size = footprint.on_device("gradients", count, self.ranks)
            yield Part.of_parameters(f"{model.role}: gradients", count, size)
            if self.gathers:
                name = f"{model.role}: {'gathered layers' if self.footprint.fsdp else 'one layer'}"
                yield Part(name, self._gathered(model), "gathered from all ranks")
        # copies of the gradients that one message between the ranks contains
        if self.ranks > 1 and trained and self.footprint.bucket:
            count = min(self.footprint.bucket, trained)
            size = 4 * self.footprint.copies * count
            yield Part.of_parameters("gradient bucket", count, size, estimated=True)

    def _gathered(self, model: Model) -> float:
        """Return the bytes of the weights that training gathers at once, and of their gradients.

        FSDP2 gathers embeddings and head during the whole pass. Messages between ranks need 1.5 copies more.
        With shared prompts autograd completes no gradient, and FSDP2 releases no weight, before the
        backward pass of the prompts (`rlhf.engines.fsdp2_engine`).
        """
        size, weights = model.counted, self.weights(model)[1].weights
        gradients = self.footprint.gradients if model.adapters is None else 0
        ends = size.vocabulary * size.hidden
        if not self.footprint.fsdp:
            return max(size.backbone // max(1, size.layers), ends) * (weights + gradients)
        block, ends = (size.backbone - ends) // max(1, size.layers), ends + size.head
        if self.cfg.model.shared_prefix and (self.cfg.algo.keeps or self.cfg.algo.samples_per_prompt) > 1:
            return size.parameters * (weights + gradients) + 1.5 * max(block, ends) * gradients
        return (ends + 2.5 * block) * weights + 2.5 * max(block, ends) * gradients

    def phases(self) -> Iterator[Phase]:
        """Yield the phases: training, optimizer step, log-probs and scores, sampling in this process."""
        cfg, gradients = self.cfg, tuple(self.gradients())
        samples, kept = cfg.algo.samples_per_prompt, cfg.algo.keeps or cfg.algo.samples_per_prompt
        trained = [model for model in self.models if model.trained]
        prompts = cfg.schedule.prompts_per_update // max(1, cfg.schedule.minibatches)
        minibatch = -(-prompts // self.ranks) * kept  # sequences of one optimizer step on one rank
        tokens = self.tokens(min(most_sequences(cfg), minibatch), kept)
        activations = (self._activations(model, tokens, backward=True) for model in trained)
        yield Phase("training", (*gradients, *activations))
        if self.device == "cuda" and "optimizer" not in self.footprint.offloaded:
            yield Phase("optimizer step", (*gradients, self._updates(trained)))
        reads = [
            self._activations(model, self.tokens(model.batch_size, each), backward=False)
            for model in self.models
            for each in (samples, 1)
        ]
        yield Phase("log-probs and scores", (max(reads, key=lambda part: part.bytes),))
        copy = tuple(self._whole_copy())
        # Evaluations sample even if the generator does not.
        decodes = cfg.generator.decodes if cfg.generator.samples else cfg.eval.batch_size
        if cfg.algo.trains is Trains.reward or not decodes:
            return
        if not cfg.has_worker:
            yield Phase("sampling", (*copy, self.sampling(decodes)))
        elif copy:  # `rlhf.trials.trials.samples_with_cache`
            yield Phase("comparison of sampling", copy)

    def unreleased(self) -> Iterator[Part]:
        """Yield the memory, besides the permanent parts, that the trainer keeps while vLLM uses its GPU.

        Before vLLM samples, the trainer returns segments of memory without any tensor to the GPU. Segments
        that contain both a permanent tensor and freed memory remain. ZeRO-3 keeps its gradients.
        """
        if self.gathers:
            yield from (part for part in self.gradients() if part.name.endswith(": gradients"))
        largest = max(self.phases(), key=lambda phase: phase.bytes)
        made_of = f"{_UNRELEASED:.0%} of the memory of {largest.name}"
        yield Part(
            "trainer: memory torch cannot return", _UNRELEASED * largest.bytes, made_of, estimated=True
        )

    def sampling(self, batch_size: int) -> Part:
        """Return the memory of decoding without the weights: the larger value of rollouts and evaluation.

        Args:
            batch_size: sequences decoded in parallel.
        """
        cfg = self.cfg
        requests = [self.tokens(batch_size, cfg.algo.samples_per_prompt)] if cfg.generator.samples else []
        if cfg.schedule.eval_every:
            single = self.tokens(batch_size, 1)
            requests.append(replace(single, prompts=min(batch_size, cfg.eval.prompts)))
            requests += [self.tokens(batch_size, n) for n in [cfg.eval.attempts] if n]
        parts = []
        for tokens in requests:
            forward = Forward(size=self.policy, tokens=tokens, precision=self.trained, **self._how)
            parts.append(Part("KV cache and logits", forward.sampling(), str(tokens), estimated=True))
        return max(parts, key=lambda part: part.bytes, default=Part("nothing", 0))

    def _updated_by_muon(self, model: Model) -> int:
        """Return the number of parameters of a model that Muon updates."""
        if self.cfg.optim.optimizer is not Optimizer.muon or not model.trained:
            return 0
        if model.adapters is None:
            return min(matrix_parameters(model.counted), model.trainable)
        return adapter_parameters(model.counted, self.cfg.model.lora.rank, self.cfg.model.lora.targets)

    def _updates(self, trained: list[Model]) -> Part:
        """Return the part of temporary tensors of an optimizer step.

        Muon updates one matrix after the other. The kernel of AdamW with 8-bit moments has no such tensors.
        """
        count, size = sum(model.trainable for model in trained), 0.0
        if self.cfg.optim.optimizer is not Optimizer.adamw_8bit:
            size = self.footprint.step * sum(m.trainable - self._updated_by_muon(m) for m in trained)
        if self.cfg.optim.optimizer is Optimizer.muon:
            shapes = (linear_shapes(model.counted).values() for model in trained)
            size += _ITERATION * max(inputs * outputs for each in shapes for inputs, outputs in each)
        size /= self.ranks if "optimizer" in self.footprint.sharded else 1
        return Part.of_parameters("updates", count, size)

    def _activations(self, model: Model, tokens: Tokens, backward: bool) -> Part:
        """Return the part of the activations of a forward pass, with `backward` also of the backward pass.

        On a GPU, shorter prompts without a separate pass may need more memory than longer prompts with one.
        """
        requests = [tokens]
        if tokens.apart and self.device == "cuda" and not self.gathers:
            shorter = folder.prompt_pass_pays_from(tokens.samples, self.policy.hidden) / tokens.prompts
            requests.append(replace(tokens, prompt=max(1, int(shorter)), apart=False))
        precision = self.trained if model.trained else self.frozen
        passes = [
            Forward(size=model.counted, tokens=each, precision=precision, **self._how) for each in requests
        ]
        if not backward:
            size = max(each.inference() for each in passes)
            return Part(model.role, size, str(tokens), estimated=True)
        size = max(each.training(self.cfg.model.gradient_checkpointing) for each in passes)
        return Part(f"{model.role}: activations", size, str(tokens), estimated=True)

    def _whole_copy(self) -> Iterator[Part]:
        """Yield the whole copy of the policy from which a rank samples, if the weights are divided.

        `DeepSpeedEngine.whole` builds the copy on each rank, without adapters. Its weights are float32. With
        bfloat16, the weights of linear layers are bfloat16, except for a head that is tied or in float32.
        """
        if not self.gathers:
            return
        count, model = self.policy.parameters, self.cfg.model
        size = 4 * count
        if model.dtype is Dtype.bfloat16:
            head = 0 if model.float32_head else self.policy.head
            size -= 2 * (matrix_parameters(self.policy) + head)
        yield Part.of_parameters("policy: whole copy", count, size)


class Workers:
    """The processes on a host besides the ranks: those of generators, and annotators.

    Args:
        trainer: the memory of one rank.
        local: number of ranks on this host.

    Attributes:
        generators: number of generators on this host; all replicas count as one generator.
        each: number of processes of one generator; 0 if it samples in the trainer's process.
        annotates: whether the run has an annotator process.
        route: how the processes get the weights if trainer and generator have GPUs.
        dtype: the dtype of the weights in the processes of a generator.
        weights: the bytes of the weights in one process of a generator.
    """

    def __init__(self, trainer: Trainer, local: int) -> None:
        generator, lag = trainer.cfg.generator, trainer.cfg.schedule.max_lag
        self.trainer, self.local = trainer, local
        self.generators = local if generator.on_each_rank(lag) else 1
        self.each = generator.processes(lag)
        self.annotates = generator.annotates(lag, trainer.ranks, on_gpu=trainer.device == "cuda")
        self.route = generator.route(gpus=True)
        self.dtype = generator.weights_dtype(trainer.cfg.model.dtype)
        self.weights = (4 if self.dtype == "float32" else 2) * trainer.policy.parameters

    def in_ram(self, ram: int) -> Iterator[Part]:
        """Yield the parts of a generator and its annotator on a host without GPUs, which has `ram` bytes."""
        if not self.each:
            return
        yield self.in_transfer()
        process = [Part("generator's process", PROCESS, LIBRARIES)]
        if reserved := self.trainer.cfg.generator.reserves(on_gpu=False):
            cache = f"{reserved.share:g} of RAM (generator.memory)"
            process.append(Part(f"{reserved.engine}: weights", self.weights, self.dtype))
            process.append(Part(f"{reserved.engine}: keys and values", reserved.share * ram, cache))
        else:
            process += self._copy_that_decodes()
        yield from (part.times(self.each) for part in process)
        if self.annotates:
            yield Part("annotator's process", PROCESS, LIBRARIES)
            yield from self._annotator()

    def in_ram_beside_gpus(self) -> Iterator[Part]:
        """Yield the parts of all processes in the RAM of a host with GPUs."""
        yield Part("processes", PROCESS * (self.local + self.each * self.generators), LIBRARIES)
        yield from (part.times(self.local) for part in self.trainer.in_ram())
        if self.trainer.cfg.has_worker and self.route is Transfer.shared_memory:
            yield self.in_transfer().times(self.generators)
        if self.annotates:
            yield Part("annotator's process", PROCESS, LIBRARIES).times(self.generators)

    def in_transfer(self) -> Part:
        """Return the part of the versions of the weights that their store keeps."""
        schedule = self.trainer.cfg.schedule
        most = most_versions(self.each, schedule.in_flight)
        versions = max(2, min(self.each + schedule.max_lag, most))
        return Part("weights in transfer", versions * self.weights, f"{versions} versions in {self.dtype}")

    def of_engine(self, reserved: Reserved) -> Iterator[Part]:
        """Yield the least that an engine needs of each GPU: weights, a KV cache of one sequence."""
        engine, policy = reserved.engine, self.trainer.policy
        precision = FLOAT32 if self.dtype == "float32" else BFLOAT16
        yield Part(f"{engine}: weights", self.weights / reserved.gpus, self.dtype)
        tokens = replace(self.trainer.tokens(1, 1), prompts=1)
        made_of = f"{tokens}; {engine} uses the rest of its share for more"
        yield Part(f"{engine}: keys and values", policy.cache(tokens.length, precision.cache), made_of)
        if self.trainer.cfg.generator.shares_gpu:
            working = working_memory(
                hidden=policy.hidden,
                intermediate=policy.intermediate,
                vocabulary=policy.vocabulary,
                number_bytes=precision.product,
                sequences=reserved.sequences,
            )
            yield Part(f"{engine}: working memory", working, "activations, CUDA graphs, choice of tokens")
        yield from nccl(int(reserved.gpus > 1) + int(self.route is Transfer.nccl))

    def on_gpus(self, gpus: int) -> dict[int, list[Part]]:
        """Return the parts of processes that allocate GPU memory while they use it, by the index of the GPU.

        Args:
            gpus: number of GPUs of this host; 0: unknown, then the processes share the GPUs of the ranks.
        """
        generator, local = self.trainer.cfg.generator, self.local
        count, seen = self.each * self.generators, max(gpus, local)
        found: dict[int, list[Part]] = defaultdict(list)
        if generator.decodes:
            for number in range(count):
                gpu = worker_gpu(number, seen, local, number if self.generators > 1 else 0)
                found[gpu] += [Part("CUDA", CONTEXT, "the generator's process"), *self._copy_that_decodes()]
        for rank in range(self.generators if self.annotates else 0):
            gpu = worker_gpu(count + rank, seen, local, rank, generator.reserved_gpus(local))
            found[gpu] += [Part("CUDA", CONTEXT, "the annotator's process"), *self._annotator()]
            for phase in self.trainer.phases():
                if phase.name == "log-probs and scores":
                    found[gpu] += [replace(part, name=f"annotator: {phase.name}") for part in phase.parts]
        return {gpu: [part.times(n) for part, n in Counter(parts).items()] for gpu, parts in found.items()}

    def own_gpus(self, parts: Mapping[int, list[Part]], gpus: tuple[int, ...]) -> Iterator[Use]:
        """Yield the memory needed on the GPUs that no rank uses, joined if their parts are equal.

        Args:
            parts: the result of `on_gpus`.
            gpus: bytes of each GPU of this host.
        """
        own: dict[tuple[Part, ...], list[int]] = defaultdict(list)
        for gpu in sorted(parts):
            if gpu >= self.local:
                own[tuple(parts[gpu])].append(gpu)
        for found, alike in own.items():
            yield Use.of(f"GPU {' '.join(map(str, alike))}", min(gpus[gpu] for gpu in alike), found)

    def _copy_that_decodes(self) -> Iterator[Part]:
        trainer = self.trainer
        yield Part.of_parameters("generator: weights", trainer.policy.parameters, self.weights)
        sampling = trainer.sampling(trainer.cfg.generator.decodes)
        yield replace(sampling, name="generator: KV cache and logits")

    def _annotator(self) -> Iterator[Part]:
        # The annotator loads a reference model even if that of the trainer is the policy without adapters.
        models = {model.role: model for model in self.trainer.models}
        if self.trainer.cfg.algo.trains is Trains.policy:
            reference = replace(self.trainer.models[0], trained=False, adapters=None)
            models.setdefault("reference", reference)
        for role, model in models.items():
            if role in ("reference", "reward model"):
                count, footprint = self.trainer.weights(model)
                yield Part.of_parameters(f"annotator: {role}", count, count * footprint.weights)
