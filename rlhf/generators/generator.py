"""The interface of a generator, and generators that wrap others or read stored rollouts."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow.parquet
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.config.generators import DatasetConfig
from rlhf.config.models import ModelConfig
from rlhf.core.batch import Prompts, Rollouts, Sampling, concatenated
from rlhf.core.errors import RunError, UserError
from rlhf.core.files import files, shared, vocabulary
from rlhf.core.metrics import Metrics
from rlhf.environments.environment import EnvironmentFactory
from rlhf.generators.weights import Manifest
from rlhf.processes.ranks import Ranks
from rlhf.processes.worker import Channel, Service
from rlhf.terminal.console import Phases
from rlhf.text.encoding import encode_completions, pad_prompts, padded

T = TypeVar("T")

# The interface of a generator, which processes requests and weight loads first in, first out.
#
# A new generator needs four files: a section in `rlhf/config/generators.py` that names its part
# (`@option("generator", "mine", part="module:function")`), the part, `conf/generator/mine.yaml`, and a test.


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
        annotator: creates the annotator inside its process; see `Worker`.
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
    annotator: Callable[[Channel], Service]
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

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: B027
        """Load the weights of a version, for the requests submitted after this call.

        By default, do nothing, because the responses do not depend on weights.
        """

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


class Wrapper(Generator):
    """A generator that passes to another one what a subclass does not do itself.

    Args:
        generator: the other generator.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into the other generator."""
        self.generator.load(weights, version)

    def wait(self) -> None:
        """Wait until the other generator can take new weights."""
        self.generator.wait()

    @property
    def slots(self) -> int:
        """The number of responses that are sampled at a time."""
        return self.generator.slots

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that may sample a response that is requested now."""
        return self.generator.oldest

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Call a function whenever `oldest` may have changed."""
        self.generator.when_loaded(call)

    def cut(self, answer: Future[Rollouts]) -> None:
        """End a single response with the tokens that it has."""
        self.generator.cut(answer)

    def figures(self) -> Metrics:
        """Return the metrics of the other generator."""
        return self.generator.figures()

    def close(self) -> None:
        """Close the other generator."""
        self.generator.close()


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Call a function, and give its result, or the exception that it raises, to a future."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def finished(rollouts: Rollouts) -> Future[Rollouts]:
    """Return a finished future with the result `rollouts`."""
    future: Future[Rollouts] = Future()
    future.set_result(rollouts)
    return future


# The interface of a sampler: a model in a generator process that samples and loads new weights.
#
# `rlhf.generators.process.WorkerGenerator` starts the process and calls one method of the sampler at a time:
#
#     factory.build() -> load(manifest) -> sample(...) -> sample(...) -> load(manifest) -> ... -> close()
#
# There is always a `load` before the first `sample`. On the trainer's GPU there is a `load` before every
# `sample`, because vLLM discards the weights afterwards. With `schedule.update=in_flight`, `sample` itself
# may cause further calls of `load`.


Update = Callable[[], int]  # loads newer weights, if there are any; returns the version of the weights


class Sampler(Protocol):
    """A model that answers prompts with the weights of the last load."""

    def sample(self, prompts: Prompts, sampling: Sampling, update: Update | None = None) -> Rollouts:
        """Return K responses to each prompt, with the log-probs of their tokens.

        Args:
            prompts: the prompts, as token ids on the CPU.
            sampling: number of samples, temperature and response length of the request.
            update: with in-flight updates, a function to call before every forward pass. The key-value cache
                of earlier tokens is not recomputed (PipelineRL, Piche et al., arXiv 2509.19128).

        Returns:
            Rollouts [N, K, T] on the CPU, T = `sampling.response_length`. Log-probs are at
            `sampling.temperature`, by the weights that sampled each token. With `update`, the rollouts have
            `token_versions`. The caller adds `version` and `generate_s`.
        """

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Load the weights that the manifest describes, and discard caches computed with previous weights.

        A cache that a running request uses is not discarded before the request ends.

        Returns:
            Checksums of the loaded tensors by name, which the trainer compares with the checksums of the
            tensors that it sent: `rlhf.generators.weights.checksum`, or `fingerprint` for weights on a
            GPU.

        Raises:
            TransferError: the weights differ from the weights that the trainer sent.
        """

    def close(self) -> None:
        """Release all resources of the sampler."""


