"""Sizes of models, before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.config.algorithms import Trains, ValueFrom
from rlhf.config.models import WITHOUT_GRADIENT, Combine
from rlhf.config.root import Config
from rlhf.config.schema import data_file, value_at
from rlhf.config.scorers import scorers
from rlhf.core.machine import cached_folder
from rlhf.models.folder import is_local
from rlhf.models.headers import opened

# The size of a model, from its config.json, the headers of its safetensors files, or its config section.
#
# If the weights are on this machine, parameters are counted exactly: the header of a safetensors file lists
# the shapes of its tensors. Otherwise a formula computes the number of parameters from config.json, or from
# the table of published models if config.json is not on this machine either. The formula is exact for
# GPT-NeoX (Pythia), Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3.


_NAMES: dict[str, Any] = data_file("rlhf.memory", "names.yaml")
_BUFFERS = re.compile(r"\.(attention|attn)\.(masked_)?bias$|\.inv_freq$")  # tensors that are not parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder that determine its memory."""

    backbone: int  # parameters without the output head
    head: int  # parameters of the output head; 0 if it is tied to the input embeddings
    hidden: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_size: int
    intermediate: int  # width inside the MLP
    vocabulary: int  # outputs of the head; 1 for a reward model
    gated: bool = False  # the MLP has a gate and three matrix products (Llama), not two (GPT-NeoX)
    rms: bool = False  # norms are RMS norms, several operations each; False: layer norms, one operation
    parallel: bool = False  # attention and MLP have the same input; False: the MLP follows attention
    fused: bool = False  # one matrix product computes queries, keys and values

    @property
    def parameters(self) -> int:
        """The number of parameters, output head included."""
        return self.backbone + self.head

    @property
    def query_width(self) -> int:
        """The width of a token's queries, all heads together."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """The width of a token's keys, all heads together; the width of its values is equal."""
        return self.kv_heads * self.head_size

    def cache(self, tokens: int, number_bytes: float) -> float:
        """Return the bytes of the keys and values of `tokens` tokens in all layers."""
        return self.layers * 2 * self.kv_width * tokens * number_bytes

    def scoring(self) -> ModelSize:
        """Return the size of a reward or value model: the same backbone, a head with one output."""
        return replace(self, head=self.hidden, vocabulary=1)


def named_size(name: str) -> ModelSize | None:
    """Return the size of the model `name`, a folder or a hub name.

    Returns:
        The size; None if config.json lacks a size, or if the model is neither on this machine nor in the
        table of published models.
    """
    if (folder := _folder_of(name)) is not None:
        return folder_size(folder)
    published = published_config(name)
    return None if published is None else config_size(published)


def _folder_of(name: str) -> Path | None:
    return Path(name).expanduser() if is_local(name) else cached_folder(name)


def adapter_parameters(size: ModelSize, rank: int, targets: list[str] | None) -> int:
    """Return the number of parameters of low-rank adapters.

    Args:
        size: the adapted model.
        rank: rank of the adapters.
        targets: the adapted linear layers, by the last part of their names; None: all linear layers except
            the head. Layers that neither GPT-NeoX nor Llama has are not counted.
    """
    shapes = linear_shapes(size)
    names = shapes if targets is None else {target.rpartition(".")[2] for target in targets}
    return size.layers * sum(rank * sum(shape) for name, shape in shapes.items() if name in names)


def matrix_parameters(size: ModelSize) -> int:
    """Return the number of parameters of the linear layers between embeddings and head, without biases."""
    return size.layers * sum(inputs * outputs for inputs, outputs in linear_shapes(size).values())


