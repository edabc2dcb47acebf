"""The task `reasoning_gym`: problems of the package reasoning-gym, which generates and verifies them.

In most data sets of the package, neighbouring seeds share their examples: example i of seed s + 1 is example
i + 1 of seed s. Therefore each split has a derived seed, and training leaves out held-out questions.
"""

from __future__ import annotations

import json
import logging
import string
from ast import literal_eval
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from datasets.exceptions import DatasetGenerationError

from rlhf.core.errors import UserError
from rlhf.core.seeding import derive
from rlhf.tasks.records import NOTHING, Wanted
from rlhf.tasks.source import EmbeddedSource, as_messages

if TYPE_CHECKING:
    from rlhf.config.reasoning_gym import ReasoningGymConfig

log = logging.getLogger(__name__)


class ReasoningGymSource(EmbeddedSource):
    """A source of problems of reasoning-gym; with `task.chat`, as messages of the user.

    Each row has what the verifier needs in the columns `dataset` (its name), `arguments` (JSON) and `entry`
    (the question, the answer and the metadata, as a Python literal).
    """

    config: ReasoningGymConfig
    pattern = r"</?answer>|[\s\S]"

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        self.conversational = config.chat

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return the marks of an answer, all printable characters of ASCII, and the sign of products."""
        return ("<answer>", "</answer>", *string.printable, "×")

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with `query` (or `messages`) and `reference_response`, empty without an answer."""
        rows = super().prompts(split, wanted)
        return as_messages(rows) if self.config.chat else rows

    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` examples; of the training split, those whose question no held-out example has.

        Raises:
            UserError: every training question is also held out.
        """
        rows = self._entries(split, size)
        if split == "train":
            sizes = {"validation": self.config.validation_size, "test": self.config.test_size}
            seen = {text for other in sizes.items() for text in self._entries(*other)["question"]}
            kept = [i for i, question in enumerate(rows["question"]) if question not in seen]
            if not kept:
                raise UserError(
                    "task.arguments must give more problems than the held-out examples (none is left for "
                    f"training), got {self.config.arguments}; set larger ranges"
                )
            if len(kept) < size:
                log.info("left out %d of %d training problems, which are held out", size - len(kept), size)
            rows = rows.select(kept)
        form, answers = self.config.question_format, rows["answer"]
        return {
            "query": [form.replace("{question}", question) for question in rows["question"]],
            "reference_response": [answer and f"<answer>{answer}</answer>" for answer in answers],
            "entry": list(rows["entry"]),
            "dataset": [self.config.dataset] * len(rows),
            "arguments": [json.dumps(self.config.arguments)] * len(rows),
        }

    def _entries(self, split: str, size: int) -> Dataset:
        """Return generated examples, from the cache of `datasets` if they were generated before.

        Raises:
            UserError: the data set cannot make so many problems with its arguments.
        """
        seed = derive(self.config.data_seed, "reasoning_gym", split) % 2**32
        arguments = {"name": self.config.dataset, "seed": seed, "size": size, **self.config.arguments}
        given = {"version": version("reasoning-gym"), "arguments": arguments}
        try:
            return Dataset.from_generator(_generated, gen_kwargs=given)
        except DatasetGenerationError as error:
            reason = f"{type(error.__cause__).__name__}: {error.__cause__}"
            raise UserError(
                f"task.arguments must be arguments with which {self.config.dataset} makes {size} problems "
                f"({reason}), got {self.config.arguments}; correct them"
            ) from None


def _generated(version: str, arguments: dict[str, Any]) -> Iterator[dict[str, str]]:
    from reasoning_gym import create_dataset  # takes seconds

    problems = create_dataset(**arguments)
    for i in range(arguments["size"]):
        entry = problems[i]
        answer = "" if entry["answer"] is None else entry["answer"]
        yield {"question": entry["question"], "answer": answer, "entry": _literal(entry)}


def _literal(entry: dict[str, Any]) -> str:
    """Return an entry as a Python literal, which keeps tuples: some verifiers compare them."""
    try:
        literal_eval(text := repr(entry))
    except ValueError:  # metadata with objects, which become plain as JSON
        text = repr(json.loads(json.dumps(entry)))
    return text
