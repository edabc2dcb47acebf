"""The models that the trainer process of a run loads, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.config.policy_gradient import ValueFrom
from rlhf.config.scorer import scorers
from rlhf.memory.model_size import adapter_parameters, config_size, module_parameters, named_size
from rlhf.memory.tokens import without_gradient

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.memory.model_size import ModelSize


@dataclass(frozen=True, slots=True)
class Model:
    """A model in the trainer process."""

    role: str  # name in tables, for example "policy" or "reference"
    key: str  # config key that names the model
    name: str | None  # hub name or folder; None: an earlier stage makes the model
    size: ModelSize | None  # None: unknown
    trained: bool = False
    batch_size: int = 0  # sequences per forward pass without gradients
    adapters: int | None = None  # parameters trained beside frozen weights; None: the model has no adapters

    @property
    def counted(self) -> ModelSize:
        """The size of the model; may be read only if `size` is not None."""
        assert self.size is not None
        return self.size

    @property
    def trainable(self) -> int:
        """The number of parameters that have gradients and optimizer states."""
        if not self.trained:
            return 0
        return self.counted.parameters if self.adapters is None else self.adapters


def models(cfg: Config) -> Iterator[Model]:
    """Yield the models that the trainer process of the run `cfg` loads, trained models first."""
    model, algo, batch = cfg.model, cfg.algo, without_gradient(cfg)
    start = cfg.start
    policy = _size(cfg, start)
    key = "model.base" if algo.trains is Trains.base else "model.policy"
    if algo.trains is Trains.reward:
        yield _adapted(cfg, Model("reward model", key, start, policy and policy.scoring(), True, batch))
        return
    yield _adapted(cfg, Model("policy", key, start, policy, True, batch))
    if cfg.value_starts_as is not None:
        value = start
        if cfg.value_starts_as is ValueFrom.reward:
            key, value = "model.reward", cfg.value_reward
        size = _size(cfg, value)
        yield _adapted(cfg, Model("value model", key, value, size and size.scoring(), True, batch))
    if algo.trains is Trains.policy and not (model.lora.rank and model.starts_as_reference):
        name = model.reference or model.policy
        key = "model.reference" if model.reference else "model.policy"
        yield Model("reference", key, name, _size(cfg, name), False, batch)
    yield from _scoring_models(cfg)


def judges(cfg: Config) -> Iterator[Model]:
    """Yield the models of the judge, the only models that `rlhf.relabel` loads."""
    return (model for model in _scoring_models(cfg) if model.role == "judge")


def _scoring_models(cfg: Config) -> Iterator[Model]:
    """Yield the models of the training scorer and of the judge."""
    for at, scorer in scorers(cfg):
        if scorer.sequences:
            key, name = scorer.reward_model(at, cfg.model.reward) or ("model.reward", None)
            role = "judge" if at.startswith("gold") else "reward model"
            size = _size(cfg, name)
            yield Model(role, key, name, size and size.scoring(), False, scorer.sequences)


def _adapted(cfg: Config, model: Model) -> Model:
    """Return a trained model with the number of parameters that are trained beside the frozen weights.

    These are the adapters, a trained copy of the modules in `model.lora.modules_to_save`, and the head of a
    model with one output.
    """
    lora = cfg.model.lora
    if not lora.rank or model.size is None:
        return model
    whole = list(lora.modules_to_save)
    count = adapter_parameters(model.size, lora.rank, lora.targets)
    if model.size.vocabulary == 1:
        count += model.size.head
        whole = [name for name in whole if name != "score"]
    original = _size(cfg, model.name)
    assert original is not None, "the size of the model is known"
    return replace(model, adapters=count + module_parameters(model.name, original, whole))


def _size(cfg: Config, name: str | None) -> ModelSize | None:
    """Return the size of a model, or None if it is unknown.

    Args:
        cfg: the config of the run.
        name: hub name or folder; None: the model that is made for an embedded task.
    """
    if name is not None:
        return named_size(name)
    made = cfg.model.architecture(cfg.task.vocabulary_size)
    if not made or not cfg.task.embedded:
        return None
    return named_size(cfg.model.base) if cfg.model.base else config_size(made)
