"""The interface of an environment: a program that answers the replies of a model until the episode is done.

    reset(example)    once, before the first reply
    step(reply)       after each reply: (message, reward, done), or an `Answer`
    close()           optional, after the last reply

One instance plays one episode. An episode must depend on `example` and the replies only, because an
interrupted request is played again from its start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlhf.config.address import load_class
from rlhf.core.errors import RunError

if TYPE_CHECKING:
    from rlhf.config.environment import EnvironmentConfig, TurnsConfig

_NO_FIGURES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What an environment knows of an example; only `sample` differs between the samples of a prompt."""

    prompt: str
    reference: str
    record: Mapping[str, Any]  # what the task stored for the environment, such as a secret
    seed: int  # of the example and the request
    sample: int  # number of the sample, from 0 to K - 1


class Answer(NamedTuple):
    """The answer to a reply."""

    message: str = ""  # not read if the episode is done
    reward: float = 0.0  # of this turn
    done: bool = False
    error: bool = False  # the reply was wrong in form; counted in `environment/tool_errors`
    figures: Mapping[str, float] = _NO_FIGURES  # logged as `environment/<name>`, the mean over episodes


class Environment(Protocol):
    """An environment of one episode."""

    def reset(self, example: Example) -> None:
        """Begin the episode."""

    def step(self, reply: str) -> Answer | tuple[str, float, bool]:
        """Return the answer to a reply of the model, a text without its end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFactory:
    """Makes the environments of a run. It holds plain values, because it is sent to generator processes."""

    address: str  # module:Class or file.py:Class
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the class
    max_turns: int = 8  # replies of an episode
    reply_tokens: int | None = None  # tokens of a reply; None: what is left of the episode

    def begun(self, example: Example) -> Environment:
        """Return an environment that has begun an episode.

        Raises:
            RunError: the class fails.
        """
        try:
            made: Environment = load_class("environment.path", self.address)(**self.arguments)
            made.reset(example)
        except Exception as error:
            raise self._failed("reset", error, f"the prompt {example.prompt!r}") from error
        return made

    def answer(self, environment: Environment, reply: str) -> Answer:
        """Return the answer of an environment to a reply.

        Raises:
            RunError: the class fails, or returns no answer.
        """
        try:
            found = Answer(*environment.step(reply))
            reward = float(found.reward)
            if not isinstance(found.message, str):
                raise TypeError(f"the message must be a text, got {found.message!r}")
            if not math.isfinite(reward):
                raise ValueError(f"the reward must be finite, got {reward}")
        except Exception as error:
            raise self._failed("step", error, f"the reply {reply!r}") from error
        return found._replace(reward=reward, done=bool(found.done))

    def _failed(self, method: str, error: Exception, given: str) -> RunError:
        return RunError(
            f"{self.address} must answer without an error in {method} (message, reward, done), got "
            f"{type(error).__name__}: {error} for {given[:300]}; correct the class"
        )


def none(config: EnvironmentConfig) -> None:
    """Return no factory: the policy replies once."""


def build(config: TurnsConfig) -> EnvironmentFactory:
    """Return the factory of the environments of a run."""
    return EnvironmentFactory(
        address=config.address,
        arguments=config.class_arguments,
        max_turns=config.max_turns,
        reply_tokens=config.reply_tokens,
    )
