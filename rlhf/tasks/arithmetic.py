"""The embedded task `arithmetic`: sums with answers that can be checked, similar to GSM8K.

    Problem: 7 + 5 + 8
    Solution: 7 + 5 = 12, 12 + 8 = 20 #### 20

SFT imitates pupils who sometimes forget the carry, more often for larger terms: 7 + 5 = 2. After SFT, the
policy samples correct and wrong sums; the wrong sum is more likely where most pupils are wrong. Reference
responses are correct, and answers are compared with them.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from rlhf.config.task import Difficulty
from rlhf.tasks.source import EmbeddedSource

if TYPE_CHECKING:
    from rlhf.config.task import ArithmeticConfig

_TERMS = {Difficulty.easy: 2, Difficulty.medium: 3, Difficulty.hard: 5}  # terms of a sum, each 1 to 9
_FORGETS_CARRY = 0.1  # times the term: probability that a carry is forgotten; 0.9 for + 9
_LARGEST = 9 * max(_TERMS.values())
_TOKEN_PATTERN = r"\n| ?[0-9]+| ?[A-Za-z]+:| ?#+| ?[^\sA-Za-z0-9#]"


def problem(terms: list[int]) -> str:
    """Return the prompt that asks for the sum of `terms`."""
    return f"Problem: {' + '.join(map(str, terms))}\nSolution:"


def _solution(totals: list[int], terms: list[int]) -> str:
    """Return the worked solution with the running totals `totals`, which may be wrong."""
    steps = zip(totals[:-1], terms[1:], totals[1:], strict=True)
    work = ", ".join(f"{before} + {term} = {after}" for before, term, after in steps)
    return f" {work} #### {totals[-1]}"


def forgetful_add(before: int, term: int, forgets: bool) -> int:
    """Return `before + term`; if `forgets` is True, without the carry: 17 + 5 = 12."""
    carries = before % 10 + term >= 10
    return before + term - 10 * (carries and forgets)


def pupil_totals(terms: list[int], rng: random.Random) -> list[int]:
    """Return the running totals of a pupil who sometimes forgets the carry."""
    return list(
        accumulate(
            terms, lambda before, term: forgetful_add(before, term, rng.random() < _FORGETS_CARRY * term)
        )
    )


class ArithmeticSource(EmbeddedSource):
    """A source of sums, generated from `task.data_seed`, and of preference pairs from a folder."""

    config: ArithmeticConfig
    pattern = _TOKEN_PATTERN

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token except special tokens. Operators, `####` and numbers begin with a space."""
        numbers = (f" {number}" for number in range(_LARGEST + 1))
        return ("Problem:", "Solution:", "\n", " +", " =", ",", " ####", *numbers)

    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` examples: `reference_response` is correct, `demonstration` is the work of a pupil."""
        count = _TERMS[self.config.difficulty]
        rng = random.Random(f"arithmetic/{self.config.data_seed}/{split}")
        rows: dict[str, list[str]] = {"query": [], "reference_response": [], "demonstration": []}
        for _ in range(size):
            terms = [rng.randint(1, 9) for _ in range(count)]
            rows["query"].append(problem(terms))
            rows["reference_response"].append(_solution(list(accumulate(terms)), terms))
            rows["demonstration"].append(_solution(pupil_totals(terms, rng), terms))
        return rows
