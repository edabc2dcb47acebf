"""The figures of one run as PNG files, for dashboards."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rlhf.report.figures import charts
from rlhf.report.groups import sections
from rlhf.report.runs import load

log = logging.getLogger(__name__)


def run_figures(folder: Path) -> dict[str, bytes]:
    """Return the figures of a run whose updates are complete: name -> PNG file.

    The result is empty if matplotlib is not installed, or if the files of the run cannot be read.

    Args:
        folder: the run folder; its trainer_state.json does not have to be marked as finished.
    """
    if find_spec("matplotlib") is None:
        return {}
    try:
        run = load(folder)
    except ValueError as error:
        log.warning(f"the dashboards get no figures of {folder}: {error}")
        return {}
    finished = replace(run, state={**run.state, "finished": True})
    return {chart.name: chart.png() for section in sections([finished]) for chart in charts(section)[0]}
