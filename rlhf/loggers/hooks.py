"""User code that a run calls after an update, an evaluation or a checkpoint.

    # my_hooks.py
    from rlhf import Hook

    class Announce(Hook):
        def after_evaluation(self, state, metrics, completions):
            print(state.update, metrics["eval/score"])

    python -m rlhf.train algo=dpo 'hooks=[my_hooks:Announce]'

Hooks run on the first rank only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError, one_line
from rlhf.loggers.logger import Logger
from rlhf.terminal.console import say
from rlhf.usercode.address import load_class

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.core.metrics import Evaluation, Metrics, Row
    from rlhf.core.state import TrainState


class StopRun(Exception):
    """A hook raises this exception to stop its run before the last update. The run does not fail.

    The run stops after the current or the next update, with a checkpoint. The same command resumes the run.

    Args:
        reason: the reason in a word or two, for tables, such as "pruned".
    """


class Hook:
    """The base class of hooks. Every method does nothing; subclasses override methods.

    A hook must not change its arguments. If a method raises an exception other than `StopRun`, the run ends
    with an error that names the hook, after the current or the next update and with a checkpoint.
    """

    def after_update(self, state: TrainState, metrics: Row) -> None:
        """Handle the end of an update.

        Args:
            state: the counters of the run: `update`, `num_updates`, `episode`, `version`, `lag`.
            metrics: the training metrics, as means since the last row of metrics.jsonl.
        """

    def after_evaluation(self, state: TrainState, metrics: Row, completions: list[dict[str, Any]]) -> None:
        """Handle an evaluation, including the evaluation before training (`state.update` is 0).

        Args:
            state: the counters of the run.
            metrics: the metrics of the evaluation (`eval/...`).
            completions: one dictionary per held-out example, with the keys of completions.jsonl.
        """

    def after_checkpoint(self, state: TrainState, folder: Path) -> None:
        """Handle a checkpoint, which is complete, in its `folder`."""


METHODS = frozenset(name for name in vars(Hook) if name.startswith("after_"))


class Hooks(Logger):
    """A logger that calls hooks, and asks the run to stop if a hook raises an exception.

    After an exception, no hook is called again.

    Args:
        hooks: the hooks, called in this order.
        stop: asks the run to stop after the current update.
    """

    def __init__(self, hooks: Sequence[Hook], stop: Callable[[], None]) -> None:
        self.hooks = hooks
        self.stop = stop
        self.failure: str | None = None  # the hook, its method and its exception
        self.stopped: str | None = None  # the reason of a `StopRun`

    def updated(self, figures: Metrics, state: TrainState) -> None:
        """Call `after_update` of every hook."""
        if self.hooks:
            values = {name: stat.value() for name, stat in figures.items()}
            self.call("after_update", state, {name: x for name, x in values.items() if x is not None})

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Call `after_evaluation` of every hook."""
        self.call("after_evaluation", state, evaluation.figures, evaluation.samples)

    def saved(self, checkpoint: Path, state: TrainState) -> None:
        """Call `after_checkpoint` of every hook."""
        self.call("after_checkpoint", state, checkpoint)

    def call(self, method: str, state: TrainState, *arguments: Any) -> None:
        """Call a method of every hook; print the traceback of an exception and ask the run to stop."""
        for hook in self.hooks:
            if self.failure is not None or self.stopped is not None:
                return
            try:
                getattr(hook, method)(state, *arguments)
            except StopRun as reason:
                self.stopped = str(reason)
                self.stop()
            except Exception as error:  # the user's code may raise any exception
                traceback.print_exc()
                name = type(hook).__qualname__
                self.failure = f"hook {name}.{method} raised {one_line(error)}"
                say(f"{self.failure}; the run stops after an update, with a checkpoint", style="red")
                self.stop()


def load_hooks(paths: Sequence[str]) -> list[Hook]:
    """Import and build hooks, in the process of the job.

    Args:
        paths: the addresses of their classes.

    Raises:
        UserError: a class cannot be imported or built, or is not a hook.
    """
    hooks: list[Hook] = []
    found: list[str] = []
    for path in paths:
        try:
            hooks.append(_build(path))
        except UserError as error:
            found += error.problems
    if found:
        raise UserError(*found)
    return hooks


def _build(path: str) -> Hook:
    """Return the hook at the address `path`.

    Raises:
        UserError: the class cannot be imported or built, is not a hook, or has an unknown method `after_...`.
    """
    cls = load_class("hooks", path)
    if not issubclass(cls, Hook):
        raise UserError(
            f"hooks must name subclasses of rlhf.Hook (the run calls their methods), got {path!r}; write "
            f"class {cls.__name__}(rlhf.Hook)"
        )
    unknown = sorted(name for name in dir(cls) if name.startswith("after_") and name not in METHODS)
    if unknown:
        close = get_close_matches(unknown[0], METHODS, n=1) or sorted(METHODS)
        raise UserError(
            f"hooks must have only the methods {', '.join(sorted(METHODS))} that begin with after_ (no other "
            f"method is called), got {path!r} with {unknown[0]}; rename it {close[0]}"
        )
    try:
        return cls()
    except Exception as error:  # the user's code may raise any exception
        raise UserError(
            f"hooks must name classes that can be built without arguments ({one_line(error)}), "
            f"got {path!r}; correct {cls.__name__}.__init__"
        ) from None
