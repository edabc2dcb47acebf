"""Errors that end the command without a traceback."""

from __future__ import annotations

from signal import Signals


class UserError(ValueError):
    """What the user asked for cannot be done; says which key, which rule, why, the value, the remedy.

    Raised anywhere in a run, it ends the command with `error: ...`, exit code 2 and no traceback. `problems`
    are the messages, one for each thing to mend.
    """

    everywhere = False  # every rank has it, so that the first alone tells it

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return report(self.problems)


class RunError(RuntimeError):
    """The run had to stop, at a loss that is not finite for example; the message says where and what to do.

    It ends the command with `error: ...`, exit code 1 and no traceback.
    """

    everywhere = False  # every rank has it, so that the first alone tells it


class Interrupted(BaseException):
    """The run was asked to stop (`rlhf.signals`), to be gone on with; the message says where it stands.

    It ends the command with exit code 75 (`os.EX_TEMPFAIL`) and no traceback. It is no `Exception`, so that
    nobody takes it for a failure: a sweep does not start the jobs that are left. `received` is the signal,
    None where it came to another rank.
    """

    def __init__(self, text: str, received: Signals | None = None) -> None:
        super().__init__(text)
        self.received = received


def report(problems: tuple[str, ...] | list[str]) -> str:
    """Format problems for the terminal: one behind `error:`, several below it."""
    if len(problems) == 1:
        return f"error: {problems[0]}"
    return "\n".join([f"error: {len(problems)} problems", *(f"  - {problem}" for problem in problems)])
