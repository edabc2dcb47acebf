"""Logging of a run: terminal and train.log."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf.core.launched import is_first_rank
from rlhf.runs.folder import RunFolder


def setup_logging(folder: RunFolder | Path) -> logging.Logger:
    """Send messages of the logger "rlhf" and Python warnings to the terminal and to the folder's train.log.

    Only the first rank logs. A sweep runs several jobs in one process and calls this function once per job;
    the last call determines the folder.
    """
    from rich.logging import RichHandler

    from rlhf.core.console import console, transcript

    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("rlhf")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.INFO)
    log.propagate = False
    if is_first_rank():
        to_terminal = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        to_terminal.addFilter(lambda record: record.name != transcript.name)
        log.addHandler(to_terminal)
        to_file = logging.FileHandler(folder.log, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        to_file.handleError = lambda record: None  # type: ignore[method-assign]  # no traceback if the disk is full
        log.addHandler(to_file)
    logging.captureWarnings(True)
    warnings_log = logging.getLogger("py.warnings")
    warnings_log.handlers = list(log.handlers)
    warnings_log.propagate = False
    return log
