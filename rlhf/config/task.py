"""Sections of the tasks (`task=...`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Choice, Section, entry, number, option

PROMPT_COLUMNS = ("query", "reference_response")
PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")
SPLITS = ("train", "validation")  # the splits that a run reads

Need = tuple[str, str, Sequence[str], Sequence[str], str]  # key, folder, columns, splits, reason


@dataclass(kw_only=True, slots=True)
class TaskConfig(Section):
    """The keys that every task has. `path` replaces the hub data set by local files with the same columns."""

    embedded: ClassVar[bool] = False  # True: data and models are generated from a seed
    own_data: ClassVar[bool] = False  # True: the data are always those of the user
    prompt_columns: ClassVar[tuple[str, ...]] = PROMPT_COLUMNS  # columns of `path`, if it contains prompts
    prompt_splits: ClassVar[tuple[str, ...]] = SPLITS  # splits of `path`, if it contains prompts

    name: str = MISSING
    path: str | None = entry(
        None, means="folder with a data file per split; with task=local also a single file"
    )
    preferences_path: str | None = entry(
        None, means="folder of preference pairs; null: task.path, else the hub"
    )
    max_prompt_tokens: int = number(
        512, least=1, means="largest prompt length in tokens; longer prompts are skipped"
    )

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part of a mixture in the training prompts, by its name; empty without parts."""
        return {}

    @property
    def for_base_models(self) -> bool:
        """Whether the prompts ask in a form for models that are not trained on dialogues."""
        return False

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the local folders that a run reads, with the columns and splits that they must contain.

        Args:
            pairs: whether training reads preference pairs; otherwise it reads prompts.
            evaluates: whether the run evaluates a policy on prompts and references.
        """
        if self.path is not None and (not pairs or evaluates):
            reason = (
                "the policy is evaluated on prompts and references"
                if pairs
                else "the run reads prompts from it"
            )
            yield "task.path", self.path, self.prompt_columns, self.prompt_splits, reason
        if pairs:
            reason = "the run reads preference pairs from it"
            if self.preferences_path is not None:
                yield "task.preferences_path", self.preferences_path, PREFERENCE_COLUMNS, SPLITS, reason
            elif self.path is not None and not self.embedded:
                yield "task.path", self.path, PREFERENCE_COLUMNS, SPLITS, reason


@dataclass(kw_only=True, slots=True)
class EmbeddedTaskConfig(TaskConfig):
    """A task that is generated from a seed."""

    embedded: ClassVar[bool] = True
    vocabulary_size: ClassVar[int]  # tokens of the task's tokenizer, for the memory plan

    data_seed: int = entry(0, means="seed of the generated data; the run's own seed does not change the data")
    train_size: int = number(MISSING, least=1, means="examples to generate", remedy="512")
    validation_size: int = number(512, least=1, means="examples to generate")
    test_size: int = number(512, least=1, means="examples to generate")


class Difficulty(Choice):
    """The difficulty of an embedded task."""

    easy = "easy"
    medium = "medium"
    hard = "hard"


@option("task", "tldr_mini", part="rlhf.tasks.tldr_mini:TLDRMiniSource")
@dataclass(kw_only=True, slots=True)
class TLDRMiniConfig(EmbeddedTaskConfig):
    """TL;DR in miniature: generated posts, flawed references, and a program as judge."""

    vocabulary_size: ClassVar[int] = 372

    name: str = "tldr_mini"
    train_size: int = 8192
    max_prompt_tokens: int = 192
    difficulty: Difficulty = Difficulty.medium


@option("task", "tldr", part="rlhf.tasks.source:StoredSource")
@dataclass(kw_only=True, slots=True)
class TLDRConfig(TaskConfig):
    """Reddit posts and the summaries of their writers, with the data sets of Stiennon et al. (2020)."""

    name: str = "tldr"
    prompts_name: str = entry(
        "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144",
        means="hub name of the prompts and references",
    )
    preferences_name: str = entry(
        "mnoukhov/summarize_from_feedback_oai_preprocessing_1706381144_relabel_pythia6.9b",
        means="hub name of the preference pairs",
    )


QUESTION = "[MATH_TASK] Problem:\n{question}\n\nSolution:"  # for base models, as in the paper
CHAT_QUESTION = "{question}\n\nSolve this step by step. End with a line that has only #### and the number."


@option("task", "gsm8k", part="rlhf.tasks.gsm8k:GSM8KSource")
@dataclass(kw_only=True, slots=True)
class GSM8KConfig(TaskConfig):
    """Grade-school mathematics with answers that can be checked (Cobbe et al., 2021)."""

    prompt_columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    prompt_splits: ClassVar[tuple[str, ...]] = ("train",)

    name: str = "gsm8k"
    prompts_name: str = entry("openai/gsm8k", means="hub name of the prompts and references")
    chat: bool = entry(
        False,
        means="the prompt is a message of the user, in the format of the model's chat template",
        added=True,
    )
    template: str = entry(
        QUESTION, means="format of a prompt with {question}; the default with chat is an instruction"
    )
    validation_size: int = number(
        473, least=1, means="last rows of train for evaluation, unless there is a validation split"
    )

    @property
    def for_base_models(self) -> bool:
        """Whether the questions are texts that a base model continues."""
        return not self.chat

    @property
    def question_format(self) -> str:
        """The format of a prompt, which contains `{question}`."""
        return CHAT_QUESTION if self.chat and self.template == QUESTION else self.template

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if the template does not contain `{question}`."""
        yield from TaskConfig.problems(self, at)
        if "{question}" not in self.question_format:
            yield (
                f"{at}.template must contain {{question}} (it is replaced by the problem), "
                f"got {self.template!r}; set {at}.template='Problem: {{question}} Solution:'"
            )


