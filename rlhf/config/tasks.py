"""Sections of the tasks (`task=...`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Choice, Section, entry, fact, number, option
from rlhf.core.errors import setting

PROMPT_COLUMNS = ("query", "reference_response")
PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")
SPLITS = ("train", "validation")  # the splits that a run reads

Need = tuple[str, str, Sequence[str], Sequence[str], str]  # key, folder, columns, splits, reason


@dataclass(kw_only=True, slots=True)
class ColumnsConfig(Section):
    """Columns of `task=local` with names that are not recognised; null: recognised by name."""

    prompt: str | None = entry(None, "texts, or lists of messages")
    response: str | None = entry(None, "reference responses; needed for SFT")
    chosen: str | None = entry(None, "preferred responses")
    rejected: str | None = entry(None, "other responses")
    messages: str | None = entry(None)
    """dialogues; the last message of the assistant is the reference response"""


@dataclass(kw_only=True, slots=True)
class TaskConfig(Section):
    """The keys that every task has. `path` replaces the hub data set by local files with the same columns."""

    embedded: ClassVar[bool] = False  # True: data and models are generated from a seed
    reads_path: ClassVar[bool] = True  # False: examples are always generated
    own_data: ClassVar[bool] = False  # True: the data are always those of the user
    has_answers: ClassVar[bool] = True  # False: the references contain no answer that can be compared
    dialogues: ClassVar[bool | None] = False  # the prompts are dialogues; None: the rows or the parts decide
    shares: ClassVar[dict[str, float]] = {}  # of each part of a mixture in the training prompts, by its name
    vocabulary_size: ClassVar[int] = 0  # tokens of the task's own tokenizer; 0: a model has the tokenizer
    prompt_columns: ClassVar[tuple[str, ...]] = PROMPT_COLUMNS  # columns of `path`, if it contains prompts
    prompt_splits: ClassVar[tuple[str, ...]] = SPLITS  # splits of `path`, if it contains prompts
    # the arguments of `LocalFiles` for the user's own files; None: the task reads none
    own_files: ClassVar[tuple[str, ColumnsConfig, bool] | None] = None

    name: str = MISSING
    path: str | None = entry(None, "folder with a data file per split; with task=local also a single file")
    preferences_path: str | None = entry(None, "folder of preference pairs; null: task.path, else the hub")
    max_prompt_tokens: int = number(512, least=1)
    """largest prompt length in tokens; longer prompts are skipped"""
    teacher_column: str | None = entry(None, added=True)
    """column with the prompt of the teacher: the response is judged as if it followed this text"""

    # of tasks without such a key
    validation_split: ClassVar[str] = "validation"  # its name in the data set
    parts: ClassVar[dict[str, TaskConfig]] = {}  # of a mixture, by their names

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for a `path` that is not read, and for a split whose name leads out of a folder."""
        if self.path is not None and not self.reads_path:
            rule, remedy = f"be null for task={self.name}", f"set {at}.path=null, or task=local"
            yield self.refused(at, "path", rule, "its examples are generated", remedy=remedy)
        split = self.validation_split
        if not split or split.startswith(".") or "/" in split or "\0" in split:  # stand-ins have such files
            rule, reason = "be the name of a split", "files have its name"
            yield self.refused(at, "validation_split", rule, reason, "test")

    def own_key(self, name: str, text: str) -> str:
        """Return a text in which the keys of `task` are those of the part `name`."""
        return text

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the local folders that a run reads, with the columns and splits that they must contain.

        Args:
            pairs: whether training reads preference pairs; otherwise it reads prompts.
            evaluates: whether the run evaluates a policy on prompts and references.
        """
        if self.path is not None and (not pairs or evaluates):
            reason = "the policy is evaluated on it" if pairs else "the run reads prompts from it"
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
    data_seed: int = entry(0, "seed of the generated data; the run's own seed does not change the data")
    train_size: int = number(MISSING, "examples to generate", least=1, remedy="512")
    validation_size: int = number(512, "examples to generate", least=1)
    test_size: int = number(512, "examples to generate", least=1)


class Difficulty(Choice):
    """The difficulty of an embedded task."""

    easy = "easy"
    medium = "medium"
    hard = "hard"


@option("task", "tldr_mini", part="rlhf.tasks.tldr_mini:TLDRMiniSource")
class TLDRMiniConfig(EmbeddedTaskConfig):
    """TL;DR in miniature: generated posts, flawed references, and a program as judge."""

    vocabulary_size: ClassVar[int] = 372
    has_answers: ClassVar[bool] = False

    train_size: int = 8192
    max_prompt_tokens: int = 192
    difficulty: Difficulty = Difficulty.medium


@option("task", "tldr", part="rlhf.tasks.source:StoredSource")
class TLDRConfig(TaskConfig):
    """Reddit posts and the summaries of their writers, with the data sets of Stiennon et al. (2020)."""

    has_answers: ClassVar[bool] = False

    prompts_name: str = entry("vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144")
    """hub name of the prompts and references"""
    preferences_name: str = entry(
        "mnoukhov/summarize_from_feedback_oai_preprocessing_1706381144_relabel_pythia6.9b"
    )
    """hub name of the preference pairs"""


class QuestionsConfig(TaskConfig):
    """Questions in a template, as texts that a base model continues, or as messages of the user.

    A task of questions has the keys `chat` and `template`. A template with its default is replaced by
    `chat_question` if the questions are messages.
    """

    __slots__ = ()
    chat_question: ClassVar[str]
    if TYPE_CHECKING:  # fields of the section, with its defaults
        chat: bool
        template: str

    @property
    def dialogues(self) -> bool:  # type: ignore[override]
        """Whether the questions are messages of the user."""
        return self.chat

    @property
    def question_format(self) -> str:
        """The format of a prompt, which contains `{question}`."""
        usual = fact(type(self), "template", "declared")
        return self.chat_question if self.chat and self.template == usual else self.template

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the template does not contain `{question}`."""
        if "{question}" not in self.template:
            remedy = f"set {setting(f'{at}.template', 'Problem: {question} Solution:')}"
            reason = "it is replaced by the problem"
            yield self.refused(at, "template", "contain {question}", reason, remedy=remedy)


