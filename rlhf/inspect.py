"""Command `python -m rlhf.inspect [group=option ...] [key=value ...]`: show what a run would train on.

The arguments are the arguments of `rlhf.train`. The command checks the config, the model folders and the
data. It prints the models, the tokenizer, the data and three tokenized examples with their masks; then it
probes the reward and tries judges. No run is started and no file is written. Problems of the config and of
model folders are reported before torch is imported.

Exit codes:
    0: no problem found.
    1: the reward or a judge fails for a reference response, or a judge contradicts itself.
    2: the run would fail; every problem is printed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rlhf.checks.check import checked, composed, downloads, warn, warnings
from rlhf.core.errors import UserError, lines
from rlhf.launch.command_line import Command
from rlhf.loggers.logger import load_hooks
from rlhf.memory.sizes import Model, models
from rlhf.models.folder import is_local, on_this_machine
from rlhf.terminal.console import console, say_loading
from rlhf.words import catalogue

COMMAND = Command(
    name="rlhf.inspect",
    usage="[--config-dir <folder>] [group=option ...] [key=value ...]",
    does="Prints models, tokenizer, data and tokenized examples of a run,\nand probes its reward.",
)
_WIDTH = 80  # most columns of the examples


def main() -> None:
    """Run the command line."""
    COMMAND.run(lambda _, overrides: _show(overrides))


def _show(overrides: list[str]) -> None:
    """Print what the run with these overrides would train on.

    Raises:
        UserError: the run would fail.
    """
    cfg = checked(composed(overrides))
    if found := [*downloads(cfg), *cfg.environment.job_problems("environment")]:
        raise UserError(*found)
    load_hooks(cfg.hooks)
    warn([*catalogue.replaced(cfg, overrides), *warnings(cfg)])
    _line("Models", "bold")
    for model in models(cfg):
        for text in _described(model):
            _line(text)
    _line("")
    say_loading()
    from rlhf.stages.inspection import Inspection

    Inspection(cfg, min(_WIDTH, console.width), _line).report()
    _line("")
    _line("no problem found; to start the run:", "bold")
    for text in lines("python -m rlhf.train", *map(shlex.quote, [*catalogue.config_dir_words(), *overrides])):
        _line(text)


def _line(text: str, style: str | None = None) -> None:
    """Print a line without markup; a line that is too long is wrapped by the terminal, not divided."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def _described(model: Model) -> Iterator[str]:
    """Yield the lines about a model: its role and name, then what its files state."""
    yield f"  {model.role:18}{model.name or 'made by the run first'}"
    facts = []
    if model.name is not None:
        found = on_this_machine(model.name)
        if found is not None and found.config:
            facts += [found.name, *([f"context {found.context:,} tokens"] if found.context else [])]
        elif found is None and not is_local(model.name):
            facts.append("downloaded by the run first")
    if model.size is not None:
        facts.insert(1, f"{model.size.parameters:,} parameters")
    if facts:
        yield f"  {'':18}{', '.join(facts)}"


if __name__ == "__main__":
    main()
