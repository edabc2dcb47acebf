"""Folders with models: checks, kinds of models, what they can share, downloads. No torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf.core import machine
from rlhf.core.errors import UserError, literal, python_command, setting
from rlhf.models.headers import DamagedFile, ModelFolder, opened, read_object

# Checks of local model folders and of context lengths.


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
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
        reason: why the hub cannot be used, from `rlhf.core.machine.unreachable`.
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
        missing = f"no config.json in {path!r}, a run folder"
        remedy = f"set {setting(key, Path(path) / 'model')}"
    elif (folder / ADAPTER).is_file():
        return _adapter_problem(key, path)
    elif defect := opened(folder).defect:
        missing, remedy = f"{path!r}: {defect}", _repair(key, path)
    else:
        return None
    return (
        f"{key} must name a model on the hub or a folder with config.json and safetensors weights "
        f"({missing}), got {path!r}; {remedy}"
    )


def on_this_machine(path: str) -> ModelFolder | None:
    """Return what the files of a model or tokenizer state: of a local folder, or of a downloaded hub model.

    Args:
        path: hub name or local folder.

    Returns:
        None if there is no such folder on this machine.
    """
    folder = Path(path).expanduser() if is_local(path) else machine.cached_folder(path)
    return opened(folder) if folder is not None and folder.is_dir() else None


def _repair(key: str, path: str) -> str:
    """Return the remedy for a folder without a complete model."""
    folder = Path(path).expanduser()
    rewards = key.endswith(("reward", "path"))
    auto = "AutoModelForSequenceClassification" if rewards else "AutoModelForCausalLM"
    has_config = (folder / "config.json").is_file()
    has_weights = any(folder.glob("*.safetensors"))
    if (gguf := next(folder.glob("*.gguf"), None)) and not (has_config and has_weights):
        return _from_gguf(key, Path(path) / gguf.name)
    if not has_config:
        models = sorted(Path(path) / each.parent.name for each in folder.glob("*/config.json"))
        if len(models) == 1:
            return f"did you mean {setting(key, models[0])}?"
        examples = f", for example {models[0]} or {models[1]}" if models else ""
        return f"set {key}=<hub name or folder>{examples}"
    if any(folder.glob("*.bin")) and not has_weights:
        written = Path(path).with_name(f"{folder.name}-safetensors")
        code = (
            f"from transformers import {auto} as M, AutoTokenizer as T; "
            f"M.from_pretrained({literal(path)}).save_pretrained({literal(written)}); "
            f"T.from_pretrained({literal(path)}).save_pretrained({literal(written)})"
        )
        return f"if you trust the files, run: {python_command(code)}, then set {setting(key, written)}"
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


def _adapter_problem(key: str, path: str) -> str:
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


def target_problems(layers: Sequence[str], targets: Sequence[str]) -> Iterator[str]:
    """Yield an error for each target of adapters that is neither one of the linear layers nor its end."""
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            yield (
                "model.lora.targets must name linear layers below the model's head "
                f"({', '.join(last_names(layers))}), got {target}; set model.lora.targets=null for all layers"
            )


def last_names(modules: Sequence[str]) -> list[str]:
    """Return the different parts of names of modules after the last dot, in alphabetic order."""
    return sorted({name.rpartition(".")[2] for name in modules})


def context_problem(
    context: int | None, prompt_length: int, response_length: int, original: int | None = None
) -> str | None:
    """Return an error message if prompt and response together are too long for a model, else None.

    With rope_type=longrope, all positions of a batch get other frequencies as soon as one sequence is longer
    than the original context of the model. Log-probs of a sequence would then depend on the other sequences
    of the batch, and would change while a sequence is sampled. With rope_type=dynamic, the same happens from
    max_position_embeddings on, which is the context.

    Args:
        context: context length of the model in tokens; None if unknown, which is no error.
        prompt_length: longest prompt in tokens.
        response_length: longest response in tokens.
        original: original context length of a model with rope_type=longrope; None: another model.
    """
    whole, reason = prompt_length + response_length, "the context length of the model"
    if context is None or whole <= context:
        if original is None or whole <= original:
            return None
        context = original
        reason = "the original context; with rope_type=longrope, longer sequences change their whole batch"
    if context > prompt_length:
        remedy = f"set generator.response_length={context - prompt_length}"
    elif context > response_length:
        remedy = f"set task.max_prompt_tokens={context - response_length}"
    else:
        half = context // 2
        remedy = f"set task.max_prompt_tokens={half} generator.response_length={context - half}"
    return (
        f"task.max_prompt_tokens + generator.response_length must be <= {context} ({reason}), got "
        f"{prompt_length} + {response_length} = {whole}; {remedy}"
    )


# Rules that decide when the samples of a prompt share the encoding of the prompt, from plain numbers.
#
# Forwards (`rlhf.models.forward`), sampling and the memory plan call the same functions.


_SHALLOW = 8  # number of blocks up to which a CPU encodes the prompt in a separate pass if K = 1
_GPU_LAYER = 3e11  # FLOPs of a GPU while one layer is launched: 0.75 ms at 400 TFLOP/s
_TOGETHER = 8  # smallest target for the number of samples in one decoding row


def prompt_apart(samples: int, tokens: int, *, layers: float, hidden: float, gpu: bool, whole: bool) -> bool:
    """Return True if the prompts of a micro-batch are encoded in a separate pass before their responses.

    If K > 1, the separate pass encodes each prompt once instead of K times. If K = 1, the pass saves most of
    the last block's work on the prompt and costs a second copy of the prompt's keys. With prompts of 384
    tokens, two passes took 0.70 of the time of one pass in a model with 2 blocks, and 0.89 with 6 blocks. A
    deep model gains nothing. On a GPU, a pass costs the time to launch its operations: see
    `prompt_pass_pays_from`.

    Args:
        samples: samples per prompt, K.
        tokens: prompt tokens of the micro-batch, padding included.
        layers: blocks of the model.
        hidden: hidden size of the model.
        gpu: whether the forward runs on a GPU.
        whole: True if no forward may stop early. Then the result depends on K only, so that all ranks of a
            sharded model get the same result.
    """
    if whole:
        return samples > 1
    return tokens >= prompt_pass_pays_from(samples, hidden) if gpu else samples > 1 or layers <= _SHALLOW


def prompt_pass_pays_from(samples: int, hidden: float) -> float:
    """Return the number of prompt tokens in a micro-batch from which a separate prompt pass pays on a GPU.

    Launching the operations of a layer takes the same time for any number of tokens. The pass pays if it
    saves `_GPU_LAYER` or more FLOPs per layer. A layer of hidden size H has 12 H^2 weights, so the pass saves
    2 * 12 H^2 * (K - 1) FLOPs per prompt token.

    Args:
        samples: samples per prompt, K.
        hidden: hidden size of the model, H.
    """
    return _GPU_LAYER / (2 * 12 * hidden**2 * (samples - 1)) if samples > 1 else math.inf


def in_forward(samples: int, known: int, response: int) -> int:
    """Return how many samples of a prompt share one row of a forward, and so one copy of the prompt's keys.

    A sample in a shared row also computes attention to the keys of the other samples, which are masked. The
    result is the largest divisor of `samples` for which the masked keys add at most a quarter to the keys of
    a sample (prompt and own response).

    Args:
        samples: samples per prompt, K.
        known: prompt tokens already encoded.
        response: response tokens of one sample.
    """
    most = 1 + (known + response) // (4 * response)
    return max(g for g in _divisors(samples) if g <= most)


def in_decoding(samples: int, prompt: int, response: int) -> int:
    """Return how many samples of a prompt are decoded in one row, and so read one copy of the prompt's keys.

    A sample in a shared row also computes attention to the tokens of the other samples, which are masked. The
    target is 4 * prompt / response, but at least `_TOGETHER`. The result is the divisor of `samples` whose
    ratio to the target is nearest to 1.

    Args:
        samples: samples per prompt, K.
        prompt: prompt length in tokens.
        response: response length in tokens.
    """
    wanted = max(_TOGETHER, 4 * prompt // response)
    return min(_divisors(samples), key=lambda g: max(g / wanted, wanted / g))


def _divisors(samples: int) -> list[int]:
    """Return the divisors of `samples`: the group sizes that fill all rows equally."""
    return [g for g in range(1, samples + 1) if samples % g == 0]


# Loading from a local folder, the hub's cache or the hub, with errors that name the config key.


def fetch(auto: Any, path: str, key: str, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)`: from a local folder or the local cache, else from the hub.

    The hub is contacted only if the model is not cached, because cluster nodes often have no network. If the
    hub does not answer, the error comes within seconds.

    Args:
        auto: auto class of transformers.
        path: hub name or local folder.
        key: config key that names `path`, for error messages.
        settings: further arguments of `from_pretrained`.

    Raises:
        UserError: the local folder is missing or cannot be read, or the hub name is not cached and cannot be
            loaded from the hub.
    """
    from huggingface_hub.errors import StrictDataclassError  # here, because mistakes need no such library
    from safetensors import SafetensorError

    # What transformers raises for files with invalid content. RuntimeError is not here: too little memory.
    invalid = (
        OSError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError, ImportError,
        SafetensorError, StrictDataclassError,
    )  # fmt: skip
    path = os.path.expanduser(path)
    try:
        return auto.from_pretrained(path, local_files_only=True, **settings)
    except invalid as error:
        if is_local(path):
            folder = Path(path).is_dir()
            reason = f"{path!r} could not be read: {_cause(error)}" if folder else f"no folder {path!r}"
            remedy = "correct or copy its files, or set {}=<hub name or another folder>" if folder else None
            raise UserError(_not_loaded(key, path, reason, remedy)) from None
    if (offline := machine.unreachable()) is not None:
        raise UserError(offline_problem(key, path, offline))
    try:
        return auto.from_pretrained(path, **settings)
    except invalid as error:
        reason = f"no folder {path!r}, and not found on the hub or hub not reachable: {_cause(error)}"
        raise UserError(_not_loaded(key, path, reason)) from None


def _not_loaded(key: str, path: str, reason: str, remedy: str | None = None) -> str:
    """Return the error message for a model that cannot be loaded.

    Args:
        key: config key that names the model.
        path: hub name or local folder.
        reason: why the model cannot be loaded.
        remedy: what to do, with `{}` for the key; None: name or download a model.
    """
    remedy = remedy or "set {}=<hub name or folder>, or download the model once on a machine with a network"
    return (
        f"{key} must name a model on the hub or a folder with model and tokenizer ({reason}), got {path!r}; "
        f"{remedy.format(key)}"
    )


def _cause(error: Exception) -> str:
    """Return why files cannot be read, on one line: the text of an exception, after its class if needed."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    if isinstance(error, StrictDataclassError):  # its first line does not name the value
        return " ".join(str(error).split())
    plain = isinstance(error, OSError | ValueError | SafetensorError)
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or the name of its class if the text is empty."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
