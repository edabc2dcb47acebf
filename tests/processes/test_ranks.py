"""Tests of the errors that ranks report."""

import pytest
import torch.distributed as dist

from rlhf.core.errors import RunError
from rlhf.processes.ranks import explain_lost_ranks


@pytest.mark.parametrize(
    "error", [RuntimeError("[gloo/pair.cc:537] reset by peer"), dist.DistError("timeout")]
)
def test_a_failed_collective_of_a_library_is_reported_as_a_lost_rank(error):
    with pytest.raises(RunError, match="the connection between the ranks failed"), explain_lost_ranks():
        raise error


def test_other_errors_of_libraries_are_not_reported_as_a_lost_rank():
    with pytest.raises(RuntimeError, match="out of memory"), explain_lost_ranks():
        raise RuntimeError("out of memory")
