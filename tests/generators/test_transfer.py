"""Tests of weight transfer by shared memory: weights arrive unchanged or an error names the tensor."""

import os
import pickle
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import pytest
import torch

from rlhf.core.errors import RunError
from rlhf.generators import weights as shared_memory
from rlhf.generators.weights import (
    SharedWeights,
    TransferError,
    checksum,
    confirm,
    read,
)

WEIGHTS = {
    "embed.weight": torch.randn(7, 3),
    "odd": torch.randn(5).to(torch.bfloat16),
    "strided": torch.randn(4, 6).t(),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "ids": torch.arange(9),
}


@pytest.fixture
def shared():
    shared = SharedWeights()
    yield shared
    shared.close()


@pytest.fixture(params=["nameless", "named", "folder"])
def either(request, monkeypatch, tmp_path):
    """Yield a store in memory without a name, as on Linux, with a name, and one in a folder of the user."""
    if request.param == "named":
        monkeypatch.delattr(os, "memfd_create")
    shared = SharedWeights(folder=tmp_path / "weights" if request.param == "folder" else None)
    yield shared
    shared.close()


def taken(manifest):
    return {name: tensor.clone() for name, tensor in read(manifest)}


def equal(found, sent):
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_tensors_of_all_shapes_and_dtypes_arrive_unchanged(either):
    manifest = pickle.loads(pickle.dumps(either.write(WEIGHTS.items(), 3)))
    equal(taken(manifest), WEIGHTS)
    confirm(manifest, 3, {name: checksum(tensor) for name, tensor in WEIGHTS.items()})


@pytest.mark.process
def test_another_process_reads_the_weights(either):
    manifest = either.write(WEIGHTS.items(), 3)
    code = (
        "import pickle, sys\n"
        "from rlhf.generators.weights import read\n"
        "from rlhf.generators.weights import checksum\n"
        "manifest = pickle.load(sys.stdin.buffer)\n"
        "pickle.dump({name: checksum(tensor) for name, tensor in read(manifest)}, sys.stdout.buffer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(manifest), capture_output=True, check=True
    )
    confirm(manifest, 3, pickle.loads(done.stdout))


def test_weights_are_requested_one_tensor_at_a_time(shared):
    made, alive = [], []

    def weights():
        for i in range(5):
            made.append(weakref.ref(tensor := torch.full((1000,), float(i))))
            alive.append(sum(each() is not None for each in made))
            yield str(i), tensor
            del tensor

    manifest = shared.write(weights(), 1)
    assert [float(t[0]) for _, t in read(manifest)] == [0, 1, 2, 3, 4]
    assert max(alive) == 2  # the tensor just written and the next tensor


def overwritten(tensors):
    """Yield `tensors` one by one in the same memory, as an engine does that gathers weights from shards."""
    memory = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        view = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, view.copy_(tensor)
    memory.zero_()


@pytest.mark.parametrize("on_host", [True, False], ids=["cpu", "as on a gpu"])
def test_each_tensor_is_copied_before_the_next_is_requested(shared, monkeypatch, on_host):
    monkeypatch.setattr(shared_memory, "_in_host_memory", lambda tensor: on_host)
    for version in (1, 2):
        equal(taken(shared.write(overwritten(WEIGHTS), version)), WEIGHTS)


def test_a_buffer_is_not_reused_before_its_tensor_is_written(shared, monkeypatch):
    write_at = shared_memory.write_at

    def slow(file, data, offset):
        time.sleep(0.02)
        return write_at(file, data, offset)

    monkeypatch.setattr(shared_memory, "_in_host_memory", lambda tensor: False)
    monkeypatch.setattr(shared_memory, "write_at", slow)
    weights = {str(i): torch.full((100,), float(i)) for i in range(5)}
    equal(taken(shared.write(weights.items(), 1)), weights)


def test_half_the_bytes_of_weights_on_a_gpu_are_copied_to_a_buffer(monkeypatch):
    shared = SharedWeights(torch.bfloat16)
    monkeypatch.setattr(shared_memory, "_in_host_memory", lambda tensor: False)
    equal(taken(shared.write([("w", torch.ones(3))], 1)), {"w": torch.ones(3, dtype=torch.bfloat16)})
    assert [len(buffer) for buffer in shared.staging] == [6, 0]
    shared.close()


def test_floating_point_tensors_are_rounded_to_the_dtype_of_the_sampler():
    shared = SharedWeights(torch.bfloat16)
    found = taken(shared.write(WEIGHTS.items(), 1))
    equal(found, {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in WEIGHTS.items()})
    shared.close()


