"""Loading of tokenizers and models from the hub or local folders, creation of new models, and saving."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import cached_file

from rlhf.config.models import ModelConfig
from rlhf.core.errors import UserError
from rlhf.models.folder import fetch, first_line, folder_problem, is_local
from rlhf.models.headers import ENDS, TOKENIZER_FILES, choose_pad_token, end_ids, opened, pad_problem
from rlhf.models.modules import is_adapted, score_head, whole_weights

# Loading of tokenizers from the hub or local folders, and checks that a tokenizer fits a model.


def read_tokenizer(
    path: str, trust_remote_code: bool = False, key: str = "model.policy"
) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer at `path`, with padding on the left and the pad token of its files, if any.

    Raises:
        UserError: there is no fast tokenizer at `path`, its files are damaged, or it has no end token.
    """
    folder = Path(path).expanduser()
    if is_local(path) and folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(_without_tokenizer(key, path))
    try:
        tokenizer = fetch(AutoTokenizer, path, key, trust_remote_code=trust_remote_code, padding_side="left")
    except UserError:
        raise
    except Exception as error:  # damaged files: transformers and tokenizers have no exception class for them
        raise UserError(
            f"{key} must come with a tokenizer that can be read ({type(error).__name__}: "
            f"{first_line(error)}), got {path!r}; copy tokenizer.json and tokenizer_config.json again, or "
            "set model.tokenizer=<hub name or folder>"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{key} must come with a fast tokenizer (tokenizer.json), got {path!r}; choose another model"
        )
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(_without_tokenizer(key, path))  # transformers returns an empty tokenizer
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{key} must come with a tokenizer that has an end token (it ends every response), got {path!r} "
            f'with eos_token {tokenizer.eos_token!r}; set "eos_token" in its tokenizer_config.json, or set '
            "model.tokenizer=<hub name or folder>"
        )
    return tokenizer


def _without_tokenizer(key: str, path: str) -> str:
    """Return the error message for a model without tokenizer files."""
    return (
        f"{key} must come with its tokenizer (tokenizer.json), got {path!r} without a tokenizer; set "
        "model.tokenizer=<hub name or folder>"
    )


def set_pad_token(
    tokenizer: PreTrainedTokenizerFast, chosen: str | None, models: Collection[str] = ()
) -> str | None:
    """Set the pad token of the tokenizer of a model that is trained.

    Args:
        tokenizer: the tokenizer, which is changed.
        chosen: the value of `model.pad_token`. None: the pad token of the tokenizer; if it has none, or uses
            its end token as pad token, a token that stands for nothing (`choose_pad_token`).
        models: hub names or folders of models, whose end tokens are not used as pad token.

    Returns:
        A note about the pad token that was found for a tokenizer without one; None: it needed none.

    Raises:
        UserError: the pad token is missing, not in the vocabulary, or equal to the end token.
    """
    ids, path = tokenizer.get_vocab(), tokenizer.name_or_path
    pad, end = tokenizer.pad_token, tokenizer.eos_token
    found = None
    if chosen is None and pad in (None, end):
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        found = choose_pad_token(ids, {end, *declared_ends(models)}, tokenizer.bos_token, template)
    if problem := pad_problem("model.pad_token", chosen, path, ids, found or pad, end):
        raise UserError(problem)
    if chosen is not None:
        tokenizer.pad_token = chosen
    if found is not None:
        tokenizer.add_special_tokens({"pad_token": found})  # decoding then skips the token
        return f"{found} (chosen: the model has no own pad token; another one: model.pad_token=<token>)"
    return None


