"""How large a model is, before torch is imported: from its config.json, the headers of its safetensors files,
or the section of an embedded model.

Parameters are counted exactly where weights are on this machine (a safetensors file opens with the shapes of
its tensors), else by the formula of a decoder, exact for GPT-NeoX (Pythia), Llama, Mistral and Qwen2.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.models.folders import is_local, read_config

if TYPE_CHECKING:
    from rlhf.config.model import NanoConfig

LARGEST_HEADER = 10**8  # bytes, the format's own limit
HEADS = ("lm_head.", "embed_out.", "score.")  # what tensors of an output head are called
BUFFERS = re.compile(
    r"\.(attention|attn)\.(masked_)?bias$|\.inv_freq$"
)  # old checkpoints hold what is computed
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
NAMES = {  # as configs spell it, the usual name first
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder that its memory depends on."""

    backbone: int  # parameters without the output head
    head: int  # parameters of the head; 0 where it is the input embeddings
    hidden: int
    layers: int
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_size: int
    intermediate: int  # width inside the MLP
    vocabulary: int  # outputs of the head: 1 of a reward model
    gated: bool = False  # the MLP has a gate (Llama); else two products (GPT-NeoX)
    rms: bool = False  # norms are RMS norms, written out; else layer norms, one kernel
    parallel: bool = False  # attention and MLP read the same state
    fused: bool = False  # one product makes queries, keys and values

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.backbone + self.head

    @property
    def query_width(self) -> int:
        """Numbers of one token's queries."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Numbers of one token's keys; its values have as many."""
        return self.kv_heads * self.head_size

    def scoring(self) -> ModelSize:
        """The same backbone with a head of one number: a reward or value model."""
        return replace(self, head=self.hidden, vocabulary=1)


def named_size(name: str) -> ModelSize | None:
    """The size of the model `name`, a folder or a hub name; None where it is not here, or cannot be told."""
    folder = Path(name).expanduser() if is_local(name) else cached_folder(name)
    return None if folder is None else folder_size(folder)