_QUESTION = "[MATH_TASK] Problem:\n{question}\n\nSolution:"  # for base models, as in the paper


@option("task", "gsm8k", part="rlhf.tasks.kinds:GSM8KSource")
class GSM8KConfig(QuestionsConfig):
    """Grade-school mathematics with answers that can be checked (Cobbe et al., 2021)."""

    chat_question: ClassVar[str] = (
        "{question}\n\nSolve this step by step. End with a line that has only #### and the number."
    )
    prompt_columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    prompt_splits: ClassVar[tuple[str, ...]] = ("train",)

    prompts_name: str = entry("openai/gsm8k", "hub name of the prompts and references")
    chat: bool = entry(False, added=True)
    """the prompt is a message of the user, in the format of the model's chat template"""
    template: str = entry(_QUESTION)
    """format of a prompt with {question}; the default with chat is an instruction"""
    validation_size: int = number(473, least=1)
    """last rows of train for evaluation, unless there is a validation split"""


@option("task", "arithmetic", part="rlhf.tasks.kinds:ArithmeticSource")
class ArithmeticConfig(EmbeddedTaskConfig):
    """Generated sums with answers that can be checked; the SFT responses contain mistakes of pupils."""

    vocabulary_size: ClassVar[int] = 56

    train_size: int = 16384
    max_prompt_tokens: int = 32
    difficulty: Difficulty = Difficulty.medium


@option("task", "chat", part="rlhf.tasks.kinds:ChatSource")
class ChatConfig(TaskConfig):
    """Dialogues whose last turn is the reference, as in No Robots (Rajani et al., 2023)."""

    has_answers: ClassVar[bool] = False
    prompt_columns: ClassVar[tuple[str, ...]] = ("messages",)

    prompts_name: str = entry("HuggingFaceH4/no_robots", "hub name of the prompts and references")
    preferences_name: str | None = entry(None)
    """hub name of pairs with prompt, chosen, rejected in this format"""
    validation_split: str = entry("test")  # type: ignore[misc]
    """the name of the validation split in the data set"""
    turn: str | None = entry(None)
    """format of a turn, with {role} and {content}; null: the tokenizer's chat template"""
    reply: str | None = entry(None)
    """text at the end of every prompt, before the response; set together with turn"""

    @property
    def dialogues(self) -> bool:  # type: ignore[override]
        """Whether the chat template of the tokenizer formats the prompts, instead of `turn`."""
        return self.turn is None

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the local folders that a run reads; pairs are never in the folder of the dialogues."""
        for key, folder, columns, splits, reason in TaskConfig.needs(self, pairs, evaluates):
            if columns == self.prompt_columns:
                yield key, folder, columns, ("train", self.validation_split), reason
            elif key != "task.path":
                yield key, folder, columns, splits, reason

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for a `turn` that lacks `reply` or a field."""
        if (self.turn is None) != (self.reply is None):
            missing, given = ("turn", "reply") if self.turn is None else ("reply", "turn")
            rule, remedy = f"be set together with {at}.{given}", f"set {at}.{given}=null"
            reason = "both replace the chat template of the tokenizer"
            yield self.refused(at, missing, rule, reason, remedy=remedy)
        for part in ("{role}", "{content}"):
            if self.turn is not None and part not in self.turn:
                reason = "it is the format of each turn of a dialogue"
                remedy = f"add {part}, or set {at}.turn=null {at}.reply=null"
                yield self.refused(at, "turn", f"contain {part}", reason, remedy=remedy)