@option("task", "arithmetic", part="rlhf.tasks.arithmetic:ArithmeticSource")
@dataclass(kw_only=True, slots=True)
class ArithmeticConfig(EmbeddedTaskConfig):
    """Generated sums with answers that can be checked; the SFT responses contain mistakes of pupils."""

    vocabulary_size: ClassVar[int] = 56

    name: str = "arithmetic"
    train_size: int = 16384
    max_prompt_tokens: int = 32
    difficulty: Difficulty = Difficulty.medium


@option("task", "chat", part="rlhf.tasks.chat:ChatSource")
@dataclass(kw_only=True, slots=True)
class ChatConfig(TaskConfig):
    """Dialogues whose last turn is the reference, as in No Robots (Rajani et al., 2023)."""

    prompt_columns: ClassVar[tuple[str, ...]] = ("messages",)

    name: str = "chat"
    prompts_name: str = entry("HuggingFaceH4/no_robots", means="hub name of the prompts and references")
    preferences_name: str | None = entry(
        None, means="hub name of pairs with prompt, chosen, rejected in this format"
    )
    validation_split: str = entry("test", means="the name of the validation split in the data set")
    turn: str | None = entry(
        None, means="format of a turn, with {role} and {content}; null: the tokenizer's chat template"
    )
    reply: str | None = entry(
        None, means="text at the end of every prompt, before the response; set together with turn"
    )

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the local folders that a run reads; pairs are never in the folder of the dialogues."""
        for key, folder, columns, splits, reason in TaskConfig.needs(self, pairs, evaluates):
            if columns == self.prompt_columns:
                yield key, folder, columns, ("train", self.validation_split), reason
            elif key != "task.path":
                yield key, folder, columns, splits, reason

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if only one of `turn` and `reply` is set, or `turn` lacks one of its two fields."""
        yield from TaskConfig.problems(self, at)
        if (self.turn is None) != (self.reply is None):
            missing, given = ("turn", "reply") if self.turn is None else ("reply", "turn")
            yield (
                f"{at}.{missing} must be set together with {at}.{given} (both replace the chat template of "
                f"the tokenizer), got null; set {at}.{given}=null"
            )
        for part in ("{role}", "{content}"):
            if self.turn is not None and part not in self.turn:
                yield (
                    f"{at}.turn must contain {part} (it is the format of each turn of a dialogue), got "
                    f"{self.turn!r}; add {part}, or set {at}.turn=null {at}.reply=null"
                )


