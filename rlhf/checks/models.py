"""Rules for models and the content of their folders."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from rlhf.checks.rules import (
    RULES,
    TRAINING_RULES,
    Allowed,
    When,
    chosen,
    doubt,
    must,
    one_of,
    rule,
    training_rule,
)
from rlhf.config.algorithms import Trains
from rlhf.config.backends import Device
from rlhf.config.models import Dtype, float16_needs_gpu
from rlhf.config.root import Config
from rlhf.config.scorers import scorers
from rlhf.core import machine
from rlhf.core.errors import setting
from rlhf.core.machine import this_machine
from rlhf.models import folder as kinds
from rlhf.models.folder import (
    context_length,
    context_problem,
    folder_problem,
    is_local,
    read_config,
    rope_problem,
    similar_folder,
)
from rlhf.models.headers import (
    ENDS,
    LOOKS_SPECIAL,
    DamagedFile,
    TensorHeader,
    TokenizerHeader,
    choose_pad_token,
    end_ids,
    linear_layers,
    pad_problem,
    pad_remedy,
    tokenizer_header,
    weight_headers,
)
from rlhf.tasks.files import has_dialogues
from rlhf.words import catalogue

# Rules for models: which must be named, local folders, context length, dtype, adapters, the value model.


_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def _value_model_has_no_start(cfg: Config) -> bool:
    made = cfg.makes_models and cfg.scorer.reads_reward
    return chosen(cfg, "algo.value_from") == "reward" and not made and cfg.value_reward is None


_PORTABLE = When("with backend.portable=true", lambda cfg: cfg.backend.portable)

RULES += [
    must("backend", "torch", _PORTABLE, "other engines may compile kernels for this processor"),
    must("model.dtype", "float32", _PORTABLE, "some processors have kernels for 16 bits"),
    must(
        "backend.device",
        "cpu",
        When(_PORTABLE.text, lambda cfg: _PORTABLE.holds(cfg) and bool(this_machine().gpus)),
        "a GPU computes other bits",
    ),
    must(
        "backend.compile",
        one_of(None, False),
        _PORTABLE,
        "it compiles for this processor",
        "backend.compile=null",
    ),
    must(
        "generator",
        Allowed("sample with transformers", lambda generator: not generator.packages),
        _PORTABLE,
        "vLLM has kernels of its own for each processor",
        fix="generator=hf",
    ),
    must(
        "model.dtype",
        one_of("float32", "bfloat16"),
        When("with backend={backend}", lambda cfg: not cfg.backend.scales_loss),
        "it does not scale the loss, without which small gradients are 0",
        fix="model.dtype=bfloat16",
    ),
    must(
        "model.lora.rank",
        0,
        When(
            "for algo={algo} without model.base",
            lambda cfg: cfg.algo.trains is Trains.base and cfg.model.base is None,
        ),
        "adapters need a pretrained model",
    ),
    must(
        "model.reward",
        Allowed("name a reward model", lambda path: path is not None),
        When("for algo.value_from=reward", _value_model_has_no_start),
        "the value model starts from it",
        fix="model.reward=<hub name or folder> or algo.value_from=policy",
    ),
]

TRAINING_RULES += [
    must(
        "backend.compile",
        one_of(None, False),
        When("with backend={backend}", lambda cfg: not cfg.backend.compiles),
        "DeepSpeed changes the modules of a model",
        fix="backend.compile=null, or backend=torch",
    )
]


@rule
def _float16_has_a_gpu(cfg: Config) -> Iterator[str]:
    if cfg.model.dtype is Dtype.float16 and cfg.backend.device is Device.cpu:
        yield float16_needs_gpu("backend.device=cpu")


@rule
def _flash_attention_can_run(cfg: Config) -> Iterator[str]:
    name, device = cfg.model.attention, cfg.backend.device
    if name not in _FLASH_PACKAGES:
        return
    package = _FLASH_PACKAGES[name]
    if device is Device.cpu or not this_machine().gpus:
        yield (
            "model.attention must be sdpa without a GPU (flash attention has no kernels for CPUs), got "
            f"{name}; set model.attention=sdpa"
        )
    elif cfg.model.dtype is Dtype.float32:
        yield (
            "model.attention must be sdpa with model.dtype=float32 (flash attention computes in 16 bits), "
            f"got {name}; set model.dtype=bfloat16 or model.attention=sdpa"
        )
    elif importlib.util.find_spec(package) is None and importlib.util.find_spec("kernels") is None:
        install = "run: pip install flash-attn --no-build-isolation, or " if package == "flash_attn" else ""
        yield (
            f"model.attention must be an installed implementation (Python finds no package {package}), got "
            f"{name}; {install}set model.attention=auto"
        )


@rule
def _fused_head_can_run(cfg: Config) -> Iterator[str]:
    if not cfg.model.fused_head:
        return
    reasons = {
        "without a GPU (Liger has no kernel for CPUs)": cfg.backend.device is Device.cpu
        or not this_machine().gpus,
        "with model.float32_head=true (Liger computes logits in 16 bits)": cfg.model.float32_head,
        f"with backend={cfg.backend.name} (Liger would keep the gathered weight)": (
            cfg.backend.footprint().gathered
        ),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        yield f"model.fused_head must be null or false {reason}, got true; set model.fused_head=null"
    elif importlib.util.find_spec("liger_kernel") is None:
        yield (
            "model.fused_head needs Liger Kernel, which is not installed, got true; run: "
            "pip install -e '.[liger]', or set model.fused_head=null"
        )


@rule
def _models_are_named(cfg: Config) -> Iterator[str]:
    if cfg.makes_models:
        return
    model = cfg.model
    wanted = {"base": model.base} if cfg.algo.trains is Trains.base else {"policy": model.policy}
    if cfg.scorer.reads_reward and not cfg.algo.supervised:
        wanted["reward"] = model.reward
    for key, value in wanted.items():
        if value is None:
            other = {"base": model.policy, "policy": model.base}.get(key)  # probably meant for this algorithm
            yield (
                f"model.{key} must name a model for task={cfg.task.name} (only embedded tasks make their "
                f"own), got null; set "
                + (setting(f"model.{key}", other) if other else f"model.{key}=<hub name or folder>")
            )


@rule
def _models(cfg: Config) -> Iterator[str]:
    contexts = []
    for key, path in named_models(cfg):
        if problem := folder_problem(key, path):
            yield problem
        elif is_local(path):
            contexts.append(context_length(path))
    tokenizer = cfg.model.tokenizer
    if tokenizer is not None and is_local(tokenizer) and not Path(tokenizer).expanduser().is_dir():
        file = Path(tokenizer).expanduser().is_file()
        close = str(Path(tokenizer).parent) if file else similar_folder(tokenizer)
        remedy = (
            f"did you mean model.tokenizer={close}?" if close else "set model.tokenizer=<hub name or folder>"
        )
        yield (
            "model.tokenizer must name a tokenizer on the hub or a folder that contains one (there is no "
            f"folder {tokenizer!r}), got {tokenizer!r}; {remedy}"
        )
    made = not cfg.stand_ins and cfg.model.policy is None and cfg.model.base is None
    if made and not contexts:
        contexts.append(cfg.model.context)
    context = min((c for c in contexts if c is not None), default=None)
    if problem := context_problem(context, cfg.task.max_prompt_tokens, cfg.generator.response_length):
        yield problem


@rule
def _encodings_of_positions(cfg: Config) -> Iterator[str]:
    lengths = cfg.task.max_prompt_tokens, cfg.generator.response_length
    for key, path in named_models(cfg):
        sound = is_local(path) and folder_problem(key, path) is None
        if sound and (problem := rope_problem(read_config(path) or {}, *lengths)):
            yield problem
            return


def named_models(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the config key and the value (hub name or folder) of every model that the config names."""
    found = {f"model.{name}": getattr(cfg.model, name) for name in ("base", "policy", "reference", "reward")}
    yield from ((key, path) for key, path in found.items() if path is not None)
    for at, scorer in scorers(cfg):
        if (named := scorer.reward_model(at, None)) is not None:
            yield named


