"""Loading of tokenizers and models from the hub or local folders, creation of new models, and saving."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf.core.errors import UserError
from rlhf.models.folders import context_of, context_problem, folder_problem, is_local
from rlhf.models.lora import is_adapted, whole_weights
from rlhf.models.modules import score_head

if TYPE_CHECKING:
    from rlhf.config.model import NanoConfig


def load_tokenizer(
    path: str, pad_token: str | None = None, trust_remote_code: bool = False, key: str = "model.policy"
) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer at `path`, with padding on the left.

    Args:
        path: hub name or local folder.
        pad_token: pad token to set. A value is required if the tokenizer has no pad token, or uses its end
            token as pad token. None keeps the pad token of the tokenizer.
        trust_remote_code: passed to transformers.
        key: config key that names `path`, for error messages.

    Raises:
        UserError: there is no fast tokenizer at `path`, or its pad token is missing, not in the vocabulary,
            or equal to the end token.
    """
    tokenizer = fetch(AutoTokenizer, path, key, trust_remote_code=trust_remote_code, padding_side="left")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{key} must come with a fast tokenizer (tokenizer.json), got {path!r}; choose another model"
        )
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(  # transformers returns an empty tokenizer for a folder without tokenizer files
            f"{key} must come with its tokenizer (tokenizer.json), got {path!r} without a tokenizer; "
            "set model.tokenizer=<hub name or folder>"
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise UserError(
                f"model.pad_token must be in the vocabulary of the tokenizer of {path!r} (a new token would "
                f"have no embedding), got {pad_token!r}; set model.pad_token to an unused token of the "
                "vocabulary, such as a reserved token"
            )
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(
            f"model.pad_token must be set for the tokenizer of {path!r} (the pad token must differ from the "
            f"end token, which is trained on), got pad token {tokenizer.pad_token!r} and end token "
            f"{tokenizer.eos_token!r}; set model.pad_token to an unused token of the vocabulary, such as a "
            "reserved token"
        )
    return tokenizer


def same_tokens(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Return True if two tokenizers have the same vocabulary and the same end token."""
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def load_causal_lm(
    path: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    key: str = "model.policy",
) -> PreTrainedModel:
    """Return the causal LM at `path`, without dropout and in evaluation mode.

    Args:
        path: hub name or local folder; weights must be safetensors.
        dtype: dtype of the weights: float32 for a model that is trained, any dtype for a frozen model.
        attention: attention implementation of transformers, such as "sdpa".
        trust_remote_code: passed to transformers.
        key: config key that names `path`, for error messages.

    Raises:
        UserError: there is no causal LM at `path`, or its checkpoint lacks parameters.
    """
    return load(AutoModelForCausalLM, path, dtype, attention, trust_remote_code, key)


def load_reward_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    key: str = "model.reward",
) -> PreTrainedModel:
    """Return the sequence classifier with one label at `path`, without dropout and in evaluation mode.

    The arguments are those of `load_causal_lm`.

    Raises:
        UserError: there is no model at `path`, or the model lacks a classification head with exactly one
            label.
    """
    return load(AutoModelForSequenceClassification, path, dtype, attention, trust_remote_code, key)


def new_reward_model(
    path: str,
    pad_token_id: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    key: str = "model.policy",
) -> PreTrainedModel:
    """Return a new reward model: the backbone of the causal LM at `path` with a random head.

    The head is drawn from a normal distribution with mean 0 and standard deviation 1/sqrt(d+1), where d is
    the hidden size (Stiennon et al., arXiv 2009.01325; Huang et al., arXiv 2403.17031, detail 11).

    Args:
        path: hub name or local folder of the causal LM.
        pad_token_id: pad token for the config of the reward model.
        generator: source of the random head; None uses torch's global generator.
        dtype: dtype of the weights.
        attention: attention implementation of transformers.
        trust_remote_code: passed to transformers.
        key: config key that names `path`, for error messages.

    Raises:
        UserError: there is no model at `path`, or its checkpoint lacks parameters.
    """
    model = load(
        AutoModelForSequenceClassification, path, dtype, attention, trust_remote_code, key,
        new_parameter="score.weight", num_labels=1, pad_token_id=pad_token_id,
    )  # fmt: skip
    weight = score_head(model).weight
    drawn = torch.randn(weight.shape, generator=generator) / (weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        weight.copy_(drawn)
    return model


def load(
    auto: Any,
    path: str,
    dtype: torch.dtype,
    attention: str,
    trust_remote_code: bool,
    key: str,
    new_parameter: str | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Return the model that the auto class `auto` loads from `path`, without dropout.

    Args:
        auto: auto class of transformers.
        path: hub name or local folder.
        dtype: dtype of the weights.
        attention: attention implementation of transformers.
        trust_remote_code: passed to transformers.
        key: config key that names `path`, for error messages.
        new_parameter: name of a parameter that may be missing in the checkpoint; None: all are required.
        settings: values for the model's config.

    Raises:
        UserError: the checkpoint is missing or lacks parameters, or a sequence classifier does not have
            exactly one label.
    """
    problem = folder_problem(key, path)
    if problem is not None:
        raise UserError(problem)
    config = fetch(AutoConfig, path, key, trust_remote_code=trust_remote_code, **settings)
    without_dropout(config)
    model, report = fetch(
        auto,
        path,
        key,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = sorted(set(report["missing_keys"]) - {new_parameter})
    if missing or report["mismatched_keys"]:
        raise UserError(
            f"{key} must name a checkpoint of {type(model).__name__} (missing parameters would be random), "
            f"got {path!r} without {', '.join(missing[:3]) or 'matching shapes'}; set "
            f"{key}=<hub name or folder>"
        )
    if auto is AutoModelForSequenceClassification and model.config.num_labels != 1:
        raise UserError(
            f"{key} must name a reward model with one label (a reward is one number), got {path!r} with "
            f"{model.config.num_labels} labels; set {key}=<hub name or folder>"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def without_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout rate of a model config to 0: all numbers whose name contains "drop"."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, int | float):
            setattr(config, name, 0.0)


def fetch(auto: Any, path: str, key: str, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)`: from a local folder or the local cache, else from the hub.

    The hub is contacted only if the model is not cached, because cluster nodes often have no network.

    Args:
        auto: auto class of transformers.
        path: hub name or local folder.
        key: config key that names `path`, for error messages.
        settings: further arguments of `from_pretrained`.

    Raises:
        UserError: the local folder is missing or cannot be read, or the hub name is not cached and cannot be
            loaded from the hub.
    """
    path = os.path.expanduser(path)
    try:
        return auto.from_pretrained(path, local_files_only=True, **settings)
    except (OSError, ValueError) as error:
        if is_local(path):
            folder = Path(path).is_dir()
            reason = f"{path!r} could not be read: {first_line(error)}" if folder else f"no folder {path!r}"
            raise UserError(unreachable(key, path, reason)) from error
    try:
        return auto.from_pretrained(path, **settings)
    except (OSError, ValueError) as error:
        reason = f"no folder {path!r}, and not found on the hub or hub not reachable: {first_line(error)}"
        raise UserError(unreachable(key, path, reason)) from error


def unreachable(key: str, path: str, reason: str) -> str:
    """Return the error message for a model that cannot be loaded; `reason` says why."""
    return (
        f"{key} must name a model on the hub or a folder with model and tokenizer ({reason}), got {path!r}; "
        f"set {key}=<hub name or folder>, or download the model once on a machine with a network"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or the name of its class if the text is empty."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def new_nano(nano: NanoConfig, tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    """Return a GPT-NeoX with random weights, in float32 and evaluation mode.

    Weights are drawn from torch's global generator. The weights of the projections into the residual stream
    are divided by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019).

    Args:
        nano: sizes of the model.
        tokenizer: source of the vocabulary size and of the special tokens.
    """
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=nano.hidden_size,
        num_hidden_layers=nano.layers,
        num_attention_heads=nano.heads,
        intermediate_size=4 * nano.hidden_size,
        max_position_embeddings=nano.context,
        initializer_range=nano.hidden_size**-0.5,  # with 0.02, a narrow model learns to copy much later
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    without_dropout(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=nano.attention)
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            for product in (layer.attention.dense, layer.mlp.dense_4h_to_h):
                product.weight.div_((2 * nano.layers) ** 0.5)
    return model.eval()


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer to `folder`, so that `from_pretrained(folder)` loads them.

    LoRA adapters are merged into the weights; the saved weights are then float32.

    Args:
        model: the model; its weights are saved as safetensors.
        tokenizer: the tokenizer.
        folder: where the files are written.
        state_dict: weights to save, for example gathered from all ranks; None: the weights of `model`.
    """
    adapted = is_adapted(model)
    if state_dict is None and adapted:
        state_dict = dict(whole_weights(model))
    model.save_pretrained(folder, state_dict=state_dict)
    if adapted:  # the saved weights are float32, but the frozen weights may have 16 bits
        model.config.dtype = torch.float32
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, key: str = "model.tokenizer"
) -> None:
    """Check that every token id of the tokenizer has an embedding in the model.

    A tokenizer with fewer ids than embeddings is accepted.

    Raises:
        UserError: the largest token id has no embedding.
    """
    rows = model.config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"{key} must fit the model (every token id needs an embedding), got ids up to {largest} and "
            f"{rows} embeddings; set {key} to the tokenizer that the model was trained with"
        )


def check_context(config: PreTrainedConfig, prompt_length: int, response_length: int) -> str | None:
    """Return an error message if prompt and response together exceed the model's context length, else None.

    Args:
        config: config of the model.
        prompt_length: longest prompt in tokens.
        response_length: longest response in tokens.
    """
    return context_problem(context_of(config.to_dict()), prompt_length, response_length)
