"""A framework for RLHF experiments, with one training loop for synchronous and asynchronous runs.

The Python API: `Experiment`, `Study`, `Hook`, `StopRun`, `sweep`, and the errors `UserError`,
`RunError` and `Interrupted`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhf.core import launched
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.launched import __version__

if TYPE_CHECKING:
    from rlhf.experiment import Experiment as Experiment
    from rlhf.loggers.logger import Hook as Hook
    from rlhf.loggers.logger import StopRun as StopRun
    from rlhf.study.study import Study as Study
    from rlhf.sweeping import sweep as sweep

# Name -> module. They are imported at their first use, so that the commands start quickly.
_LAZY = {
    "Experiment": "rlhf.experiment",
    "Hook": "rlhf.loggers.logger",
    "StopRun": "rlhf.loggers.logger",
    "Study": "rlhf.study.study",
    "sweep": "rlhf.sweeping",
}
__all__ = ["Interrupted", "RunError", "UserError", "__version__", *_LAZY]

launched.handle()


def __getattr__(name: str) -> Any:
    """Import a name of the Python API at its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
