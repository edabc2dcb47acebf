"""Logging of a run: terminal and train.log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.core.console import show, transcript
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.launched import is_first_rank
from rlhf.core.secrets import hide
from rlhf.runs.folder import RunFolder


class TerminalHandler(logging.Handler):
    """A handler that prints messages in the terminal; warnings are yellow and begin with "warning: "."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless it is meant for train.log only."""
        if record.name == transcript.name:
            return
        warning = record.levelno == logging.WARNING
        text = self.format(record)
        show(f"warning: {text}" if warning else text, style="yellow" if warning else None)


class LogFile(logging.FileHandler):
    """A handler that writes train.log. If the disk is full, lines are lost and the run continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a line that cannot be written."""

    def close(self) -> None:
        """Close the file; lines that cannot be written are lost."""
        with suppress(OSError):
            super().close()


class WithoutSecrets(logging.Formatter):
    """A formatter of train.log, which hides secrets in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a message."""
        return hide(super().format(record))


def setup_logging(folder: RunFolder | Path) -> logging.Logger:
    """Send messages of the logger "rlhf" and Python warnings to the terminal and to the folder's train.log.

    Only the first rank logs. A sweep runs several jobs in one process and calls this function once per job;
    the last call determines the folder.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("rlhf")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.INFO)
    log.propagate = False
    if is_first_rank():
        log.addHandler(TerminalHandler())
        to_file = LogFile(folder.log, encoding="utf-8")
        to_file.setFormatter(WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(to_file)
    logging.captureWarnings(True)
    warnings_log = logging.getLogger("py.warnings")
    warnings_log.handlers = list(log.handlers)
    warnings_log.propagate = False
    return log


@contextmanager
def run_log() -> Iterator[None]:
    """Write the error that ends the block to the train.log that `setup_logging` opens in the block.

    A UserError or RunError is written with the traceback of the exception that caused it, for example in a
    reward function. After the block, messages go where they went before: a run that makes its SFT model first
    returns to its own train.log.
    """
    loggers = logging.getLogger("rlhf"), logging.getLogger("py.warnings")
    outer = [log.handlers[:] for log in loggers]
    for log in loggers:
        log.handlers.clear()
    try:
        yield
    except (UserError, RunError) as error:
        transcript.error(str(error).removeprefix("error: "), exc_info=error.__context__)
        raise
    except KeyboardInterrupt:
        transcript.error("interrupted by Ctrl-C; the same command resumes the run from its last checkpoint")
        raise
    except Interrupted:  # `rlhf.stages.run` has written where the run stopped
        raise
    except BaseException as error:
        transcript.error("unexpected error: %s", type(error).__name__, exc_info=error)
        raise
    finally:
        for handler in loggers[0].handlers:
            handler.close()
        for log, handlers in zip(loggers, outer, strict=True):
            log.handlers[:] = handlers
