"""The engine of DeepSpeed: errors of writes do not keep a rank from taking part in later collectives."""

import errno

import pytest

from rlhf.engines.deepspeed_engine import write_errors_last


class FullDisk:
    def save(self, state, path):
        raise OSError(errno.ENOSPC, f"no space for {path}")

    def makedirs(self, path, exist_ok=False):
        raise OSError(errno.ENOSPC, f"no space for {path}")


def test_a_write_error_is_raised_after_all_writes_of_a_checkpoint():
    files, reached = FullDisk(), []
    with pytest.raises(OSError, match="no space for first"), write_errors_last(files):
        files.makedirs("first", exist_ok=True)
        reached.append("a barrier")
        files.save({}, "second")
        reached.append("another barrier")
    assert reached == ["a barrier", "another barrier"]
    with pytest.raises(OSError, match="no space for third"):  # outside of the block: at once
        files.save({}, "third")