@option("task", "preferences", part="rlhf.tasks.kinds:PreferencesSource")
class PreferencesConfig(TaskConfig):
    """Any data set with the columns prompt, chosen and rejected."""

    own_data: ClassVar[bool] = True
    has_answers: ClassVar[bool] = False
    dialogues: ClassVar[None] = None  # the rows decide

    preferences_name: str | None = entry(None, "hub name")
    validation_split: str = entry("validation")  # type: ignore[misc]
    """the name of the validation split in the data set"""

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

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if no data set is named."""
        if self.folder is None and self.preferences_name is None:
            rule, reason = "name a folder for task=preferences", "it has no data set of its own"
            remedy = f"set {at}.path=<folder> or {at}.preferences_name=<hub name>"
            yield self.refused(at, "path", rule, reason, remedy=remedy)

    def doubts(self, at: str) -> Iterator[str]:
        """Yield a warning for each data set key without effect, because another key names the pairs."""
        hidden = {"preferences_name": self.preferences_name}
        if self.preferences_path is not None:
            hidden["path"] = self.path
        for key, value in hidden.items():
            if self.folder is not None and value is not None:
                read = self.folder[0].replace("task", at, 1)
                yield f"{at}.{key} has no effect (the pairs come from {read}), got {value}; leave it out"


@option("task", "local", part="rlhf.tasks.kinds:LocalSource")
class LocalConfig(TaskConfig):
    """Your own files: prompts, prompts with responses, dialogues, or preference pairs."""

    own_data: ClassVar[bool] = True
    dialogues: ClassVar[None] = None  # the rows decide

    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    validation_fraction: float = number(0.1, above=0, below=1)
    """share of the rows for validation, if there is no validation file"""
    chat: bool = entry(False, added=True)
    """texts are messages of a dialogue; default: true if the model has a chat template and the texts do not
    begin with its marks"""
    all_replies: bool = entry(False, added=True)
    """SFT trains on all replies of a dialogue; false: on the last"""

    @property
    def own_files(self) -> tuple[str, ColumnsConfig, bool] | None:  # type: ignore[override]
        """The path of the files, the names of their columns, and whether texts are messages of the user."""
        return None if self.path is None else (self.path, self.columns, self.chat)

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the folder of `preferences_path`; a rule of its own checks `path`, whose columns differ."""
        return (need for need in TaskConfig.needs(self, pairs, evaluates) if need[0] != "task.path")

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if no data set is named."""
        if self.path is None:
            rule, reason = "name a file or folder for task=local", "it has no data set of its own"
            yield self.refused(at, "path", rule, reason, "<file or folder>")


# Sections of the tasks that belong to an environment: `calculator`, `guess_number`, `environment`.


@dataclass(kw_only=True, slots=True)
class GameConfig(EmbeddedTaskConfig):
    """A task of generated dialogues with an environment."""

    reads_path: ClassVar[bool] = False
    dialogues: ClassVar[bool] = True  # of messages of the user

    train_size: int = 4096
    max_prompt_tokens: int = 32


@option("task", "calculator", part="rlhf.tasks.kinds:CalculatorSource")
class CalculatorTaskConfig(GameConfig):
    """Generated sums for a calculator; the SFT responses are those of pupils, of whom few use it."""

    vocabulary_size: ClassVar[int] = 66


@option("task", "guess_number", part="rlhf.tasks.kinds:GuessNumberSource")
class GuessNumberTaskConfig(GameConfig):
    """Numbers to guess in four guesses; the SFT responses ignore half of the answers."""

    vocabulary_size: ClassVar[int] = 27
    has_answers: ClassVar[bool] = False


@option("task", "environment", part="rlhf.tasks.kinds:FirstMessages")
class EnvironmentTaskConfig(TaskConfig):
    """The first messages of the environment: the texts that `reset` returns for seeds."""

    reads_path: ClassVar[bool] = False
    has_answers: ClassVar[bool] = False
    dialogues: ClassVar[bool] = True  # a first message is a message of the user

    data_seed: int = entry(0, "seed of the seeds; the run's own seed does not change the data")
    train_size: int = number(1024, "first messages to ask for", least=1)
    validation_size: int = number(256, "first messages to ask for", least=1)
    test_size: int = number(256, "first messages to ask for", least=1)


@option("task", "lookup", part="rlhf.tasks.kinds:LookupSource")
class LookupTaskConfig(EnvironmentTaskConfig):
    """Questions about two towns, for the tools `search` over a text file and `calculate`."""

    has_answers: ClassVar[bool] = True
