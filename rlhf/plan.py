"""Command `python -m rlhf.plan [group=option ...] [key=value ...]`: print memory, time and price of a run.

The arguments are the arguments of `rlhf.train`, and those of `COMMAND.own`. The command composes and checks
the config and prints the memory that each device needs, part by part, settings that need less, and the
seconds of an update. The command starts no run.

Exit codes:
    0: the memory suffices, or the memory that the run needs is unknown.
    2: the memory does not suffice, or the config is invalid.
"""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Column, Table

from rlhf.checks.check import check_memory, checked, composed
from rlhf.config.root import Config
from rlhf.core.errors import UserError
from rlhf.core.machine import this_machine
from rlhf.launch.command_line import Command
from rlhf.memory.plan import device, plan, savings, unknown_models
from rlhf.memory.times import DEVICES, FROM_RUN, Clock, from_run, run_s, update_s
from rlhf.memory.uses import Use, gib
from rlhf.runs.folder import RunFolder
from rlhf.terminal.console import console

COMMAND = Command(
    name="rlhf.plan",
    usage="[gpu=<name>] [run=<folder>] [price_per_gpu_hour=<price>] [--config-dir <folder>] "
    "[group=option ...] [key=value ...]",
    does="Prints the memory, the time and the price of a run, part by part, and runs nothing.",
    own={
        "gpu": f"GPU of the time: {', '.join(name for name in DEVICES if name[0].isupper())} (default: H100)",
        "run": "run folder; its measured phases replace the rates of the device",
        "price_per_gpu_hour": "price of a GPU for an hour, for the price of the run",
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(_show)


def _show(own: dict[str, str], overrides: list[str]) -> None:
    """Print the plan of a run.

    Raises:
        UserError: the config or an argument is invalid, or a device has too little memory.
    """
    cfg = checked(composed(overrides))
    needed = plan(cfg)
    time = _time(cfg, own) if needed.uses else None
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
        console.print(time)
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


def _time(cfg: Config, own: dict[str, str]) -> Table:
    """Return the table of the seconds of an update, and of the hours and the price of the run.

    Raises:
        UserError: there is no such GPU, price, or measured run.
    """
    machine, price = this_machine(), own.get("price_per_gpu_hour", "0")
    name = own.get("gpu", "H100") if (cuda := device(cfg, machine) == "cuda") else "cpu"
    if not cuda and (word := next((each for each in ("gpu", "price_per_gpu_hour") if each in own), None)):
        raise UserError(f"{word}= needs a run on a GPU, got {own[word]}; set backend.device=cuda")
    if name not in DEVICES:
        raise UserError(f"gpu= must be {COMMAND.own['gpu'].partition(': ')[2]}, got {name}; set gpu=H100")
    if not price.replace(".", "", 1).isdigit():
        raise UserError(f"price_per_gpu_hour= must be a number, got {price}; set price_per_gpu_hour=2.5")
    clock, source = Clock(cfg, DEVICES[name], machine), f"{name}, full length"
    phases, factor = clock.phases(), clock.rates["factor"]
    if "run" in own:
        phases = from_run(RunFolder(Path(own["run"]).expanduser()), clock.rates, machine, phases)
        factor, source = FROM_RUN, f"from the run {own['run']}"
    found = [(f"  {phase}", seconds, "s") for phase, seconds in phases.items() if seconds]
    found.append(("an update", update_s(cfg, phases), "s"))
    if cfg.epochs is None:
        hours = run_s(cfg, clock, found[-1][1]) / 3600
        found.append((f"the run: {cfg.num_updates():,} updates", hours, "h"))
        if float(price):
            others = () if cfg.generator.shares_gpu else cfg.generator.reserved_gpus(1)
            gpus = clock.trainer.ranks + len(others)
            found.append((f"its price with {gpus} GPU{'s' * (gpus > 1)}", hours * gpus * float(price), ""))
    title = f"Time ({source}):"
    made = Table("time", "about", "range", title=title, title_justify="left", box=box.SIMPLE)
    for what, value, unit in found:
        made.add_row(what, f"{value:.3g} {unit}", f"{value / factor:.3g} to {value * factor:.3g} {unit}")
    return made


if __name__ == "__main__":
    main()
