"""Command `python -m rlhf.plan [group=option ...] [key=value ...]`: print the memory plan of a run.

The arguments are the arguments of `rlhf.train`. The command composes and checks the config and prints the
memory that each device needs, part by part, and settings that need less. The command starts no run.

Exit codes:
    0: the memory suffices, or the memory that the run needs is unknown.
    2: the memory does not suffice, or the config is invalid.
"""

from __future__ import annotations

from rich import box
from rich.table import Column, Table

from rlhf.checks.check import check_memory, checked, composed
from rlhf.launch.command_line import Command
from rlhf.memory.plan import plan, savings, unknown_models
from rlhf.memory.uses import Use, gib
from rlhf.terminal.console import console

COMMAND = Command(
    name="rlhf.plan",
    usage="[--config-dir <folder>] [group=option ...] [key=value ...]",
    does="Prints the memory that a run needs, part by part, and runs nothing.",
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(lambda _, overrides: _show(overrides))


def _show(overrides: list[str]) -> None:
    """Print the memory plan of a run.

    Raises:
        UserError: the config is invalid, or a device has too little memory.
    """
    cfg = checked(composed(overrides))
    needed = plan(cfg)
    if needed.unknown:
        console.print(f"memory: {unknown_models(needed.unknown)}")
    for use in needed.uses:
        console.print(_table(use))
    if needed.uses:
        device, smaller = savings(cfg)
        title = f"{device} with one of these settings:"
        columns = Column("setting", no_wrap=True), Column("size", justify="right", no_wrap=True)
        less = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
        for override, size in smaller.items():
            less.add_row(override, gib(size))
        console.print(less)
    check_memory(cfg)


def _table(use: Use) -> Table:
    """Return the table of a device: permanent parts, then the parts of each phase."""
    total = "" if use.total is None else f" of {gib(use.total)}"
    title = f"{use.device}: about {gib(use.bytes)}{total}"
    columns = Column("part", no_wrap=True), Column("size", justify="right", no_wrap=True), "made of"
    made = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    for part in use.parts:
        made.add_row(part.name, gib(part.bytes), part.made_of)
    for phase in use.phases:
        made.add_section()
        largest = phase is use.largest
        note, style = ("the most", "bold") if largest else ("less", None)
        made.add_row(f"while {phase.name}", gib(phase.bytes), note, style=style)
        for part in phase.parts:
            made.add_row(f"  {part.name}", gib(part.bytes), part.made_of)
    return made


if __name__ == "__main__":
    main()
