"""The episodes of a request as tokens, turn by turn, for every sampler.

A sampler asks which episodes run, samples a reply to the history of each, and gives the reply back. A history
is the prompt, the sampled tokens and the tokens of messages: nothing is formatted or encoded again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, product, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.core.batch import Begun, Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.core.launched import derive
from rlhf.environments.environment import COUNTS, Answer, Calls, Example, asynchronous, checked, too_many_hang
from rlhf.text.chat import unquoted
from rlhf.text.encoding import padded

if TYPE_CHECKING:
    from rlhf.environments.environment import Call, Environment, EnvironmentFactory

FIRST_MESSAGE = "first_message"  # in the record of a prompt that `reset` returned for the `seed` beside it
_END_S = 4.0  # for the calls that run when the episodes end early, and for `close` after them


@dataclass(slots=True)
class _Episode:
    example: Example
    environment: Environment | None = None
    ids: list[int] = field(default_factory=list)  # tokens after the prompt
    sampled: list[bool] = field(default_factory=list)  # per token: by the model, not by the environment
    logprobs: list[float] = field(default_factory=list)  # 0 at messages
    versions: list[int] = field(default_factory=list)  # 0 at messages
    rewards: list[float] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    running: bool = True
    most: int | None = None  # tokens that the model may still sample in this request; None: no limit
    before: int = 0  # tokens of earlier requests
    open: int = 0  # tokens of a reply that is not finished
    failed: bool = False  # in `reset`; it ends after its first reply
    ended: bool = False  # by the environment, not by a limit
    random: Any = None  # its state of the generator of the module `random`, if the class uses that

    def append(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], sampled: bool
    ) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(ids)


def first_messages(factory: EnvironmentFactory, seeds: Sequence[int]) -> list[Any]:
    """Return what `reset` returns for each seed, in the order of the seeds.

    Raises:
        RunError: the environment fails.
    """
    kind, found = factory.load(), []
    calls = Calls(1, factory.step_limit_s, asynchronous(kind))
    try:
        for seed in seeds:
            made = kind(**factory.arguments)
            example = Example(prompt="", reference="", record={"seed": seed}, seed=seed, sample=0)
            calls.ask(None, made.reset, example)
            (call,) = calls.ended(math.inf)
            if call.error is not None:
                raise factory.failed(call, "reset", example) or RunError(f"{factory.address} fails in reset")
            found.append(call.result)
            if close := getattr(made, "close", None):
                calls.ask(None, close)
                calls.ended(math.inf)
    finally:
        calls.close(_END_S, ())
    return found


class Episodes:
    """N prompts with K episodes each. An episode has a position n * K + k.

    The calls of the environments are made in threads, which end with the episodes: after `rollouts`, after an
    error, and at the end of a `with` block. Their answers change the episodes in the thread of the caller.

    Args:
        prompts: N prompts.
        sampling: K, and the largest number T of tokens of an episode, messages included. Episodes that are
            `begun` are played again from their start, and go on for at most `most` sampled tokens.
        factory: makes the environments, and their messages as tokens.
        stop_ids: tokens that end a reply.
        seed: the seed of the run.

    Raises:
        RunError: an environment fails in `reset`, or answers otherwise than before.
    """

    def __init__(
        self,
        prompts: Prompts,
        sampling: Sampling,
        factory: EnvironmentFactory,
        stop_ids: Sequence[int],
        seed: int,
    ) -> None:
        self.prompts, self.sampling, self.factory, self.turns = prompts, sampling, factory, factory.turns
        self.stop_ids = frozenset(stop_ids)
        self.heads = prompts.unpadded()
        records = prompts.records or [{}] * len(prompts)
        own = seed, "environment", sampling.purpose
        places = [*product(enumerate(prompts.index.tolist()), range(sampling.samples))]
        begun = sampling.begun or [Begun(sampling.request, k, [], []) for _, k in places]
        self._all = [
            _Episode(
                Example(
                    prompt=prompts.texts[n],
                    reference=unquoted(prompts.references[n]),
                    record=deepcopy(records[n]),  # the class may change it
                    seed=records[n]["seed"] if FIRST_MESSAGE in records[n] else derive(*own, request, row),
                    sample=k,
                )
            )
            for ((n, row), _), (request, k, *_) in zip(places, begun, strict=True)
        ]
        self._ready: list[int] = []
        self.unread = ""  # a text that `reset` returned although the prompt is a row of the data
        self._class = factory.load()
        in_loop = asynchronous(self._class)
        self._in_turn = not (factory.threads or in_loop)
        self._calls = Calls(max(1, factory.threads), factory.step_limit_s, in_loop)
        try:
            for i, episode in enumerate(self._all):
                self._ask(i, "reset", partial(self._begin, episode), episode.example)
            self.running()
            if sampling.most is not None:
                self._play_again(begun, sampling.most.flatten().tolist())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments of the episodes that still run, and end the threads."""
        self._calls.close(_END_S, (close for each in self._all if (close := self._closing(each))))

    def running(self) -> list[int]:
        """Wait for all answers, and return the positions of the episodes that wait for a reply.

        Raises:
            RunError: an environment fails.
        """
        while self._calls.open:
            self._take(self._calls.ended(math.inf))
        return [i for i, episode in enumerate(self._all) if episode.running]

    def ready(self, wait: bool = False) -> list[int]:
        """Return the positions of the episodes that wait for a reply and were not returned before.

        Args:
            wait: wait for at least one; none is returned only if no answer is awaited.

        Raises:
            RunError: an environment fails.
        """
        self._take(self._calls.ended())
        while self._calls.open and (self._in_turn or (wait and not self._ready)):
            self._take(self._calls.ended(math.inf))
        found, self._ready = sorted(self._ready), []
        return found

    @property
    def open(self) -> bool:
        """Whether the answer of an environment is awaited."""
        return bool(self._calls.open)

    def history(self, i: int) -> list[int]:
        """Return the token ids that the next reply of episode `i` follows, the prompt included."""
        return self.heads[i // self.sampling.samples] + self._all[i].ids

    def begun(self, i: int) -> Begun:
        """Return episode `i` so far, which the next reply follows."""
        episode = self._all[i]
        return Begun(self.sampling.request, episode.example.sample, episode.ids, episode.sampled)

    def added(self, i: int) -> int:
        """Return the number of tokens of episode `i` that this request has added."""
        return len(self._all[i].ids) - self._all[i].before

    def room(self, i: int) -> int:
        """Return the largest number of tokens that are to be sampled next for episode `i`."""
        left, most = self._left(self._all[i]), self._all[i].most
        return left if most is None else min(left, most)

    def _left(self, episode: _Episode) -> int:
        left = self.sampling.response_length - len(episode.ids)
        most = self.factory.reply_tokens
        return left if most is None else min(left, most - episode.open)

    def reply(
        self, i: int, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int] | None = None
    ) -> None:
        """Add a reply to episode `i`, and the answer of its environment.

        An episode ends if the environment is done, the reply does not end with the end token, there are
        `max_turns` replies, or the message leaves no room for another reply. It stops running, but does not
        end, if the request has sampled as many tokens as it may.

        Args:
            i: the position of the episode.
            ids: the sampled tokens, at most `room(i)`, with the end token.
            logprobs: their log-probs.
            versions: the version of the weights that sampled each token; None: one version samples all.

        Raises:
            RunError: the environment fails.
        """
        episode = self._all[i]
        episode.append(ids, logprobs, versions or [0] * len(ids), sampled=True)
        episode.figures["turns"] += not episode.open
        episode.open += len(ids)
        if episode.most is not None:
            episode.most -= len(ids)
        if ids[-1] not in self.stop_ids:
            if episode.most is not None and self._left(episode):
                return self._await(i)  # the reply goes on
            return self._stop(i, "cut")  # a call in a reply that was cut may be valid by chance
        ids, episode.open = episode.ids[-episode.open :], 0
        if episode.failed or episode.environment is None:
            return self._answer(i, Answer(reward=self.factory.error_reward, done=True))
        text = str(self.turns.tokenizer.decode(ids[:-1], skip_special_tokens=False))
        return self._ask(i, "step", episode.environment.step, text)

    def _begin(self, episode: _Episode, example: Example) -> Any:
        episode.environment = made = self._class(**self.factory.arguments)
        return made.reset(example)

    def _ask(self, i: int, method: str, function: Callable[..., Any], *given: Any) -> None:
        """Call a method of an environment."""
        if not getattr(self._class, "uses_global_random", False):
            return self._calls.ask((i, method, *given), function, *given)
        with _random_of(self._all[i]):
            self._calls.ask((i, method, *given), function, *given)
            ended = self._calls.ended(math.inf)
        return self._take(ended)

    def _take(self, ended: list[Call]) -> None:
        """Change the episodes by the outcomes of calls. After an error, nothing is left running."""
        try:
            for call in ended:
                self._take_one(call, *call.key)
        except RunError:
            self.close()
            raise

    def _take_one(self, call: Call, i: int, method: str, given: Any = None) -> None:
        episode = self._all[i]
        episode.figures.update({"seconds": call.seconds, "timed_out": call.late})
        answer = None
        try:
            if method == "step":
                timed_out = getattr(episode.environment, "timed_out", None)
                if call.late and timed_out and not too_many_hang():
                    call.result, call.error = timed_out(self.factory.step_limit_s), None
                answer = checked(call.result) if call.error is None else None
            elif method == "reset" and call.error is None and not isinstance(call.result, str | None):
                raise TypeError(f"reset must return None or a text, got {call.result!r:.100}")
        except Exception as error:  # the class of the user may return anything
            call.error = error
        if call.error is not None:
            if failure := self.factory.failed(call, method, given):
                raise failure
            episode.figures["step_errors"] += 1
        if method == "reset":
            first = episode.example.record.get(FIRST_MESSAGE)
            if call.error is None and first is None:
                self.unread = self.unread or call.result or ""
            elif call.error is None and call.result != first:
                raise RunError(
                    f"{self.factory.address} must return the same text from reset for the same seed (it is "
                    f"the prompt), got {call.result!r:.80} and {first!r:.80}; use only example.seed"
                )
            episode.failed = call.error is not None
            self._ready.append(i)
        elif method == "step":
            self._answer(i, answer or Answer(reward=self.factory.error_reward, done=True))

    def _answer(self, i: int, answer: Answer) -> None:
        episode = self._all[i]
        episode.rewards[-1] = answer.reward
        episode.figures["tool_errors"] += answer.error
        episode.figures.update(answer.figures)
        if answer.done:
            episode.ended = True
            return self._stop(i)
        if episode.ids[-1] != self.turns.tokenizer.eos_token_id:  # a message follows the end token only
            return self._stop(i, "cut")
        if episode.figures["turns"] == self.factory.max_turns:
            return self._stop(i, "out_of_turns")
        message = self.turns.tokens(answer.message)
        if len(message) >= self.sampling.response_length - len(episode.ids):
            return self._stop(i, "no_room")
        nothing = [0] * len(message)
        episode.append(message, nothing, nothing, sampled=False)
        return self._await(i)

    def _await(self, i: int) -> None:
        """Let an episode wait for tokens of the model, or stop it if this request samples no more."""
        if self._all[i].most == 0:
            return self._stop(i)
        return self._ready.append(i)

    def _play_again(self, begun: Sequence[Begun], most: Sequence[int]) -> None:
        """Give the replies of earlier requests to the environments, turn by turn."""
        replies: list[list[list[int]]] = []
        for episode, each, more in zip(self._all, begun, most, strict=True):
            episode.most = sum(each.sampled) + more
            parts = groupby(zip(each.ids, each.sampled, strict=True), key=lambda token: token[1])
            replies.append([[id for id, _ in part] for sampled, part in parts if sampled])
        for turn in zip_longest(*replies):
            for i, ids in enumerate(turn):
                if ids and self._all[i].running:
                    self.reply(i, ids, [0.0] * len(ids))
            self.running()
        for i, (episode, each) in enumerate(zip(self._all, begun, strict=True)):
            episode.before = len(each.ids)
            if episode.ids[: episode.before] != each.ids or (episode.most and not episode.running):
                raise RunError(
                    f"{self.factory.address} must answer the same replies in the same way (clock=virtual "
                    f"plays episodes again), got another answer in sample {each.sample} of "
                    f"{self.prompts.place(i // self.sampling.samples)}; use only the example and the "
                    "replies, or set clock=wall"
                )

    def _stop(self, i: int, limit: str | None = None) -> None:
        episode = self._all[i]
        episode.running = False
        if limit:
            episode.figures[limit] += 1
        if close := self._closing(episode):
            self._ask(i, "close", close)

    def _closing(self, episode: _Episode) -> Callable[[], Any] | None:
        """Return a function that closes the environment of an episode once; None: nothing is to be closed."""

        def close() -> Any:
            environment, episode.environment = episode.environment, None
            return None if environment is None else environment.close()  # type: ignore[attr-defined]

        return close if callable(getattr(episode.environment, "close", None)) else None

    def rollouts(self, pad_id: int, in_flight: bool = False) -> Rollouts:
        """Return the episodes as rollouts [N, K, T]; with `in_flight`, tokens have versions.

        Tokens of earlier requests are left out; `ended` and `episode` are those of the whole episode.
        """
        self.running()
        self.close()
        N, K, T = len(self.prompts), self.sampling.samples, self.sampling.response_length

        def table(column: str, fill: Any, dtype: torch.dtype) -> Tensor:
            new = [getattr(each, column)[each.before :] for each in self._all]
            return padded(new, T, fill, dtype).view(N, K, T)

        sampled = table("sampled", False, torch.bool)
        lengths = torch.tensor([len(each.ids) - each.before for each in self._all])
        real = (torch.arange(T) < lengths[:, None]).view(N, K, T)
        names = dict.fromkeys([*COUNTS, *(name for each in self._all for name in each.figures)])
        return self.prompts.extend(
            Rollouts,
            response_ids=table("ids", pad_id, torch.int64),
            response_mask=sampled,
            environment_mask=real & ~sampled,
            behaviour_logprobs=table("logprobs", 0.0, torch.float32),
            token_versions=table("versions", 0, torch.int64) if in_flight else None,
            rewards=table("rewards", 0.0, torch.float64),
            ended=torch.tensor([each.ended for each in self._all]).view(N, K),
            episode={
                name: torch.tensor([float(each.figures[name]) for each in self._all]).view(N, K)
                for name in names
            },
        )


@contextmanager
def _random_of(episode: _Episode) -> Iterator[None]:
    """Give the module `random` the state of an episode during the block."""
    outside = random.getstate()
    random.setstate(episode.random) if episode.random else random.seed(episode.example.seed)
    try:
        yield
    finally:
        episode.random = random.getstate()
        random.setstate(outside)
