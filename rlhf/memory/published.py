"""Shapes of published models, by name, for memory plans before a model is downloaded. No torch."""

from __future__ import annotations

import re
from typing import Any

# Parts of names that do not change the shape, such as -Instruct, -it, -deduped and -2407.
VARIANT = re.compile(r"-(instruct|thinking|chat|base|pt|it|deduped|\d{4})(?=-|$)")
_MEANINGS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {  # model_type -> name -> values of `_MEANINGS`
    "llama": {
        "meta-llama-3-8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
        "meta-llama-3-70b": (8192, 80, 64, 8, 128, 28672, 128256, False),
        "llama-3.2-1b": (2048, 16, 32, 8, 64, 8192, 128256, True),
        "llama-3.2-3b": (3072, 28, 24, 8, 128, 8192, 128256, True),
        "llama-3.1-8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
        "llama-3.1-70b": (8192, 80, 64, 8, 128, 28672, 128256, False),
        "llama-3.3-70b": (8192, 80, 64, 8, 128, 28672, 128256, False),
        "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True),
        "smollm2-360m": (960, 32, 15, 5, 64, 2560, 49152, True),
        "smollm2-1.7b": (2048, 24, 32, 32, 64, 8192, 49152, True),
        "rho-math-1b-v0.1": (2048, 22, 32, 4, 64, 5632, 32000, False),
    },
    "qwen2": {
        "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, 151936, True),
        "qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960, 151936, True),
        "qwen2.5-3b": (2048, 36, 16, 2, 128, 11008, 151936, True),
        "qwen2.5-7b": (3584, 28, 28, 4, 128, 18944, 152064, False),
        "qwen2.5-14b": (5120, 48, 40, 8, 128, 13824, 152064, False),
        "qwen2.5-32b": (5120, 64, 40, 8, 128, 27648, 152064, False),
        "qwen2.5-72b": (8192, 80, 64, 8, 128, 29568, 152064, False),
    },
    "qwen3": {
        "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936, True),
        "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151936, True),
        "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936, True),
        "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 151936, False),
        "qwen3-14b": (5120, 40, 40, 8, 128, 17408, 151936, False),
        "qwen3-32b": (5120, 64, 64, 8, 128, 25600, 151936, False),
    },
    "mistral": {
        "mistral-7b-v0.1": (4096, 32, 32, 8, 128, 14336, 32000, False),
        "mistral-7b-v0.2": (4096, 32, 32, 8, 128, 14336, 32000, False),
        "mistral-7b-v0.3": (4096, 32, 32, 8, 128, 14336, 32768, False),
        "mistral-nemo": (5120, 40, 32, 8, 128, 14336, 131072, False),
        "mistral-small-24b": (5120, 40, 32, 8, 128, 32768, 131072, False),
    },
    "gemma2": {
        "gemma-2-2b": (2304, 26, 8, 4, 256, 9216, 256000, True),
        "gemma-2-9b": (3584, 42, 16, 8, 256, 14336, 256000, True),
        "gemma-2-27b": (4608, 46, 32, 16, 128, 36864, 256000, True),
    },
    "gemma3_text": {
        "gemma-3-270m": (640, 18, 4, 1, 256, 2048, 262144, True),
        "gemma-3-1b": (1152, 26, 4, 1, 256, 6912, 262144, True),
    },
    "gpt_neox": {
        "pythia-70m": (512, 6, 8, 8, 64, 2048, 50304, False),
        "pythia-160m": (768, 12, 12, 12, 64, 3072, 50304, False),
        "pythia-410m": (1024, 24, 16, 16, 64, 4096, 50304, False),
        "pythia-1b": (2048, 16, 8, 8, 256, 8192, 50304, False),
        "pythia-1.4b": (2048, 24, 16, 16, 128, 8192, 50304, False),
        "pythia-2.8b": (2560, 32, 32, 32, 80, 10240, 50304, False),
        "pythia-6.9b": (4096, 32, 32, 32, 128, 16384, 50432, False),
        "pythia-12b": (5120, 36, 40, 40, 128, 20480, 50688, False),
    },
}


def published_config(name: str) -> dict[str, Any] | None:
    """Return the sizes in the config.json of a published model; None if the model is not in `SHAPES`.

    The owner of the repository and the parts of the name in `VARIANT` are ignored, so that chat models and
    copies have the sizes of their base model.
    """
    model = VARIANT.sub("", name.rpartition("/")[2].lower())
    for kind, shapes in SHAPES.items():
        if model in shapes:
            sizes = dict(zip(_MEANINGS, shapes[model], strict=True))
            if kind == "gpt_neox":  # the number of key and value heads marks a gated MLP
                del sizes["num_key_value_heads"]
            return {"model_type": kind, **sizes}
    return None
