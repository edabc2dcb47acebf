"""Episodes as dialogues for readers: who wrote what, and the reward of each reply."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.core.batch import Rollouts
    from rlhf.environments.turns import Turns


def transcripts(rollouts: Rollouts, turns: Turns) -> list[list[dict[str, Any]]]:
    """Return the first episode of each of N prompts as a list of replies and messages.

    Each has the keys `role` and `content`, and a reply with a reward other than 0 also `reward`. The texts
    lack the marks of the chat template.
    """
    assert rollouts.environment_mask is not None and rollouts.rewards is not None
    end, columns = turns.tokenizer.eos_token_id, (rollouts.response_ids, rollouts.response_mask)
    found = []
    for row in zip(*(x[:, 0] for x in (*columns, rollouts.environment_mask, rollouts.rewards)), strict=True):
        ids, sampled, messages, rewards = (x.tolist() for x in row)
        dialogue: list[dict[str, Any]] = []
        tokens = [each for each in zip(ids, sampled, messages, rewards, strict=True) if each[1] or each[2]]
        for (own, _), group in groupby(tokens, key=lambda token: token[1:3]):
            part = list(group)
            own_ids = [token[0] for token in part]
            if own:
                text = str(turns.tokenizer.decode(own_ids[: len(own_ids) - (own_ids[-1] == end)]))
                reward = sum(token[3] for token in part)
                dialogue.append(
                    {"role": "assistant", "content": text} | ({"reward": reward} if reward else {})
                )
            else:
                dialogue.append({"role": turns.role, "content": turns.text(own_ids)})
        found.append(dialogue)
    return found
