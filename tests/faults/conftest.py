"""Fixtures of the fault tests: a workspace that all pytest workers share."""

import pytest

from tests.faults.workspace import Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Workspace:
    """Return the workspace of all pytest workers. The first worker that needs a run makes it."""
    base = tmp_path_factory.getbasetemp()
    return Workspace((base.parent if base.name.startswith("popen-") else base) / "faults")