def cached_folder(name: str) -> Path | None:
    """Where the hub's cache on this machine keeps the model `name`; None where it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def adapter_parameters(size: ModelSize, rank: int, targets: list[str] | None) -> int:
    """Parameters of low-rank adapters beside the linear layers `targets`; None: all below the head.

    Layers are named by the last part of their names; one that GPT-NeoX or Llama has not counts for nothing.
    """
    h, q, kv, inner = size.hidden, size.query_width, size.kv_width, size.intermediate
    if size.gated:
        shapes = {
            "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
            "gate_proj": (h, inner), "up_proj": (h, inner), "down_proj": (inner, h),
        }  # fmt: skip
    else:
        shapes = {
            "query_key_value": (h, q + 2 * kv), "dense": (q, h),
            "dense_h_to_4h": (h, inner), "dense_4h_to_h": (inner, h),
        }  # fmt: skip
    names = shapes if targets is None else {target.rpartition(".")[2] for target in targets}
    return size.layers * sum(rank * sum(shape) for name, shape in shapes.items() if name in names)


def folder_size(folder: Path) -> ModelSize | None:
    """The size of the model in `folder`: exact from its weights' headers, else by its config."""
    size = config_size(read_config(str(folder)) or {})
    shapes = weight_shapes(folder)
    if size is None or shapes is None:
        return None if size is None or size.backbone == 0 else size
    counts = {name: math.prod(shape) for name, shape in shapes.items() if not BUFFERS.search(name)}
    head = sum(count for name, count in counts.items() if name.startswith(HEADS))
    return replace(size, backbone=sum(counts.values()) - head, head=head)


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the weights in `folder` by name, read from file headers; None where there are none whole."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if whole.is_file():
            files = {whole}
        elif index.is_file():
            files = {folder / name for name in json.loads(index.read_bytes())["weight_map"].values()}
        else:
            files = set(folder.glob("*.safetensors"))
        found: dict[str, tuple[int, ...]] = {}
        for file in files:
            found |= header_shapes(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # weights that cannot be read are refused where they are loaded
    return found or None


def header_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file by name: 8 bytes of length, then JSON.

    Raises:
        ValueError: it is not such a file.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= LARGEST_HEADER:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(stream.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def config_size(config: dict[str, Any]) -> ModelSize | None:
    """The size of a model with this config.json; None where it lacks what is needed.

    The backbone of a mixture of experts is given as 0 parameters: only its weights tell how many there are.
    """
    nested = config.get("text_config")
    config = {**config, **(nested if isinstance(nested, dict) else {})}
    found = {key: first_number(config, names) for key, names in NAMES.items()}
    hidden, layers, heads = (found[key] for key in ("hidden", "layers", "heads"))
    vocabulary = first_number(config, ("vocab_size",))
    if hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    kind = config.get("model_type", "")
    gated = "num_key_value_heads" in config and kind not in ("phi", "falcon", "gpt_bigcode", "starcoder2")
    kv_heads = first_number(config, ("num_key_value_heads",)) or heads
    head_size = first_number(config, ("head_dim",)) or hidden // heads
    intermediate = found["intermediate"] or 4 * hidden
    size = ModelSize(
        backbone=0,
        head=0,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate=intermediate,
        vocabulary=vocabulary,
        gated=gated,
        rms=gated,
        parallel=kind == "gpt_neox" and config.get("use_parallel_residual", True) is True,
        fused=kind == "gpt_neox",
    )
    scores = any("SequenceClassification" in str(name) for name in config.get("architectures") or ())
    tied = config.get("tie_word_embeddings", True) is True  # what configs leave out was true
    if any(first_number(config, (name,)) for name in EXPERTS):
        return size.scoring() if scores else size
    backbone = llama_parameters(size, config) if gated else neox_parameters(size, config)
    head = 0 if tied else vocabulary * hidden
    size = replace(size, backbone=backbone, head=head)
    return size.scoring() if scores else size


def llama_parameters(size: ModelSize, config: dict[str, Any]) -> int:
    """Parameters of a gated decoder without its head: three products in the MLP, RMS norms."""
    h, q, kv = size.hidden, size.query_width, size.kv_width
    kind = config.get("model_type")
    attention = h * (q + 2 * kv) + q * h
    if kind == "qwen2" or config.get("attention_bias"):
        attention += q + 2 * kv + (h if config.get("attention_bias") else 0)
    if kind in ("qwen3", "gemma3_text"):
        attention += 2 * size.head_size  # norms of queries and keys
    mlp = 3 * h * size.intermediate + (2 * size.intermediate + h if config.get("mlp_bias") else 0)
    return size.vocabulary * h + size.layers * (attention + mlp + 2 * h) + h


def neox_parameters(size: ModelSize, config: dict[str, Any]) -> int:
    """Parameters of a decoder with two products in the MLP and layer norms, without its head: GPT-NeoX, and
    with learned positions GPT-2.
    """
    h, q, kv, inner = size.hidden, size.query_width, size.kv_width, size.intermediate
    attention = h * (q + 2 * kv) + q * h
    if config.get("attention_bias", True):
        attention += q + 2 * kv + h
    mlp = 2 * h * inner + inner + h
    positions = (first_number(config, ("n_positions",)) or 0) * h
    return size.vocabulary * h + positions + size.layers * (attention + mlp + 4 * h) + 2 * h


def nano_size(nano: NanoConfig, vocabulary: int) -> ModelSize:
    """The size of the embedded model that `rlhf.models.new_nano` makes."""
    size = config_size(
        {
            "model_type": "gpt_neox",
            "vocab_size": vocabulary,
            "hidden_size": nano.hidden_size,
            "num_hidden_layers": nano.layers,
            "num_attention_heads": nano.heads,
            "intermediate_size": 4 * nano.hidden_size,
            "tie_word_embeddings": False,
        }
    )
    assert size is not None
    return size


def first_number(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of `names` that is a whole number in `config`."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
