"""The episodes of a request as tokens, turn by turn, for every sampler.

A sampler asks which episodes run, samples a reply to the history of each, and gives the reply back. A history
is the prompt, the sampled tokens and the tokens of messages: nothing is formatted or encoded again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.core.batch import Rollouts
from rlhf.core.seeding import derive
from rlhf.environments.environment import Example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf.core.batch import Prompts, Sampling
    from rlhf.environments.environment import Environment, EnvironmentFactory
    from rlhf.environments.turns import Turns

_COUNTS = ("turns", "tool_errors", "out_of_turns", "cut", "no_room")  # figures that every environment has


@dataclass(slots=True)
class _Episode:
    environment: Environment
    ids: list[int] = field(default_factory=list)  # tokens after the prompt
    sampled: list[bool] = field(default_factory=list)  # per token: by the model, not by the environment
    logprobs: list[float] = field(default_factory=list)  # 0 at messages
    versions: list[int] = field(default_factory=list)  # 0 at messages
    rewards: list[float] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    running: bool = True
    ended: bool = False  # by the environment, not by a limit

    def append(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], sampled: bool
    ) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(ids)


class Episodes:
    """N prompts with K episodes each. An episode has a position n * K + k.

    Args:
        prompts: N prompts.
        sampling: K, and the largest number T of tokens of an episode, messages included.
        factory: makes the environments.
        turns: the messages as tokens.
        stop_ids: tokens that end a reply.
        seed: the seed of the run.
    """

    def __init__(
        self,
        prompts: Prompts,
        sampling: Sampling,
        factory: EnvironmentFactory,
        turns: Turns,
        stop_ids: Sequence[int],
        seed: int,
    ) -> None:
        self.prompts, self.sampling, self.factory, self.turns = prompts, sampling, factory, turns
        self.stop_ids = frozenset(stop_ids)
        self.heads = [
            ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        ]
        records = prompts.records or [{}] * len(prompts)
        self._all = [
            _Episode(
                factory.begun(
                    Example(
                        prompt=prompts.texts[n],
                        reference=prompts.references[n],
                        record=records[n],
                        seed=derive(seed, "environment", sampling.purpose, sampling.request, row),
                        sample=k,
                    )
                )
            )
            for (n, row), k in product(enumerate(prompts.index.tolist()), range(sampling.samples))
        ]

    def running(self) -> list[int]:
        """Return the positions of the episodes that wait for a reply."""
        return [i for i, episode in enumerate(self._all) if episode.running]

    def history(self, i: int) -> list[int]:
        """Return the token ids that the next reply of episode `i` follows, the prompt included."""
        return self.heads[i // self.sampling.samples] + self._all[i].ids

    def length(self, i: int) -> int:
        """Return the number of tokens of episode `i` after its prompt."""
        return len(self._all[i].ids)

    def room(self, i: int) -> int:
        """Return the largest number of tokens of the next reply of episode `i`."""
        left = self.sampling.response_length - self.length(i)
        return min(left, self.factory.reply_tokens or left)

    def reply(
        self, i: int, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int] | None = None
    ) -> None:
        """Add a reply to episode `i`, and the answer of its environment.

        An episode ends if the environment is done, the reply does not end with the end token, there are
        `max_turns` replies, or the message leaves no room for another reply.

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
        episode.figures["turns"] += 1
        if ids[-1] not in self.stop_ids:  # a call in a reply that was cut may be valid by chance
            return self._stop(episode, "cut")
        text = str(self.turns.tokenizer.decode(list(ids[:-1]), skip_special_tokens=False))
        answer = self.factory.answer(episode.environment, text)
        episode.rewards[-1] = answer.reward
        episode.figures["tool_errors"] += answer.error
        episode.figures.update(answer.figures)
        if answer.done:
            episode.ended = True
            return self._stop(episode)
        if ids[-1] != self.turns.tokenizer.eos_token_id:  # the template's message follows the end token only
            return self._stop(episode, "cut")
        if episode.figures["turns"] == self.factory.max_turns:
            return self._stop(episode, "out_of_turns")
        message = self.turns.tokens(answer.message)
        if len(message) >= self.sampling.response_length - len(episode.ids):
            return self._stop(episode, "no_room")
        nothing = [0] * len(message)
        return episode.append(message, nothing, nothing, sampled=False)

    def _stop(self, episode: _Episode, limit: str | None = None) -> None:
        episode.running = False
        if limit:
            episode.figures[limit] += 1
        if close := getattr(episode.environment, "close", None):
            close()

    def close(self) -> None:
        """End the episodes that still run."""
        for i in self.running():
            self._stop(self._all[i])

    def rollouts(self, pad_id: int, in_flight: bool = False) -> Rollouts:
        """Return the episodes as rollouts [N, K, T]; with `in_flight`, tokens have versions."""
        N, K, T = len(self.prompts), self.sampling.samples, self.sampling.response_length

        def table(rows: list[list[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
            padded = [row + [fill] * (T - len(row)) for row in rows]
            return torch.tensor(padded, dtype=dtype).view(N, K, T)

        sampled = table([each.sampled for each in self._all], False, torch.bool)
        real = table([[True] * len(each.ids) for each in self._all], False, torch.bool)
        names = dict.fromkeys([*_COUNTS, *(name for each in self._all for name in each.figures)])
        return self.prompts.extend(
            Rollouts,
            response_ids=table([each.ids for each in self._all], pad_id, torch.int64),
            response_mask=sampled,
            environment_mask=real & ~sampled,
            behaviour_logprobs=table([each.logprobs for each in self._all], 0.0, torch.float32),
            token_versions=table([each.versions for each in self._all], 0, torch.int64)
            if in_flight
            else None,
            rewards=table([each.rewards for each in self._all], 0.0, torch.float32),
            ended=torch.tensor([each.ended for each in self._all]).view(N, K),
            episode={
                name: torch.tensor([float(each.figures[name]) for each in self._all]).view(N, K)
                for name in names
            },
        )
