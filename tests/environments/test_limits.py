"""Limits of environments: classes that fail or hang, threads, an event loop, and what is left running."""

import asyncio
import inspect
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import torch

from rlhf.core.errors import RunError, UserError
from rlhf.environments import environment
from rlhf.environments.environment import Answer
from rlhf.environments.episodes import Episodes
from rlhf.generators.hf.generator import respond
from tests.environments.test_episodes import SAMPLING, model, prompts, same, sampled, settings
from tests.usercode.test_protection import CHANGES

HERE = "tests.environments.test_limits"
RELEASE = threading.Event()  # lets hanging calls return
CLOSED: list[str] = []
STOP, GO = [10, 0], [7, 8, 0]  # replies: " stop", " a b"


@pytest.fixture(autouse=True)
def released(monkeypatch):
    monkeypatch.setattr(environment, "_GRACE_S", 0.2)
    CLOSED.clear()
    RELEASE.clear()
    yield
    RELEASE.set()
    until = time.monotonic() + 5
    while any(thread.name == "environment" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread is left"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def own_threads() -> int:
    return sum(thread.name == "environment" for thread in threading.enumerate())


def endless():
    yield from itertools.repeat("more")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


class Wrong:
    """Does what `how` says after the reply " stop", or already in reset."""

    def __init__(self, how, where="step"):
        self.how, self.where = how, where

    def reset(self, example):
        self.name = f"{example.prompt}{example.sample}"
        if self.where == "reset":
            self.fail()

    def step(self, reply):
        return self.fail() if "stop" in reply else (" yes", 0.5, False)

    def fail(self):
        if self.how == "raise":
            raise KeyError("secret")
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "unspeakable":
            raise Unspeakable
        if self.how == "hang":
            RELEASE.wait(30)  # here it hangs
        return {
            "none": None, "text": " text", "nan": ("", float("nan"), False), "endless": endless(),
            "number": (5, 0.0, False), "tensor": ("", torch.ones(2), False),
            "figures": Answer(figures={"turns": 3.0}), "share": Answer(figures={"token_share": 3.0}),
            "nan figure": Answer(figures={"a": float("nan")}), "five": ("", 0.0, False, False, {}),
            "huge": ("", 1e300, False), "words": ("", "0.5", False), "done": ("", 0.5, "False"),
        }.get(self.how)  # fmt: skip

    def close(self):
        CLOSED.append(self.name)
        if self.where == "close":
            self.fail()


class AsyncWrong(Wrong):
    async def reset(self, example):
        await asyncio.sleep(0)
        super().reset(example)

    async def step(self, reply):
        if "stop" not in reply:
            return " yes", 0.5, False
        if self.how == "hang":
            await asyncio.sleep(30)  # here it waits
        return super().step(reply)

    async def close(self):
        super().close()


class AsyncBlocks(Wrong):
    async def step(self, reply):
        return super().step(reply)


class AsyncClose(Wrong):
    async def close(self):
        await asyncio.sleep(0)
        super().close()


class Sleepy:
    """Takes a while; the answer depends on the reply only."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def reset(self, example):
        time.sleep(self.seconds)

    def step(self, reply):
        time.sleep(self.seconds or random.random() * 0.003)
        return " yes", len(reply), reply == " stop"


class AsyncSleepy(Sleepy):
    async def step(self, reply):
        await asyncio.sleep(self.seconds or random.random() * 0.003)
        return " yes", len(reply), reply == " stop"


class Dice:
    uses_global_random = True

    def reset(self, example):
        self.rolls = [random.random()]

    def step(self, reply):
        self.rolls.append(random.random())
        return Answer(" yes", done="stop" in reply, figures={f"roll{len(self.rolls)}": self.rolls[-1]})


class AsyncDice(Dice):
    async def step(self, reply):
        return super().step(reply)


def episodes(name, count=2, samples=2, turns_left=8, **limits) -> Episodes:
    arguments = limits.pop("arguments", {})
    limits = {"step_limit_s": 0.3, "max_turns": turns_left} | limits
    factory = replace(settings().environment, address=f"{HERE}:{name}", arguments=arguments, **limits)
    return Episodes(prompts(count), replace(SAMPLING, samples=samples), factory, [0], 7)


def reply(played: Episodes, i: int, ids=GO) -> None:
    played.reply(i, ids, [-1.0] * len(ids))


def line_of(text: str) -> int:
    lines = inspect.getsource(inspect.getmodule(Wrong)).splitlines()
    return 1 + next(n for n, line in enumerate(lines) if text in line)


WAYS = {
    "raise": ("KeyError: 'secret'", 'raise KeyError("secret")'),
    "exit": ("SystemExit: 3", "raise SystemExit(3)"),
    "hang": (r"TimeoutError: no answer in 0\.\d+ s", "# here it hangs"),
    "none": (r"TypeError: step must return \(message, reward, done\), or an Answer, got None", ""),
    "text": ("TypeError: step must return .*, got ' text'", ""),
    "nan": ("ValueError: the reward must be finite, got nan", ""),
    "number": ("TypeError: the message must be a text, got 5", ""),
    "endless": ("TypeError: step must return .*, got <generator", ""),
    "figures": ("ValueError: a figure must have another name than .*, got turns", ""),
    "tensor": ("RuntimeError|ValueError", ""),
    "share": ("ValueError: a figure must have another name than .*, got token_share", ""),
    "nan figure": ("ValueError: the figure a must be finite, got nan", ""),
    "five": ("TypeError: step must return .*, got \\(", ""),
    "huge": ("ValueError: the reward must be finite below 3.4e38.*, got 1e\\+300", ""),
    "words": ("ValueError: the reward must be finite, got '0.5'", ""),
    "done": ("TypeError: done must be True or False, got 'False'", ""),
    "unspeakable": ("Unspeakable", "raise Unspeakable"),
}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("how", WAYS)
def test_a_class_that_fails_stops_the_run_with_class_place_reply_and_remedy(how, threads):
    said, place = WAYS[how]
    started = time.monotonic()
    with (
        pytest.raises(RunError) as raised,
        episodes("Wrong", arguments={"how": how}, threads=threads) as played,
    ):
        reply(played, 0)
        reply(played, 1, STOP)
        played.running()
    line = line_of(place or "    def step(self, reply):")
    assert time.monotonic() - started < 2
    assert raised.match(
        rf"^{HERE}:Wrong must answer without an error in step \(.*test_limits.py, line {line}\), got "
        rf"({said}).* for the reply ' stop'; correct the class, or set environment.on_error=end"
    )
    assert ("environment.step_limit_s=0.6" in str(raised.value)) == (how == "hang")
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1"]
    assert own_threads() == (how == "hang"), "the abandoned thread"


SHARED = (
    "default dtype",
    "folder",
    "environment",
    "output",
    "recursion",
    "warnings",
    "precision",
    "deterministic",
)


class Meddler:
    def __init__(self, name, where):
        self.change, self.where = CHANGES[name][0], where

    def reset(self, example):
        if self.where == "reset":
            self.change()

    def step(self, reply):
        if self.where == "step":
            self.change()
        return " yes", 0.0, False


class AsyncMeddler(Meddler):
    async def close(self):
        if self.where == "close":
            self.change()


@pytest.mark.parametrize("name", ["Meddler", "AsyncMeddler"])
@pytest.mark.parametrize("setting", SHARED)
def test_settings_that_a_class_changes_are_restored_before_sampling_goes_on(name, setting):
    read = CHANGES[setting][1]
    before, cases = read(), [("reset", 0), ("step", 0), ("step", 2)]
    cases += [("close", 0)] if name == "AsyncMeddler" else []
    for where, threads in cases:
        with episodes(name, arguments={"name": setting, "where": where}, threads=threads) as played:
            assert read() == before
            reply(played, 0)
            assert played.running() == [0, 1, 2, 3] and read() == before
        assert read() == before


def test_calls_that_overlap_may_change_a_setting_for_their_own_time():
    made = [environment.Calls(1, 5.0), environment.Calls(1, 5.0)]
    before = os.getcwd()
    made[0].ask("stays", lambda: (os.chdir("/"), RELEASE.wait(5), os.getcwd())[2])
    until = time.monotonic() + 5
    while os.getcwd() != "/":
        assert time.monotonic() < until
    made[1].ask("short", int)
    assert made[1].ended(5.0) and os.getcwd() == "/", "a call of another request still runs"
    RELEASE.set()
    assert [call.result for call in made[0].ended(5.0)] == ["/"] and os.getcwd() == before
    for each in made:
        each.close(1.0, ())


class Starter:
    """Starts processes that do not end, and prints their numbers."""

    def reset(self, example):
        pass

    def step(self, reply):
        started = [
            subprocess.Popen(["sleep", "600"]),
            subprocess.Popen(["sleep", "600"], start_new_session=True),
        ]
        other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        other.start()
        print(*(each.pid for each in (*started, other)))
        if reply == " stop":
            subprocess.run(["sleep", "600"], check=False)
        return "", 0.0, False


class AsyncStarter(Starter):
    async def step(self, reply):
        return super().step(" go")


@pytest.mark.process
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux knows who started a process")
def test_processes_that_steps_start_end_with_the_run_and_no_others():
    """One of them keeps its step from returning, and `multiprocessing` waits for others at its exit."""
    program = (
        f"import subprocess\nfrom {HERE} import STOP, GO, episodes, reply\n"
        "kept = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(kept.pid)\n"
        "for name in ('Starter', 'AsyncStarter'):\n"
        "    with episodes(name, on_error='end', step_limit_s=3.0) as played:\n"
        "        reply(played, 0)\n        played.running()\n"
        "        if name == 'Starter':\n            reply(played, 1, STOP)\n            played.running()\n"
    )
    started = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", f"if __name__ == '__main__':\n{textwrap.indent(program, '    ')}"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert time.monotonic() - started < 300
    kept, *own = map(int, found)
    try:
        assert runs(kept) and len(own) == 9 and not any(map(runs, own))
    finally:
        for pid in map(int, found):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_child_that_a_step_forks_ends_with_the_step():
    """The child has the worker's code, and would go on with the calls of its parent."""
    asked = environment.Calls(1, 5.0)
    asked.ask("fork", os.fork)
    (call,) = asked.ended(5.0)
    assert os.waitstatus_to_exitcode(os.waitpid(call.result, 0)[1]) == 0
    asked.close(1.0, ())


@pytest.mark.parametrize(("how", "place"), [("hang", "# here it waits"), ("raise", 'KeyError("secret")')])
def test_the_place_of_an_error_of_an_asynchronous_method(how, place):
    with episodes("AsyncWrong", arguments={"how": how}) as played:
        reply(played, 1, STOP)
        with pytest.raises(RunError, match=rf"in step \(.*test_limits.py, line {line_of(place)}\), got"):
            played.running()
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1"] and own_threads() == 0


@pytest.mark.parametrize("name", ["Wrong", "AsyncWrong"])
@pytest.mark.parametrize("how", WAYS)
def test_with_on_error_end_only_the_episode_ends(how, name):
    played = episodes(name, arguments={"how": how}, on_error="end", error_reward=-2.0)
    for i, ids in enumerate([GO, STOP, GO, STOP]):
        reply(played, i, ids)
    assert played.running() == [0, 2]
    reply(played, 0)
    reply(played, 2)
    assert played.running() == [0, 2]
    found = played.rollouts(1)
    assert found.episode["step_errors"].tolist() == [[0, 1], [0, 1]]
    assert found.rewards.sum(-1).tolist() == [[1.0, -2.0], [1.0, -2.0]] and found.rewards[0, 1, 1] == -2.0
    assert found.ended.tolist() == [[False, True]] * 2
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1"]
    assert (found.episode["seconds"][:, 1] > 0.25).all() == (how == "hang")


@pytest.mark.parametrize("how", ["raise", "hang"])
@pytest.mark.parametrize("name", ["Wrong", "AsyncWrong"])
def test_an_episode_whose_reset_fails_ends_after_its_first_reply(name, how):
    arguments = {"how": how, "where": "reset"}
    with pytest.raises(
        RunError, match=r"in reset \(.*test_limits.py, line \d+\), .* for the prompt 'p'; correct"
    ):
        episodes(name, 1, 1, arguments=arguments)
    played = episodes(name, 1, 1, arguments=arguments, on_error="end", error_reward=-2.0)
    assert played.running() == [0]
    reply(played, 0)
    found = played.rollouts(1)
    assert found.episode["step_errors"] == 1 and found.rewards[0, 0].tolist()[:4] == [0, 0, -2, 0]
    assert CLOSED == ["p0", "p0"]


class Unmade(Wrong):
    def __new__(cls, how):
        if how == "raise":
            raise KeyError("secret")  # in __new__
        return super().__new__(cls)

    def reset(self):
        pass


@pytest.mark.parametrize(("how", "place"), [("raise", "# in __new__"), ("", "    def reset(self):")])
def test_an_error_outside_of_the_code_of_the_class_has_the_place_of_its_method(how, place):
    with pytest.raises(
        RunError, match=rf"Unmade .* in reset \(.*test_limits.py, line {line_of(place)}\), got"
    ):
        episodes("Unmade", 1, 1, arguments={"how": how})


def test_an_environment_that_cannot_be_closed_is_an_error():
    played = episodes("Wrong", 1, 1, arguments={"how": "raise", "where": "close"}, turns_left=1)
    reply(played, 0)
    with pytest.raises(RunError, match="in close .*KeyError: 'secret'"):
        played.rollouts(1)


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_three_calls_that_hang_stop_the_run_also_with_on_error_end(threads):
    played = episodes("Wrong", 2, 2, arguments={"how": "hang"}, on_error="end", threads=threads)
    with pytest.raises(RunError, match="no answer in .* s, for the third time .*whose threads still run"):
        for i in range(4):
            reply(played, i, STOP)
        played.running()
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1"]


def test_a_thread_that_returns_late_changes_nothing_and_is_not_counted():
    played = episodes("Wrong", 3, 1, arguments={"how": "hang"}, on_error="end", error_reward=-2.0)
    for i in range(3):
        reply(played, i, STOP)
        assert i not in played.running()
        RELEASE.set()
        while own_threads() > 1:
            time.sleep(0.01)
        RELEASE.clear()
    assert played.rollouts(1).rewards.sum(-1).flatten().tolist() == [-2.0] * 3


def test_a_step_that_blocks_the_event_loop_is_noticed():
    played = episodes("AsyncBlocks", arguments={"how": "hang"}, on_error="end", error_reward=-2.0)
    reply(played, 1, STOP)
    assert played.running() == [0, 2, 3]
    reply(played, 0)
    assert played.running() == [0, 2, 3], "a new loop goes on"
    reply(played, 0, STOP)
    played.running()
    with pytest.raises(RunError, match="no answer in .*, for the third time"):
        reply(played, 2, STOP)
        played.running()


def test_results_do_not_depend_on_threads_or_an_event_loop():
    kinds = (("Sleepy", 0), ("Sleepy", 5), ("AsyncSleepy", 0))
    found = [sampled(address=f"{HERE}:{name}", threads=threads) for name, threads in kinds]
    assert found[0].episode["turns"].max() > 2
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize(
    ("name", "threads", "least"), [("Sleepy", 0, 0.36), ("Sleepy", 6, 0), ("AsyncSleepy", 0, 0.3)]
)
def test_calls_of_several_threads_or_of_an_event_loop_take_place_at_the_same_time(name, threads, least):
    started = time.monotonic()
    played = episodes(name, 3, 2, arguments={"seconds": 0.06}, threads=threads)
    middle = time.monotonic()
    for i in range(6):
        reply(played, i, STOP)
    assert played.running() == []
    steps = time.monotonic() - middle
    assert steps >= 0.36 if least == 0.36 else steps < 0.2
    assert (played.rollouts(1).episode["seconds"] >= 0.1).all() and middle - started >= 0.05


def test_ready_returns_each_waiting_episode_once_and_waits_if_it_is_told_to():
    played = episodes("Sleepy", 2, 2, arguments={"seconds": 0.1}, threads=2)
    assert played.ready() == [0, 1, 2, 3] and played.ready() == played.ready(wait=True) == []
    reply(played, 3)
    reply(played, 2, STOP)
    reply(played, 1)
    assert played.ready() == []
    assert played.ready(wait=True) == [3]
    assert played.ready(wait=True) == [1]
    assert played.ready(wait=True) == []
    for i in (0, 1, 3):
        reply(played, i, STOP)
    assert played.ready(wait=True) == []
    assert played.rollouts(1).ended.all() and own_threads() == 0


def test_interleaved_games_with_the_global_generator_give_the_rolls_of_games_in_turn():
    def rolls(order):
        random.seed(5)
        with episodes("Dice", 2, 2) as played:
            for i in order:
                reply(played, i)
            for i in range(4):
                reply(played, i, STOP)
            figures = played.rollouts(1).episode
        assert random.random() == random.Random(5).random(), "the state outside is as before"
        return torch.stack([figures[name] for name in sorted(figures) if name.startswith("roll")])

    found = rolls([0, 1, 2, 3] * 2)
    assert torch.equal(found, rolls([0, 0, 1, 1, 2, 2, 3, 3])) and len(found) == 3
    assert torch.equal(found[..., 0], found[..., 1]), "samples of a prompt have the same rolls"
    assert not torch.equal(found[:, 0], found[:, 1])
    assert len({*found[:, 0, 0].tolist()}) == 3, "each roll is another"
    for name, threads in (("Dice", 2), ("AsyncDice", 0)):
        with pytest.raises(
            UserError, match=f"environment.threads must be 0 for {HERE}:{name}.*set environment.th"
        ):
            episodes(name, threads=threads)


def test_a_sampler_that_fails_closes_the_environments_and_leaves_no_thread():
    factory = replace(settings().environment, address=f"{HERE}:Wrong", arguments={"how": "none"}, threads=2)
    calls_of_update = iter(range(3))  # the fourth one fails
    with pytest.raises(StopIteration):
        respond(
            model(), prompts(2), SAMPLING, replace(settings(), environment=factory),
            update=lambda: next(calls_of_update),
        )  # fmt: skip
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1", "p2", "p2"] and own_threads() == 0


@pytest.mark.parametrize("name", ["Wrong", "AsyncWrong"])
@pytest.mark.parametrize("threads", [0, 2])
def test_after_an_error_outside_nothing_is_left_running_and_environments_are_closed(name, threads):
    with (
        pytest.raises(ZeroDivisionError),
        episodes(name, arguments={"how": "none"}, threads=threads) as played,
    ):
        reply(played, 0)
        assert own_threads() == (threads or 1 if name == "Wrong" else 1)
        raise ZeroDivisionError
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1"] and own_threads() == 0
    played.close()


def test_all_calls_of_a_blocked_loop_are_given_up_at_once_and_a_new_loop_goes_on():
    async def block():
        RELEASE.wait(30)

    async def answer():
        return 5

    made = environment.Calls(1, 0.2, in_loop=True)
    made.ask("blocks", block)
    time.sleep(0.2)
    made.ask("waits", answer)
    assert [(call.key, call.late) for call in made.ended(5.0)] == [("blocks", True), ("waits", True)]
    made.ask("new", answer)
    assert [(call.key, call.result) for call in made.ended(5.0)] == [("new", 5)]
    made.close(1.0, [])


def test_an_asynchronous_close_of_a_class_of_other_methods_is_awaited():
    with episodes("AsyncClose", arguments={"how": "raise"}, on_error="end") as played:
        reply(played, 0, STOP)
        assert played.running() == [1, 2, 3] and CLOSED == ["p0"]
    assert sorted(CLOSED) == ["p0", "p0", "p1", "p1"]
