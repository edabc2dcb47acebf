"""Settings of the tasks. Nothing here imports torch or datasets; folders are looked at without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Section, option
from rlhf.tasks.folders import folder_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.tasks.source import Source


PROMPT_COLUMNS = ("query", "reference_response")


PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")


SPLITS = ("train", "validation")  # what a run reads


Need = tuple[str, str, Sequence[str], Sequence[str], str]  # key, folder, columns, splits, reason


@dataclass(kw_only=True, slots=True)
class TaskConfig(Section):
    """What every task has. `path` replaces the hub data set by local files of the same columns."""

    embedded: ClassVar[bool] = False  # its data and models are made here, from a seed
    prompt_columns: ClassVar[tuple[str, ...]] = PROMPT_COLUMNS  # of `path`, where prompts are read from it
    prompt_splits: ClassVar[tuple[str, ...]] = SPLITS

    name: str = MISSING
    path: str | None = None  # a folder of prompts: <split>.jsonl or .parquet, or datasets.save_to_disk
    preferences_path: str | None = None  # the same for prompt/chosen/rejected; null: path, else the hub
    max_prompt_tokens: int = 512  # longer prompts are left out, and counted

    def source(self) -> Source:
        """Make what loads this task's data."""
        raise NotImplementedError

    def needs(self, cfg: Config) -> Iterator[Need]:
        """Yield the local folders that the run reads, and what must be in them."""
        pairs = cfg.data.name == "preferences"
        if self.path is not None and (not pairs or cfg.algo.trains.name == "policy"):
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

    def problems(self, cfg: Config) -> Iterator[str]:
        """Folders that are missing or lack a split or a column."""
        if self.max_prompt_tokens < 1:
            yield (
                "task.max_prompt_tokens must be >= 1 (longer prompts are left out), "
                f"got {self.max_prompt_tokens}; set task.max_prompt_tokens=512"
            )
        for need in self.needs(cfg):
            yield from folder_problems(*need)

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Pairs that nothing reads."""
        if self.preferences_path is not None and cfg.data.name != "preferences":
            yield (
                f"task.preferences_path has no effect with algo={cfg.algo.name} and "
                f"generator={cfg.generator.name} (no preference pairs are read), got "
                f"{self.preferences_path}; "
                "leave it out"
            )


@dataclass(kw_only=True, slots=True)
class EmbeddedTaskConfig(TaskConfig):
    """A task that is generated from a seed."""

    embedded: ClassVar[bool] = True

    data_seed: int = 0  # of the data; the run's own seed leaves them alone
    train_size: int = MISSING
    validation_size: int = 512
    test_size: int = 512

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make the tokenizer of this task's vocabulary."""
        raise NotImplementedError

    def vocabulary_size(self) -> int:
        """How many tokens that tokenizer knows, told without making it."""
        raise NotImplementedError

    def problems(self, cfg: Config) -> Iterator[str]:
        """Sizes that leave a split empty."""
        yield from TaskConfig.problems(self, cfg)
        for key in ("train_size", "validation_size", "test_size"):
            size = getattr(self, key)
            if size < 1:
                yield f"task.{key} must be >= 1 (examples to make), got {size}; set task.{key}=512"


class Difficulty(Enum):
    """How hard an embedded task is."""

    easy = "easy"
    medium = "medium"
    hard = "hard"