def linear_shapes(size: ModelSize) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a block, as in Llama or GPT-NeoX: name -> number of inputs and outputs."""
    h, q, kv, inner = size.hidden, size.query_width, size.kv_width, size.intermediate
    if size.gated:
        return {
            "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
            "gate_proj": (h, inner), "up_proj": (h, inner), "down_proj": (inner, h),
        }  # fmt: skip
    return {
        "query_key_value": (h, q + 2 * kv), "dense": (q, h),
        "dense_h_to_4h": (h, inner), "dense_4h_to_h": (inner, h),
    }  # fmt: skip


def module_parameters(name: str | None, size: ModelSize, modules: list[str]) -> int:
    """Return the number of parameters of the modules that the names in `modules` match.

    Without the weights on this machine, only input embeddings and output head are counted.

    Args:
        name: hub name or folder of the model; None: a model that a run makes.
        size: the size of the model.
        modules: names of modules, or the last dotted parts of names, as in `model.lora.modules_to_save`.
    """
    counts = _tensor_counts(None if name is None else _folder_of(name))
    if not counts:
        counts = {f"{each}.weight": size.vocabulary * size.hidden for each in _NAMES["modules"]}
    if "lm_head" in modules:  # the head's name in transformers; files of GPT-NeoX name it embed_out
        modules = [*modules, "embed_out"]
    return sum(
        count for tensor, count in counts.items() if any(f".{each}." in f".{tensor}" for each in modules)
    )


def _tensor_counts(folder: Path | None) -> dict[str, int]:
    """Return the number of parameters of each tensor in a model folder; empty if it has no weights."""
    tensors = {} if folder is None else opened(folder).tensors
    return {tensor: math.prod(each.shape) for tensor, each in tensors.items() if not _BUFFERS.search(tensor)}


def folder_size(folder: Path) -> ModelSize | None:
    """Return the size of the model in `folder`, from the headers of its weights, otherwise from config.json.

    Returns:
        The size; None if config.json lacks a size, or describes a mixture of experts whose weights are
        missing.
    """
    size = config_size(opened(folder).config)
    counts = _tensor_counts(folder)
    if size is None or not counts:
        return None if size is None or size.backbone == 0 else size
    head = sum(count for name, count in counts.items() if name.startswith(tuple(_NAMES["heads"])))
    return replace(size, backbone=sum(counts.values()) - head, head=head)


def config_size(config: dict[str, Any]) -> ModelSize | None:
    """Return the size of a model from the content of its config.json; None if the config lacks a size.

    For a mixture of experts, `backbone` is 0: the number of parameters follows only from the weights.
    """
    nested = config.get("text_config")
    config = {**config, **(nested if isinstance(nested, dict) else {})}
    hidden, layers, heads, intermediate = (_first_number(config, names) for names in _NAMES["sizes"].values())
    vocabulary = _first_number(config, ("vocab_size",))
    if hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    kind = config.get("model_type", "")
    gated = "num_key_value_heads" in config and kind not in ("phi", "falcon", "gpt_bigcode", "starcoder2")
    size = ModelSize(
        backbone=0,
        head=0,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_first_number(config, ("num_key_value_heads",)) or heads,
        head_size=_first_number(config, ("head_dim",)) or hidden // heads,
        intermediate=intermediate or 4 * hidden,
        vocabulary=vocabulary,
        gated=gated,
        rms=gated,
        parallel=kind == "gpt_neox" and config.get("use_parallel_residual", True) is True,
        fused=kind == "gpt_neox",
    )
    if not any(_first_number(config, (name,)) for name in _NAMES["experts"]):
        tied = config.get("tie_word_embeddings", True) is True  # true if the key is missing
        head = 0 if tied else vocabulary * hidden
        size = replace(size, backbone=_backbone_parameters(size, config), head=head)
    scores = any("SequenceClassification" in str(name) for name in config.get("architectures") or ())
    return size.scoring() if scores else size


def _backbone_parameters(size: ModelSize, config: dict[str, Any]) -> int:
    """Return the number of parameters, without the head, of a decoder.

    The decoder has a gated MLP and RMS norms (Llama), or an ungated MLP and layer norms (GPT-NeoX and, with
    learned positions, GPT-2).
    """
    h, inner, kind = size.hidden, size.intermediate, config.get("model_type")
    count_qkv = size.query_width + 2 * size.kv_width
    biased = config.get("attention_bias", not size.gated)
    layer = matrix_parameters(replace(size, layers=1)) + (h if biased else 0)
    layer += count_qkv if biased or (size.gated and kind == "qwen2") else 0
    if not size.gated:
        positions = _first_number(config, ("n_positions",)) or 0
        return (size.vocabulary + positions) * h + size.layers * (layer + inner + 5 * h) + 2 * h
    layer += 2 * inner + h if config.get("mlp_bias") else 0
    layer += 2 * size.head_size if kind in ("qwen3", "gemma3_text") else 0  # norms of queries and keys
    norms = 4 if kind in ("gemma2", "gemma3_text") else 2
    return size.vocabulary * h + size.layers * (layer + norms * h) + h


def _first_number(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first value of `config` at a key of `names` that is a whole number, or None."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


# The models that the trainer process of a run loads, and their sizes.


@dataclass(frozen=True, slots=True)
class Model:
    """A model in the trainer process."""

    role: str  # name in tables, for example "policy" or "reference"
    key: str  # config key that names the model
    name: str | None  # hub name or folder; None: an earlier stage makes the model
    size: ModelSize | None  # None: unknown
    trained: bool = False
    batch_size: int = 0  # sequences per forward pass without gradients
    adapters: int | None = None  # parameters trained beside frozen weights; None: the model has no adapters

    @property
    def counted(self) -> ModelSize:
        """The size of the model; may be read only if `size` is not None."""
        assert self.size is not None
        return self.size

    @property
    def trainable(self) -> int:
        """The number of parameters that have gradients and optimizer states."""
        if not self.trained:
            return 0
        return self.counted.parameters if self.adapters is None else self.adapters


def models(cfg: Config) -> Iterator[Model]:
    """Yield the models that the trainer process of the run `cfg` loads, trained models first."""
    model, algo, start, batch = cfg.model, cfg.algo, cfg.start, most_sequences(cfg, WITHOUT_GRADIENT)
    key = cfg.start_key
    if algo.trains is Trains.reward:
        yield _model(cfg, "reward model", key, start, batch, trained=True, scores=True)
        return
    yield _model(cfg, "policy", key, start, batch, trained=True)
    if cfg.value_starts_as is not None:
        value = start
        if cfg.value_starts_as is ValueFrom.reward:
            key, value = "model.reward", cfg.value_reward
        yield _model(cfg, "value model", key, value, batch, trained=True, scores=True)
    in_policy = model.lora.rank and model.starts_as_reference
    if algo.trains is Trains.policy and not (in_policy or algo.teacher_url):
        key = "model.reference" if model.reference else "model.policy"
        yield _model(cfg, "reference", key, model.reference or model.policy, batch)
    yield from _scorers(cfg)


def judges(cfg: Config) -> Iterator[Model]:
    """Yield the models of the judge, the only models that `rlhf.relabel` loads."""
    return (model for model in _scorers(cfg) if model.role == "judge")


def _scorers(cfg: Config) -> Iterator[Model]:
    """Yield the models of the training scorer and of the judge."""
    for at, scorer in scorers(cfg):
        if scorer.sequences:
            named: list[tuple[str, Any]] = [*scorer.reward_models(at, cfg.model.reward)]
            named = named or [("model.reward", None)] * cfg.stages.members
            role = "judge" if at.startswith("gold") else "reward model"
            for key, name in named[:1] if value_at(scorer, "combine") is Combine.weights else named:
                yield _model(cfg, role, key, name, scorer.sequences, scores=True)


def _model(
    cfg: Config,
    role: str,
    key: str,
    name: str | None,
    batch_size: int,
    *,
    trained: bool = False,
    scores: bool = False,
) -> Model:
    """Return a model with its size; `scores`: its head is replaced by a head with one output.

    With LoRA, the parameters of a trained model that are trained beside the frozen weights are the adapters,
    a copy of the modules in `model.lora.modules_to_save`, and the head of a model with one output.
    """
    original: ModelSize | None = None  # the size is unknown
    if name is not None:
        original = named_size(name)
    elif cfg.task.embedded and (made := cfg.model.architecture(cfg.task.vocabulary_size)):
        original = named_size(cfg.model.base) if cfg.model.base else config_size(made)
    if original is None:
        return Model(role, key, name, None, trained, batch_size)
    size, lora, adapters = original.scoring() if scores else original, cfg.model.lora, None
    if trained and lora.rank:
        whole, adapters = lora.modules_to_save, adapter_parameters(size, lora.rank, lora.targets)
        if size.vocabulary == 1:
            adapters += size.head
            whole = [each for each in whole if each != "score"]
        adapters += module_parameters(name, original, whole)
    return Model(role, key, name, size, trained, batch_size, adapters)


def longest(cfg: Config) -> int:
    """Return the tokens of the longest possible sequence: prompt and response."""
    return cfg.task.max_prompt_tokens + cfg.generator.response_length


def most_sequences(cfg: Config, times: int = 1) -> int:
    """Return the largest number of the longest sequences in a forward pass with gradients.

    Args:
        cfg: the config of the run.
        times: `WITHOUT_GRADIENT`: in a pass without gradients.
    """
    most, tokens = cfg.backend.micro_batch, cfg.backend.tokens
    return max(1, min(times * most, times * tokens // longest(cfg))) if tokens else most


# Shapes of published models, by name, for memory plans before a model is downloaded. No torch.


# Parts of names that do not change the shape, such as -Instruct, -it, -deduped and -2407.
VARIANT = re.compile(r"-(instruct|thinking|chat|base|pt|it|deduped|\d{4})(?=-|$)")
SHAPES: dict[str, dict[str, list[int]]] = data_file("rlhf.memory", "published.yaml")


def published_config(name: str) -> dict[str, Any] | None:
    """Return the sizes in the config.json of a published model; None if the model is not in `SHAPES`.

    The owner of the repository and the parts of the name in `VARIANT` are ignored, so that chat models and
    copies have the sizes of their base model.
    """
    model = VARIANT.sub("", name.rpartition("/")[2].lower())
    for kind, shapes in SHAPES.items():
        if model in shapes:
            sizes = dict(zip(_NAMES["published"], shapes[model], strict=True))
            if kind == "gpt_neox":  # the number of key and value heads marks a gated MLP
                del sizes["num_key_value_heads"]
            return {"model_type": kind, **sizes}
    return None