def test_a_version_is_kept_until_it_is_released(shared):
    first = shared.write([("w", torch.ones(3))], 1)
    second = shared.write([("w", torch.zeros(3))], 2)
    assert first.path != second.path
    assert torch.equal(taken(first)["w"], torch.ones(3)) and torch.equal(taken(second)["w"], torch.zeros(3))
    shared.release(first)
    assert shared.write([("w", torch.zeros(3))], 3).path == first.path
    assert shared.kept == 2


def test_reading_a_version_fails_if_its_file_was_reused_for_another_version(shared):
    first = shared.write([("w", torch.ones(3))], 1)
    shared.release(first)
    shared.write([("w", torch.zeros(3))], 2)
    with pytest.raises(TransferError, match="w of version 1 must have the checksum"):
        taken(first)


def test_reading_a_version_fails_if_a_later_write_is_incomplete(shared):
    def breaks():
        yield "a", torch.zeros(3)
        raise ValueError("gathering failed")

    first = shared.write([("a", torch.ones(3))], 1)
    shared.release(first)
    with pytest.raises(ValueError, match="gathering failed"):
        shared.write(breaks(), 2)
    with pytest.raises(TransferError, match="a of version 1 must have the checksum"):
        taken(first)


def test_a_truncated_file_gives_an_error_that_names_the_tensor_and_the_version(either):
    manifest = either.write([("a", torch.ones(300)), ("b", torch.ones(300))], 4)
    os.truncate(manifest.path, 2000)
    with pytest.raises(TransferError, match=r"b of version 4 must .* 1200 bytes .* in \d+ bytes"):
        taken(manifest)


def test_a_changed_byte_gives_an_error_that_names_the_tensor_and_the_version(either):
    manifest = either.write([("a", torch.ones(300)), ("b", torch.ones(300))], 4)
    with open(manifest.path, "r+b") as file:
        file.seek(manifest.entries[1].offset + 17)
        file.write(b"?")
    with pytest.raises(TransferError, match="b of version 4 must have the checksum"):
        taken(manifest)


def test_a_missing_file_gives_an_error(shared):
    manifest = replace(shared.write([("a", torch.ones(3))], 4), path="/nowhere/weights")
    with pytest.raises(TransferError, match="version 4 cannot be read"):
        taken(manifest)


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        (4, {}, "must confirm version 5 .* got version 4"),
        (5, {"a": 1}, "must hold a of version 5 with the checksum .* got 0000000000000001"),
        (5, {"a": None}, "must hold a of version 5 .* got no tensor"),
        (5, {"c": 1}, "must hold c of version 5 with the checksum no tensor"),
    ],
)
def test_a_wrong_confirmation_gives_an_error_that_names_the_tensor_and_the_versions(
    shared, version, change, message
):
    manifest = shared.write([("a", torch.ones(3)), ("b", torch.ones(4))], 5)
    held = {k: v for k, v in {**manifest.checksums(), **change}.items() if v is not None}
    with pytest.raises(TransferError, match=message):
        confirm(manifest, version, held)


def test_a_store_without_space_gives_a_run_error_with_a_remedy(shared, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="version 2 must fit into .*; free space, or set generator.folder="):
        SharedWeights(folder=tmp_path / "file").write([("a", torch.ones(3))], 2)

    def full(data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "_digest", full)
    with pytest.raises(RunError, match="version 2 must fit into shared memory"):
        shared.write([("a", torch.ones(3))], 2)


def test_a_folder_has_only_the_files_of_the_kept_versions_and_is_removed_with_them(tmp_path):
    folder = tmp_path / "weights"
    SharedWeights(folder=folder).write([("a", torch.ones(3))], 1)  # of a run that was killed
    store = SharedWeights(folder=folder)
    first, second = (store.write([("a", torch.full((3,), float(i)))], i) for i in (7, 8))
    store.release(first)
    assert [str(file) for file in folder.iterdir()] == [second.path]
    store.close()
    assert not folder.exists()


def test_a_version_is_kept_until_each_of_three_users_has_released_it(shared):
    manifest = shared.write([("a", torch.ones(3))], 1)
    shared.hold(manifest)
    shared.hold(manifest)
    kept = []
    for _ in range(3):
        shared.release(manifest)
        kept.append(shared.kept)
    assert kept == [1, 1, 0]
