"""The stream of rollouts in the order of virtual time; it takes the place of `rlhf.training.stream.Stream`.

The clock decides which weights sample which tokens and which groups the trainer gets. This module gives the
clock prompts and a sampler, makes batches of the trained groups, and keeps the state for checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.config.schedule import Unit
from rlhf.core.batch import Batch, Begun, Prompts, Rollouts, concatenated
from rlhf.core.seeding import derive
from rlhf.environments.environment import LIMITS
from rlhf.generators.hf.sampling import uniforms
from rlhf.training import sequences
from rlhf.training.clock import Clock
from rlhf.training.replay import with_token_versions
from rlhf.training.ruled import RuledStream
from rlhf.training.sequences import MESSAGE, Piece, Start
from rlhf.training.stream import joined

if TYPE_CHECKING:
    from rlhf.config.clock import VirtualConfig
    from rlhf.training.ruled import Response
    from rlhf.training.stream import StreamContext

_Group = Sequence[sequences.Sequence]  # the sequences of a group that have started
_PADDING = -2  # in place of a version


class VirtualStream(RuledStream):
    """A stream of rollouts in virtual time.

    Args:
        config: virtual seconds.
        context: what the stream is built from.
    """

    def __init__(self, config: VirtualConfig, context: StreamContext) -> None:
        super().__init__(context)
        schedule = context.schedule
        self.clock = Clock(
            self.rules,
            config,
            self,
            length=self.sampling.response_length,
            seed=context.seed,
            in_flight=schedule.in_flight,
            whole=schedule.unit is Unit.group,
        )
        self.scored: dict[int, Batch] = {}  # groups [1] that have ended, with `schedule.refill`
        self.spare: deque[Prompts] = deque()  # prompts [1] that were drawn to replace others
        self.generate_s = 0.0  # seconds of sampling since the last batch
        if context.saved is not None:
            self._load(context.saved)

    @property
    def resumable(self) -> bool:
        """Whether `state_dict` can be called: not while the clock runs on to a load."""
        return self.taken > self.rules.version or self.unused

    def next_batch(self) -> Rollouts:
        """Run the clock until the next load, and return the batch of its update."""
        recorder, made = self.context.recorder, self.clock
        with recorder.timer("wait"), self.context.phases("waiting for rollouts"):
            if self.taken > self.rules.version:  # the loop has loaded the weights of the last update
                made.loaded()
            soon = self.rules.room() + self.rules.batch * self.rules.drops - len(self.discards)
            while len(self.next) < soon:  # the groups that may start until the load
                self.draw(self.next)
            groups = made.next_batch()
        recorder.add(self.figures(groups, made.now, made.slots, made.usage))
        if self.refill is None:
            rollouts = replace(self._rollouts(groups), generate_s=self.generate_s)
        else:
            scored = [self.scored[own[0].group.number] for own in groups]
            rollouts = batch = joined(scored, self.context.pad_id, self.rules.version, self.generate_s)
            recorder.add(self.refill.figures(batch.scores, self.rules.refilled - self.rules.before))
        self.generate_s = 0.0
        taken = made.now - made.costs.sync_s - made.update_s
        for own in groups:
            ready = max(each.end for each in own) + made.costs.score_s
            fate = "cut" if any(each.cut for each in own) else "trained"
            self.forget(own, fate, ready=ready, taken=taken, loaded=made.now)
        self.lines, self.noted = self.noted, []
        return rollouts

    # -- what the clock asks -----------------------------------------------------------------------

    def begin(self, starts: Sequence[Start], most: Sequence[int]) -> list[Piece]:
        """Return the first tokens of sequences, at most `most` of each.

        Whole requests are sampled as `Stream` samples them; other sequences are sampled in one call.
        """
        size, count = self.rules.batch, self.rules.batch * self.rules.samples
        if len(starts) % count or starts[0] != (starts[0].group // size * size, 0):
            count = len(starts)
        found: list[Piece] = []
        for first in range(0, len(starts), count):
            some = slice(first, first + count)
            found += self._sampled(starts[some], most[some])
        return found

    def go_on(self, sequences: _Group, most: Sequence[int]) -> list[Piece]:
        """Return the next tokens of sequences, at most `most` of each.

        Keys and values of earlier tokens are computed again, so a token has the log-prob that the present
        weights give it after all tokens before it.
        """
        return self._sampled([each.key for each in sequences], most, sequences)

    def prompt(self, group: int) -> tuple[int, int]:
        """Return the row of the prompt of a group in the data, and its number of tokens."""
        prompt = self.prompt_of(group)
        return int(prompt.index), int(prompt.prompt_mask.sum())

    def signal(self, group: _Group) -> bool:
        """Return whether the scores of a group differ, given its ended sequences."""
        assert self.refill is not None
        batch, signal = self.refill.score(self._rollouts([group]))
        self.scored[group[0].group.number] = with_token_versions(batch)
        return bool(signal)

    def replaced(self, group: _Group, by: int) -> None:
        """Forget a group without signal, and draw a prompt for the group that starts in its place."""
        self.forget(group, "replaced")
        self.known[by] = self.drawn(self.spare)

    # -- prompts and samples -----------------------------------------------------------------------

    def _sampled(self, keys: Sequence[Start], most: Sequence[int], before: _Group = ()) -> list[Piece]:
        """Return the next tokens of sequences, sampled in one call; `before`: those that have tokens.

        The uniform numbers of a group are those that `Stream` would use for its prompt.
        """
        k, pad_id = self.rules.samples, self.context.pad_id
        if before or keys != [Start(group, sample) for group, _ in keys[::k] for sample in range(k)]:
            k = 1  # each sequence is a row; else each row has all samples of a prompt
        seed = derive(self.context.seed, "sample", self.sampling.purpose)
        shape = self.sampling.samples, self.sampling.response_length
        uniform = {
            group: uniforms(seed, group // self.rules.batch, self.prompt_of(group).index, *shape)[0]
            for group in dict.fromkeys(key.group for key in keys)
        }
        begun, numbers = [], []
        for (group, sample), each in zip_longest(keys, before):
            ids, sampled = (each.ids, [v != MESSAGE for v in each.versions]) if each else ([], [])
            begun.append(Begun(group // self.rules.batch, sample, ids, sampled))
            numbers.append(uniform[group][sample, len(ids) :])
        prompts = concatenated([self.prompt_of(key.group) for key in keys[::k]], pad_id)
        asked = replace(
            self.sampling,
            samples=k,
            numbers=pad_sequence(numbers, batch_first=True).unflatten(0, (-1, k)),
            most=torch.tensor(most).view(-1, k),
            begun=begun,
        )
        found = self.context.generator.submit(Prompts(**prompts), asked).result()
        self.generate_s += found.generate_s
        assert found.behaviour_logprobs is not None
        fields = (found.response_ids, found.behaviour_logprobs, found.real.sum(-1), found.ended)
        pieces = [
            Piece(ids[:count], logprobs[:count], ended)
            for ids, logprobs, count, ended in zip(*(x.flatten(0, 1).tolist() for x in fields), strict=True)
        ]
        return pieces if found.episode is None else [*_episodes(found, pieces)]

    def forget(self, own: Sequence[Response], fate: str, **times: float) -> Prompts:
        """Note the line of a group for groups.jsonl, forget the group, and return its prompt [1]."""
        self.scored.pop(own[0].group.number, None)
        return super().forget(own, fate, **times)

    def _rollouts(self, groups: Sequence[_Group]) -> Rollouts:
        """Return groups whose sequences have ended as rollouts."""

        def padded(name: str, fill: float, dtype: torch.dtype | None = None) -> Tensor:
            """Return one value per token of each sequence, [N, K, T]."""
            length = self.sampling.response_length
            rows = [[getattr(each, name) for each in own] for own in groups]
            full = [[row + [fill] * (length - len(row)) for row in own] for own in rows]
            return torch.tensor(full, dtype=dtype)

        if cut := [each for own in groups for each in own if each.cut and each.figures]:
            pieces = self._sampled([each.key for each in cut], [0] * len(cut), cut)
            for each, piece in zip(cut, pieces, strict=True):  # figures without the turns that were lost
                each.figures = {**piece.figures, "cut": 1.0}
        versions = padded("versions", _PADDING)
        mask = versions >= 0
        seen = versions[mask].unique()
        episodes: dict[str, Any] = {}
        if groups[0][0].figures:
            names = dict.fromkeys(name for own in groups for each in own for name in each.figures)
            episodes = {
                "environment_mask": versions == MESSAGE,
                "rewards": padded("rewards", 0.0, torch.float64),
                "episode": {
                    name: torch.tensor([[each.figures.get(name, 0.0) for each in own] for own in groups])
                    for name in names
                },
            }
        return Rollouts(
            **episodes,
            **concatenated([self.known[own[0].group.number] for own in groups], self.context.pad_id),
            response_ids=padded("ids", self.context.pad_id),
            response_mask=mask,
            ended=torch.tensor([[each.ended for each in own] for own in groups]),
            behaviour_logprobs=padded("logprobs", 0.0),
            version=int(seen.min()),
            trainer_version=self.rules.version,
            token_versions=versions * mask if len(seen) > 1 else None,
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the load of an update, for `torch.load(weights_only=True)`."""
        return {
            **super().state_dict(),
            "clock": self.clock.state_dict(),
            "spare": [prompt.as_dict() for prompt in self.spare],
            "scored": {group: batch.as_dict() for group, batch in self.scored.items()},
        }

    def _load(self, saved: dict[str, Any]) -> None:
        self.clock.load_state_dict(saved["clock"])
        self.load_state_dict(saved)
        self.scored = {group: Batch(**batch) for group, batch in saved["scored"].items()}
        self.spare = deque(Prompts(**prompt) for prompt in saved["spare"])


def _episodes(found: Rollouts, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the pieces of episodes with what belongs to their environments."""
    assert found.episode is not None and found.rewards is not None
    tables = (found.response_mask, found.rewards, torch.stack([*found.episode.values()], -1))
    rows = zip(pieces, *(x.flatten(0, 1).tolist() for x in tables), strict=True)
    for piece, sampled, rewards, values in rows:
        figures = dict(zip(found.episode, values, strict=True))
        yield piece._replace(
            stopped=piece.ended or any(figures[name] for name in LIMITS),
            sampled=sampled[: len(piece.ids)],
            rewards=rewards[: len(piece.ids)],
            figures=figures,
        )
