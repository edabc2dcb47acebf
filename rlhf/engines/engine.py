"""What an engine is to the rest: the model that is trained, and all that knows of devices and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rlhf.batch import Batch, Rollouts
from rlhf.metrics import Metrics
from rlhf.models import ActorCritic, OverRollouts, Policy, RewardModel
from rlhf.objectives.objective import Objective


class NonFinite(RuntimeError):
    """A loss or gradient norm that is NaN or infinite; the weights are still those before the step."""

    def __init__(self, what: str, index: Tensor) -> None:
        super().__init__(what)
        self.what = what
        self.index = index.tolist()  # rows of the task's data set in the minibatch, for replay


class Engine(Protocol):
    """Trains `module` against an objective, and holds the frozen `reference`."""

    module: Policy | RewardModel | ActorCritic
    reference: Policy | None

    @property
    def policy(self) -> Policy:
        """The policy that is trained, without its value model."""

    def infer(self, module: OverRollouts, rollouts: Rollouts, field: str) -> Tensor:
        """The output `field` of `module`, without gradient: [N, K, T], [N, K, T+1] or [N, K]."""

    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill in what the objective `needs` (see `Objective.needs`)."""

    def step(self, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step on a minibatch: each sum of losses divided by its global count, once.

        Raises:
            NonFinite: the loss or the gradient norm is not finite; no weight has changed.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the Hugging Face model that is sampled from, one tensor at a time."""

    def borrow_policy(self) -> AbstractContextManager[PreTrainedModel]:
        """The Hugging Face model that is trained, whole and on this device, to generate in this process."""

    def save_model(self, folder: Path) -> None:
        """Write the model that is trained in Hugging Face format."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`."""

    def load(self, folder: Path) -> None:
        """Stand where `save(folder)` stood."""

    def peak_gib(self) -> float:
        """Largest memory in use so far, in GiB: of the GPU where there is one, else of this process."""
