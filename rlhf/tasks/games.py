"""The embedded tasks with an environment, `calculator` and `guess_number`: dialogues in the plain format.

    user       Problem: 7 + 5 + 8        Guess: 1 to 15
    assistant   calc 7 + 5                8
    user        12                        higher
    assistant   calc 12 + 8               12
    user        20
    assistant   #### 20

SFT imitates pupils, whom the environment answers. Of those with a problem, 60 % answer by head, and forget
carries as in `arithmetic`; 40 % use the calculator, and 20 % of these write another number than its last
result. Pupils who guess a number ignore the earlier answers in half of their guesses. RL learns to use the
calculator, and to search.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.core.chat_format import PLAIN, set_template
from rlhf.environments.environment import Example
from rlhf.environments.games import Calculator, GuessNumber
from rlhf.tasks.arithmetic import pupil_totals
from rlhf.tasks.source import EmbeddedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.tasks.columns import Message

Pupil = Generator[str, str, None]  # yields replies, gets messages

_MARKS = ("<|user|>", "<|assistant|>", "\n", " error")
_TERMS, _BY_HEAD, _CARELESS = 3, 0.6, 0.2
_LARGEST, _HEEDLESS = 15, 0.5


class GameSource(EmbeddedSource):
    """A source of generated questions to a user, and of the dialogues of pupils with an environment.

    Besides the columns of every source, each row has the column `secret`, the number that answers the
    question; an environment receives it in its record.
    """

    pattern = r"<\|[a-z]+\|>|\n| ?[0-9]+| ?[A-Za-z]+:?| ?#+| ?[^\sA-Za-z0-9#]"
    conversational = True
    environment: ClassVar[type[Calculator | GuessNumber]]
    replies: ClassVar[int]  # largest number in a dialogue

    @staticmethod
    @abstractmethod
    def game(rng: random.Random) -> tuple[str, int, str, Pupil]:
        """Return a question, the number that answers it, the right last reply, and a pupil."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this vocabulary and the plain chat format."""
        made = super().tokenizer()
        set_template(made, PLAIN)
        return made

    def generate(self, split: str, size: int) -> dict[str, list[Any]]:
        """Return `size` examples with the columns of dialogues, and `secret`."""
        rng = random.Random(f"{self.config.name}/{self.config.data_seed}/{split}")
        names = ("messages", "reference_response", "demonstration", "secret")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        for _ in range(size):
            question, secret, right, pupil = self.game(rng)
            record = {"secret": secret}
            example = Example(prompt=question, reference=right, record=record, seed=0, sample=0)
            rows["messages"].append([_said("user", question)])
            rows["reference_response"].append([_said("assistant", right)])
            rows["demonstration"].append(self._played(example, pupil))
            rows["secret"].append(secret)
        return rows

    def _played(self, example: Example, pupil: Pupil) -> list[Message]:
        """Return the dialogue of a pupil with the environment, from the first reply on."""
        environment = self.environment()
        environment.reset(example)
        talk = [_said("assistant", next(pupil))]
        for _ in range(self.replies - 1):
            if (answer := environment.step(talk[-1]["content"])).done:
                break
            talk += [_said("user", answer.message), _said("assistant", pupil.send(answer.message))]
        return talk


class CalculatorSource(GameSource):
    """A source of sums, which a calculator adds."""

    environment, replies = Calculator, _TERMS

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token except special tokens; numbers up to twice the largest sum."""
        numbers = (f" {number}" for number in range(2 * 9 * _TERMS + 1))
        return (*_MARKS, "Problem:", " calc", " +", " ####", *numbers)

    @staticmethod
    def game(rng: random.Random) -> tuple[str, int, str, Pupil]:
        """Return a sum, and a pupil who answers by head or with the calculator."""
        terms = [rng.randint(1, 9) for _ in range(_TERMS)]

        def pupil() -> Pupil:
            if rng.random() < _BY_HEAD:
                yield f" #### {pupil_totals(terms, rng)[-1]}"
            total = f" {terms[0]}"
            for term in terms[1:]:
                total = yield f" calc{total} + {term}"
            careless = rng.random() < _CARELESS
            yield f" #### {rng.randint(_TERMS, 9 * _TERMS)}" if careless else f" ####{total}"

        return f"Problem: {' + '.join(map(str, terms))}", sum(terms), f" #### {sum(terms)}", pupil()


class GuessNumberSource(GameSource):
    """A source of numbers, which are guessed."""

    environment, replies = GuessNumber, 4

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token except special tokens."""
        return (*_MARKS, "Guess:", " to", " higher", " lower", *(f" {i}" for i in range(_LARGEST + 1)))

    @staticmethod
    def game(rng: random.Random) -> tuple[str, int, str, Pupil]:
        """Return a number, and a pupil who heeds some of the answers."""
        secret = rng.randint(1, _LARGEST)

        def pupil() -> Pupil:
            low, high = 1, _LARGEST
            while True:
                heedless = rng.random() < _HEEDLESS
                guess = rng.randint(1, _LARGEST) if heedless else rng.randint(low, high)
                if (yield f" {guess}") == " higher":
                    low = max(low, guess + 1)
                else:
                    high = min(high, guess - 1)

        return f"Guess: 1 to {_LARGEST}", secret, f" {secret}", pupil()


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
