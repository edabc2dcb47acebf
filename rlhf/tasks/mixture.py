"""The task `mixture`: several tasks, whose training prompts are drawn in proportion to their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features, Json, Value, concatenate_datasets

from rlhf.config.schema import PARTS
from rlhf.core.errors import UserError
from rlhf.core.metrics import How, Stat, mean
from rlhf.core.numerics import derive
from rlhf.tasks.files import different_forms
from rlhf.tasks.reading import NOTHING, RECORD, TOOLS, Wanted
from rlhf.tasks.source import Source, is_text, temporary

if TYPE_CHECKING:
    from rlhf.config.scorers import MixtureConfig
    from rlhf.core.batch import Batch, Prompts
    from rlhf.core.metrics import Metrics
    from rlhf.tasks.task import Task


TEXT, DIALOGUE = Value("string"), Json()


class MixtureSource(Source):
    """A source of several tasks; the column `part` is the number of the task that a row comes from.

    The rows of the training split are those of the first task, then those of the second task, and so on;
    `mixed_order` determines the order of training. In other splits, each part has about its share of the
    first rows, until its rows end.

    Args:
        config: config section of the task.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.sources: dict[str, Source] = {}
        for name, part in config.parts.items():
            module, _, source = PARTS[type(part)].partition(":")
            self.sources[name] = getattr(import_module(module), source)(part)

    @property
    def conversational(self) -> bool:
        """Whether the prompts are dialogues.

        Raises:
            UserError: some parts have dialogues, others texts.
        """
        found = {name: source.conversational for name, source in self.sources.items()}
        if len(set(found.values())) > 1:
            first = {kind: next(name for name in found if found[name] is kind) for kind in (True, False)}
            raise UserError(different_forms(first[True], first[False]))
        return any(found.values())

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `query` or `messages`, `reference_response` and `part`.

        If a part has the column `demonstration` or `place`, the result has it.

        Raises:
            UserError: the split of a part cannot be loaded, or some parts have dialogues, others texts.
        """
        columns = ["messages" if self.conversational else "query", "reference_response"]
        parts = self._loaded("prompts", split, wanted)
        if any("demonstration" in part.column_names for part in parts):
            columns.append("demonstration")
            parts = [
                part
                if "demonstration" in part.column_names
                else part.add_column("demonstration", part["reference_response"][:])
                for part in parts
            ]
        return self._joined(parts, split, columns)

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `prompt`, `chosen`, `rejected`, `part`; `place` as in `prompts`.

        Raises:
            UserError: a part names no pairs, or its pairs cannot be loaded.
        """
        parts = self._loaded("preferences", split, wanted)
        forms = {
            isinstance(part.features["prompt"], Value): name
            for name, part in zip(self.sources, parts, strict=True)
        }
        if len(forms) > 1:
            raise UserError(different_forms(forms[False], forms[True]))
        return self._joined(parts, split, ["prompt", "chosen", "rejected"])

    def _loaded(self, method: str, split: str, wanted: Wanted) -> list[Dataset]:
        """Return the split of each part. Errors name the keys of the part instead of those of `task`."""
        parts = []
        for name, source in self.sources.items():
            try:
                parts.append(getattr(source, method)(split, wanted.parts.get(name, NOTHING)))
            except UserError as error:
                raise UserError(*(self.config.own_key(name, text) for text in error.problems)) from None
        return parts

    def _joined(self, parts: list[Dataset], split: str, columns: list[str]) -> Dataset:
        """Return the rows of all parts with `columns` and `part`, and with others that a part has."""
        others = [
            name for name in ("place", RECORD, TOOLS) if any(name in part.column_names for part in parts)
        ]
        columns = [*columns, *others]
        found = []
        for number, (name, rows) in enumerate(zip(self.sources, parts, strict=True)):
            places = [f"row {i + 1} of the split {split} of {name}" for i in range(len(rows))]
            absent = {"place": places, RECORD: ["{}"] * len(rows), TOOLS: ["null"] * len(rows)}  # JSON
            for column in set(others) - {*rows.column_names}:
                rows = rows.add_column(column, absent[column])
            rows = rows.select_columns(columns)
            texts = {each for each in columns if each != TOOLS and is_text(rows, each)}
            features = Features({each: TEXT if each in texts else DIALOGUE for each in columns})
            rows = rows if rows.features == features else rows.cast(features, **temporary(rows))
            found.append(rows.add_column("part", np.full(len(rows), number)))
        whole = concatenate_datasets(found)
        if split == "train":
            return whole
        sizes, shares = [len(rows) for rows in found], list(self.config.shares.values())
        return whole.select(interleaved(sizes, shares))


def interleaved(sizes: Sequence[int], shares: Sequence[float]) -> np.ndarray:
    """Return an order of the rows of consecutive parts; each part has about its share of the first rows.

    Args:
        sizes: number of rows of each part.
        shares: share of each part.
    """
    each = zip(sizes, shares, strict=True)
    ranks = np.concatenate([(np.arange(size) + 0.5) / share for size, share in each])
    return np.argsort(ranks, kind="stable")


