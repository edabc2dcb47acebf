"""LoRA through PEFT: small matrices beside the linear layers of a model, whose own weights stay as they are.

    y = x W^T + (alpha / rank) (x A^T) B^T      # A [rank, in], B [out, rank]; B = 0 at the start

(Hu et al., arXiv 2106.09685.) A model with adapters keeps its class and config; PEFT's layers stand in the
place of its own, so it is run, and generated from, as before. What is to be known of it beyond that is here:
what of it is trained, how it runs without adapters, what its whole weights are in the names of Hugging Face.
"""

from __future__ import annotations

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


FILE = "adapter_model.safetensors"


PREFIX = "base_model.model."  # of the names in that file


Gather = Callable[[Iterable[Tensor]], AbstractContextManager[Any]]


def adapt(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Give `model` adapters, drawn by `seed`, in place: these are trained, in float32; all else is frozen.

    The head of a sequence classifier is trained whole, beside `modules_to_save`: it is often a new one.

    Raises:
        UserError: a name of `targets` or `modules_to_save` matches nothing in the model, or something that
            cannot be trained so.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    classifies = model.get_output_embeddings() is None
    targets = chosen_targets(model, config.targets)
    whole = chosen_modules(model, config.modules_to_save, targets)
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
    """Whether the model has adapters."""
    return bool(getattr(model, "peft_config", None))


def chosen_targets(model: PreTrainedModel, names: list[str] | None) -> list[str]:
    """The linear layers that get adapters, by the last part of their names; None: all below the head."""
    below = set(model.base_model.modules())
    linear = [
        name
        for name, module in model.named_modules()
        if module in below and isinstance(module, nn.Linear | Conv1D)
    ]
    there = sorted({name.rpartition(".")[2] for name in linear})
    if names is None:
        return there
    for target in names:
        if not any(matches(name, target) for name in linear):
            raise UserError(
                f"model.lora.targets must name linear layers below the model's head ({', '.join(there)}), "
                f"got {target}; set model.lora.targets=null for all of them"
            )
    return sorted(set(names))


def chosen_modules(model: PreTrainedModel, names: list[str], targets: list[str]) -> list[str]:
    """The modules that are trained whole, by their full names."""
    found: list[str] = []
    tied = [model.get_input_embeddings(), model.get_output_embeddings()]
    for wanted in names:
        matching = {name: m for name, m in model.named_modules() if matches(name, wanted)}
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
            if isinstance(module, nn.ModuleList) or any(matches(i, t) for i in inside for t in targets):
                raise UserError(
                    "model.lora.modules_to_save must name modules that can be trained whole (none with "
                    f"adapters of its own, no list of modules), got {wanted}; leave it out, or set "
                    "model.lora.targets to other layers"
                )
            if module in tied and model.config.get_text_config().tie_word_embeddings:
                raise UserError(
                    "model.lora.modules_to_save must not name the embeddings of a model whose output "
                    f"embeddings are its input embeddings (they would be two after training), got {wanted}; "
                    "leave it out"
                )
        found += matching
    return list(dict.fromkeys(found))


def matches(name: str, wanted: str) -> bool:
    """Whether the module `name` is meant by `wanted`, a full name or the end of one."""
    return name == wanted or name.endswith(f".{wanted}")


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before `adapt`, modules that are trained whole too, for the time being."""
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
    model: PreTrainedModel, gather: Gather = lambda parameters: nullcontext()
) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model` in the names of Hugging Face, one tensor at a time, without changing any.

    Adapters are merged, in float32: W + (alpha / rank) B A. Of a model without any, they are as they are.
    `gather` is the context in which given parameters are whole, where a backend divides them over ranks.
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
    """What is trained of a model with adapters, by PEFT's names: the tensors themselves."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {f"{PREFIX}{name}": tensor for name, tensor in found.items()}


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write what is trained, for `load_adapter` and for `PeftModel.from_pretrained(base model, folder)`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = copy(model.peft_config[NAME])
    settings.inference_mode = True
    settings.target_modules = sorted(settings.target_modules)  # PEFT makes a set of them
    settings.save_pretrained(str(folder))
    tensors = {name: tensor.detach().contiguous() for name, tensor in adapter_weights(model).items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Give a model with adapters the values that `save_adapter` wrote.

    Raises:
        RunError: they are those of other adapters.
    """
    saved, own = load_file(folder / FILE), adapter_weights(model)
    if unlike := saved.keys() ^ own.keys():
        raise RunError(
            f"{folder / FILE} must have the tensors of the adapters of this run, and only one of the two has "
            f"{min(unlike)}; set resume=never to start again"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
