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
from rlhf.core.errors import setting
from rlhf.core.machine import this_machine
from rlhf.models.folder import (
    context_problem,
    folder_problem,
    is_local,
    on_this_machine,
    similar_folder,
)
from rlhf.models.headers import (
    ENDS,
    LOOKS_SPECIAL,
    ModelFolder,
    TokenizerHeader,
    choose_pad_token,
    end_ids,
    pad_problem,
    pad_remedy,
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
    for key, path in _named_models(cfg):
        if problem := folder_problem(key, path):
            yield problem
        elif is_local(path) and (found := on_this_machine(path)) is not None:
            contexts.append(found.context)
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
    lengths = cfg.task.max_prompt_tokens, cfg.generator.response_length
    if problem := context_problem(context, *lengths):
        yield problem
    for _, path, model in _sound(cfg):
        if is_local(path) and (problem := context_problem(None, *lengths, model.original_context)):
            yield problem
            return


def _named_models(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the config key and the value (hub name or folder) of every model that the config names."""
    found = {f"model.{name}": getattr(cfg.model, name) for name in ("base", "policy", "reference", "reward")}
    yield from ((key, path) for key, path in found.items() if path is not None)
    yield from _reward_models(cfg, None)


def _reward_models(cfg: Config, default: str | None) -> Iterator[tuple[str, str]]:
    """Yield the config key and the value of the model of each scorer; `default` is that of model.reward."""
    for at, scorer in scorers(cfg):
        if (named := scorer.reward_model(at, default)) is not None:
            yield named


# Rules for the content of model folders: kind of model, vocabulary, tokenizer, special tokens, adapters.
#
# The rules read config.json, tokenizer files and the headers of weights, never the weights. They cover local
# folders and downloaded hub models; other hub models are checked when they are loaded. A local folder that
# `_models` refuses is skipped here.


_CAUSAL = ("model.base", "model.policy", "model.reference")  # keys of causal language models


def _sound(cfg: Config, *paths: str | None) -> Iterator[tuple[str, str, ModelFolder]]:
    """Yield key, value and files of each model on this machine whose folder has no evident defect.

    Args:
        cfg: the config, which names the models.
        paths: values to look at; none: those of all models that the config names.
    """
    for key, path in [("", path) for path in paths if path] if paths else _named_models(cfg):
        found = on_this_machine(path)
        if found is not None and not (is_local(path) and folder_problem(key, path)):
            yield key, path, found


def tokenizer_in(path: str | None) -> TokenizerHeader | None:
    """Return the tokenizer of the model `path`, or None if its files do not show it."""
    found = None if path is None else on_this_machine(path)
    return None if found is None else found.tokenizer


@rule
def _kinds_of_models(cfg: Config) -> Iterator[str]:
    # transformers may learn further types of models from model folders or from plugins
    learns = cfg.model.trust_remote_code or bool(entry_points(group=catalogue.GROUP))
    for key, path, model in _sound(cfg):
        if (kind := model.unknown_type) is not None and not learns:
            remedy = "correct model_type in its config.json, or run: pip install -U transformers"
            if "auto_map" in model.config:  # the model comes with code of its own
                remedy = "set model.trust_remote_code=true to run the code in its folder"
            yield (
                f"{key} must name a model that the installed transformers knows, got {path!r} of type "
                f"{kind!r}; {remedy}"
            )
        elif "quantization_config" in model.config:
            yield (
                f"{key} must name a model with float weights (quantized weights are not supported), got "
                f"{path!r}, whose config.json has a quantization_config; set {key}=<the model before "
                "quantization>"
            )
        elif key not in _CAUSAL:
            if (found := model.not_reward()) is not None:
                yield (
                    f"{key} must name a reward model (a sequence classifier with one label and a head named "
                    f"score), got {path!r}, {found}; train one with algo=reward model.policy=<model>"
                )
        elif (found := model.not_causal()) is not None:
            if cfg.algo.trains is Trains.reward and model.is_classifier:
                continue  # a reward model may start from a classifier: see `_new_head`
            yield (
                f"{key} must name a causal language model (it predicts the next token), got {path!r}, "
                f"{found}; set {key}=<hub name or folder>"
            )


@doubt
def _new_head(cfg: Config) -> Iterator[str]:
    path = cfg.model.policy
    model = on_this_machine(path) if cfg.algo.trains is Trains.reward and path is not None else None
    if model is not None and model.is_classifier:
        yield f"the head of model.policy={path} (a sequence classifier) is replaced by a random head"


@rule
def _tokenizers_are_readable(cfg: Config) -> Iterator[str]:
    own, path = tokenizer_of(cfg)
    wanted = [] if path is None else [(own, path, "set model.tokenizer=<hub name or folder>")]
    copy = "copy the files of its tokenizer into the folder"
    wanted += [(key, name, copy) for key, name in _reward_models(cfg, cfg.model.reward)]
    for key, name, remedy in wanted:
        found = on_this_machine(name) if is_local(name) else None
        if found is None or (key != "model.tokenizer" and folder_problem(key, name)):
            continue
        if (defect := found.tokenizer_defect) is not None:
            yield f"{key} must come with its tokenizer (tokenizer.json), got {name!r} with {defect}; {remedy}"


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
    # The chat template may end a turn of a dialogue with another token.
    has_template = tokenizer.template is not None or cfg.model.chat_template is not None
    dialogues = has_template and (cfg.reads_pairs or has_dialogues(cfg.task) is not False)
    known = None if dialogues else end
    if wanted is None and "pad_token" in special and pad in (None, known):
        models = (on_this_machine(each) for each in (path, cfg.start) if each is not None)
        files = (model.path / name for model in models if model is not None for name in ENDS)
        template = tokenizer.template if cfg.model.chat_template is None else None
        used = {known, *end_ids(*files)}
        pad = choose_pad_token(tokenizer.ids, used, special.get("bos_token"), template or "") or pad
    if wanted is not None or "pad_token" in special:
        end = known if wanted or pad else end
        problem = pad_problem("model.pad_token", wanted, path, tokenizer.ids, pad, end)
        if problem is not None:
            yield problem


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
def _vocabularies(cfg: Config) -> Iterator[str]:
    """Yield an error for each model that lacks embeddings for tokens of the tokenizer that encodes its texts.

    A reward model has its own tokenizer. If this is the tokenizer of the policy, the reward model reads the
    ids that the policy samples, and only ids of tokens are sampled.
    """
    key, path = tokenizer_of(cfg)
    tokenizer, start = tokenizer_in(path), _start_key(cfg)
    for own, name, model in _sound(cfg):
        rows, header = model.vocabulary, model.tokenizer
        if own not in _CAUSAL and rows is not None and header is not None and header.largest_id >= rows:
            yield (
                f"{own} must have an embedding for every token of its tokenizer, got ids up to "
                f"{header.largest_id} in the tokenizer of {name!r} and {rows} embeddings; set "
                f"{own}=<a folder with the tokenizer of the model>"
            )
        if tokenizer is None or own not in (start, "model.reference"):
            continue
        reference = own == "model.reference"
        if rows is not None and tokenizer.largest_id >= rows:
            kind = "a model with the vocabulary of the policy" if reference else "the tokenizer of the model"
            yield (
                f"{own if reference else key} must fit the model (every token id needs an embedding), got "
                f"ids up to {tokenizer.largest_id} in the tokenizer of {path!r} and {rows} embeddings in "
                f"{name!r}; set {own if reference else 'model.tokenizer'}=<{kind}>"
            )
        elif reference and header is not None:
            ids = header.ids  # tokens of only one tokenizer do not count
            other = next((each for each, id in tokenizer.ids.items() if ids.get(each, id) != id), None)
            if other is not None:
                yield (
                    "model.reference must have the vocabulary of the policy (both read the same token ids), "
                    f"got {name!r}, in which {other!r} has another id than in {path!r}; set "
                    "model.reference=<a model with the vocabulary of the policy>"
                )


@training_rule
def _layers_with_adapters(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    if lora.rank < 1 or not lora.targets:
        return
    for _, _, model in _sound(cfg, cfg.start):
        layers = model.linear_layers()
        available = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        for target in lora.targets if layers else ():
            if not any(f".{name}".endswith(f".{target}") for name in layers):
                yield (
                    f"model.lora.targets must name linear layers below the model's head ({available}), got "
                    f"{target}; set model.lora.targets=null for all layers"
                )


@doubt
def _large_adapters(cfg: Config) -> Iterator[str]:
    rank = cfg.model.lora.rank
    for _, _, model in _sound(cfg, cfg.start):
        width = model.config.get("hidden_size")
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
