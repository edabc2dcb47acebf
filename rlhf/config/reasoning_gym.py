"""Sections of `task=reasoning_gym` and `scorer=reasoning_gym`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from rlhf.config.packages import missing_package
from rlhf.config.schema import entry, option
from rlhf.config.scorer import ScorerConfig
from rlhf.config.task import EmbeddedTaskConfig, QuestionsConfig, TaskConfig

_UNREPEATABLE = (  # found with two values of PYTHONHASHSEED, 40 examples of each data set
    *("codeio", "futoshiki", "intermediate_integration", "isomorphic_strings", "knight_swap"),
    *("list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"),
)
_REFUSED = {
    "composite": "task=mixture combines data sets",
    **dict.fromkeys(_UNREPEATABLE, "its examples differ between processes with the same seed"),
}


@option("task", "reasoning_gym", part="rlhf.tasks.reasoning_gym:ReasoningGymSource")
@dataclass(kw_only=True, slots=True)
class ReasoningGymConfig(QuestionsConfig, EmbeddedTaskConfig):
    """Problems of a data set of the package reasoning-gym, which generates and verifies them."""

    chat_question: ClassVar[str] = "{question}\n\nWrite the answer between <answer> and </answer>."
    vocabulary_size: ClassVar[int] = 106
    has_answers: ClassVar[bool] = False
    reads_path: ClassVar[bool] = False

    name: str = "reasoning_gym"
    dataset: str = entry("chain_sum", means="name of the data set in reasoning-gym")
    arguments: dict[str, Any] = entry(
        factory=dict, means="arguments of the data set, such as {min_terms: 2, max_terms: 3}"
    )
    chat: bool = entry(
        False, means="the prompt is a message of the user, in the format of the model's chat template"
    )
    template: str = entry(
        "{question}\n", means="format of a prompt with {question}; the default with chat is an instruction"
    )
    train_size: int = 8192
    max_prompt_tokens: int = 256

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error for a missing package, a refused data set, a `path`, or a template without field."""
        yield from EmbeddedTaskConfig.problems(self, at)
        yield from self.template_problems(at)
        yield from missing_package("task=reasoning_gym", "reasoning_gym", "reasoning", "reasoning-gym")
        if (reason := _REFUSED.get(self.dataset)) is not None:
            yield (
                f"{at}.dataset must not be {self.dataset} ({reason}), got {self.dataset}; "
                f"set {at}.dataset=chain_sum"
            )

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if reasoning-gym has no such data set, or refuses the arguments."""
        from reasoning_gym.factory import DATASETS, create_dataset  # takes seconds

        if self.dataset not in DATASETS:
            near = [*get_close_matches(self.dataset, DATASETS, n=1), "chain_sum"][0]
            yield f"{at}.dataset must be in reasoning-gym, got {self.dataset}; set {at}.dataset={near}"
            return
        try:
            create_dataset(self.dataset, seed=0, size=self.train_size, **self.arguments)
        except Exception as error:  # the package checks with assert, and data sets with errors of their own
            names = {each.name for each in fields(DATASETS[self.dataset][1])} - {"seed", "size"}
            yield (
                f"{at}.arguments must be arguments of {self.dataset} ({', '.join(sorted(names))}) that it "
                f"accepts ({type(error).__name__}: {error}), got {self.arguments}; correct them"
            )


@option("scorer", "reasoning_gym", part="rlhf.scorers.function:ReasoningGymScorer")
@dataclass(kw_only=True, slots=True)
class ReasoningGymScorerConfig(ScorerConfig):
    """The verifier of the problem in `task=reasoning_gym`."""

    verifies: ClassVar[bool] = True
    columns: ClassVar[frozenset[str]] = frozenset({"dataset", "arguments", "entry"})

    name: str = "reasoning_gym"
    pattern: str | None = entry(
        r"<answer>([\s\S]*?)</answer>",
        means="regular expression whose group matches the answer; null: the whole response",
    )
    exact: bool = entry(True, means="1 for a full score of the verifier, else 0; false: its score")

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return a reason for every other task."""
        return None if task.name == "reasoning_gym" else "it verifies only problems of task=reasoning_gym"
