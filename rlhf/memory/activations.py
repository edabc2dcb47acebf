"""Peak memory of a forward, of a forward with its backward, and of sampling: formulas, in bytes.

What autograd keeps of a layer for one token. h: hidden size, q: width of the queries, m: width inside the
MLP; a number of the residual stream has r bytes, one that products read a: 4 and 4 in float32, 4 and 2 under
bfloat16 autocast.

    two layer norms     r h (each, but once where attention and MLP read the same state) + a 2h, their outputs
    two RMS norms       2 (2 r h + a h): they are written out, so what they normalised is kept too
    attention           a 2q, queries and what attention gives
    keys and values     a 2q for each token that is attended to: repeated for every head, in every sequence
    mask                a for each pair of tokens, if any, and once for all layers with a shared prefix; eager
                        attention keeps a probability a head
    MLP                 a 2m (before and after the activation), a 4m with a gate

With a shared prefix and several samples, or in a model of few layers, the prompt's tokens count once, without
mask, and in the last layer only for their keys and values; these count once for the responses that share a
row, else once a response; without gradient only one layer at a time repeats them (`rlhf.forward`). The head
holds tiles of logits (`rlhf.logprobs`), and its weight's gradient. With gradient checkpointing a layer keeps
its input, and the prompt's keys and values, and one layer at a time is whole.

`tests/unit/test_activations.py` compares with what the engine allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.models import sharing_rules as sharing

if TYPE_CHECKING:
    from rlhf.memory.model_size import ModelSize

TILE_BYTES = {"cpu": 2**21, "cuda": 2**29}  # of logits at once, as in rlhf.logprobs
PROMPT_TOKENS = {"cpu": 2**12, "cuda": 2**14}  # encoded at once, as in rlhf.generators.decoding
CHOICE_CHUNK = {"cpu": 2**20, "cuda": 2**24}  # probabilities at once, as in rlhf.generators.sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes a number: of the residual stream, of what products read, of cached keys and values on average."""

    residual: int
    product: int
    cache: int  # under autocast keys are float32, which rotary positions make of them, and values are not


FLOAT32 = Precision(residual=4, product=4, cache=4)
AUTOCAST = Precision(residual=4, product=2, cache=3)  # bfloat16 products over float32 weights
BFLOAT16 = Precision(residual=2, product=2, cache=2)  # a model in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one forward, all sequences as long as the longest may be.

    `apart`: a prompt is encoded in a pass of its own (`model.shared_prefix`), and responses run against its
    keys and values.
    """

    prompts: int
    samples: int
    prompt: int  # tokens
    response: int  # tokens
    apart: bool = True

    @property
    def sequences(self) -> int:
        """Responses."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response

    def a_row(self, eager: bool) -> int:
        """Responses in a row of a forward."""
        return 1 if eager else sharing.in_forward(self.samples, self.prompt - 1, self.response)

    def decoded_a_row(self, eager: bool) -> int:
        """Responses in a row of the batch while they are sampled."""
        return 1 if eager else sharing.in_decoding(self.samples, self.prompt, self.response)

    def passes(self, eager: bool) -> Iterator[tuple[int, int, int]]:
        """Rows, tokens that are encoded in a row, tokens that they attend to: one or two passes."""
        if self.apart:
            group = self.a_row(eager)
            yield self.prompts, self.prompt, self.prompt
            yield self.sequences // group, group * self.response, self.prompt + group * self.response
        else:
            yield self.sequences, self.length, self.length


def training(
    size: ModelSize,
    tokens: Tokens,
    precision: Precision,
    *,
    eager: bool = False,
    device: str = "cpu",
    checkpointing: bool = False,
) -> float:
    """What a forward with its backward holds beside weights and gradients."""
    encoded = sum(rows * queries for rows, queries, _ in tokens.passes(eager))
    layer = [kept_pass(size, tokens, precision, eager, *each) for each in tokens.passes(eager)]
    prompts = cache_bytes(size, tokens.prompts * tokens.prompt, precision) if tokens.apart else 0
    if checkpointing:
        kept = size.layers * encoded * size.hidden * precision.residual + prompts + sum(layer)
    else:
        kept = size.layers * sum(layer) - (layer[0] if tokens.apart else 0)
    normed = encoded - (tokens.prompts * tokens.prompt if tokens.apart else 0)  # after the last layer
    kept += mask_bytes(tokens, precision, eager)
    ends = (encoded + normed + 3 * tokens.sequences * tokens.response) * size.hidden * precision.residual
    repeated = size.kv_heads < size.heads or precision.product < precision.cache
    on_top = max(
        prompts if repeated else 0,  # else what is cached is what autograd keeps
        head_bytes(size, tokens, precision, device, backward=True),
        encoded * size.intermediate * precision.product,  # the first gradients
    )
    return kept + ends + on_top + autocast_copies(size, precision)


