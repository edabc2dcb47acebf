"""Errors that end the command without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """What the user asked for cannot be done; says which key, which rule, why, the value, the remedy.

    Raised anywhere in a run, it ends the command with `error: ...`, exit code 2 and no traceback. `problems`
    are the messages, one for each thing to mend.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return report(self.problems)


class RunError(RuntimeError):
    """The run had to stop, at a loss that is not finite for example; the message says where and what to do.

    It ends the command with `error: ...`, exit code 1 and no traceback.
    """


def report(problems: tuple[str, ...] | list[str]) -> str:
    """Format problems for the terminal: one behind `error:`, several below it."""
    if len(problems) == 1:
        return f"error: {problems[0]}"
    return "\n".join([f"error: {len(problems)} problems", *(f"  - {problem}" for problem in problems)])
