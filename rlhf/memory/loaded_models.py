"""The models that a run loads, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.config.algo import PPOConfig, Trains, ValueFrom
from rlhf.config.model import NanoConfig
from rlhf.config.scorer import RewardModelScorerConfig, scorers
from rlhf.config.task import EmbeddedTaskConfig
from rlhf.memory.model_size import adapter_parameters, named_size, nano_size

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.memory.model_size import ModelSize


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the trainer's process. `key`: where the config names it; `size`: None where not known."""

    role: str
    key: str
    name: str | None  # hub name or folder; None: made on the way
    size: ModelSize | None
    trained: bool = False
    batch_size: int = 0  # sequences a forward without gradient
    adapters: int | None = None  # parameters of these, which are then trained alone

    @property
    def counted(self) -> ModelSize:
        """The size; a plan is made only where all are known."""
        assert self.size is not None
        return self.size

    @property
    def trainable(self) -> int:
        """Parameters that have gradients and optimizer states."""
        if not self.trained:
            return 0
        return self.counted.parameters if self.adapters is None else self.adapters


def models(cfg: Config) -> Iterator[Model]:
    """The models that the trainer's process of `cfg` loads, those that are trained first."""
    model, algo, batch = cfg.model, cfg.algo, cfg.backend.micro_batch
    start = cfg.start
    policy = size_of(cfg, start)
    key = "model.base" if algo.trains is Trains.base else "model.policy"
    if algo.trains is Trains.reward:
        yield adapted(cfg, Model("reward model", key, start, policy and policy.scoring(), True, batch))
        return
    yield adapted(cfg, Model("policy", key, start, policy, True, batch))
    if isinstance(algo, PPOConfig):
        value = start
        if cfg.value_starts_as is ValueFrom.reward:
            key, value = "model.reward", cfg.value_reward
        size = size_of(cfg, value)
        yield adapted(cfg, Model("value model", key, value, size and size.scoring(), True, batch))
    if algo.trains is Trains.policy and not (model.lora.rank and model.starts_as_reference):
        name = model.reference or model.policy
        key = "model.reference" if model.reference else "model.policy"
        yield Model("reference", key, name, size_of(cfg, name), False, batch)
    for at, scorer in scorers(cfg):
        if isinstance(scorer, RewardModelScorerConfig):
            key, name = (f"{at}.path", scorer.path) if scorer.path else ("model.reward", model.reward)
            role = "judge" if at.startswith("gold") else "reward model"
            size = size_of(cfg, name)
            yield Model(role, key, name, size and size.scoring(), False, scorer.batch_size)


def adapted(cfg: Config, model: Model) -> Model:
    """A model that is trained, with the adapters that the config wants; `modules_to_save` are not counted.

    A head of one number is trained whole.
    """
    lora = cfg.model.lora
    if not lora.rank or model.size is None:
        return model
    count = adapter_parameters(model.size, lora.rank, lora.targets)
    return replace(model, adapters=count + (model.size.head if model.size.vocabulary == 1 else 0))


def size_of(cfg: Config, name: str | None) -> ModelSize | None:
    """The size of the model `name`, or of the one that embedded tasks make; None where it is not known."""
    if name is not None:
        return named_size(name)
    if isinstance(cfg.model, NanoConfig) and isinstance(cfg.task, EmbeddedTaskConfig):
        return size_of(cfg, cfg.model.base) if cfg.model.base else made_size(cfg.model, cfg.task)
    return None


def made_size(model: NanoConfig, task: EmbeddedTaskConfig) -> ModelSize:
    """The size of the embedded model with the vocabulary of an embedded task."""
    return nano_size(model, task.vocabulary_size)