def kept_pass(
    size: ModelSize, tokens: Tokens, precision: Precision, eager: bool, rows: int, queries: int, keys: int
) -> float:
    """What autograd keeps of one pass through one layer."""
    r, a, h = precision.residual, precision.product, size.hidden
    norms = 2 * (2 * r + a) * h if size.rms else ((1 if size.parallel else 2) * r + 2 * a) * h
    mlp = (4 if size.gated else 2) * a * size.intermediate
    token = norms + mlp + 2 * a * size.query_width
    if size.fused and not tokens.apart:
        token += 2 * a * size.query_width  # the values are a view of the product that made all three
    kept = rows * queries * token + rows * keys * 2 * a * size.query_width
    if eager:
        return kept + rows * queries * keys * size.heads * (4 + (a if a < 4 else 0))
    return kept + (0 if tokens.apart else rows * queries * keys * a)


def mask_bytes(tokens: Tokens, precision: Precision, eager: bool) -> float:
    """The mask of responses that run against their prompts' keys, which all layers share."""
    if not tokens.apart or eager:
        return 0
    rows, queries, keys = list(tokens.passes(eager))[-1]
    return rows * queries * keys * precision.product


def inference(
    size: ModelSize,
    tokens: Tokens,
    precision: Precision,
    *,
    eager: bool = False,
    device: str = "cpu",
) -> float:
    """What a forward without gradient holds beside the weights."""
    held = cache_bytes(size, tokens.prompts * tokens.prompt, precision) if tokens.apart else 0
    largest = 0.0
    for rows, queries, keys in tokens.passes(eager):
        again = 2 * size.kv_width * rows * keys * precision.cache if keys > queries else 0
        largest = max(largest, held + again + one_layer(size, rows, queries, keys, precision, eager))
    states = 2 * tokens.sequences * tokens.response * size.hidden * precision.residual
    head = head_bytes(size, tokens, precision, device, backward=False)
    return max(largest, states + head) + autocast_copies(size, precision)


def sampling(
    size: ModelSize,
    tokens: Tokens,
    precision: Precision,
    *,
    eager: bool = False,
    device: str = "cpu",
) -> float:
    """What sampling all of `tokens` at once holds beside the weights (`rlhf.generators.sampling`)."""
    rows = tokens.sequences // tokens.decoded_a_row(eager)
    cached = replace(precision, cache=precision.product)
    held = cache_bytes(size, rows * tokens.prompt + tokens.sequences * tokens.response, cached)
    at_once = min(tokens.prompts, max(1, PROMPT_TOKENS[device] // tokens.prompt))
    prefill = one_layer(size, at_once, tokens.prompt, tokens.prompt, precision, eager)
    logits = tokens.sequences * size.vocabulary
    chunk = min(logits, max(CHOICE_CHUNK[device], size.vocabulary))
    choice = 4 * (logits + tokens.prompts * size.vocabulary + 2 * chunk)
    # A CUDA graph has memory of its own, which does not take over what is free of the rest.
    most = prefill + choice if device == "cuda" else max(prefill, choice)
    return held + most + autocast_copies(size, precision)


def one_layer(
    size: ModelSize, rows: int, queries: int, keys: int, precision: Precision, eager: bool
) -> float:
    """The most that a layer holds at a time when nothing is kept: its MLP, or its attention."""
    r, a, h = precision.residual, precision.product, size.hidden
    mlp = rows * queries * (2 * r * h + a * h + (3 if size.gated else 2) * a * size.intermediate)
    cast = r if a < r and size.kv_heads < size.heads else 0  # keys are repeated before they are cast
    attended = (2 * a + cast) * size.query_width * rows * keys
    pairs = rows * queries * keys * (2 * 4 * size.heads if eager else 1 + a)
    attention = rows * queries * (r * h + a * h + 3 * a * size.query_width) + attended + pairs
    return max(mlp, attention)


def cache_bytes(size: ModelSize, tokens: int, precision: Precision) -> float:
    """Keys and values of so many tokens, in all layers."""
    return size.layers * 2 * size.kv_width * tokens * precision.cache


def head_bytes(size: ModelSize, tokens: Tokens, precision: Precision, device: str, backward: bool) -> float:
    """The log-probs of the responses: two tiles of float32 logits, and the gradient of the weight.

    In bfloat16 there are copies of a tile of logits, and of the weight's, in that type too.
    """
    weight = size.vocabulary * size.hidden
    logits = tokens.sequences * tokens.response * size.vocabulary * 4
    tile = min(logits, TILE_BYTES[device])
    low = precision.product < 4
    return (2.5 if low else 2) * tile + (4 * weight if backward else 0)


def autocast_copies(size: ModelSize, precision: Precision) -> float:
    """The weights of the layers in the type of the products, which autocast keeps while it is on."""
    if precision.product == precision.residual:
        return 0
    return precision.product * max(0, size.parameters - 2 * size.vocabulary * size.hidden)
