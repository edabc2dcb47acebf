"""Five faults of the catalogue, one of each kind: each ends as its entry states.

`make test-faults` tries the whole catalogue.
"""

import pytest

from tests import needs
from tests.faults.__main__ import line, missing
from tests.faults.catalogue import BY_NAME
from tests.faults.trial import Trial

pytestmark = [pytest.mark.process, pytest.mark.forks]

NAMES = (  # of runs that tests/faults/test_harness.py also needs
    "kill.trainer.sync",
    "remove.checkpoint.config.json",
    "file_limit.end",
    "twice.after_kill",
    "clock.hour_forward",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_has_the_outcome_that_the_catalogue_states(name, workspace, tmp_path):
    entry = BY_NAME[name]
    if missing(entry) is not None:
        pytest.skip(needs.MOUNT)
    report = Trial(entry, "2:0", tmp_path / "trial", workspace).carry_out()
    assert report.passed, "\n" + line(report)
