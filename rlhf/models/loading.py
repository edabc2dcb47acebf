"""Load tokenizers and models, from the hub or from local folders, and save them."""

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
    """The fast tokenizer at `path` (hub name or folder), padding on the left.

    `pad_token` names the pad token where the tokenizer has none of its own, or one that is also its end.
    Raises UserError where the pad token is missing, unknown to the vocabulary, or equal to the end token.
    """
    tokenizer = fetch(AutoTokenizer, path, key, trust_remote_code=trust_remote_code, padding_side="left")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{key} must come with a fast tokenizer (tokenizer.json), got {path!r}; choose another model"
        )
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(  # transformers makes an empty tokenizer of a folder that has none
            f"{key} must come with its tokenizer (tokenizer.json), got {path!r} without one; "
            "set model.tokenizer=<hub name or folder>"
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise UserError(
                f"model.pad_token must be a token of the tokenizer of {path!r} (a new one would have no "
                f"embedding), got {pad_token!r}; set model.pad_token to a token that is never used, such as "
                "a reserved one"
            )
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(
            f"model.pad_token must be set for the tokenizer of {path!r} (pad must differ from the end "
            f"token, which is trained on), got pad {tokenizer.pad_token!r} and end {tokenizer.eos_token!r}; "
            "set model.pad_token to a token of its vocabulary that is never used, such as a reserved one"
        )
    return tokenizer


def same_tokens(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Whether token ids of the one mean the same to the other."""
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def load_causal_lm(
    path: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    key: str = "model.policy",
) -> PreTrainedModel:
    """The causal LM at `path` (hub name or folder; safetensors only), dropout off, in evaluation mode.

    What is trained is loaded in float32; a frozen model in any dtype. Raises UserError, naming `key`, where
    there is no such model.
    """
    return load(AutoModelForCausalLM, path, dtype, attention, trust_remote_code, key)


def load_reward_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    key: str = "model.reward",
) -> PreTrainedModel:
    """The sequence classifier with one label at `path`, as `load_causal_lm`.

    Raises UserError also where it has another number of labels, or no head at all.
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
    """A reward model on the backbone of the causal LM at `path`, its head drawn from N(0, 1/sqrt(d+1)).

    d is the hidden size (Stiennon et al., arXiv 2009.01325; Huang et al., arXiv 2403.17031, detail 11); the
    draw is from `generator`, or torch's own.
    """
    model = load(
        AutoModelForSequenceClassification, path, dtype, attention, trust_remote_code, key,
        new="score.weight", num_labels=1, pad_token_id=pad_token_id,
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
    new: str | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Load through an auto class; `new` names the parameter that the checkpoint need not have."""
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
    missing = sorted(set(report["missing_keys"]) - {new})
    if missing or report["mismatched_keys"]:
        raise UserError(
            f"{key} must name a checkpoint of {type(model).__name__} (parameters that it lacks would be "
            f"random numbers), got {path!r} without {', '.join(missing[:3]) or 'fitting shapes'}; set "
            f"{key}=<hub name or folder>"
        )
    if auto is AutoModelForSequenceClassification and model.config.num_labels != 1:
        raise UserError(
            f"{key} must name a reward model with one label (a reward is one number), got {path!r} with "
            f"{model.config.num_labels}; set {key}=<hub name or folder>"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def without_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout rate of a model config to 0: `attention_dropout`, `resid_pdrop`, and the like."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, int | float):
            setattr(config, name, 0.0)


def fetch(auto: Any, path: str, key: str, **settings: Any) -> Any:
    """`auto.from_pretrained` of a folder or of what is cached here; from the hub only where both fail.

    Nodes of a cluster often have no network, and what is cached needs none. Raises UserError, naming `key`,
    where `path` is in none of the three.
    """
    path = os.path.expanduser(path)
    try:
        return auto.from_pretrained(path, local_files_only=True, **settings)
    except (OSError, ValueError) as error:
        if is_local(path):
            folder = Path(path).is_dir()
            reason = (
                f"{path!r} could not be read: {first_line(error)}" if folder else f"no folder {path!r} here"
            )
            raise UserError(unreachable(key, path, reason)) from error
    try:
        return auto.from_pretrained(path, **settings)
    except (OSError, ValueError) as error:
        reason = f"no folder {path!r} here, and the hub has none or could not be reached: {first_line(error)}"
        raise UserError(unreachable(key, path, reason)) from error


def unreachable(key: str, path: str, reason: str) -> str:
    """The error for a model that is nowhere."""
    return (
        f"{key} must name a model on the hub or a folder with model and tokenizer ({reason}), got {path!r}; "
        f"set {key}=<hub name or folder>, or download it once where there is a network"
    )


def first_line(error: Exception) -> str:
    """The first line of an exception's text."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def new_nano(nano: NanoConfig, tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    """A GPT-NeoX from nothing: the size of `nano`, the vocabulary of `tokenizer`, float32, torch's own RNG.

    The products that write to the residual stream start smaller by sqrt(2 * layers), as GPT-2's (Radford et
    al. 2019).
    """
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=nano.hidden_size,
        num_hidden_layers=nano.layers,
        num_attention_heads=nano.heads,
        intermediate_size=4 * nano.hidden_size,
        max_position_embeddings=nano.context,
        initializer_range=nano.hidden_size
        ** -0.5,  # the usual 0.02 is for wide models: copying is learned late
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
    """Write safetensors, config and tokenizer for `from_pretrained`; `state_dict`: gathered weights.

    Adapters are merged, and the weights then float32.
    """
    adapted = is_adapted(model)
    if state_dict is None and adapted:
        state_dict = dict(whole_weights(model))
    model.save_pretrained(folder, state_dict=state_dict)
    if adapted:  # where frozen weights are held in 16 bits, that is what it calls itself
        model.config.dtype = torch.float32
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, key: str = "model.tokenizer"
) -> None:
    """Raise ValueError where the tokenizer has ids without an embedding in the model. Fewer ids are fine."""
    rows = model.config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"{key} must fit the model (every id needs an embedding), got ids up to {largest} and {rows} "
            f"embeddings; set {key} to the tokenizer that the model was trained with"
        )


def check_context(config: PreTrainedConfig, prompt_length: int, response_length: int) -> str | None:
    """What is wrong when prompts and responses of so many tokens exceed the model's positions, or None."""
    return context_problem(context_of(config.to_dict()), prompt_length, response_length)
