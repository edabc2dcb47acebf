"""Tasks whose prompts belong to an environment."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from datasets import Dataset

from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import derive
from rlhf.environments.environment import Example
from rlhf.environments.episodes import FIRST_MESSAGE, first_messages
from rlhf.environments.library import Calculator, GuessNumber
from rlhf.tasks.kinds import pupil_totals
from rlhf.tasks.reading import NOTHING, RECORD, Wanted
from rlhf.tasks.source import EmbeddedSource, Source, as_messages
from rlhf.text.chat import PLAIN, set_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.tasks.columns import Message


# The embedded tasks `calculator` and `guess_number`: dialogues with an environment in the plain chat format.
#
#     Problem: 7 + 5 + 8 | calc 7 + 5 | 12 | calc 12 + 8 | 20 | #### 20        Guess: 1 to 15 | 8 | higher |
#     12
#
# SFT imitates pupils, whom the environment answers. Of those with a problem, 60 % answer by head and forget
# carries as in `arithmetic`; 40 % use the calculator, and 20 % of these write another number than its result.
# Pupils who guess a number ignore the answers in half of their guesses. RL learns to calculate and to search.


Pupil = Generator[str, str, None]  # yields replies, gets messages

_MARKS = ("<|user|>", "<|assistant|>", "\n", " error")
_TERMS, _BY_HEAD, _CARELESS = 3, 0.6, 0.2
_LARGEST, _HEEDLESS = 15, 0.5


class GameSource(EmbeddedSource):
    """A source of questions, whose rows have the number that answers them in the column `secret`."""

    pattern = r"<\|[a-z]+\|>|\n| ?[0-9]+| ?[A-Za-z]+:?| ?#+| ?[^\sA-Za-z0-9#]"
    conversational = True
    environment: ClassVar[type[Calculator | GuessNumber]]
    replies: ClassVar[int]  # largest number in a demonstration

    @staticmethod
    @abstractmethod
    def game(rng: random.Random) -> tuple[str, str, Pupil]:
        """Return a question, the right last reply, and a pupil."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this vocabulary and the plain chat format."""
        made = super().tokenizer()
        set_template(made, PLAIN)
        return made

    def generate(self, split: str, size: int) -> dict[str, list[Any]]:
        """Return `size` examples; the demonstrations are dialogues of pupils with the environment."""
        rng = random.Random(f"{self.config.name}/{self.config.data_seed}/{split}")
        rows = [self._example(*self.game(rng)) for _ in range(size)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _example(self, question: str, right: str, pupil: Pupil) -> dict[str, Any]:
        record, environment = {"secret": int(right.split()[-1])}, self.environment()
        environment.reset(Example(prompt=question, reference=right, record=record, seed=0, sample=0))
        talk = [_said("assistant", next(pupil))]
        for _ in range(self.replies - 1):
            if (answer := environment.step(talk[-1]["content"])).done:
                break
            talk += [_said("user", answer.message), _said("assistant", pupil.send(answer.message))]
        asked, reference = [_said("user", question)], [_said("assistant", right)]
        return {"messages": asked, "reference_response": reference, "demonstration": talk, **record}


class CalculatorSource(GameSource):
    """A source of sums, and of pupils who add by head or with a calculator."""

    environment, replies = Calculator, _TERMS

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token except special tokens; numbers up to twice the largest sum."""
        numbers = (f" {number}" for number in range(2 * 9 * _TERMS + 1))
        return (*_MARKS, "Problem:", " calc", " +", " ####", *numbers)

    @staticmethod
    def game(rng: random.Random) -> tuple[str, str, Pupil]:
        """Return a problem, its answer, and a pupil."""
        terms = [rng.randint(1, 9) for _ in range(_TERMS)]

        def pupil() -> Pupil:
            if rng.random() < _BY_HEAD:
                yield f" #### {pupil_totals(terms, rng)[-1]}"
            total = f" {terms[0]}"
            for term in terms[1:]:
                total = yield f" calc{total} + {term}"
            careless = rng.random() < _CARELESS
            yield f" #### {rng.randint(_TERMS, 9 * _TERMS)}" if careless else f" ####{total}"

        return f"Problem: {' + '.join(map(str, terms))}", f" #### {sum(terms)}", pupil()


class GuessNumberSource(GameSource):
    """A source of numbers, and of pupils who guess them."""

    environment, replies = GuessNumber, 4

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token except special tokens."""
        return (*_MARKS, "Guess:", " to", " higher", " lower", *(f" {i}" for i in range(_LARGEST + 1)))

    @staticmethod
    def game(rng: random.Random) -> tuple[str, str, Pupil]:
        """Return the question, a number, and a pupil."""

        def pupil() -> Pupil:
            low, high = 1, _LARGEST
            while True:
                heedless = rng.random() < _HEEDLESS
                guess = rng.randint(1, _LARGEST) if heedless else rng.randint(low, high)
                if (yield f" {guess}") == " higher":
                    low = max(low, guess + 1)
                else:
                    high = min(high, guess - 1)

        return f"Guess: 1 to {_LARGEST}", f" {rng.randint(1, _LARGEST)}", pupil()


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# The task `environment`: prompts that the environment of a run returns from `reset`.


class FirstMessages(Source):
    """A source of first messages, as messages of the user. The record of a row has its text and `seed`.

    Attributes:
        factory: makes the environments; set after the construction, because a task knows only its section.
    """

    conversational = True
    factory: EnvironmentFactory

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` and `reference_response`, which is empty.

        Raises:
            UserError: the environment fails, or `reset` returns no text.
        """
        size = getattr(self.config, f"{split}_size")
        seeds = [derive(self.config.data_seed, "first message", split, i) % 2**31 for i in range(size)]
        try:
            texts = first_messages(self.factory, seeds)
        except RunError as error:
            raise UserError(str(error)) from None
        if unfit := [text for text in texts if not isinstance(text, str) or not text.strip()]:
            raise UserError(
                f"environment must return a text from reset for task=environment (it is the prompt), got "
                f"{unfit[0]!r} from {self.factory.address}; return the first message"
            )
        made = [{"seed": seed, FIRST_MESSAGE: text} for seed, text in zip(seeds, texts, strict=True)]
        rows = {"query": texts, "reference_response": [""] * size, RECORD: [*map(wanted.record, made)]}
        return as_messages(Dataset.from_dict(rows))
