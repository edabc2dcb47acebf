"""Sums with a checkable answer, the embedded counterpart of GSM8K.

    Problem: 7 + 5 + 8
    Solution: 7 + 5 = 12, 12 + 8 = 20 #### 20

What SFT imitates is the work of pupils, who forget to carry, the more so the larger the term: 7 + 5 = 2. So
a policy after SFT knows the right and the wrong way and goes the wrong one where most pupils do. References,
by which answers are checked, are right.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from rlhf.config.task import PROMPT_COLUMNS, Difficulty

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.task import ArithmeticConfig


TERMS = {Difficulty.easy: 2, Difficulty.medium: 3, Difficulty.hard: 5}  # numbers of 1 to 9 to add


FORGETS_CARRY = 0.1  # times the term: the share of the sums across a ten that go wrong, + 9 nine times of ten


LARGEST = 9 * max(TERMS.values())


TOKEN_PATTERN = r"\n| ?[0-9]+| ?[A-Za-z]+:| ?#+| ?[^\sA-Za-z0-9#]"


def problem(terms: list[int]) -> str:
    """The prompt that asks for a sum."""
    return f"Problem: {' + '.join(map(str, terms))}\nSolution:"


def solution(totals: list[int], terms: list[int]) -> str:
    """The worked solution with the running totals `totals`, right or wrong."""
    steps = zip(totals[:-1], terms[1:], totals[1:], strict=True)
    work = ", ".join(f"{before} + {term} = {after}" for before, term, after in steps)
    return f" {work} #### {totals[-1]}"


def forgetful_add(before: int, term: int, forgets: bool) -> int:
    """A sum in which the carry may be forgotten: 17 + 5 = 12."""
    carries = before % 10 + term >= 10
    return before + term - 10 * (carries and forgets)


class ArithmeticSource:
    """Sums from the seed; pairs from a folder."""

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config

    def prompts(self, split: str) -> Dataset:
        """The split as texts `query`, `reference_response` (right) and `demonstration` (a pupil's)."""
        from datasets import Dataset

        from rlhf.tasks.source import Stored

        if self.config.path is not None:
            return Stored(key="task.path", place=self.config.path).load(split, PROMPT_COLUMNS)
        count = TERMS[self.config.difficulty]
        rng = random.Random(f"arithmetic/{self.config.data_seed}/{split}")
        rows: dict[str, list[str]] = {"query": [], "reference_response": [], "demonstration": []}
        for _ in range(getattr(self.config, f"{split}_size")):
            terms = [rng.randint(1, 9) for _ in range(count)]
            pupils = accumulate(
                terms, lambda before, term: forgetful_add(before, term, rng.random() < FORGETS_CARRY * term)
            )
            rows["query"].append(problem(terms))
            rows["reference_response"].append(solution(list(accumulate(terms)), terms))
            rows["demonstration"].append(solution(list(pupils), terms))
        return Dataset.from_dict(rows)

    def preferences(self, split: str) -> Dataset:
        """The split of `task.preferences_path` as texts `prompt`, `chosen` and `rejected`."""
        from rlhf.tasks.source import sampled_pairs

        return sampled_pairs(self.config, split)


@cache
def vocabulary() -> tuple[str, ...]:
    """Every token but the special ones. All but the headings carry the space before them."""
    numbers = (f" {number}" for number in range(LARGEST + 1))
    return ("Problem:", "Solution:", "\n", " +", " =", ",", " ####", *numbers)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a number; decoding gives back the very text that was encoded."""
    from rlhf.tasks.word_tokenizer import word_tokenizer

    return word_tokenizer(vocabulary(), TOKEN_PATTERN)
