"""The interface of a generator, which processes requests and weight loads first in, first out.

A new generator needs four files: a section in `rlhf/config/generator.py` that names its part
(`@option("generator", "mine", part="module:function")`), the part, `conf/generator/mine.yaml`, and a test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.core.phases import Phases

if TYPE_CHECKING:
    from rlhf.config.model import ModelConfig
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.processes.ranks import Ranks
    from rlhf.processes.service import ServiceFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorContext:
    """The parts and settings of a run that a generator is built from, besides its config section.

    Args:
        policy: the Hugging Face model that the run trains (with `algo=reward` a reward model).
        borrow: returns a context that yields `policy`, for sampling in this process.
        tokenizer: the policy's tokenizer.
        ranks: the ranks of the run, and the device of this rank.
        folder: the run folder, for the logs of generator processes.
        model: the config section `model`.
        prompt_tokens: the maximum number of tokens of a prompt.
        seed: the seed of the run.
        max_lag: later rollout batches in flight while a batch is trained on (`schedule.max_lag`).
        in_flight: whether weights change while a request runs (`schedule.update=in_flight`).
        threads: CPU threads of each generator process; None: the default of torch.
        annotator: factory that creates the annotator inside its process.
        asks_service: whether the scorer of the annotator waits for the answers of a service.
        cached: whether the Hugging Face sampler can use a cache of keys and values with this model.
        stop_ids: ids of the tokens that end a response.
        environment: makes the environments that answer replies; None: a response is one reply.
        phases: the phases of the run, for its progress display; a generator in this process enters them.
    """

    policy: PreTrainedModel
    borrow: Callable[[], AbstractContextManager[PreTrainedModel]]
    tokenizer: PreTrainedTokenizerFast
    ranks: Ranks
    folder: Path
    model: ModelConfig
    prompt_tokens: int
    seed: int
    max_lag: int
    in_flight: bool
    threads: int | None
    annotator: ServiceFactory
    asks_service: bool = False
    cached: bool = True
    stop_ids: Sequence[int]
    environment: EnvironmentFactory | None = None
    phases: Phases = field(default_factory=Phases)


class Generator(ABC):
    """A source of responses to prompts.

    Requests and loads are processed first in, first out. The responses of a request are sampled by the
    weights of the last load before the request, and the rollouts have the version of these weights. With
    `schedule.update=in_flight`, loads overtake requests, and the rollouts have a version for every token.

    Raises:
        RunError: from any method or future, if the generator cannot continue.
    """

    @abstractmethod
    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt; the future returns the rollouts."""

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights of a version, for the requests submitted after this call."""

    def wait(self) -> None:  # noqa: B027
        """Wait until `load` can copy a new version of the weights; by default, do not wait.

        A generator keeps a limited number of versions. `load` waits as well if this method was not called.
        """

    def resume(self, rollouts: Rollouts) -> Future[Rollouts]:
        """Return a future of rollouts that a checkpoint contains, as `submit` would return them."""
        return finished(rollouts)

    @property
    def slots(self) -> int:
        """The number of responses that are sampled at a time, if the generator samples single responses.

        Such a generator takes requests with one sample that name the sample (`Sampling.begun`).
        """
        raise NotImplementedError

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that may sample a response that is requested now."""
        raise NotImplementedError

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Call a function, in another thread, whenever `oldest` may have changed."""
        raise NotImplementedError

    def cut(self, answer: Future[Rollouts]) -> None:
        """End a single response with the tokens that it has, at least one."""
        raise NotImplementedError

    def figures(self) -> Metrics:
        """Return metrics of the generator since the last call; by default none."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release the resources of the generator; by default there are none."""


def finished(rollouts: Rollouts) -> Future[Rollouts]:
    """Return a finished future with the result `rollouts`."""
    future: Future[Rollouts] = Future()
    future.set_result(rollouts)
    return future