class SamplerFactory(Protocol):
    """A factory that creates a sampler in the generator process.

    The factory is pickled and sent to the process. So it is a dataclass of plain values, and only `build`
    imports what the sampler needs.
    """

    def build(self) -> Sampler:
        """Create the sampler.

        Raises:
            UserError, RunError: no sampler can be created with the values of the factory; the run ends.
        """


# Generators for runs with several ranks: one generator for all ranks, or one per rank.
#
# In both cases every rank submits all prompts and gets the rollouts of all prompts. The ranks exchange
# rollouts in the first call of a future's `result()`. This call is a collective: all ranks must call
# `result()` of their futures in the same order. The same applies to `wait()` of the generators.
# `backend.timeout_s` does not limit these waits, because a generator may restart its process several times;
# `generator.request_limit_s`, `.start_limit_s` and `.restarts` limit them.


class _Exchanged(Future[Rollouts]):
    """A future of the rollouts of all prompts, exchanged between the ranks in the first call of `result()`.

    Args:
        exchange: exchanges the rollouts between the ranks, and returns the rollouts of all prompts.
    """

    def __init__(self, exchange: Callable[[], Rollouts]) -> None:
        super().__init__()
        self.exchange = exchange

    def result(self, timeout: float | None = None) -> Rollouts:
        """Return the rollouts of all prompts; the first call is a collective.

        Args:
            timeout: has no effect, because the exchange does not end early.

        Raises:
            RunError: the generator of a rank failed.
        """
        if not self.done():
            settle(self, self.exchange)
        return super().result(timeout)


def _put_together(prompts: Prompts, parts: list[Rollouts]) -> Rollouts:
    """Return the rollouts of all `prompts`, given the rollouts of consecutive parts of the prompts.

    The `version` of the result is the lowest version of the parts; other numbers, such as seconds, are the
    highest.
    """
    numbers = {name for name, value in parts[0].as_dict().items() if isinstance(value, int | float)}
    highest = {name: max(getattr(part, name) for part in parts) for name in numbers}
    return replace(parts[0], **{**highest, **concatenated(parts), **prompts.as_dict()})


class _Absent(Generator):
    """The generator of a rank for which the first rank samples."""

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Return a future that never has a result."""
        return Future()

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Iterate over `weights`, because gathering sharded weights is a collective."""
        for _ in weights:
            pass


class SharedGenerator(Wrapper):
    """A generator on the first rank that samples for all ranks.

    Args:
        generator: the generator on the first rank; None on the other ranks.
        ranks: the ranks of the run.
    """

    def __init__(self, generator: Generator | None, ranks: Ranks) -> None:
        super().__init__(generator or _Absent())
        self.ranks = ranks

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt from the first rank's generator."""
        part = self.generator.submit(prompts, sampling)
        return _Exchanged(lambda: self.ranks.from_first(part.result))

    def wait(self) -> None:
        """Wait on every rank until the first rank's generator can take new weights."""
        self.ranks.from_first(self.generator.wait)


class PerRankGenerator(Wrapper):
    """The generator of one rank, if every rank has a generator; it answers its rank's share of each request.

    Args:
        generator: the generator of this rank.
        ranks: the ranks of the run.
    """

    def __init__(self, generator: Generator, ranks: Ranks) -> None:
        super().__init__(generator)
        self.ranks = ranks

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each of this rank's prompts from this rank's generator."""
        rows = self.ranks.rows(len(prompts))
        part = self.generator.submit(prompts.select(rows), sampling)

        def gather() -> Rollouts:
            self.ranks.wait_for(part)  # a generator may take long, for example while its process restarts
            return _put_together(prompts, self.ranks.gather(part.result()))

        return _Exchanged(gather)

    def wait(self) -> None:
        """Wait until the generator of every rank can take new weights."""
        waiting: Future[None] = Future()
        threading.Thread(target=settle, args=(waiting, self.generator.wait), daemon=True).start()
        self.ranks.wait_for(waiting)
        waiting.result()


# A generator that splits a request into chunks and reports progress after each chunk.


class ChunkedGenerator(Wrapper):
    """A generator that answers a request in chunks of `size` prompts.

    After each chunk, the generator calls its attribute `advance` with the number of prompts in the chunk. The
    samples do not depend on the chunk size, because the random numbers of a sample depend on its example, not
    on the batch.

    Args:
        generator: the generator that answers the chunks.
        size: prompts per chunk.
    """

    def __init__(self, generator: Generator, size: int) -> None:
        super().__init__(generator)
        self.size = size
        self.advance: Callable[[int], None] = lambda count: None

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Sample K responses to each prompt, chunk by chunk, and return a finished future."""
        parts = []
        for rows in torch.arange(len(prompts)).split(self.size):
            parts.append(self.generator.submit(prompts.select(rows), sampling).result())
            self.advance(len(rows))
        return finished(_put_together(prompts, parts))


