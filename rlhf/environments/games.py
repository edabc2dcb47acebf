"""The environments of the embedded tasks: a calculator, and the game of guessing a number."""

from __future__ import annotations

import re

from rlhf.environments.environment import Answer, Example


class Calculator:
    """Adds two numbers for the model; the reward is 1 for the right sum.

    The replies are " calc 7 + 5", which is answered with " 12", and " #### 20", which ends the episode.
    """

    def reset(self, example: Example) -> None:
        """Begin an episode; the reference of the example is the right last reply."""
        self.right = example.reference

    def step(self, reply: str) -> Answer:
        """Return the sum of a call, the reward of an answer, or an error."""
        if call := re.fullmatch(r" calc (\d+) \+ (\d+)", reply):
            return Answer(f" {int(call[1]) + int(call[2])}")
        if re.fullmatch(r" #### \d+", reply):
            return Answer(reward=float(reply == self.right), done=True)
        return Answer(" error", error=True)


class GuessNumber:
    """Answers a guess with " higher" or " lower"; the reward is 1 for the right number."""

    def reset(self, example: Example) -> None:
        """Begin an episode; the record of the example has the number as `secret`."""
        self.secret: int = example.record["secret"]

    def step(self, reply: str) -> Answer:
        """Return where the number is, or the reward."""
        if not re.fullmatch(r" \d+", reply):
            return Answer(" error", error=True)
        right = int(reply) == self.secret
        return Answer(" higher" if int(reply) < self.secret else " lower", float(right), right)
