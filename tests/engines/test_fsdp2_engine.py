"""The reader of checkpoints of FSDP2: it runs nothing that a file names."""

import pickle
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf.core.errors import RunError
from rlhf.engines.fsdp2_engine import _Reader

TENSOR = TensorStorageMetadata(
    TensorProperties(torch.float32),
    torch.Size([2]),
    [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
)


class Call:
    """Is stored as a call of a function."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def read(tmp_path, content, protocol=4):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content, protocol))
    return _Reader(tmp_path).read_metadata()


def test_a_description_of_tensors_is_read(tmp_path):
    stored = Metadata({"a": TENSOR}, {"a": ("a",)}, {MetadataIndex("a", [0]): None}, StorageMeta(tmp_path))
    assert read(tmp_path, stored) == stored


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("function", [subprocess.getoutput, exec, torch.load])
def test_any_other_name_is_refused_and_nothing_runs(tmp_path, protocol, function):
    proof = tmp_path / "proof"
    given = f"open({str(proof)!r}, 'w')" if function is exec else f"touch {proof}"
    with pytest.raises(RunError, match=rf"got \S+\.{function.__name__};"):
        read(tmp_path, Call(function, given), protocol)
    with pytest.raises(RunError, match=rf"got \S+\.{function.__name__};"):
        read(tmp_path, Metadata({"a": TENSOR}, Call(function, given)))
    assert not proof.exists()


def test_an_entry_that_torch_would_unpickle_is_refused(tmp_path):
    with pytest.raises(RunError, match="BytesStorageMetadata"):
        read(tmp_path, Metadata({"step_index": BytesStorageMetadata()}))


def test_a_member_of_an_enum_as_older_pythons_stored_it_is_read_and_no_other_attribute(tmp_path):
    format_ = type(TENSOR.properties.__getstate__()[3])
    assert read(tmp_path, Call(getattr, format_, "TORCH_CHANNELS_LAST")) is format_.TORCH_CHANNELS_LAST
    with pytest.raises(KeyError):
        read(tmp_path, Call(getattr, Metadata, "__init__"))