def declared_ends(models: Collection[str]) -> set[int]:
    """Return the ids of the end tokens that the files of models declare."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    files = []
    for model, name in product(models, ENDS):
        path = str(Path(model).expanduser()) if is_local(model) else model
        file = cached_file(path, name, local_files_only=True, **quiet)
        files.append(file if file or is_local(model) else cached_file(path, name, **quiet))
    return set(end_ids(*files))


def stop_ids(tokenizer: PreTrainedTokenizerFast, models: Collection[str]) -> list[int]:
    """Return the ids of all tokens that end a response, the end token of the tokenizer first.

    A chat model often declares two: the end of a turn and the end of a document.

    Args:
        tokenizer: the tokenizer of the run. Its end token is the end of a turn if the task has dialogues; the
            end token in its files also ends a response.
        models: hub names or folders of models, whose files declare further end tokens. Ids that no token of
            the tokenizer has are left out.
    """
    tokens = tokenizer.get_vocab()
    own, known = tokens.get(str(tokenizer.init_kwargs.get("eos_token"))), set(tokens.values())
    ends = [tokenizer.eos_token_id, own, *sorted(declared_ends(models))]
    return [number for number in dict.fromkeys(ends) if number in known]


def fill_pad_token(tokenizer: PreTrainedTokenizerFast, chosen: str | None, key: str) -> None:
    """Set the pad token of the tokenizer of a model that is only evaluated.

    Any token can be the pad token, because the masks exclude padding from every result.

    Args:
        tokenizer: the tokenizer, which is changed.
        chosen: the pad token; None selects the pad token of the tokenizer, or else its end token.
        key: config key of `chosen`, for error messages.

    Raises:
        UserError: the pad token is not in the vocabulary.
    """
    pad = chosen or tokenizer.pad_token or tokenizer.eos_token
    if problem := pad_problem(key, pad, tokenizer.name_or_path, tokenizer.get_vocab(), pad, end=None):
        raise UserError(problem)
    tokenizer.pad_token = pad


def same_tokens(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Return True if two tokenizers have the same vocabulary and the same end token."""
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, key: str = "model.tokenizer"
) -> None:
    """Check that every token id of the tokenizer has an embedding in the model.

    A tokenizer with fewer ids than embeddings is accepted.

    Args:
        model: the model.
        tokenizer: the tokenizer.
        key: config key of the tokenizer or of the model, for error messages.

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


# Loading of models from the hub or local folders, creation of new models, and saving.


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
    model = _load(transformers.AutoModelForSequenceClassification, path, **options)
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
            f"{key} must name a checkpoint of {type(model).__name__}, got {path!r} without "
            f"{', '.join(missing[:3]) or 'matching shapes'}; set {key}=<hub name or folder>"
        )
    head, tied = model.get_output_embeddings(), model.config.get_text_config().tie_word_embeddings
    if head is not None and tied and head.weight is not model.get_input_embeddings().weight:
        raise UserError(
            f"{key} must name a model whose config.json describes its weights (vLLM would use another head), "
            f"got {path!r} with tie_word_embeddings=true and another head; write false in its config.json"
        )
    if auto is transformers.AutoModelForSequenceClassification and model.config.num_labels != 1:
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
load_causal_lm = partial(_load, transformers.AutoModelForCausalLM)
load_reward_model = partial(_load, transformers.AutoModelForSequenceClassification, key="model.reward")


def load_mean_reward_model(paths: Sequence[str], dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Return a reward model whose weights are the means, in float32, of those at `paths` (arXiv 2401.12187).

    Models with equal weights have exactly these as means. At most two models are in memory at a time.

    Args:
        paths: hub names or local folders.
        dtype: dtype of the weights of the result.
        options: further arguments of `load_reward_model`.

    Raises:
        UserError: a model cannot be loaded, or has other parameters than the first one.
    """
    mean: dict[str, Tensor] = {}
    for number, path in enumerate(paths if len(paths) > 1 else (), 1):
        state = load_reward_model(path, torch.float32, **options).state_dict()
        mean = mean or dict(state)
        for name in {**mean, **state}:
            one, other = (tuple(each[name].shape) if name in each else "none" for each in (mean, state))
            if one != other:
                rule = f"{options['key']} must name models of one architecture (their weights are averaged)"
                got = f"got {name} {other} in {path!r} and {one} in {paths[0]!r}"
                raise UserError(f"{rule}, {got}; combine their scores: combine=mean")
            if mean[name].is_floating_point():
                mean[name] += (state[name] - mean[name]) / number
    made = load_reward_model(paths[0], dtype, **options)
    if mean:
        made.load_state_dict(mean)
    return made


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


def new_nano(nano: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> transformers.GPTNeoXForCausalLM:
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
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=nano.loaded_attention)
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
    for config in filter(None, (model.config, getattr(model, "generation_config", None))):
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