@option("task", "tldr_mini")
@dataclass(kw_only=True, slots=True)
class TLDRMiniConfig(EmbeddedTaskConfig):
    """TL;DR in miniature: posts from a program, flawed references, a gold score that is a program."""

    name: str = "tldr_mini"
    train_size: int = 8192
    max_prompt_tokens: int = 192
    difficulty: Difficulty = Difficulty.medium

    def source(self) -> Source:
        """Posts and references from the seed; pairs from `preferences_path`."""
        from rlhf.tasks.tldr_mini import TLDRMiniSource

        return TLDRMiniSource(self)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a word of the generator, whatever the difficulty."""
        from rlhf.tasks.tldr_mini import build_tokenizer

        return build_tokenizer()

    def vocabulary_size(self) -> int:
        """The words of the generator, and the special tokens."""
        from rlhf.tasks.tldr_mini import vocabulary
        from rlhf.tasks.word_tokenizer import SPECIAL

        return len(SPECIAL) + len(vocabulary())


@option("task", "tldr")
@dataclass(kw_only=True, slots=True)
class TLDRConfig(TaskConfig):
    """Reddit posts and their writers' summaries (Stiennon et al., 2020), as in the paper's data sets."""

    name: str = "tldr"
    prompts_name: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    preferences_name: str = "mnoukhov/summarize_from_feedback_oai_preprocessing_1706381144_relabel_pythia6.9b"

    def source(self) -> Source:
        """The data sets of the hub, or the local folders that stand for them."""
        from rlhf.tasks.source import Stored, StoredSource

        prompts = Stored(key="task.prompts_name", place=self.prompts_name)
        pairs = Stored(key="task.preferences_name", place=self.preferences_name)
        if self.path is not None:
            prompts = pairs = Stored(key="task.path", place=self.path)
        if self.preferences_path is not None:
            pairs = Stored(key="task.preferences_path", place=self.preferences_path)
        return StoredSource(stored_prompts=prompts, stored_preferences=pairs)


@option("task", "gsm8k")
@dataclass(kw_only=True, slots=True)
class GSM8KConfig(TaskConfig):
    """Grade-school mathematics with answers that can be checked (Cobbe et al., 2021)."""

    prompt_columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    prompt_splits: ClassVar[tuple[str, ...]] = ("train",)

    name: str = "gsm8k"
    prompts_name: str = "openai/gsm8k"
    template: str = "[MATH_TASK] Problem:\n{question}\n\nSolution:"
    validation_size: int = 473  # rows at the end of train; not used where there is a validation split

    def problems(self, cfg: Config) -> Iterator[str]:
        """A template without the question, a validation split without rows."""
        yield from TaskConfig.problems(self, cfg)
        if "{question}" not in self.template:
            yield (
                "task.template must contain {question} (the problem goes there), "
                f"got {self.template!r}; set task.template='Problem: {{question}} Solution:'"
            )
        if self.validation_size < 1:
            yield (
                "task.validation_size must be >= 1 (rows for evaluation), "
                f"got {self.validation_size}; set task.validation_size=473"
            )

    def source(self) -> Source:
        """The data set of the hub, or the local folder that stands for it."""
        from rlhf.tasks.gsm8k import GSM8KSource
        from rlhf.tasks.source import Stored

        rows = Stored(key="task.prompts_name", place=self.prompts_name, subset="main")
        if self.path is not None:
            rows = Stored(key="task.path", place=self.path)
        pairs = None
        if self.preferences_path is not None:
            pairs = Stored(key="task.preferences_path", place=self.preferences_path)
        return GSM8KSource(
            problems=rows, pairs=pairs, template=self.template, validation_size=self.validation_size
        )


@option("task", "arithmetic")
@dataclass(kw_only=True, slots=True)
class ArithmeticConfig(EmbeddedTaskConfig):
    """Sums with an answer that can be checked, from a program; SFT imitates pupils who make mistakes."""

    name: str = "arithmetic"
    train_size: int = 16384
    max_prompt_tokens: int = 32
    difficulty: Difficulty = Difficulty.medium

    def source(self) -> Source:
        """Sums from the seed; pairs from `preferences_path`."""
        from rlhf.tasks.arithmetic import ArithmeticSource

        return ArithmeticSource(self)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a number, whatever the difficulty."""
        from rlhf.tasks.arithmetic import build_tokenizer

        return build_tokenizer()

    def vocabulary_size(self) -> int:
        """The words of the generator, and the special tokens."""
        from rlhf.tasks.arithmetic import vocabulary
        from rlhf.tasks.word_tokenizer import SPECIAL

        return len(SPECIAL) + len(vocabulary())


