"""Environments of other libraries: episodes of a game of gymnasium, and of a server with sessions."""

import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlhf.config.environments import GymnasiumConfig, OpenEnvConfig
from rlhf.core.errors import RunError
from rlhf.environments.episodes import Episodes
from tests.environments.test_episodes import SAMPLING, prompts, settings


class Lake:
    """A game in the interface of gymnasium: a walk to the right."""

    made: list["Lake"] = []

    def __init__(self, id, **options):
        self.id, self.options, self.closed, self.seeds = id, options, False, []
        self.made.append(self)

    def reset(self, seed):
        self.seeds.append(seed)
        self.at = seed % 2
        return self.at, {}

    def step(self, action):
        self.at += action
        return self.at, float(self.at == 3), self.at == 3, self.at < 0, {}

    def close(self):
        self.closed = True


def episodes(config, samples=2) -> Episodes:
    factory = replace(
        settings().environment,
        address=config.address,
        arguments=config.class_arguments,
        step_limit_s=5.0,
    )
    return Episodes(prompts(1), replace(SAMPLING, samples=samples), factory, [0], 7)


def answers(played: Episodes, *replies: str):
    """Yield the answer of the environment to each reply of the first episode."""
    for reply in replies:
        found = played._all[0].environment.step(reply)
        yield found.message, found.reward, found.done, found.error


@contextmanager
def server(most: int):
    """Serve sessions in the protocol of OpenEnv, `most` at a time; yield the address and the state."""
    serving = pytest.importorskip("websockets.sync.server")
    state = SimpleNamespace(open=0, most_open=0, seeds=[], paths=set(), lock=threading.Lock())

    def session(connection):
        state.paths.add(connection.request.path)
        with state.lock:
            state.open += 1
            state.most_open = max(state.most_open, state.open)
        try:
            if state.open > most:
                connection.send(json.dumps({"type": "error", "data": {"message": "no session is free"}}))
            total = 0
            for raw in connection:
                asked = json.loads(raw)
                if asked["type"] == "close":
                    break
                if asked["type"] == "reset":
                    state.seeds.append(asked["data"]["seed"])
                    seen = {"observation": {"text": "start"}, "reward": None, "done": False}
                elif asked["data"].keys() != {"message"}:
                    connection.send(json.dumps({"type": "error", "data": {"message": "no such field"}}))
                    continue
                else:
                    total += len(asked["data"]["message"])
                    seen = {"observation": {"text": " yes é"}, "reward": total / 2, "done": total > 9}
                connection.send(json.dumps({"type": "observation", "data": seen}))
        finally:
            with state.lock:
                state.open -= 1

    with serving.serve(session, "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.socket.getsockname()[1]}/", state
        finally:
            made.shutdown()
            thread.join()


def test_each_episode_has_a_session_of_the_server():
    with server(most=3) as (url, state):
        played = episodes(OpenEnvConfig(url=url), samples=3)
        assert state.open == 3 and len({*state.seeds}) == 1 and state.paths == {"/ws"}
        for i, ids in enumerate(([7, 8, 0], [10, 0], [7] * 5 + [0])):
            played.reply(i, ids, [-1.0] * len(ids))
        assert played.running() == [0, 1]
        found = played.rollouts(1)
        assert found.rewards.sum(-1).tolist() == [[2.0, 2.5, 5.0]]
        assert found.ended.tolist() == [[False, False, True]] and state.most_open == 3
    assert state.open == 0


def test_the_message_is_a_field_of_the_observation_or_all_of_it():
    turns = settings().environment.turns
    assert (
        turns.tokens(" yes é")
        != turns.tokens('{"text": " yes é"}')
        != turns.tokens('{"text": " yes \\u00e9"}')
    )
    for observation, said in (("text", " yes é"), (None, '{"text": " yes é"}')):
        with server(most=1) as (url, _):
            played = episodes(OpenEnvConfig(url=url, observation=observation), samples=1)
            played.reply(0, [7, 8, 0], [-1.0] * 3)
            played.running()
            assert played.history(0)[-len(turns.tokens(said)) :] == turns.tokens(said)
            played.close()


def test_a_server_without_a_free_session_or_with_other_actions_is_an_error_with_its_words():
    with server(most=1) as (url, _):
        with pytest.raises(
            RunError, match="OpenEnv must .* in reset .*the server answers: no session is free"
        ):
            episodes(OpenEnvConfig(url=url))
        played = episodes(OpenEnvConfig(url=url, action="code"), samples=1)
        played.reply(0, [7, 0], [-1.0] * 2)
        with pytest.raises(RunError, match="in step .*the server answers: no such field"):
            played.running()
    with pytest.raises(RunError, match="in reset .*(Connect|refused|OSError).*; correct the environment"):
        episodes(OpenEnvConfig(url="http://127.0.0.1:9"))


def test_a_real_game_of_gymnasium_is_won_by_the_words_of_its_actions():
    words = {"left": 0, "down": 1, "right": 2, "up": 3}
    lake = GymnasiumConfig(id="FrozenLake-v1", actions=words, options={"is_slippery": False})
    played = episodes(lake, samples=2)
    assert [each.environment._seen for each in played._all] == ["0", "0"]
    found = [
        *answers(played, *(f" {word}" for word in ["down", "down", "fly", "right", "right", "down", "right"]))
    ]
    assert [error for *_, error in found] == [False, False, True, *[False] * 4]
    assert found[2][0] == "8\nAnswer with one of: left, down, right, up"
    assert [message for message, *_ in found[3:]] == ["9", "10", "14", "15"]
    assert [(reward, done) for _, reward, done, _ in found[-2:]] == [(0.0, False), (1.0, True)]
    played.close()


def test_words_are_actions_of_a_game_and_samples_of_a_prompt_begin_alike(monkeypatch):
    Lake.made.clear()
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=Lake))
    played = episodes(GymnasiumConfig(id="Lake-v1", actions={"right": 1, "left": -1}, options={"size": 4}))
    first, second = Lake.made
    assert first.seeds == second.seeds and first.seeds[0] < 2**31 and first.options == {"size": 4}
    start = first.at
    found = [*answers(played, " right\n", "up", *["right"] * (2 - start))]
    assert found[0] == (str(start + 1), 0.0, start == 2, False)
    assert found[1] == (f"{start + 1}\nAnswer with one of: right, left", 0.0, False, True)
    assert found[-1] == ("3", 1.0, True, False)
    played.close()
    assert first.closed and second.closed
