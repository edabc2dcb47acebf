"""Shapes of published models, by name, for memory plans before a model is downloaded. No torch."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import yaml

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
SHAPES: dict[str, dict[str, list[int]]] = yaml.safe_load(
    (files("rlhf.memory") / "published.yaml").read_text(encoding="utf-8")
)


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
