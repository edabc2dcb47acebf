"""Episodes as dialogues for readers: who wrote what, and the reward of each reply."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rlhf.core.score import in_float32

if TYPE_CHECKING:
    from rlhf.core.batch import Rollouts
    from rlhf.environments.turns import Turns


def transcripts(rollouts: Rollouts, turns: Turns) -> list[list[dict[str, Any]]]:
    """Return the N * K episodes, each as a list of replies and messages.

    Each has the keys `role` and `content`, and a reply with a reward other than 0 also `reward`. The texts
    lack the marks of the chat template.
    """
    assert rollouts.environment_mask is not None and rollouts.rewards is not None
    columns = (rollouts.response_ids, rollouts.response_mask, rollouts.environment_mask, rollouts.rewards)
    end, found = turns.tokenizer.eos_token_id, []
    for episode in zip(*(x.flatten(0, 1).tolist() for x in columns), strict=True):
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
        found.append(dialogue)
    return found
