"""Environments: programs that answer a model's replies; their messages as tokens, time limits."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf.config.environments import ClassConfig, EnvironmentConfig, TurnsConfig
from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError, UserError, one_line
from rlhf.core.formatting import as_score, in_float32, not_a_score
from rlhf.processes.signals import note_children
from rlhf.text import chat
from rlhf.text.encoding import message_tokens
from rlhf.usercode.address import LIBRARIES, load_class
from rlhf.usercode.protection import same_settings

# The interface of an environment: a program that answers the replies of a model until the episode is done.
#
#     reset(example)    once, before the first reply
#     step(reply)       after each reply: (message, reward, done), or an `Answer`
#     close()           optional, after the last reply
#
# One instance plays one episode. An episode must depend on `example` and the replies only, because an
# interrupted request is played again from its start, and so is any episode with `clock=virtual`. The methods
# are called in threads (`Calls`). With `async def`, all episodes wait at the same time, in one event loop.
#
# Two further members are optional. With `uses_global_random = True`, each episode has its own state of the
# generator of the module `random`. `timed_out(limit_s)` returns the answer if `step` took too long.


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
    names = ("max_turns", "reply_tokens", "threads", "step_limit_s", "error_reward")
    limits = {name: getattr(config, name) for name in names} | {"on_error": config.on_error.value}
    return EnvironmentFactory(address=address, turns=turns, arguments=arguments, **limits)


# Messages of an environment as tokens: what stands between two replies of a model.
#
# An episode only grows: the sampled tokens of a reply, then the tokens of a message and the start of a reply.
# No dialogue is formatted or tokenized again, because the sampled tokens could change. Instead, the template
# formats the message behind a short dialogue in place of the real one. This is exact if the template writes a
# message in the same way after every reply; `Turns` checks this.


_ANSWER, _EARLIER_ANSWER = chat.ANSWERS
_MESSAGE, _EARLIER_MESSAGE = "message-of-an-environment", "earlier-words"
_PROBES = (_MESSAGE, "", "12", f" {_MESSAGE} 1\n", f"{{'a': [1]}}\n\n{_MESSAGE}")
_THOUGHT = "thought-of-an-assistant"
_LEFT_OUT = "\n[... left out ...]\n"  # in place of the middle of a long message
_CHARACTERS = 8  # characters of a message that are read at most, for each token of the limit


class Turns:
    """The messages of an environment as tokens behind the end token of a reply.

    Args:
        tokenizer: a fast tokenizer with a chat template; its end token ends a reply (`set_format`).
        role: the role of the messages, such as "user" or "tool".
        limit: largest number of tokens of a message, with its role marks and the start of the next reply.
        options: further arguments of the chat template, such as `tools`.

    Raises:
        UserError: the template does not write a message in the same way after every reply, or the limit has
            no room for a shortened message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, role: str, limit: int, **options: Any) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.role, self.limit = role, limit
        if not tokenizer.chat_template:
            raise UserError(chat.no_template(tokenizer.name_or_path))
        if fault := self._fault(role):
            user = "environment.role=user or " if role != "user" and not self._fault("user") else ""
            raise UserError(
                f"model.chat_template must write a message with the role {role} in the same way after every "
                f"reply ({fault}), got {chat.template_name(tokenizer)}; set {user}model.chat_template="
                f"{chat.PLAIN} or model.chat_template=<file with a Jinja template that does so>"
            )
        # Some vocabularies have white space and letters as added tokens
        added = tokenizer.added_tokens_decoder.items()
        self._control = {id for id, token in added if token.special or len(token.content.strip()) > 1}
        self._control -= {tokenizer.unk_token_id} - {tokenizer.eos_token_id}  # unknown characters may stay
        self._own = sum(id in self._control for id in self._message("", role)[1])
        self._before, _, self._after = self._message(_MESSAGE, role)[0].partition(_MESSAGE)
        marks = chat.ROLE_MARK.findall(self._before + self._after)
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        if (least := len(self._message(_LEFT_OUT, role)[1])) > limit:
            raise UserError(
                f"environment.message_tokens must be at least {least} (role marks, {_LEFT_OUT.strip()!r}), "
                f"got {limit}; set environment.message_tokens={max(512, 2 * least)}"
            )

    def tokens(self, text: str) -> list[int]:
        """Return a message as at most `limit` token ids: all between two replies of an episode.

        Control tokens and role marks in the text are removed, so that the text cannot end the message. A text
        that is too long keeps its start and its end.
        """
        text = text.encode(errors="replace").decode()  # half a surrogate pair has no tokens
        if len(text) > (most := _CHARACTERS * self.limit):
            text = _shortened(text, most)
        _, ids = self._message(text, self.role)
        if self._marks.search(text) or sum(id in self._control for id in ids) > self._own:
            text = self._without_marks(text)
            _, ids = self._message(text, self.role)
        kept = len(text)
        while len(ids) > self.limit:
            kept = kept * (self.limit - 1) // len(ids)
            _, ids = self._message(_shortened(text, kept), self.role)
        return ids

    def text(self, ids: list[int]) -> str:
        """Return the text of a message from its token ids, without the marks of the template around it."""
        return str(self.tokenizer.decode(ids)).removeprefix(self._before).removesuffix(self._after)

    @property
    def describes_tools(self) -> bool:
        """Whether the template writes the descriptions of tools into a prompt."""
        plain = chat.render(self.tokenizer, [{"role": "user", "content": chat.QUESTION}])
        return self._write([("user", chat.QUESTION)]) != plain

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each way in which the template formats a dialogue other than as an episode."""
        if _THOUGHT not in self._dialogue(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}", self.role, _MESSAGE):
            yield "the chat template leaves out the thoughts of earlier replies; an episode keeps them"
        if self.options.get("tools") and not self.describes_tools:
            yield "the chat template does not write the descriptions of tools; the prompts must have them"
        start, whole = self._write([("user", chat.QUESTION)]), self._dialogue(_ANSWER, self.role, _MESSAGE)
        if not (before := whole.rpartition(_ANSWER)[0]).startswith(start):
            same = before.rpartition(chat.QUESTION)[0] == start.rpartition(chat.QUESTION)[0]
            what = "a finished reply otherwise than the start of a reply" if same else "earlier messages anew"
            yield f"the chat template formats {what}; an episode stays as it was sampled"

    def _fault(self, role: str) -> str | None:
        """Return why messages cannot be appended to an episode; None if they can."""
        try:
            for text in _PROBES:
                after, ids = self._message(text, role)
                if _MESSAGE in text and _MESSAGE not in after:
                    return "it leaves out or changes the message"
                for earlier in range(3):
                    if self._message(text, role, earlier)[0] != after:
                        return "its text depends on earlier messages"
                    whole, _ = self._encode(self._dialogue(_ANSWER, role, text, earlier))
                    if whole[-len(ids) - 1 :] != [self.tokenizer.eos_token_id, *ids]:
                        return "its tokens depend on earlier messages"
        except ValueError as error:  # an error of the template is the cause of a `UserError`
            return str(error.__context__ or error)
        return None

    def _write(self, turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return chat.formatted(
            self.tokenizer, messages, "an episode", add_generation_prompt=True, **self.options
        )

    def _dialogue(self, answer: str, role: str, text: str, earlier: int = 0) -> str:
        between = [("assistant", _EARLIER_ANSWER), (role, _EARLIER_MESSAGE)] * earlier
        return self._write([("user", chat.QUESTION), *between, ("assistant", answer), (role, text)])

    def _message(self, text: str, role: str, earlier: int = 0) -> tuple[str, list[int]]:
        """Return a message and the start of the next reply as text and tokens, behind the end of a reply."""
        turn = {"role": "assistant", "content": _EARLIER_ANSWER}, {"role": role, "content": _EARLIER_MESSAGE}
        message, before = {"role": role, "content": text}, [{"role": "user", "content": chat.QUESTION}]
        before += turn * earlier
        after = chat.after_reply(self.tokenizer, [message], before, "an episode", **self.options)
        if after is None:
            raise ValueError(f"it does not end earlier replies with {self.tokenizer.eos_token}")
        return after, message_tokens(self.tokenizer, [after])[0]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _without_marks(self, text: str) -> str:
        """Return a text without control tokens and role marks, also those that a removal brings together."""
        removed = None
        while removed != set():
            spans = [span for id, span in zip(*self._encode(text), strict=True) if id in self._control]
            spans += [mark.span() for mark in self._marks.finditer(text)]
            removed = {place for span in spans for place in range(*span)}
            text = "".join(letter for place, letter in enumerate(text) if place not in removed)
        return text


def _shortened(text: str, kept: int) -> str:
    """Return the first and last characters of a text, `kept` in all, with a mark between."""
    return text[: kept - kept // 2] + _LEFT_OUT + text[len(text) - kept // 2 :]


# Episodes as dialogues for readers: who wrote what, and the reward of each reply.


def transcripts(rollouts: Rollouts, turns: Turns) -> list[list[dict[str, Any]]]:
    """Return the N * K episodes, each as a list of replies and messages.

    Each has the keys `role` and `content`, a reply with a reward other than 0 also `reward`, and a last reply
    that was cut also `cut`. The texts lack the marks of the chat template.
    """
    assert rollouts.environment_mask is not None and rollouts.rewards is not None
    columns = (rollouts.response_ids, rollouts.response_mask, rollouts.environment_mask, rollouts.rewards)
    end, found = turns.tokenizer.eos_token_id, []
    cuts = (rollouts.episode or {}).get("cut", torch.zeros(rollouts.ended.shape)).flatten().tolist()
    for cut, *episode in zip(cuts, *(x.flatten(0, 1).tolist() for x in columns), strict=True):
        dialogue: list[dict[str, Any]] = []
        tokens = [each for each in zip(*episode, strict=True) if each[1] or each[2]]
        for own, group in groupby(tokens, key=itemgetter(1)):
            ids, _, _, rewards = map(list, zip(*group, strict=True))
            if own:
                text = str(turns.tokenizer.decode(ids[: len(ids) - (ids[-1] == end)]))
                reward = {"reward": in_float32(sum(rewards))} if any(rewards) else {}
                dialogue.append({"role": "assistant", "content": text} | reward)
            else:
                dialogue.append({"role": turns.role, "content": turns.text(ids)})
        dialogue[-1] |= {"cut": True} if cut else {}
        found.append(dialogue)
    return found


def limits(rollouts: Rollouts, factory: EnvironmentFactory) -> list[str | None]:
    """Return the key of the limit that ended each of the N * K episodes; None: the environment ended it.

    A reply may also end with an end token behind which the chat template writes no message.
    """
    assert rollouts.episode is not None
    figures = {name: values.cpu().numpy() > 0 for name, values in rollouts.episode.items()}
    tokens, reply = (mask.sum(-1).cpu().numpy() for mask in (rollouts.real, rollouts.last_reply))
    cut, failed = figures["cut"], figures["step_errors"]
    found = np.full(cut.shape, None, dtype=object)
    found[cut] = "another end token"
    found[cut & (reply == factory.reply_tokens)] = "environment.reply_tokens"
    full = tokens == rollouts.response_ids.shape[-1]
    found[figures["no_room"] | (cut & full)] = "generator.response_length"
    found[figures["out_of_turns"]] = "environment.max_turns"
    found[failed] = "environment.on_error"
    found[failed & figures["timed_out"]] = "environment.step_limit_s"
    return list(found.flatten())


# Calls of environments with a time limit, in threads or in an event loop.
#
# A thread cannot be killed. A call that takes too long is given up, and its thread is abandoned and replaced.
# Processes that calls start may outlive their threads; they are killed when this process ends.
# Global settings that calls change are restored when no call runs: a call may change them for its own time.


_GRACE_S = 1.0  # an event loop ends a call that takes too long itself, unless it is blocked
_POLL_S = 0.5  # between two looks at the time limit
_MOST_HANGING = 3
_abandoned: list[Thread] = []  # threads of this process that did not return in time
_idle: list[_Loop] = []  # event loops without calls: clients of the user's code belong to the loop they know


@dataclass(eq=False, slots=True)
class Call:
    """A call and its outcome."""

    key: Any  # the name that the caller gives it
    function: Callable[[], Any]
    result: Any = None  # what the function returned
    error: BaseException | None = None  # what it raised; a `TimeoutError` if it was given up
    late: bool = False  # it was given up
    frames: Sequence[tuple[str, int]] = ()  # files and lines where it failed, the innermost last
    seconds: float = 0.0  # how long it took
    thread: _Worker | _Loop | None = None
    began: float = math.inf  # in the thread
    taken: Lock = field(default_factory=Lock)  # by the first who has an outcome

    def end(self, result: Any = None, error: BaseException | None = None, late: bool = False) -> bool:
        """Set the outcome, and return True; False: the call has an outcome."""
        if not self.taken.acquire(blocking=False):
            return False
        self.seconds, self.result, self.late = perf_counter() - self.began, result, late
        self.error = TimeoutError(f"no answer in {self.seconds:.3g} s") if late else error
        walk = [*traceback.walk_tb(error.__traceback__ if error else None)]
        if late and not error and self.thread:
            walk = [*traceback.walk_stack(sys._current_frames().get(self.thread.ident or 0))][::-1]
        files = ((frame.f_code.co_filename, line) for frame, line in walk)
        self.frames = [each for each in files if each[0] != __file__]
        return True


class _Worker(Thread):
    """A thread that makes calls one by one, until it gets None or its call is given up."""

    def __init__(self, asked: SimpleQueue[Call | None], ended: SimpleQueue[Call]) -> None:
        super().__init__(name="environment", daemon=True)
        self.asked, self.ended = asked, ended
        self.start()

    def run(self) -> None:
        while call := self.asked.get():
            call.thread, call.began, result, error = self, perf_counter(), None, None
            process = os.getpid()
            try:
                result = call.function()
            except BaseException as raised:  # code of the user may raise anything, such as SystemExit
                error = raised
            if os.getpid() != process:  # a child that the code forked
                os._exit(os.EX_OK)
            if not call.end(result, error):
                return
            self.ended.put(call)


class _Loop(Thread):
    """A thread with an event loop, which makes all calls at the same time, until it is `stopped`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.loop, self.stopped = asyncio.new_event_loop(), asyncio.Event()
        self.start()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # at its end, it cancels all tasks
            runner.run(self.stopped.wait())


