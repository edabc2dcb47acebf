"""Episodes as dialogues for readers: who wrote what, and the reward of each reply."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf.core.score import in_float32

if TYPE_CHECKING:
    from rlhf.core.batch import Rollouts
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.environments.turns import Turns


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
    cut, no_room, out_of_turns, failed, late = (
        rollouts.episode[name] > 0 for name in ("cut", "no_room", "out_of_turns", "step_errors", "timed_out")
    )
    full = rollouts.real.sum(-1) == rollouts.response_ids.shape[-1]
    longest = rollouts.last_reply.sum(-1) == (factory.reply_tokens or -1)
    found = np.full(cut.shape, None, dtype=object)
    found[cut] = "another end token"
    found[cut & longest] = "environment.reply_tokens"
    found[no_room | (cut & full)] = "generator.response_length"
    found[out_of_turns] = "environment.max_turns"
    found[failed] = "environment.on_error"
    found[failed & late] = "environment.step_limit_s"
    return list(found.flatten())
