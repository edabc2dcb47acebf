"""Sections of the task that consists of other tasks (`task=mixture`), and of its scorer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from rlhf.config.models import Dtype
from rlhf.config.schema import entry, option
from rlhf.config.scorers import PartsScorerConfig
from rlhf.config.tasks import Need, TaskConfig


@option("task", "mixture", part="rlhf.tasks.mixture:MixtureSource")
@dataclass(kw_only=True, slots=True)
class MixtureConfig(TaskConfig):
    """Several tasks with weights: the prompts of each part are drawn in proportion to its weight.

    Add a part with `+schema/task@task.parts.<name>=<task>`.
    """

    own_data: ClassVar[bool] = True

    name: str = "mixture"
    parts: dict[str, TaskConfig] = entry(dict, "name chosen by the user -> task")
    weights: dict[str, float] = entry(dict, "name of a part -> weight; 1 for other parts")

    @property
    def dialogues(self) -> bool | None:
        """None: the parts decide."""
        return None

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the training prompts, by its name."""
        weights = {name: self.weights.get(name, 1.0) for name in self.parts}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the local folders that the parts read."""
        for name, part in self.parts.items():
            for key, folder, columns, splits, reason in part.needs(pairs, evaluates):
                yield self.own_key(name, key), folder, columns, splits, reason

    def own_key(self, name: str, text: str) -> str:
        """Return a text in which the keys of `task` are those of the part `name`."""
        keys = "|".join(each.name for each in fields(self.parts[name]))
        return re.sub(rf"(?<![\w/.-])task\.(?=(?:{keys})\b)", f"task.parts.{name}.", text)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for missing or nested parts, wrong weights, and data outside of the parts."""
        if not self.parts:
            rule, remedy = "contain at least one task", f"set +schema/task@{at}.parts.<name>=<task>"
            yield self.refused(at, "parts", rule, "prompts are drawn from it", remedy=remedy)
        for name, part in self.parts.items():
            if not re.fullmatch("[a-z0-9_]+", name):
                rule = f"{at}.parts must have names of lower-case letters, digits and _"
                yield f"{rule} (metrics have these names), got {name}; rename it"
            if isinstance(part, MixtureConfig):
                rule, remedy = "not be in a mixture", f"add its parts to {at}.parts"
                reason = "its parts would have no weights"
                yield part.refused(f"{at}.parts.{name}", "name", rule, reason, remedy=remedy)
        for name, weight in self.weights.items():
            if name not in self.parts:
                rule = f"{at}.weights must name parts of the mixture ({', '.join(self.parts) or 'none'})"
                remedy = f"leave it out, or add +schema/task@{at}.parts.{name}=<task>"
                yield f"{rule}, got {name}; {remedy}"
            elif not 0 < weight < math.inf:
                reason = "the share of its prompts is proportional to it"
                yield self.refused(at, f"weights.{name}", "be > 0", reason, 1)
        for key in ("path", "preferences_path"):
            if (value := getattr(self, key)) is not None:
                remedy = f"set {at}.parts.<name>.{key}={value} {at}.{key}=null"
                rule = "be null for task=mixture"
                yield self.refused(at, key, rule, "each part has its own data", remedy=remedy)

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each part with a limit of prompt tokens, which has no effect."""
        for name, part in self.parts.items():
            if part.max_prompt_tokens != type(part)().max_prompt_tokens:
                yield (
                    f"{at}.parts.{name}.max_prompt_tokens has no effect ({at}.max_prompt_tokens applies to "
                    f"all parts), got {part.max_prompt_tokens}; leave it out"
                )


@option("scorer", "mixture", part="rlhf.scorers.scorer:MixtureScorer")
@dataclass(kw_only=True, slots=True)
class MixtureScorerConfig(PartsScorerConfig):
    """A scorer for each part of `task=mixture`, under the name of the part.

    Add a scorer with `+scorer@scorer.parts.<name>=<option>`. Each score is multiplied by its `weight`.
    The missing-EOS settings of a part apply to its score, those of this section to the weighted scores.
    """

    reason: ClassVar[str] = "each part has one"
    of_mixture: ClassVar[bool] = True

    name: str = "mixture"

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return a reason for a task without parts."""
        return None if task.name == "mixture" else "only task=mixture has parts"

    @property
    def verifies(self) -> bool:  # type: ignore[override]
        """Whether the score is 1 for a correct response, else 0: each part verifies, with the weight 1."""
        return bool(self.parts) and all(part.verifies and part.weight == 1 for part in self.parts.values())

    def rounding(self, dtype: Dtype) -> float:
        """Return the largest rounding error of the parts."""
        return max((part.rounding(dtype) for part in self.parts.values()), default=0.0)
