"""The kind of a model, from its config.json: causal language model, reward model, encoder. No torch."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.models.headers import architectures, is_causal

if TYPE_CHECKING:
    from rlhf.models.headers import TensorHeader

_ENCODERS = (  # model types that read a text in both directions, unless config.json has is_decoder
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet",
    "roberta", "xlm-roberta",
)  # fmt: skip
_NO_CAUSAL_HEAD = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")  # ends of class names


def named(config: dict[str, Any]) -> str:
    """Return the class name of a model for messages; if config.json names none, the model type."""
    return ", ".join(architectures(config)) or str(config.get("model_type"))


def is_classifier(config: dict[str, Any]) -> bool:
    """Return True if config.json names the architecture of a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in architectures(config))


def labels(config: dict[str, Any]) -> int:
    """Return the number of labels of a sequence classifier; transformers' default is 2."""
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) else int(config.get("num_labels", 2))


def unknown_type(config: dict[str, Any]) -> str | None:
    """Return the model type in config.json if the installed transformers does not know it, else None."""
    kind = config.get("model_type")
    known = _known_types()
    if not kind or not known:
        return None
    return None if kind in known else str(kind)


def not_causal(config: dict[str, Any]) -> str | None:
    """Return why a model is no causal language model, or None."""
    if is_classifier(config):
        return f"a sequence classifier ({named(config)}), as reward models are"
    if config.get("is_encoder_decoder") or "decoder_start_token_id" in config:
        return f"an encoder-decoder ({named(config)})"
    encodes = config.get("model_type") in _ENCODERS and not config.get("is_decoder")
    if encodes or any(name.endswith(_NO_CAUSAL_HEAD) for name in architectures(config)):
        return f"an encoder ({named(config)})"
    kind, known = str(config.get("model_type")), _causal_types()
    if kind in _known_types() and known and kind not in known and "auto_map" not in config:
        media = [part.removesuffix("_config") for part in ("vision_config", "audio_config") if part in config]
        what = f"a model of {' and '.join([*media, 'language'])}" if media else "a model of another kind"
        if not media and any(name.endswith("ForConditionalGeneration") for name in architectures(config)):
            what = "an encoder-decoder"
        return f"{what} ({named(config)})"
    return None


def not_reward(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> str | None:
    """Return why a model is no reward model, or None.

    A reward model is a sequence classifier with one label and a head with the name `score`.

    Args:
        config: content of config.json.
        tensors: headers of the weights.
    """
    head = tensors.get("score.weight")
    if is_causal(config) and head is None:
        return f"a causal language model ({named(config)}) without score.weight"
    if head is not None and head.shape[0] != 1:
        return f"a model with {head.shape[0]} labels"
    if labels(config) != 1:
        return f"a model with {labels(config)} labels"
    return None if head is not None or not tensors else "a model without score.weight"


@cache
def _known_types() -> frozenset[str]:
    """Return the model types of the installed transformers; empty if its files have an unknown layout.

    The source is searched for strings, because importing transformers takes seconds.
    """
    found = find_spec("transformers")
    folder = Path(found.origin).parent / "models" / "auto" if found and found.origin else Path("nowhere")
    files = (folder / name for name in ("auto_mappings.py", "configuration_auto.py"))
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    types = frozenset(re.findall(r'"([\w.-]+)"', "\n".join(texts)))
    return types if "llama" in types else frozenset()


@cache
def _causal_types() -> frozenset[str]:
    """Return the model types with a causal language model in the installed transformers; empty if unknown."""
    found = find_spec("transformers")
    file = Path(found.origin).parent / "models/auto/modeling_auto.py" if found and found.origin else Path()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("MAPPING_NAMES")[0]
    types = frozenset(re.findall(r'\(\s*"([\w.-]+)"', table))
    return types if "llama" in types else frozenset()