# Generators that return stored completions: the completions of the task, or the saved rollouts of a run.


_DTYPES = {
    "response_ids": torch.int64,
    "behaviour_logprobs": torch.float32,
    "token_versions": torch.int64,
    "environment_mask": torch.bool,
    "rewards": torch.float64,
}
_EPISODE = "episode/"  # before the names of the figures of episodes


def build(config: DatasetConfig, context: GeneratorContext) -> Generator:
    """Return a generator of the saved rollouts in `config.path`; if null, of the task's completions."""
    if config.path is None:
        return _DatasetGenerator(context.tokenizer)
    return ReplayGenerator(Path(config.path).expanduser(), context.tokenizer)


class _DatasetGenerator(Generator):
    """A generator that returns the completions that the task stores with its prompts, with EOS appended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Return a finished future with the stored completions as token ids."""
        assert prompts.completions is not None, "the task was not asked for completions"
        return finished(
            encode_completions(prompts, prompts.completions, self.tokenizer, sampling.response_length)
        )


class ReplayGenerator(Generator):
    """A generator that returns the saved rollouts of a run by update, with their versions and log-probs.

    Args:
        folder: the folder of rollouts that a run with `save_generations` wrote.
        tokenizer: the policy's tokenizer.

    Raises:
        UserError: the rollouts contain token ids of another tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.files = files(folder)
        self.pad_id = tokenizer.pad_token_id
        self.tokens = torch.tensor(sorted(set(tokenizer.get_vocab().values())))
        if shared(self.files[0]).vocabulary != vocabulary(tokenizer.get_vocab()):
            raise UserError(
                "generator.path must name rollouts in the tokens of the policy's tokenizer, got "
                f"{folder}; set model.policy or model.tokenizer as in the run that saved them"
            )

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Return a finished future with the saved rollouts of the update `sampling.request` (from 0).

        Raises:
            RunError: a response contains an id that no token has, whose log-prob would be -inf.
        """
        file = self.files[sampling.request]
        rollouts = read(file, self.pad_id)
        if not torch.isin(rollouts.response_ids[rollouts.response_mask], self.tokens).all():
            raise RunError(
                f"{file} has responses with ids that no token has, which are not trained on; sample again "
                "with this version, or set generator.path=<another folder>"
            )
        return finished(rollouts)


def read(file: Path, pad_id: int) -> Rollouts:
    """Return the rollouts in `file`; the saved scores become `labels` [N, K]."""
    common = shared(file)
    N, K, T = common.prompts, common.samples, common.response_length
    rows = pyarrow.parquet.read_table(file).to_pydict()
    lengths = torch.tensor([len(ids) for ids in rows["response_ids"]]).view(N, K, 1)

    def grouped(column: str) -> Tensor:
        fill = pad_id if column == "response_ids" else 0
        return padded(rows[column], T, fill, _DTYPES[column]).view(N, K, T)

    prompt_ids, prompt_mask = pad_prompts(rows["prompt_ids"][::K], pad_id)
    by_token: dict[str, Any] = {column: grouped(column) for column in _DTYPES if column in rows}
    real = torch.arange(T) < lengths
    messages = by_token.get("environment_mask", torch.zeros_like(real))
    episode = {
        name.removeprefix(_EPISODE): torch.tensor(values, dtype=torch.float32).view(N, K)
        for name, values in rows.items()
        if name.startswith(_EPISODE)
    }
    return Rollouts(
        index=torch.tensor(rows["example"][::K]),
        texts=rows["prompt"][::K],
        references=rows["reference"][::K],
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        labels=torch.tensor(rows["score"], dtype=torch.float32).view(N, K),
        response_mask=real & ~messages,
        episode=episode or None,
        ended=torch.tensor(rows["ended"]).view(N, K),
        version=rows["version"][0],
        **by_token,
    )