def mixed_order(parts: np.ndarray, shares: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """Return the positions of the training examples that an epoch of a mixture consists of, [n] int64.

    An epoch has as many examples as all parts together, and each part has its share of them. Each part is
    drawn without repetition until all of its examples were drawn, then again in another order; this order
    continues in the next epoch.

    Args:
        parts: the part of each example, [n].
        shares: share of each part.
        seed: seed of the run.
        epoch: number of the epoch, from 0.
    """
    counts = np.diff(np.round(np.cumsum([0, *shares]) * len(parts))).astype(np.int64)
    counts = np.maximum(counts, 1)
    counts[counts.argmax()] -= counts.sum() - len(parts)
    drawn = []
    for part, count in enumerate(counts.tolist()):
        examples = np.flatnonzero(parts == part)
        first, last = epoch * count, (epoch + 1) * count
        for turn in range(first // len(examples), -(-last // len(examples))):
            rng = np.random.default_rng(derive(seed, f"order of part {part}", turn))
            start = turn * len(examples)
            order = rng.permutation(examples)
            drawn.append(order[max(0, first - start) : last - start])
    rng = np.random.default_rng(derive(seed, "order of a mixture", epoch))
    return rng.permutation(np.concatenate(drawn))


def means_of_parts(
    names: Sequence[str], part: Any, values: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the means of the values of held-out prompts for each part, as metrics of an evaluation.

    Args:
        names: names of the parts.
        part: the part of each prompt, [N].
        values: name of a metric -> its value for each prompt.
    """
    numbers = np.asarray(part)
    return {
        f"eval/part/{name}/{metric}": float(np.mean(np.asarray(each, dtype=np.float64)[numbers == number]))
        for number, name in enumerate(names)
        if (numbers == number).any()
        for metric, each in values.items()
    }


# The order in which a run draws its training examples, epoch after epoch.


class PromptOrder:
    """An endless iterator over the training batches of a task.

    Seed and epoch determine the order of the examples in an epoch; a batch may span two epochs. With
    `solved_at`, an epoch leaves out the examples that were solved when its first batch was drawn: the
    "no-positive-resampling" of ScaleRL (Khatri et al., arXiv 2510.13786). An example is solved if the mean
    score of its samples was at least `solved_at` when they were last scored. If all examples are solved, none
    is left out.

    Args:
        task: the data.
        solved_at: mean score from which on an example is solved; None: no example is left out.
        start: number of the first batch, counted from 0.
        parts: names of the parts of a mixture, for metrics of each part.
    """

    def __init__(
        self,
        task: Task,
        solved_at: float | None = None,
        start: int = 0,
        parts: Sequence[str] = (),
    ) -> None:
        self.task = task
        self.parts = parts
        self.solved_at = solved_at
        self.solved: set[int] = set()  # examples as rows of the data set, like `Prompts.index`
        self.seek(start)

    def seek(self, number: int) -> None:
        """Continue with batch `number`, given that no example was left out before."""
        epoch, place = divmod(number * self.task.prompts_per_update, len(self.task))
        self.enter(epoch, place, frozenset())

    def enter(self, epoch: int, place: int, left_out: frozenset[int]) -> None:
        """Continue at position `place` of an epoch that leaves out the examples `left_out`."""
        self.epoch, self.place, self.left_out = epoch, place, left_out
        self.order = self.task.order(epoch)  # positions in the tokenized training split
        if left_out:
            kept = ~np.isin(self.task.rows()[self.order], list(left_out))
            self.order = self.order[kept] if kept.any() else self.order

    def __iter__(self) -> Iterator[Prompts]:
        return self

    def __next__(self) -> Prompts:
        """Return the next batch of N examples."""
        size, drawn = self.task.prompts_per_update, []  # type: int, list[int]
        while len(drawn) < size:
            if self.place == len(self.order):
                self.enter(self.epoch + 1, 0, frozenset(self.solved))
            part = self.order[self.place : self.place + size - len(drawn)].tolist()
            self.place += len(part)
            drawn += part
        return self.task.batch(drawn)

    def scored(self, batch: Batch) -> Metrics:
        """Note which examples of a scored batch are solved.

        Returns:
            The share of solved examples, if `solved_at` is set, and the metrics of each part of a mixture.
        """
        figures: Metrics = {}
        known = self.parts if self.parts and batch.part is not None else ()  # stored rollouts have no parts
        for number, name in enumerate(known):
            own = batch.part == number
            figures |= {
                f"part/{name}/prompts": Stat(float(own.sum()), 1.0, How.sum),
                f"part/{name}/scores": mean(batch.scores[own]),
                f"part/{name}/response_tokens": mean(batch.response_mask[own].sum(-1)),
                f"part/{name}/eos_rate": mean(batch.ended[own]),
            }
        if self.solved_at is None:
            return figures
        solved = batch.scores.mean(1) >= self.solved_at
        self.solved.difference_update(batch.index.tolist())
        self.solved.update(batch.index[solved].tolist())
        return figures | {"prompts/solved": Stat(len(self.solved) / len(self.task), 1.0, How.last)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the solved examples, as JSON values."""
        return {
            "epoch": self.epoch,
            "place": self.place,
            "left_out": sorted(self.left_out),
            "solved": sorted(self.solved),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.solved = set(saved["solved"])
        self.enter(saved["epoch"], saved["place"], frozenset(saved["left_out"]))
