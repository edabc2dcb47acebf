"""Loading of models from the hub or local folders, creation of new models, and saving."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf.config.models import ModelConfig
from rlhf.core.errors import UserError
from rlhf.models.folder import context_problem, fetch, folder_problem, rope_problem
from rlhf.models.headers import ModelFacts, opened
from rlhf.models.modules import is_adapted, score_head, whole_weights


def new_reward_model(
    path: str, pad_token_id: int, generator: torch.Generator | None = None, **options: Any
) -> PreTrainedModel:
    """Return a new reward model: the backbone of the causal LM at `path` with a random head.

    The head is drawn from a normal distribution with mean 0 and standard deviation 1/sqrt(d+1), where d is
    the hidden size (Stiennon et al., arXiv 2009.01325; Huang et al., arXiv 2403.17031, detail 11).

    Args:
        path: hub name or local folder of the causal LM.
        pad_token_id: pad token for the config of the reward model.
        generator: source of the random head; None uses torch's global generator.
        options: further arguments of `_load`, such as the dtype of the weights.

    Raises:
        UserError: there is no model at `path`, or its checkpoint lacks parameters.
    """
    options |= {"new_parameter": "score.weight", "num_labels": 1, "pad_token_id": pad_token_id}
    model = _load(AutoModelForSequenceClassification, path, **options)
    weight = score_head(model).weight
    drawn = torch.randn(weight.shape, generator=generator) / (weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        weight.copy_(drawn)
    return model


def _load(
    auto: Any,
    path: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    key: str = "model.policy",
    new_parameter: str | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Return the model that the auto class `auto` loads from `path`, without dropout, in evaluation mode.

    Args:
        auto: auto class of transformers.
        path: hub name or local folder; weights must be safetensors.
        dtype: dtype of the weights: float32 for a model that is trained, any dtype for a frozen model.
        attention: attention implementation of transformers, such as "sdpa".
        trust_remote_code: passed to transformers.
        key: config key that names `path`, for error messages.
        new_parameter: name of a parameter that may be missing in the checkpoint; None: all are required.
        settings: values for the model's config.

    Raises:
        UserError: the checkpoint is missing, lacks parameters or contains NaN, transformers does not have
            the attention implementation for the model, or a sequence classifier does not have exactly one
            label.
    """
    if problem := folder_problem(key, path):  # config.json or weights are missing, truncated or malformed
        raise UserError(problem)
    config = fetch(AutoConfig, path, key, trust_remote_code=trust_remote_code, **settings)
    _without_dropout(config)
    try:
        model, report = fetch(
            auto,
            path,
            key,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the report then lists them
            output_loading_info=True,
        )
    except UserError as error:
        if attention == "eager" or "attn_implementation" not in str(error):
            raise
        raise UserError(
            f"model.attention must be eager for {key}={path} (transformers has no attention={attention} for "
            f"{config.model_type} models), got {attention}; set model.attention=eager"
        ) from None
    missing = sorted(set(report["missing_keys"]) - {new_parameter})
    if missing or report["mismatched_keys"]:
        raise UserError(
            f"{key} must name a checkpoint of {type(model).__name__} (missing parameters would be random), "
            f"got {path!r} without {', '.join(missing[:3]) or 'matching shapes'}; set "
            f"{key}=<hub name or folder>"
        )
    head, tied = model.get_output_embeddings(), model.config.get_text_config().tie_word_embeddings
    if head is not None and tied and head.weight is not model.get_input_embeddings().weight:
        raise UserError(
            f"{key} must name a model whose config.json describes its weights (vLLM would use another head), "
            f"got {path!r} with tie_word_embeddings=true and another head; write false in its config.json"
        )
    if auto is AutoModelForSequenceClassification and model.config.num_labels != 1:
        raise UserError(
            f"{key} must name a reward model with one label (a reward is one number), got {path!r} with "
            f"{model.config.num_labels} labels; set {key}=<hub name or folder>"
        )
    with torch.no_grad():  # a sum of finite weights is finite in float32, and needs no memory for a mask
        sums = ((name, weight.sum(dtype=torch.float32)) for name, weight in model.named_parameters())
        broken = [name for name, total in sums if not total.isfinite()]
    if broken:
        raise UserError(
            f"{key} must name a checkpoint with finite weights (all results would be NaN), got {path!r} with "
            f"NaN or infinity in {', '.join(broken[:3])}; write or copy the checkpoint again"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


# Each returns the model at a path (its arguments are those of `_load` from `path` on): a causal LM, and a
# sequence classifier with one label.
load_causal_lm = partial(_load, AutoModelForCausalLM)
load_reward_model = partial(_load, AutoModelForSequenceClassification, key="model.reward")


def check_saved(folder: Path) -> None:
    """Check that a model that a run saved in `folder` can be loaded.

    Call this function before `from_pretrained` of a model class: transformers loads a folder without
    config.json as the default model of the class, which may have billions of parameters.

    Raises:
        UserError: config.json or weights are missing, truncated or malformed.
    """
    if defect := opened(folder).defect:
        raise UserError(
            f"{folder} must contain a whole model (config.json and weights), got a damaged folder "
            f"({defect}); copy the folder again, or choose another model of the run"
        )


def _without_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout rate of a model config to 0: all numbers whose name contains "drop"."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, int | float):
            setattr(config, name, 0.0)


def new_nano(nano: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    """Return a GPT-NeoX with random weights, in float32 and evaluation mode.

    Weights are drawn from torch's global generator. The weights of the projections into the residual stream
    are divided by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019).

    Args:
        nano: section with the sizes of the model.
        tokenizer: source of the vocabulary size and of the special tokens.
    """
    made = nano.architecture(len(tokenizer))
    config = AutoConfig.for_model(
        **made,
        initializer_range=made["hidden_size"] ** -0.5,  # with 0.02, a narrow model learns to copy much later
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    _without_dropout(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=nano.loaded_attention)
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            for product in (layer.attention.dense, layer.mlp.dense_4h_to_h):
                product.weight.div_((2 * made["num_hidden_layers"]) ** 0.5)
    return model.eval()


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer to `folder`, so that `from_pretrained(folder)` loads them.

    LoRA adapters are merged into the weights; the saved weights are then float32. Generation with the saved
    model stops at the end token of the tokenizer.

    Args:
        model: the model; its weights are saved as safetensors.
        tokenizer: the tokenizer.
        folder: where the files are written.
        state_dict: weights to save, for example gathered from all ranks; None: the weights of `model`.
    """
    end = tokenizer.eos_token_id
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            stated = config.eos_token_id
            ends = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
            if end not in ends:
                config.eos_token_id = [end, *ends] if ends else end
    adapted = is_adapted(model)
    if state_dict is None and adapted:
        state_dict = dict(whole_weights(model))
    model.save_pretrained(folder, state_dict=state_dict)
    if adapted:  # the saved weights are float32, but the frozen weights may have 16 bits
        model.config.dtype = torch.float32
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_context(config: PreTrainedConfig, prompt_length: int, response_length: int) -> str | None:
    """Return an error message if prompt and response together are too long for the model, else None.

    Args:
        config: config of the model.
        prompt_length: longest prompt in tokens.
        response_length: longest response in tokens.
    """
    settings = config.to_dict()
    return context_problem(ModelFacts(settings).context, prompt_length, response_length) or rope_problem(
        settings, prompt_length, response_length
    )
