"""Faults of the catalogue, one of each kind: each ends as its entry states.

`make test-faults` tries the whole catalogue. Entries are nightly if a test of tests/end_to_end states the
fact: kills in a weight transfer and damaged checkpoints (test_survival.py), the same run twice
(test_two_processes.py).
"""

import pytest

from tests import needs
from tests.faults.__main__ import line, missing
from tests.faults.catalogue import BY_NAME
from tests.faults.trial import Trial

pytestmark = [pytest.mark.process, pytest.mark.forks]

NAMES = (  # of runs that tests/faults/test_harness.py also needs
    pytest.param("kill.trainer.sync", marks=pytest.mark.nightly),
    pytest.param("remove.checkpoint.config.json", marks=pytest.mark.nightly),
    "file_limit.end",
    pytest.param("twice.after_kill", marks=pytest.mark.nightly),
    "clock.hour_forward",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_has_the_outcome_that_the_catalogue_states(name, workspace, tmp_path):
    entry = BY_NAME[name]
    if missing(entry) is not None:
        pytest.skip(needs.MOUNT)
    report = Trial(entry, "2:0", tmp_path / "trial", workspace).carry_out()
    assert report.passed, "\n" + line(report)
