"""The type of a row: a command with a wrong or unusual input, and what its result must be."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The base of the rows with own data: a tiny local Llama, own pairs and an own reward function.
RL = (
    "algo=rloo model.policy=models/smol 'model.pad_token=\"<|im_end|>\"' task=preferences "
    "task.path=data/pairs scorer=function scorer.path=my_rewards:brief task.max_prompt_tokens=128 "
    "generator.response_length=16 "
    "schedule.prompts_per_update=16 schedule.total_episodes=64 eval.prompts=16 schedule.eval_every=0"
)
SUPERVISED = (
    "'model.pad_token=\"<|im_end|>\"' task.max_prompt_tokens=128 generator.response_length=32 "
    "schedule.prompts_per_update=16 schedule.total_epochs=null schedule.total_episodes=64 eval.prompts=16 "
    "schedule.eval_every=0"
)
SFT = f"algo=sft model.base=models/smol {SUPERVISED}"
OFFLINE_DPO = (
    f"algo=dpo generator=dataset model.policy=models/smol task=preferences task.path=data/pairs {SUPERVISED}"
)
# The base of the rows with wrong keys and values: a test run of the default task.
TINY = "debug=tiny task.train_size=128 task.validation_size=32 task.test_size=8 cache_dir=ARTEFACTS"


def with_chat(base: str) -> str:
    """Return the arguments with the model that has a chat template, in which <|im_end|> ends a turn."""
    return base.replace("models/smol", "models/chat").replace("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Row:
    """A command with a wrong or unusual input, and what its result must be.

    Args:
        name: unique name; the first letter is the part.
        typed: the arguments of the command, as in a shell; in `shell` rows the whole command line, in which
            `$PYTHON` is the interpreter. The text `ARTEFACTS` is replaced by a folder that all rows share,
            `SERVICE` by the address of a local HTTP server, `RUN` by the first run in `outputs`.
        says: texts that the output must contain.
        code: the exit code; None: any.
        base: arguments before `typed`; arguments of `typed` win.
        shown: the input as the table shows it; default: `typed`.
        keeps: whether the command may leave files behind.
        never: texts that the output must not contain.
        module: the command.
        env: environment variables; a value None removes the variable.
        alone: run in a fresh Python process instead of a fork of a server that has imported the libraries.
        shell: `typed` is a shell command.
        prepare: a function that changes the folder of the row before the command starts.
        verdict: the judgement of a person about the result: good, poor or BAD.
        remark: why the verdict is not "good", or what to know.
    """

    name: str
    typed: str
    says: tuple[str, ...] = ()
    code: int | None = 2
    base: str = ""
    shown: str = ""
    keeps: bool = False
    never: tuple[str, ...] = ()
    module: str = "rlhf.train"
    env: Mapping[str, str | None] = field(default_factory=dict)
    alone: bool = False
    shell: bool = False
    prepare: Callable[[Path], None] | None = None
    verdict: str = "good"
    remark: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments of the command: those of `base` that `typed` does not set, then those of `typed`."""
        own = shlex.split(self.typed)
        keys = {word.partition("=")[0].lstrip("+~") for word in own if "=" in word}
        before = [word for word in shlex.split(self.base) if word.partition("=")[0].lstrip("+~") not in keys]
        return [*before, *own]

    @property
    def input(self) -> str:
        """The input as the table shows it."""
        return self.shown or f"`{self.typed}`"
