"""The catalogue: all entries, by kind of fault."""

from __future__ import annotations

from collections import Counter

from tests.faults.catalogue import disks, files, second, services, signals
from tests.faults.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *signals.ENTRIES,
    *files.ENTRIES,
    *disks.ENTRIES,
    *second.ENTRIES,
    *services.ENTRIES,
)
BY_NAME = {entry.name: entry for entry in ENTRIES}

repeated = [name for name, count in Counter(entry.name for entry in ENTRIES).items() if count > 1]
assert not repeated, f"entries have the same name: {repeated}"
