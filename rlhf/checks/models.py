"""Rules for models: which must be named, local folders, context length, dtype, adapters, the value model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from rlhf.checks.rules import RULES, TRAINING_RULES, Allowed, When, chosen, must, one_of, rule
from rlhf.config.algo import Trains
from rlhf.config.backend import Device
from rlhf.config.model import Dtype, float16_needs_gpu
from rlhf.config.root import Config
from rlhf.config.scorer import scorers
from rlhf.core.machine import this_machine
from rlhf.core.pasting import setting
from rlhf.models.folders import (
    context_length,
    context_problem,
    folder_problem,
    is_local,
    read_config,
    rope_problem,
    similar_folder,
)

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
