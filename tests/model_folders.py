"""Model folders with the files of a model, written without torch; the weights are zeros."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
REWARD = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
BLOCK = {
    "input_layernorm": (4,), "post_attention_layernorm": (4,),
    "self_attn.q_proj": (4, 4), "self_attn.k_proj": (4, 4), "self_attn.v_proj": (4, 4),
    "self_attn.o_proj": (4, 4),
    "mlp.gate_proj": (8, 4), "mlp.up_proj": (8, 4), "mlp.down_proj": (4, 8),
}  # fmt: skip
TENSORS = {
    "model.embed_tokens.weight": (8, 4),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in BLOCK.items()},
    "model.norm.weight": (4,),
}
HEAD = {"lm_head.weight": (8, 4)}
SCORE = {"score.weight": (1, 4)}
TOKENS = ("<pad>", "<eos>", "<unk>", "a", "b", "c")
SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}


def write_weights(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file with tensors of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_tokenizer(folder: Path, tokens: tuple[str, ...] = TOKENS, **special: str | None) -> None:
    """Write the files of a tokenizer of whole words, whose first three tokens are special."""
    folder.mkdir(exist_ok=True)
    added = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, token in enumerate(tokens[:3])
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<unk>"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    tokenizer = {
        **dict.fromkeys(parts),
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **special}
    named = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def write_model(
    folder: Path,
    config: dict[str, Any] = LLAMA,
    tensors: dict[str, tuple[int, ...]] | None = None,
    **changed: Any,
) -> str:
    """Write a whole model folder, by default a causal Llama, and return its path.

    Args:
        folder: the folder, which is made.
        config: content of config.json.
        tensors: name -> shape; None: the tensors of `LLAMA` or `REWARD`.
        changed: keys of config.json with other values; None removes the key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stated = {key: value for key, value in {**config, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))
    if tensors is None:
        tensors = {**TENSORS, **(SCORE if config is REWARD else HEAD)}
    write_weights(folder / "model.safetensors", tensors)
    write_tokenizer(folder)
    return str(folder)
