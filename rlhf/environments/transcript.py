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