class Calls:
    """Calls in daemon threads.

    Args:
        threads: the number of calls at a time; the others wait for their turn.
        limit_s: the most seconds of a call.
        in_loop: functions are asynchronous; all calls are made at the same time, in one event loop.
        abandoned: gets the threads of calls that are given up; None: those of environments (`too_many_hang`).
    """

    def __init__(
        self, threads: int, limit_s: float, in_loop: bool = False, abandoned: list[Thread] | None = None
    ) -> None:
        self.limit_s, self.in_loop = limit_s, in_loop
        self.abandoned = _abandoned if abandoned is None else abandoned
        self.open: dict[Call, None] = {}  # in the order in which they were asked
        self._settings = ExitStack()  # those before the open calls
        self._asked, self._ended = SimpleQueue[Call | None](), SimpleQueue[Call]()
        self._threads = [self._thread() for _ in range(1 if in_loop else threads)]

    def _thread(self) -> _Worker | _Loop:
        if not self.in_loop:
            return _Worker(self._asked, self._ended)
        _idle[:] = [loop for loop in _idle if loop.is_alive()]  # a process that was forked has none
        loop = _idle.pop() if _idle else _Loop()
        loop.name = "environment"
        return loop

    def ask(self, key: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Make a call as soon as a thread is free."""
        call = Call(key, partial(function, *arguments))
        if not self.open:
            self._settings.enter_context(same_settings())
        self.open[call] = None
        if isinstance(loop := self._threads[0], _Loop):
            call.thread = loop
            asyncio.run_coroutine_threadsafe(self._make(call), loop.loop)
        else:
            self._asked.put(call)

    async def _make(self, call: Call) -> None:
        """Make a call in the event loop."""
        call.began, result, error, limit = perf_counter(), None, None, asyncio.timeout(self.limit_s)
        try:
            async with limit:
                result = call.function()
                result = await result if inspect.isawaitable(result) else result
        except BaseException as raised:  # as in `_Worker`
            origin = raised.__cause__ or raised.__context__  # before Python 3.11.4, a timeout has no cause
            error = origin if limit.expired() and origin else raised
        if call.end(result, error, limit.expired()):
            self._ended.put(call)

    def ended(self, wait_s: float = 0.0) -> list[Call]:
        """Return the calls that ended, also those given up; wait at most `wait_s` for the first one."""
        found: list[Call] = []
        until = perf_counter() + wait_s
        while self.open:
            left = 0.0 if found else min(until - perf_counter(), _POLL_S, self.limit_s)
            try:
                found.append(self._ended.get(timeout=max(0.0, left)))
                del self.open[found[-1]]
            except Empty:
                found += self._give_up(self.limit_s + (_GRACE_S if self.in_loop else 0.0))
                if found or perf_counter() >= until:
                    break
        if not self.open:
            self._settings.close()
        return found

    def _give_up(self, after_s: float = 0.0) -> list[Call]:
        """Give up the calls that take longer than `after_s`, and replace their threads."""
        until = perf_counter() - after_s
        late = [call for call in self.open if call.began <= until and call.end(late=True)]
        if late and self.in_loop:  # it is blocked, so that no call returns
            late += [call for call in self.open if call.end(late=True)]
        for thread in {call.thread for call in late if call.thread}:
            self.abandoned.append(thread)
            note_children(thread.native_id or 0)
            self._threads[self._threads.index(thread)] = self._thread()
            if isinstance(thread, _Loop):
                thread.loop.call_soon_threadsafe(thread.stopped.set)
        for call in late:
            del self.open[call]
        return late

    def close(self, within_s: float, last: Iterable[Callable[[], Any]]) -> None:
        """End the threads. No call may follow.

        Args:
            within_s: the time for the calls that run now, and for the last calls.
            last: the last calls, whose outcomes are not read.
        """
        with suppress(Empty):
            while call := self._asked.get_nowait():  # no thread has begun it
                del self.open[call]
        for functions in ((), last):
            for function in functions:
                self.ask(None, function)
            until = perf_counter() + within_s
            while self.open and (left := until - perf_counter()) > 0:
                self.ended(left)
            self._give_up()
            self._settings.close()
        for thread in self._threads:
            note_children(thread.native_id or 0)
            if isinstance(thread, _Loop):
                thread.name = "idle event loop"
                _idle.append(thread)
            else:
                self._asked.put(None)
        for thread in self._threads:
            if isinstance(thread, _Worker):
                thread.join(_GRACE_S)
        self._threads = []


def asynchronous_calls(function: object) -> bool:
    """Return whether the results of a function, or of a callable object, must be awaited."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def too_many_hang() -> bool:
    """Return whether three abandoned threads of this process still run."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    return len(_abandoned) >= _MOST_HANGING
