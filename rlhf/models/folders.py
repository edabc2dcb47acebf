"""Checks of local model folders and of context lengths. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf.core.pasting import literal, python_command, setting
from rlhf.models.headers import (
    DamagedFile,
    contradiction,
    embeddings,
    has_two_heads,
    missing_tensors,
    read_object,
    weight_headers,
)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # context length in config.json
_TWO_HEADS = "config.json ties the output head to the embeddings, but it has values of its own"
_UNTIE = 'to use the head of the weights, write "tie_word_embeddings": false'
ADAPTER = "adapter_config.json"  # the file that marks a folder of PEFT
CARD = "README.md"  # the model card


def is_local(path: str) -> bool:
    """Return True if `path` means a folder: it exists, its parent exists, or no hub name has its form.

    `models/mine` is therefore local if there is a folder `models`, also if `models/mine` does not exist.
    """
    folder = Path(path).expanduser()
    return folder.is_dir() or HUB_NAME.fullmatch(path) is None or ("/" in path and folder.parent.is_dir())


def similar_folder(path: str) -> str | None:
    """Return the path of a folder that `path` may mean, or None.

    The result has the same name one folder deeper, or a similar name beside `path`. Relative paths stay
    relative.
    """
    folder = Path(path).expanduser()
    if not folder.parent.is_dir():
        return None
    beside = [each.name for each in folder.parent.iterdir() if each.is_dir()]
    deeper = [name for name in beside if (folder.parent / name / folder.name).is_dir()]
    if deeper:
        return str(Path(path).with_name(deeper[0]) / folder.name)
    close = get_close_matches(folder.name, beside, n=1)
    return str(Path(path).with_name(close[0])) if close else None


def offline_problem(key: str, name: str, reason: str) -> str:
    """Return the error message for a model that is not on this machine and cannot be downloaded.

    Args:
        key: config key that names the model.
        name: hub name.
        reason: why the hub cannot be used, from `rlhf.core.hub.unreachable`.
    """
    close = similar_folder(name)
    remedy = f"did you mean {setting(key, close)}?" if close else f"set {key}=<folder>"
    return (
        f"{key} must name a local folder or a downloaded model if the hub cannot be used ({reason}), got "
        f"{name!r}, which is neither; {remedy}, or download the model where there is a network (hf download "
        f"{name}), copy it to HF_HOME of this machine and set HF_HUB_OFFLINE=1"
    )


def folder_problem(key: str, path: str) -> str | None:
    """Return the error message for the local model folder `path`, or None if no file shows a problem.

    Only headers are read. A hub name is not checked: the result is None. The message names the config key
    `key`.
    """
    if not is_local(path):
        return None
    folder = Path(path).expanduser()
    remedy = f"set {key}=<hub name or folder>"
    if folder.is_symlink() and not folder.exists():
        missing = f"{path!r} is a link to {folder.readlink()}, which does not exist"
    elif folder.is_file() and folder.suffix.lower() == ".gguf":
        missing, remedy = f"{path!r} is a GGUF file", _from_gguf(key, Path(path))
    elif not folder.is_dir():
        missing = f"{path!r} is a file" if folder.exists() else f"no folder {path!r}"
        inside = folder.is_file() and (folder.parent / "config.json").is_file()
        hub_name = path.removeprefix("https://huggingface.co/")
        if hub_name != path:
            remedy = f"did you mean {setting(key, hub_name)}?"
        elif close := str(Path(path).parent) if inside else similar_folder(path):
            remedy = f"did you mean {setting(key, close)}?"
    elif (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
        missing, remedy = (
            f"no config.json in {path!r}, a run folder",
            f"set {setting(key, Path(path) / 'model')}",
        )
    elif (folder / ADAPTER).is_file():
        return adapter_problem(key, path)
    elif defect := damage(folder):
        missing = f"{path!r}: {defect}"
        remedy = f"{_UNTIE} in {Path(path) / 'config.json'}" if defect == _TWO_HEADS else repair(key, path)
    else:
        return None
    return (
        f"{key} must name a model on the hub or a folder with config.json and safetensors weights "
        f"({missing}), got {path!r}; {remedy}"
    )


def damage(folder: Path) -> str | None:
    """Return what is missing or damaged in the files of the model in `folder`, or None."""
    if not (folder / "config.json").is_file() and (gguf := next(folder.glob("*.gguf"), None)):
        return f"no config.json, only {gguf.name}"
    try:
        config, tensors = read_object(folder / "config.json"), weight_headers(folder)
    except DamagedFile as error:
        return str(error)
    if not config.get("model_type"):
        return "config.json has no model_type"
    if (found := embeddings(tensors)) is not None and not found.dtype.startswith(("F", "BF")):
        return f"the weights are integers ({found.dtype}); only float weights can be trained"
    if missing := missing_tensors(config, tensors):
        return f"the weights lack {', '.join(missing[:3])}"
    if has_two_heads(config, tensors):
        return _TWO_HEADS
    return contradiction(config, tensors)


def repair(key: str, path: str) -> str:
    """Return the remedy for a folder without a complete model."""
    folder = Path(path).expanduser()
    rewards = key.endswith(("reward", "path"))
    auto = "AutoModelForSequenceClassification" if rewards else "AutoModelForCausalLM"
    if not (folder / "config.json").is_file() and (gguf := next(folder.glob("*.gguf"), None)):
        return _from_gguf(key, Path(path) / gguf.name)
    if not (folder / "config.json").is_file():
        models = sorted(Path(path) / each.parent.name for each in folder.glob("*/config.json"))
        if len(models) == 1:
            return f"did you mean {setting(key, models[0])}?"
        examples = f", for example {models[0]} or {models[1]}" if models else ""
        return f"set {key}=<hub name or folder>{examples}"
    if list(folder.glob("*.bin")) and not list(folder.glob("*.safetensors")):
        written = Path(path).with_name(f"{folder.name}-safetensors")
        code = (
            f"from transformers import {auto} as M, AutoTokenizer as T; "
            f"M.from_pretrained({literal(path)}).save_pretrained({literal(written)}); "
            f"T.from_pretrained({literal(path)}).save_pretrained({literal(written)})"
        )
        return f"if you trust the files, run: {python_command(code)}, then set {setting(key, written)}"
    if (gguf := next(folder.glob("*.gguf"), None)) and not list(folder.glob("*.safetensors")):
        return _from_gguf(key, Path(path) / gguf.name)
    return f"copy or download the model again, or set {key}=<hub name or another folder>"


def _from_gguf(key: str, file: Path) -> str:
    """Return the remedy for a GGUF file: the command that writes its weights as float32."""
    written = file.parent.with_name(f"{file.stem}-safetensors")
    where = f"{literal(file.parent)}, gguf_file={literal(file.name)}"
    code = (  # transformers saves no model that has a quantizer, although the weights are dequantized
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f'm = M.from_pretrained({where}, dtype="float32"); vars(m).pop("hf_quantizer", None); '
        f'vars(m.config).pop("quantization_config", None); m.save_pretrained({literal(written)}); '
        f"T.from_pretrained({where}).save_pretrained({literal(written)})"
    )
    return (
        f"to convert the weights (dequantized, with pip install gguf), run: {python_command(code)}, then set "
        f"{setting(key, written)}"
    )


def adapter_problem(key: str, path: str) -> str:
    """Return the error message for a folder that contains a PEFT adapter instead of a model."""
    folder = Path(path).expanduser()
    try:
        settings = read_object(folder / ADAPTER)
    except DamagedFile:
        settings = {}
    base = settings.get("base_model_name_or_path") or "<base model>"
    merged = Path(path).parent / "model"
    if (folder.parent / "model" / "config.json").is_file():
        remedy = f"set {setting(key, merged)}, the merged model of the same run"
    else:
        merged = Path(path).with_name(f"{folder.name}-merged")
        classifies = settings.get("task_type") == "SEQ_CLS"
        auto, labels = ("SequenceClassification", ", num_labels=1") if classifies else ("CausalLM", "")
        code = (
            f"from peft import AutoPeftModelFor{auto} as M; from transformers import AutoTokenizer as T; "
            f"M.from_pretrained({literal(path)}{labels}).merge_and_unload()"
            f".save_pretrained({literal(merged)}); "
            f"T.from_pretrained({literal(base)}).save_pretrained({literal(merged)})"
        )
        remedy = f"run: {python_command(code)}, then set {setting(key, merged)}"
    return (
        f"{key} must name a whole model (an adapter is only the change of a model), got {path!r}, a PEFT "
        f"adapter of {base}; {remedy}"
    )


def read_config(path: str) -> dict[str, Any] | None:
    """Return the config.json of a model folder; None if the file is missing or is not a JSON object."""
    try:
        return read_object(Path(path).expanduser() / "config.json")
    except DamagedFile:
        return None


def context_length(path: str) -> int | None:
    """Return the context length, in tokens, of the model in the folder `path`.

    The result is None if `path` is not a model folder, or if config.json does not state the length.
    """
    return context_of(read_config(path) or {})


def context_of(config: dict[str, Any]) -> int | None:
    """Return the context length, in tokens, that a model config (a dictionary) states; None if not stated."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for name in _CONTEXT_KEYS:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def context_problem(context: int | None, prompt_length: int, response_length: int) -> str | None:
    """Return an error message if prompt and response together are longer than the context, else None.

    Args:
        context: context length of the model in tokens; None if unknown, which is no error.
        prompt_length: longest prompt in tokens.
        response_length: longest response in tokens.
    """
    if context is None or prompt_length + response_length <= context:
        return None
    return too_long(context, "the context length of the model", prompt_length, response_length)