@option("task", "chat")
@dataclass(kw_only=True, slots=True)
class ChatConfig(TaskConfig):
    """Dialogues whose last turn is the reference, as in No Robots (Rajani et al., 2023)."""

    prompt_columns: ClassVar[tuple[str, ...]] = ("messages",)

    name: str = "chat"
    prompts_name: str = "HuggingFaceH4/no_robots"
    preferences_name: str | None = None  # hub name of pairs: prompt, chosen, rejected, as written here
    validation_split: str = "test"  # what the dialogues call it
    turn: str = "<|{role}|>\n{content}\n"  # how a turn of a dialogue is written
    reply: str = "<|assistant|>\n"  # what a prompt ends with

    def needs(self, cfg: Config) -> Iterator[Need]:
        """The same, with the dialogues' own name of the split, and pairs that are never beside them."""
        for key, folder, columns, splits, reason in TaskConfig.needs(self, cfg):
            if columns == self.prompt_columns:
                yield key, folder, columns, ("train", self.validation_split), reason
            elif key != "task.path":
                yield key, folder, columns, splits, reason

    def problems(self, cfg: Config) -> Iterator[str]:
        """A turn without its content, and pairs that are not named."""
        yield from TaskConfig.problems(self, cfg)
        for field in ("{role}", "{content}"):
            if field not in self.turn:
                yield (
                    f"task.turn must contain {field} (each turn of a dialogue is written by it), "
                    f"got {self.turn!r}; set 'task.turn=\"<|{{role}}|>\\n{{content}}\\n\"'"
                )
        named = self.preferences_path or self.preferences_name
        if cfg.data.name == "preferences" and named is None and not cfg.stand_ins:
            yield (
                "task.preferences_path must name a folder of preference pairs for task=chat (No Robots has "
                "none), got null; set task.preferences_path=<folder> or task.preferences_name=<hub name>"
            )

    def source(self) -> Source:
        """The dialogues of the hub, or of a local folder, and pairs where they are named."""
        from rlhf.tasks.chat import ChatSource
        from rlhf.tasks.source import Stored

        dialogues = Stored(key="task.prompts_name", place=self.prompts_name)
        if self.path is not None:
            dialogues = Stored(key="task.path", place=self.path)
        pairs = None
        if self.preferences_path is not None:
            pairs = Stored(key="task.preferences_path", place=self.preferences_path)
        elif self.preferences_name is not None:
            pairs = Stored(key="task.preferences_name", place=self.preferences_name)
        return ChatSource(
            dialogues=dialogues,
            pairs=pairs,
            validation_split=self.validation_split,
            turn=self.turn,
            reply=self.reply,
        )


@option("task", "preferences")
@dataclass(kw_only=True, slots=True)
class PreferencesConfig(TaskConfig):
    """Any data set with the columns prompt, chosen and rejected."""

    name: str = "preferences"
    preferences_name: str | None = None  # hub name
    validation_split: str = "validation"  # what the data set calls it

    @property
    def folder(self) -> tuple[str, str] | None:
        """The key and the value of the folder that is read, where one is."""
        if self.preferences_path is not None:
            return "task.preferences_path", self.preferences_path
        return None if self.path is None else ("task.path", self.path)

    def needs(self, cfg: Config) -> Iterator[Need]:
        """Pairs, whatever is trained: prompts and references are theirs."""
        if self.folder is not None:
            splits = ("train", self.validation_split)
            yield *self.folder, PREFERENCE_COLUMNS, splits, "the run reads preference pairs from it"

    def problems(self, cfg: Config) -> Iterator[str]:
        """No data set at all."""
        yield from TaskConfig.problems(self, cfg)
        if self.folder is None and self.preferences_name is None:
            yield (
                "task.path must name a folder for task=preferences (it has no data set of its own), got "
                "null; "
                "set task.path=<folder> or task.preferences_name=<hub name>"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """A hub name or folder that another one hides."""
        hidden = {"task.preferences_name": self.preferences_name}
        if self.preferences_path is not None:
            hidden["task.path"] = self.path
        for key, value in hidden.items():
            if self.folder is not None and value is not None:
                yield f"{key} has no effect (the pairs come from {self.folder[0]}), got {value}; leave it out"

    def source(self) -> Source:
        """The pairs of the hub or of a local folder."""
        from rlhf.tasks.preferences import PreferencesSource
        from rlhf.tasks.source import Stored

        if self.folder is not None:
            pairs = Stored(key=self.folder[0], place=self.folder[1])
        else:
            assert self.preferences_name is not None
            pairs = Stored(key="task.preferences_name", place=self.preferences_name)
        return PreferencesSource(pairs=pairs, validation_split=self.validation_split)
