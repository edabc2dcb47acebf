"""The memory of a device as parts and phases: activations, messages between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.models import folder

if TYPE_CHECKING:
    from rlhf.memory.sizes import ModelSize


# The memory of a device as parts and phases, and how sizes are formatted.


GIB = 2**30
# Estimated activations may exceed real activations by this factor, because few sequences have full length.
_MARGIN = 2.0
HEAP = 1.5  # bytes of RAM per byte of temporary tensors; 1.4 to 1.7 were measured with glibc
NEARLY = 0.9  # warn above this fraction of the memory of a device
PROCESS = 0.6 * GIB  # RAM of a process with torch and transformers, measured on a CPU
LIBRARIES = "Python, torch, libraries"  # what a process consists of
UNRELEASED = 0.25  # part of the largest phase that remains in segments with permanent tensors; not measured
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
#     two layer norms     inputs 2 r h (r h if attention and MLP read the same state), outputs 2 a h two RMS
#     norms       2 (2 r h + a h): the several operations of a norm also keep the normalised state attention
#     2 a q: queries and output keys and values     2 a q per token that is attended to, repeated for every
#     head and sequence mask                a per pair of tokens, if there is a mask. If prompts have a
#     separate pass, all layers share the mask of the responses. Eager attention also keeps the probabilities
#     of every head MLP                 2 a m (before and after the activation function), 4 a m with a gate
#
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
