"""LoRA adapters through PEFT: small trained matrices beside the frozen linear layers of a model.

    y = x W^T + (alpha / rank) (x A^T) B^T      # A [rank, in], B [out, rank]; B = 0 at the start

Source: Hu et al., arXiv 2106.09685. A model with adapters keeps its class and config: PEFT's layers replace
the model's linear layers, so forwards and generation work unchanged. This module adds adapters, runs a model
without its adapters, merges adapters into whole weights, and saves and loads adapters.

vLLM 0.32 can serve adapters, but gets merged weights. An adapter has no version: tokens name that of the base
model, so neither a load nor a token could be confirmed. If an adapter replaces another one during a response,
keys and values of the earlier tokens stay, so the log-probs of later tokens are those of neither adapter
(`tests/end_to_end/test_vllm_lora.py`). And an adapter must be a folder, and vLLM refuses heads that are
trained completely, and ranks outside of its list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.core.errors import RunError, UserError

if TYPE_CHECKING:
    from rlhf.config.model import LoRAConfig

NAME = "default"  # PEFT's name for the only adapter
_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of the tensor names in FILE

# PEFT and the 8-bit optimizer import bitsandbytes, which warns on some CPUs that a kernel for quantized
# models is missing; no model of this project is quantized.
logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)

_Gather = Callable[[Iterable[Tensor]], AbstractContextManager[Any]]  # returns a context with whole parameters


def adapt(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Add float32 adapters to `model` in place, and freeze all weights that are not trained.

    The modules in `config.modules_to_save` are trained whole. The head of a sequence classifier is always
    trained whole, because the head is often new.

    Args:
        model: the model.
        config: rank, alpha, names of the layers with adapters, and names of the modules trained whole.
        seed: seed of the initial adapter weights.

    Raises:
        UserError: a name in `config.targets` or `config.modules_to_save` matches no module, or matches a
            module that cannot have an adapter or be trained whole.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    classifies = model.get_output_embeddings() is None
    targets = _chosen_targets(model, config.targets)
    whole = _chosen_modules(model, config.modules_to_save, targets)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        modules_to_save=whole + ["score"] * (classifies and "score" not in whole) or None,
        task_type=TaskType.SEQ_CLS if classifies else TaskType.CAUSAL_LM,
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def is_adapted(model: PreTrainedModel) -> bool:
    """Return True if the model has adapters."""
    return bool(getattr(model, "peft_config", None))


def _chosen_targets(model: PreTrainedModel, names: list[str] | None) -> list[str]:
    """Return the ends of the names of the linear layers that get adapters, sorted.

    Args:
        model: the model.
        names: ends of layer names, as in `model.lora.targets`; None selects all linear layers below the head.

    Raises:
        UserError: a name matches no linear layer below the head.
    """
    below = set(model.base_model.modules())
    linear = [
        name
        for name, module in model.named_modules()
        if module in below and isinstance(module, nn.Linear | Conv1D)
    ]
    available = sorted({name.rpartition(".")[2] for name in linear})
    if names is None:
        return available
    for target in names:
        if not any(_matches(name, target) for name in linear):
            raise UserError(
                "model.lora.targets must name linear layers below the model's head "
                f"({', '.join(available)}), got {target}; set model.lora.targets=null for all layers"
            )
    return sorted(set(names))


def _chosen_modules(model: PreTrainedModel, names: list[str], targets: list[str]) -> list[str]:
    """Return the full names of the modules that are trained whole, without duplicates.

    Args:
        model: the model.
        names: ends of module names, as in `model.lora.modules_to_save`.
        targets: names of the layers that get adapters.

    Raises:
        UserError: a name matches no module, or matches a module that cannot be trained whole.
    """
    chosen: list[str] = []
    tied = [model.get_input_embeddings(), model.get_output_embeddings()]
    for wanted in names:
        matching = {name: m for name, m in model.named_modules() if _matches(name, wanted)}
        if not matching:
            simple = sorted(
                {
                    name.rpartition(".")[2]
                    for name, module in model.named_modules()
                    if next(module.parameters(recurse=False), None) is not None
                }
            )
            raise UserError(
                f"model.lora.modules_to_save must name modules of the model ({', '.join(simple)}), "
                f"got {wanted}; set model.lora.modules_to_save=[]"
            )
        for name, module in matching.items():
            inside = [name, *(f"{name}.{child}" for child, _ in module.named_modules() if child)]
            if isinstance(module, nn.ModuleList) or any(_matches(i, t) for i in inside for t in targets):
                raise UserError(
                    "model.lora.modules_to_save must name modules that can be trained whole (no module with "
                    f"adapters, no list of modules), got {wanted}; remove {wanted}, or set "
                    "model.lora.targets to other layers"
                )
            if module in tied and model.config.get_text_config().tie_word_embeddings:
                raise UserError(
                    "model.lora.modules_to_save must not name the embeddings of a model whose input and "
                    f"output embeddings are tied (they would differ after training), got {wanted}; "
                    f"remove {wanted}"
                )
        chosen += matching
    return list(dict.fromkeys(chosen))


def _matches(name: str, wanted: str) -> bool:
    """Return True if `wanted` is the module name `name`, or the last dotted parts of `name`."""
    return name == wanted or name.endswith(f".{wanted}")


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which `model` runs with its weights from before `adapt`.

    Adapters are disabled, and modules that are trained whole use their original weights.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def whole_weights(
    model: PreTrainedModel, gather: _Gather = lambda parameters: nullcontext()
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight of `model`, under Hugging Face's names, one tensor at a time.

    The model is not changed. If the model has adapters, weights are float32 and adapters are merged:
    W + (alpha / rank) B A. Otherwise the tensors are yielded unchanged.

    Args:
        model: the model, with or without adapters.
        gather: returns a context in which the given parameters are whole; needed if a backend shards
            parameters.
    """
    adapted = is_adapted(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        before, wrapped, after = name.partition(".base_layer.")
        if wrapped and after == "weight":
            layer: Any = model.get_submodule(before)
            with gather([tensor, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]):
                yield f"{before}.weight", tensor.float() + layer.get_delta_weight(NAME).float()
        elif ".lora_" not in name and ".original_module." not in name:
            plain = name.replace(".base_layer.", ".").replace(f".modules_to_save.{NAME}.", ".")
            with gather([tensor]):
                whole = tensor.detach()
                yield plain, whole.float() if adapted and whole.is_floating_point() else whole


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the trained tensors of a model with adapters (not copies), under PEFT's names."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the trained tensors of a model with adapters to `folder`, in PEFT's format.

    Both `load_adapter` and `PeftModel.from_pretrained(base model, folder)` read the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = copy(model.peft_config[NAME])
    settings.inference_mode = True
    settings.target_modules = sorted(settings.target_modules)  # a list, because PEFT keeps a set
    settings.save_pretrained(str(folder))
    tensors = {name: tensor.detach().contiguous() for name, tensor in adapter_weights(model).items()}
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy the tensors that `save_adapter` wrote into the adapters of `model`.

    Raises:
        RunError: the tensor names in the file differ from those of the model's adapters.
    """
    saved, own = load_file(folder / _FILE), adapter_weights(model)
    if different := saved.keys() ^ own.keys():
        raise RunError(
            f"{folder / _FILE} must have the tensors of the adapters of this run (file and adapters must "
            f"have the same layers), got {min(different)} in only one of the two; set resume=never to start "
            "again"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