# Rules for the content of model folders: kind of model, vocabulary, tokenizer, special tokens, adapters.
#
# The rules read config.json, tokenizer files and the headers of weights, never the weights. They cover local
# folders and downloaded hub models; other hub models are checked when they are loaded. A local folder that
# `rlhf.checks.models` refuses is skipped here.


_CAUSAL = ("model.base", "model.policy", "model.reference")  # keys of causal language models


def _folder_of(path: str) -> Path | None:
    """Return the folder with the files of a model; None if it is not downloaded, or has an evident defect."""
    if not is_local(path):
        return machine.cached_folder(path)
    return None if folder_problem("", path) else Path(path).expanduser()


def _folders(cfg: Config) -> Iterator[tuple[str, str, Path]]:
    """Yield key, value and folder of each model that the config names and that is on this machine."""
    for key, path in named_models(cfg):
        if (folder := _folder_of(path)) is not None:
            yield key, path, folder


def _tensors_of(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of the weights in `folder`; empty if they are not downloaded yet."""
    try:
        return weight_headers(folder)
    except DamagedFile:
        return {}


def tokenizer_in(path: str | None) -> TokenizerHeader | None:
    """Return the tokenizer of the model `path`, or None if its files do not show it."""
    folder = None if path is None else _folder_of_tokenizer(path)
    try:
        return None if folder is None else tokenizer_header(folder)
    except DamagedFile:
        return None


def _folder_of_tokenizer(path: str) -> Path | None:
    """Return the folder with the files of a tokenizer, which may contain no model; None if there is none."""
    folder = Path(path).expanduser() if is_local(path) else machine.cached_folder(path)
    return folder if folder is not None and folder.is_dir() else None


def _may_register_models(cfg: Config) -> bool:
    """Return whether transformers may learn further types of models: from model folders or from plugins."""
    return cfg.model.trust_remote_code or bool(entry_points(group=catalogue.GROUP))


@rule
def _kinds_of_models(cfg: Config) -> Iterator[str]:
    for key, path, folder in _folders(cfg):
        config = read_config(str(folder)) or {}
        if (kind := kinds.unknown_type(config)) is not None and not _may_register_models(cfg):
            remedy = "correct model_type in its config.json, or run: pip install -U transformers"
            if "auto_map" in config:  # the model comes with code of its own
                remedy = "set model.trust_remote_code=true to run the code in its folder"
            yield (
                f"{key} must name a model that the installed transformers knows, got {path!r} of type "
                f"{kind!r}; {remedy}"
            )
        elif "quantization_config" in config:
            yield (
                f"{key} must name a model with float weights (quantized weights are not supported), got "
                f"{path!r}, whose config.json has a quantization_config; set {key}=<the model before "
                "quantization>"
            )
        elif key not in _CAUSAL:
            if (found := kinds.not_reward(config, _tensors_of(folder))) is not None:
                yield (
                    f"{key} must name a reward model (a sequence classifier with one label and a head named "
                    f"score), got {path!r}, {found}; train one with algo=reward model.policy=<model>"
                )
        elif (found := kinds.not_causal(config)) is not None:
            if cfg.algo.trains is Trains.reward and kinds.is_classifier(config):
                continue  # a reward model may start from a classifier: see `new_head`
            yield (
                f"{key} must name a causal language model (it predicts the next token), got {path!r}, "
                f"{found}; set {key}=<hub name or folder>"
            )


@doubt
def _new_head(cfg: Config) -> Iterator[str]:
    path = cfg.model.policy
    if cfg.algo.trains is Trains.reward and path is not None and kinds.is_classifier(read_config(path) or {}):
        yield f"the head of model.policy={path} (a sequence classifier) is replaced by a random head"


@rule
def _tokenizers_are_readable(cfg: Config) -> Iterator[str]:
    key, path = tokenizer_of(cfg)
    wanted = [] if path is None else [(key, path, "set model.tokenizer=<hub name or folder>")]
    for key, path in _reward_models(cfg):
        wanted.append((key, path, "copy the files of its tokenizer into the folder"))
    for key, path, remedy in wanted:
        if not is_local(path) or (folder := _folder_of_tokenizer(path)) is None:
            continue
        if key != "model.tokenizer" and folder_problem(key, path):
            continue
        try:
            tokenizer_header(folder)
        except DamagedFile as defect:
            yield f"{key} must come with its tokenizer (tokenizer.json), got {path!r} with {defect}; {remedy}"


@rule
def _special_tokens(cfg: Config) -> Iterator[str]:
    key, path = tokenizer_of(cfg)
    tokenizer = tokenizer_in(path)
    if path is None or tokenizer is None:
        return
    special, wanted = tokenizer.special, cfg.model.pad_token
    end, pad = special.get("eos_token"), special.get("pad_token")
    if "eos_token" in special and end is None:
        yield (
            f"{key} must have a tokenizer with an end token (the model ends a response with it), got "
            f"{path!r} without one; set eos_token in its tokenizer_config.json"
        )
        return
    # With dialogues, the chat template determines the end token.
    known = None if _dialogues_may_end_otherwise(cfg, tokenizer) else end
    if wanted is None and "pad_token" in special and pad in (None, known):
        models = (_folder_of_tokenizer(each) for each in (path, cfg.start) if each is not None)
        files = (folder / name for folder in models if folder is not None for name in ENDS)
        template = tokenizer.template if cfg.model.chat_template is None else None
        used = {known, *end_ids(*files)}
        pad = choose_pad_token(tokenizer.ids, used, special.get("bos_token"), template or "") or pad
    if wanted is not None or "pad_token" in special:
        end = known if wanted or pad else end
        problem = pad_problem("model.pad_token", wanted, path, tokenizer.ids, pad, end)
        if problem is not None:
            yield problem


def _dialogues_may_end_otherwise(cfg: Config, tokenizer: TokenizerHeader) -> bool:
    """Return True if the run may have dialogues, and a chat template may end a turn with another token."""
    template = tokenizer.has_chat_template or cfg.model.chat_template is not None
    return template and (cfg.reads_pairs or has_dialogues(cfg.task) is not False)


@doubt
def _pad_token_of_texts(cfg: Config) -> Iterator[str]:
    pad, (_, path) = cfg.model.pad_token, tokenizer_of(cfg)
    tokenizer = None if pad is None else tokenizer_in(path)
    if tokenizer is not None and pad in tokenizer.ids and not LOOKS_SPECIAL.fullmatch(str(pad)):
        remedy = pad_remedy("model.pad_token", tokenizer.ids, tokenizer.special.get("eos_token"))
        yield f"model.pad_token={pad} is a token of ordinary texts, and texts must not contain it; {remedy}"


@rule
def _pad_tokens_of_reward_models(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        named, pad = scorer.reward_model(at, cfg.model.reward), scorer.pad_token
        if named is None or pad is None or (tokenizer := tokenizer_in(named[1])) is None:
            continue
        if (problem := pad_problem(f"{at}.pad_token", pad, named[1], tokenizer.ids, pad, None)) is not None:
            yield problem


@rule
def vocabularies(cfg: Config) -> Iterator[str]:
    """Yield an error for each model that lacks embeddings for tokens of the tokenizer that encodes its texts.

    A reward model has its own tokenizer. If this is the tokenizer of the policy, the reward model reads the
    ids that the policy samples, and only ids of tokens are sampled.
    """
    for own, name, folder in _folders(cfg):
        rows = _embeddings_of(folder)
        header = None if own in _CAUSAL else tokenizer_in(name)
        if rows is not None and header is not None and header.largest_id >= rows:
            yield (
                f"{own} must have an embedding for every token of its tokenizer, got ids up to "
                f"{header.largest_id} in the tokenizer of {name!r} and {rows} embeddings; set "
                f"{own}=<a folder with the tokenizer of the model>"
            )
    key, path = tokenizer_of(cfg)
    tokenizer = tokenizer_in(path)
    if tokenizer is None:
        return
    for own, name, folder in _folders(cfg):
        if own not in (_start_key(cfg), "model.reference"):
            continue
        rows = _embeddings_of(folder)
        if rows is not None and tokenizer.largest_id >= rows:
            reference = own == "model.reference"
            kind = "a model with the vocabulary of the policy" if reference else "the tokenizer of the model"
            yield (
                f"{own if reference else key} must fit the model (every token id needs an embedding), got "
                f"ids up to {tokenizer.largest_id} in the tokenizer of {path!r} and {rows} embeddings in "
                f"{name!r}; set {own if reference else 'model.tokenizer'}=<{kind}>"
            )
        elif own == "model.reference" and (token := _other_id(tokenizer, tokenizer_in(name))) is not None:
            yield (
                "model.reference must have the vocabulary of the policy (both read the same token ids), got "
                f"{name!r}, in which {token!r} has another id than in {path!r}; set model.reference=<a model "
                "with the vocabulary of the policy>"
            )


def _embeddings_of(folder: Path) -> int | None:
    """Return the number of rows of the embeddings in a model folder, or None if config.json lacks it."""
    config = read_config(str(folder)) or {}
    rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return rows if isinstance(rows, int) else None


def _other_id(one: TokenizerHeader, other: TokenizerHeader | None) -> str | None:
    """Return a token that has different ids in two tokenizers, or None; tokens of only one do not count."""
    ids = {} if other is None else other.ids
    return next((token for token, number in one.ids.items() if ids.get(token, number) != number), None)


@training_rule
def _layers_with_adapters(cfg: Config) -> Iterator[str]:
    lora, folder = cfg.model.lora, None if cfg.start is None else _folder_of(cfg.start)
    if lora.rank < 1 or not lora.targets or folder is None:
        return
    layers = linear_layers(read_config(str(folder)) or {}, _tensors_of(folder))
    available = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    for target in lora.targets if layers else ():
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            yield (
                f"model.lora.targets must name linear layers below the model's head ({available}), got "
                f"{target}; set model.lora.targets=null for all layers"
            )


@doubt
def _large_adapters(cfg: Config) -> Iterator[str]:
    rank, folder = cfg.model.lora.rank, None if cfg.start is None else _folder_of(cfg.start)
    width = None if folder is None or rank < 1 else (read_config(str(folder)) or {}).get("hidden_size")
    if isinstance(width, int) and rank > width:
        yield (
            f"model.lora.rank={rank} is more than the width of the model ({width}), so the adapters are "
            "larger than its weights; set model.lora.rank=16"
        )


def _start_key(cfg: Config) -> str:
    return "model.base" if cfg.algo.trains is Trains.base else "model.policy"


def tokenizer_of(cfg: Config) -> tuple[str, str | None]:
    """Return the key and the value that name the tokenizer of the trained model; None: the run makes it."""
    if cfg.model.tokenizer is not None:
        return "model.tokenizer", cfg.model.tokenizer
    return _start_key(cfg), cfg.start


def _reward_models(cfg: Config) -> Iterator[tuple[str, str]]:
    for at, scorer in scorers(cfg):
        if (named := scorer.reward_model(at, cfg.model.reward)) is not None:
            yield named