@option("task", "preferences", part="rlhf.tasks.preferences:PreferencesSource")
@dataclass(kw_only=True, slots=True)
class PreferencesConfig(TaskConfig):
    """Any data set with the columns prompt, chosen and rejected."""

    own_data: ClassVar[bool] = True

    name: str = "preferences"
    preferences_name: str | None = entry(None, means="hub name")
    validation_split: str = entry("validation", means="the name of the validation split in the data set")

    @property
    def folder(self) -> tuple[str, str] | None:
        """The key and the value of the local folder that is read; None: the data set is on the hub."""
        if self.preferences_path is not None:
            return "task.preferences_path", self.preferences_path
        return None if self.path is None else ("task.path", self.path)

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the folder of the pairs, from which prompts and references are read, too."""
        if self.folder is not None:
            splits = ("train", self.validation_split)
            yield *self.folder, PREFERENCE_COLUMNS, splits, "the run reads preference pairs from it"

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if no data set is named."""
        yield from TaskConfig.problems(self, at)
        if self.folder is None and self.preferences_name is None:
            yield (
                f"{at}.path must name a folder for task=preferences (it has no data set of its own), got "
                f"null; set {at}.path=<folder> or {at}.preferences_name=<hub name>"
            )

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each data set key without effect, because another key names the pairs."""
        hidden = {"preferences_name": self.preferences_name}
        if self.preferences_path is not None:
            hidden["path"] = self.path
        for key, value in hidden.items():
            if self.folder is not None and value is not None:
                read = self.folder[0].replace("task", at, 1)
                yield f"{at}.{key} has no effect (the pairs come from {read}), got {value}; leave it out"


@dataclass(kw_only=True, slots=True)
class ColumnsConfig(Section):
    """Columns of `task=local` with names that are not recognised; null: recognised by name."""

    prompt: str | None = entry(None, means="texts, or lists of messages")
    response: str | None = entry(None, means="reference responses; needed for SFT")
    chosen: str | None = entry(None, means="preferred responses")
    rejected: str | None = entry(None, means="other responses")
    messages: str | None = entry(
        None, means="dialogues; the last message of the assistant is the reference response"
    )


@option("task", "local", part="rlhf.tasks.local:LocalSource")
@dataclass(kw_only=True, slots=True)
class LocalConfig(TaskConfig):
    """Your own files: prompts, prompts with responses, dialogues, or preference pairs."""

    own_data: ClassVar[bool] = True

    name: str = "local"
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    validation_fraction: float = number(
        0.1, above=0, below=1, means="share of the rows for validation, if there is no validation file"
    )

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the folder of `preferences_path`; a rule of its own checks `path`, whose columns differ."""
        if pairs and self.preferences_path is not None:
            reason = "the run reads preference pairs from it"
            yield "task.preferences_path", self.preferences_path, PREFERENCE_COLUMNS, SPLITS, reason

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if no data set is named."""
        yield from TaskConfig.problems(self, at)
        if self.path is None:
            yield (
                f"{at}.path must name a file or folder for task=local (it has no data set of its own), got "
                f"null; set {at}.path=<file or folder>"
            )


PART = re.compile(r"[a-z0-9_]+")  # name of a part of a mixture, which is in the names of its metrics


@option("task", "mixture", part="rlhf.tasks.mixture:MixtureSource")
@dataclass(kw_only=True, slots=True)
class MixtureConfig(TaskConfig):
    """Several tasks with weights: the prompts of each part are drawn in proportion to its weight.

    Add a part with `+schema/task@task.parts.<name>=<task>`.
    """

    own_data: ClassVar[bool] = True

    name: str = "mixture"
    parts: dict[str, TaskConfig] = entry(factory=dict, means="name chosen by the user -> task")
    weights: dict[str, float] = entry(factory=dict, means="name of a part -> weight; 1 for other parts")

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

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error for missing or nested parts, wrong weights, and data outside of the parts."""
        yield from TaskConfig.problems(self, at)
        if not self.parts:
            yield (
                f"{at}.parts must contain at least one task (prompts are drawn from it), got none; set "
                f"+schema/task@{at}.parts.<name>=<task>"
            )
        for name, part in self.parts.items():
            if not PART.fullmatch(name):
                yield (
                    f"{at}.parts must have names of lower-case letters, digits and _ (metrics have these "
                    f"names), got {name}; rename it"
                )
            if isinstance(part, MixtureConfig):
                yield (
                    f"{at}.parts.{name} must not be a mixture (its parts would have no weights), got "
                    f"mixture; add its parts to {at}.parts"
                )
        for name, weight in self.weights.items():
            if name not in self.parts:
                yield (
                    f"{at}.weights must name parts of the mixture ({', '.join(self.parts) or 'none'}), got "
                    f"{name}; leave it out, or add +schema/task@{at}.parts.{name}=<task>"
                )
            elif not 0 < weight < math.inf:
                yield (
                    f"{at}.weights.{name} must be > 0 (the share of its prompts is proportional to it), got "
                    f"{weight:g}; set {at}.weights.{name}=1"
                )
        for key in ("path", "preferences_path"):
            if (value := getattr(self, key)) is not None:
                yield (
                    f"{at}.{key} must be null for task=mixture (each part has its own data), got {value}; "
                    f"set {at}.parts.<name>.{key}={value} {at}.{key}=null"
                )

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each part with a limit of prompt tokens, which has no effect."""
        for name, part in self.parts.items():
            if part.max_prompt_tokens != type(part)().max_prompt_tokens:
                yield (
                    f"{at}.parts.{name}.max_prompt_tokens has no effect ({at}.max_prompt_tokens applies to "
                    f"all parts), got {part.max_prompt_tokens}; leave it out"
                )