def too_long(context: int, reason: str, prompt_length: int, response_length: int) -> str:
    """Return the error message for prompts and responses that are longer than `context` for `reason`."""
    if context > prompt_length:
        remedy = f"set generator.response_length={context - prompt_length}"
    elif context > response_length:
        remedy = f"set task.max_prompt_tokens={context - response_length}"
    else:
        half = context // 2
        remedy = f"set task.max_prompt_tokens={half} generator.response_length={context - half}"
    return (
        f"task.max_prompt_tokens + generator.response_length must be <= {context} ({reason}), got "
        f"{prompt_length} + {response_length} = {prompt_length + response_length}; {remedy}"
    )


def rope_problem(config: dict[str, Any], prompt_length: int, response_length: int) -> str | None:
    """Return an error message if the encoding of a token's position would depend on other tokens, else None.

    With rope_type=longrope, all positions of a batch get other frequencies as soon as one sequence is longer
    than the original context of the model. Log-probs of a sequence would then depend on the other sequences
    of the batch, and would change while a sequence is sampled. With rope_type=dynamic, the same happens from
    max_position_embeddings on, which `context_problem` refuses.

    Args:
        config: config of a model, or content of config.json.
        prompt_length: longest prompt in tokens.
        response_length: longest response in tokens.
    """
    context = min(_original_contexts(config), default=None)
    if context is None or prompt_length + response_length <= context:
        return None
    reason = "the original context; with rope_type=longrope, longer sequences change their whole batch"
    return too_long(context, reason, prompt_length, response_length)


def _original_contexts(config: dict[str, Any]) -> Iterator[int]:
    """Yield the original context length, in tokens, for each rope_type=longrope in a config."""
    original = "original_max_position_embeddings"
    for part in (config, config.get("text_config")):
        whole = (part.get("rope_parameters") or part.get("rope_scaling")) if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(whole, dict):
            continue
        for rope in (whole, *whole.values()):  # layers of different types may have different settings
            if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
                lengths = (part.get(original), rope.get(original), context_of(part))
                yield from [length for length in lengths if isinstance(length, int)][:1]
