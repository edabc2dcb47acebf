"""Environments of other libraries. A library is imported when its class is used.

The first observation is the prompt with `task=environment`. With other tasks it is no message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from rlhf.environments.environment import Answer, Example


class Gymnasium:
    """An environment of gymnasium whose observations are written as texts.

    Args:
        id: its name.
        actions: the action that each word means, such as {left: 0}; {}: a reply is the action.
        options: further arguments of `gymnasium.make`.
    """

    def __init__(self, id: str, actions: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from gymnasium import make

        self._game, self._actions, self._seen = make(id, **options), actions, ""
        self._words = f"\nAnswer with one of: {', '.join(actions)}" if actions else ""

    def reset(self, example: Example) -> str:
        """Begin the episode with the seed of the example, and return the first observation."""
        self._seen = str(self._game.reset(seed=example.seed % 2**31)[0])
        return self._seen + self._words

    def step(self, reply: str) -> Answer:
        """Take an action. Another word changes nothing: the message has the observation and the words."""
        word, actions = reply.strip(), self._actions
        if actions and word not in actions:
            return Answer(self._seen + self._words, error=True)
        seen, reward, ended, cut, _ = self._game.step(actions[word] if actions else reply)
        self._seen = str(seen)
        return Answer(self._seen, cast(float, reward), bool(ended or cut))

    def close(self) -> None:
        """End the environment."""
        self._game.close()


class OpenEnv:
    """A session of an OpenEnv server, which must allow as many sessions as there are episodes in a request.

    Args:
        url: the address of the server, http or https.
        action: the field of an action that has the reply.
        observation: the field of an observation that is the message; None: all fields, as JSON.
    """

    def __init__(self, url: str, action: str, observation: str | None) -> None:
        self._url = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._session: Any = None

    async def reset(self, example: Example) -> str:
        """Begin a session with the seed of the example, and return the first observation."""
        from websockets.asyncio.client import connect

        self._session = await connect(self._url, max_size=2**24, proxy=None)
        return self._text(await self._ask("reset", {"seed": example.seed % 2**31}))

    async def step(self, reply: str) -> Answer:
        """Send a reply as an action."""
        found = await self._ask("step", {self._action: reply})
        return Answer(self._text(found), found.get("reward") or 0.0, bool(found.get("done")))

    def _text(self, found: dict[str, Any]) -> str:
        seen, name = found["observation"], self._observation
        return json.dumps(seen, ensure_ascii=False) if name is None else str(seen[name])

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.send(json.dumps({"type": "close"}))
            await self._session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._session.send(json.dumps({"type": kind, "data": data}))
        found = json.loads(await self._session.recv())
        if found["type"] == "error":
            raise RuntimeError(f"the server answers: {found['data'].get('message')}")
        return dict(found["data"])
