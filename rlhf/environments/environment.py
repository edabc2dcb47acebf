"""The interface of an environment: a program that answers the replies of a model until the episode is done.

    reset(example)    once, before the first reply
    step(reply)       after each reply: (message, reward, done), or an `Answer`
    close()           optional, after the last reply

One instance plays one episode. An episode must depend on `example` and the replies only, because an
interrupted request is played again from its start, and so is any episode with `clock=virtual`. The methods
are called in threads (`Calls`). With `async def`, all episodes wait at the same time, in one event loop.

Two further members are optional. With `uses_global_random = True`, each episode has its own state of the
generator of the module `random`. `timed_out(limit_s)` returns the answer if `step` took too long.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlhf.config.address import LIBRARIES, load_class
from rlhf.core.errors import RunError, UserError, one_line
from rlhf.core.score import as_score, not_a_score
from rlhf.environments.calls import too_many_hang
from rlhf.environments.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.config.environment import ClassConfig, EnvironmentConfig, TurnsConfig
    from rlhf.environments.calls import Call

LIMITS = ("out_of_turns", "cut", "no_room")  # an episode ends by one of them, or by the environment
COUNTS = ("turns", "tool_errors", "step_errors", "timed_out", *LIMITS, "seconds")
_TAKEN = (*COUNTS, "token_share")  # names of metrics `environment/<name>`
_NO_FIGURES: Mapping[str, float] = MappingProxyType({})
_RLHF = f"{Path(__file__).parents[1]}/"  # its own lines tell nothing of an error in a class of the user
_MOST_CHARACTERS = 300  # of a value in an error message


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

    def reset(self, example: Example) -> str | None:
        """Begin the episode. With `task=environment`, the returned text is the prompt."""

    def step(self, reply: str) -> Answer | tuple[str, float, bool]:
        """Return the answer to a reply of the model, a text without its end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFactory:
    """Makes the environments of a run. It holds plain values, because it is sent to generator processes."""

    address: str  # module:Class or file.py:Class
    turns: Turns  # the messages as tokens
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the class
    max_turns: int = 8  # replies of an episode
    reply_tokens: int | None = None  # tokens of a reply; None: what is left of the episode
    threads: int = 0  # calls at a time; 0: one, for which the sampler waits
    step_limit_s: float = 60.0  # of a call
    on_error: str = "stop"  # or "end": an episode whose class fails ends
    error_reward: float = 0.0  # of such an episode

    def load(self) -> type:
        """Import and return the class.

        Raises:
            UserError: there is no such class, or its calls cannot be made at the same time.
        """
        found = load_class("environment.path", self.address)
        if getattr(found, "uses_global_random", False) and (self.threads or asynchronous(found)):
            raise UserError(
                f"environment.threads must be 0 for {self.address}, and its methods must not be async (its "
                f"attribute uses_global_random needs one call at a time), got {self.threads}; set "
                "environment.threads=0, or use random.Random(example.seed) in the class"
            )
        return found

    def failed(self, call: Call, method: str, given: Any) -> RunError | None:
        """Return the error of a call that failed; None: only its episode ends."""
        if call.late and too_many_hang():
            what, remedy = f"{call.error}, for the third time", "correct the class, whose threads still run"
        elif self.on_error == "end":
            return None
        else:
            assert call.error is not None, "the call failed"
            what = one_line(call.error)[:_MOST_CHARACTERS]
            longer = f", environment.step_limit_s={2 * self.step_limit_s:g}" if call.late else ""
            faulty = "environment" if self.address.startswith("rlhf.") else "class"
            remedy = f"correct the {faulty}, or set environment.on_error=end{longer}"
        given = f"the prompt {given.prompt!r}" if isinstance(given, Example) else f"the reply {given!r}"
        error = RunError(
            f"{self.address} must answer without an error in {method}{self._place(call, method)}, got {what} "
            f"for {given[:_MOST_CHARACTERS]}; {remedy}"
        )
        error.__cause__ = call.error
        return error

    def _place(self, call: Call, method: str) -> str:
        """Return, for a message, the innermost line of the user's code, or the first line of the method."""
        code = getattr(inspect.unwrap(getattr(self.load(), method, len)), "__code__", None)
        places = [(code.co_filename, code.co_firstlineno)] if code else []
        places += [each for each in call.frames if code and each[0] == code.co_filename]
        places += [each for each in call.frames if not each[0].startswith((*LIBRARIES, _RLHF, "<"))]
        return f" ({places[-1][0]}, line {places[-1][1]})" if places else ""


def asynchronous(environment: type) -> bool:
    """Return whether a class has asynchronous methods."""
    names = ("reset", "step", "close")
    return any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in names)


def checked(found: Any) -> Answer:
    """Return what `step` returned as an answer.

    Raises:
        TypeError: it is no answer, such as the five values of a game of gymnasium.
        ValueError: the reward or a figure is not finite, or a figure has the name of another.
    """
    if not isinstance(found, tuple) or (len(found) != 3 and not isinstance(found, Answer)):
        raise TypeError(f"step must return (message, reward, done), or an Answer, got {found!r:.100}")
    answer = Answer(*found)
    if not isinstance(answer.message, str):
        raise TypeError(f"the message must be a text, got {answer.message!r:.100}")
    if answer.done not in (True, False):
        raise TypeError(f"done must be True or False, got {answer.done!r:.100}")
    if taken := [*{*_TAKEN} & {*answer.figures}]:
        raise ValueError(f"a figure must have another name than {', '.join(_TAKEN)}, got {taken[0]}")
    reward = _finite("the reward", answer.reward)
    figures = {str(name): _finite(f"the figure {name}", value) for name, value in answer.figures.items()}
    return Answer(answer.message, reward, bool(answer.done), bool(answer.error), figures)


def _finite(what: str, value: Any) -> float:
    if (number := as_score(value)) is None:
        raise ValueError(f"{what} must be finite{not_a_score(value)}, got {value!r:.100}")
    return number


def none(config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Return no factory: the policy replies once."""


def build(config: ClassConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentFactory:
    """Return the factory of the environments of a run.

    Raises:
        UserError: the chat template does not write a message in the same way after every reply.
    """
    turns = Turns(tokenizer, config.role, config.message_tokens)
    return factory(config, turns, config.address, config.class_arguments)


def factory(
    config: TurnsConfig, turns: Turns, address: str, arguments: Mapping[str, Any]
) -> EnvironmentFactory:
    """Return the factory of a class with the limits of a section."""
    return EnvironmentFactory(
        address=address,
        turns=turns,
        arguments=arguments,
        max_turns=config.max_turns,
        reply_tokens=config.reply_tokens,
        threads=config.threads,
        step_limit_s=config.step_limit_s,
        on_error=config.on_error.value,
        error_reward=config.error_reward,
    )
