"""A short draw of the catalogue with a fixed seed: each fault ends as its entry states.

`make test-faults` draws from the whole catalogue, for as long as it is given.
"""

import random

import pytest

from tests import needs
from tests.faults.__main__ import line, missing
from tests.faults.catalogue import BY_NAME, ENTRIES
from tests.faults.trial import Trial

pytestmark = [pytest.mark.process, pytest.mark.forks]

SEED = "2"
# Number of trials by part of the catalogue. A trial takes 2 to 8 seconds.
COUNTS = {
    "Signals": 8,
    "Sweeps": 1,
    "Commands": 2,
    "Resumed run": 5,
    "Active run": 2,
    "Finished run": 2,
    "Cache folder": 1,
    "Disks": 3,
    "Second process": 2,
    "Clock": 1,
    "Scoring service": 3,
}
QUICK = {"hf", "lag", "grpo", "ppo", "lora", "sft", "replicas", "in_flight", "http", "http_lag"}
QUICK |= {"evaluate", "relabel", "extend", "sweep_local"}


def drawn() -> list[str]:
    """Return the names of the entries that are tried."""
    names = []
    for part, count in COUNTS.items():
        own = [entry for entry in ENTRIES if entry.group.startswith(f"{part}:")]
        own = [entry for entry in own if entry.run in QUICK and not entry.fresh]
        names += [entry.name for entry in random.Random(f"{SEED}:{part}").sample(own, count)]
    return names


@pytest.mark.parametrize("name", drawn())
def test_a_fault_has_the_outcome_that_the_catalogue_states(name, workspace, tmp_path):
    entry = BY_NAME[name]
    if missing(entry) is not None:
        pytest.skip(needs.MOUNT)
    report = Trial(entry, f"{SEED}:0", tmp_path / "trial", workspace).carry_out()
    assert report.passed, "\n" + line(report)
