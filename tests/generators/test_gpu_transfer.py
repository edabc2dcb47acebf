"""Tests of weight transfer between GPUs, run on the CPU: checksums, snapshots, both sides of a transfer.

A socket between trainer and worker process replaces NCCL. A sampler with one weight replaces vLLM.
"""

import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from threading import Event

import pytest
import torch

from rlhf.core.errors import RunError
from rlhf.generators import weights as gpu_transfer
from rlhf.generators.process import WorkerGenerator
from rlhf.generators.weights import CudaIpc, GpuWeights, Nccl, TransferError, checksums, confirm, fingerprint
from rlhf.processes.worker import Limits
from tests.generators import test_in_flight
from tests.generators.test_in_flight import wait_for
from tests.generators.test_transfer import WEIGHTS, overwritten
from tests.processes import test_worker
from tests.processes.test_worker import IN_TURN, SECONDS, answers, ask, between_loads

pytestmark = [pytest.mark.process, pytest.mark.forks]

CPU = torch.device("cpu")

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def some(dtype):
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (5, 7), generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_checksum_depends_on_every_bit_and_not_on_the_place_in_memory(dtype, monkeypatch):
    tensor = some(dtype)
    sum_, size = fingerprint(tensor), tensor.element_size()
    assert sum_.dtype == torch.int64 and sum_.shape == ()
    assert fingerprint(tensor.clone()) == sum_ == fingerprint(tensor.t().clone().t())
    packed = torch.cat([torch.zeros(size, dtype=torch.uint8), tensor.view(-1).view(torch.uint8)])
    assert fingerprint(packed[size:].view(dtype).view(5, 7)) == sum_
    sums, bits = {int(sum_)}, [0] if dtype == torch.bool else range(8 * size)
    for place, bit in product(range(tensor.numel()), bits):
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[place * size + bit // 8] ^= 1 << bit % 8
        sums.add(int(fingerprint(other)))
    assert len(sums) == 1 + tensor.numel() * len(bits)
    for chunk in (1, 7, 34, 35):
        monkeypatch.setattr(gpu_transfer, "CHUNK", chunk)
        assert fingerprint(tensor) == sum_


def test_a_checksum_depends_on_the_order_of_elements_and_is_an_unsigned_integer():
    tensor = torch.arange(40.0)
    sums = {str(i): fingerprint(tensor.roll(i)) for i in range(40)} | {"flip": fingerprint(tensor.flip(0))}
    for i, j in product(range(40), range(40)):
        if j < i:
            swapped = tensor.clone()
            swapped[i], swapped[j] = tensor[j], tensor[i]
            sums[f"{i} {j}"] = fingerprint(swapped)
    found = checksums(sums)
    assert len({*found.values()}) == 41 + 40 * 39 // 2
    assert all(0 <= value < 2**64 for value in found.values()) and max(found.values()) > 2**63
    assert checksums({}) == {}


def test_a_checksum_depends_on_dtype_and_shape():
    zeros = torch.zeros(4, 6)
    others = [
        zeros.view(torch.int32),
        zeros.t().contiguous(),
        zeros.view(24),
        torch.zeros(4, 6, dtype=torch.float64),
    ]
    others += [torch.zeros(0), torch.zeros(0, 6), torch.zeros(())]
    assert len({int(fingerprint(tensor)) for tensor in (zeros, *others)}) == 1 + len(others)


class Snapshots(GpuWeights):
    """The snapshot store without a way to send: the base class of CUDA IPC and NCCL."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_copies_and_rounds_each_tensor_before_it_requests_the_next(dtype):
    store = Snapshots(CPU, dtype)
    manifest = store.write(overwritten(WEIGHTS), 3)
    for (name, kept), (expected, sent) in zip(store.snapshots[3], WEIGHTS.items(), strict=True):
        sent = sent.to(dtype) if sent.is_floating_point() else sent
        assert name == expected and kept.dtype == sent.dtype and torch.equal(kept, sent)
    confirm(manifest, 3, checksums({name: fingerprint(kept) for name, kept in store.snapshots[3]}))
    assert [entry.shape for entry in manifest.entries] == [tuple(x.shape) for x in WEIGHTS.values()]
    weight = torch.ones(3)
    store.write([("w", weight)], 4)
    weight.add_(1)
    assert store.snapshots[4][0][1][0] == 1, "training does not change a snapshot"
    store.release(manifest)
    assert list(store.snapshots) == [4]
    store.close()
    assert not store.snapshots


def test_a_full_gpu_gives_a_run_error_with_a_remedy():
    def weights():
        yield "a", torch.ones(3)
        raise torch.OutOfMemoryError("2 GiB more")

    with pytest.raises(
        RunError, match="version 2 must fit a second time .* set generator.transfer=shared_memory"
    ):
        Snapshots(CPU, torch.float32).write(weights(), 2)


def test_cuda_ipc_handles_are_keyed_by_the_uuid_of_the_gpu(monkeypatch):
    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(gpu_transfer, "reduce_tensor", lambda tensor: ("rebuild", (tensor,)))
    store = CudaIpc(CPU, torch.float32)
    manifest = store.write([("a", torch.ones(3)), ("b", torch.zeros(2))], 1)
    told = store.offer(manifest, fail=lambda: None)
    handles = told.update["ipc_handles"]
    assert [handle["GPU-1"][0] is kept for handle, (_, kept) in zip(handles, store.snapshots[1], strict=True)]
    assert told.entries == manifest.entries and told.group is None and manifest.update is None


class Peer:
    """A replacement for NCCL's communicator: a socket connection to the other rank."""

    def __init__(self, connection):
        self.connection = connection
        self.destroyed = Event()

    def send(self, data):
        self.connection.sendall(data)

    def receive(self, count):
        found = b""
        while len(found) < count:
            found += (more := self.connection.recv(count - len(found)))
            if not more:
                raise ConnectionResetError("the other rank is gone")
        return found

    def destroy(self):
        self.destroyed.set()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class OverSocket(Nccl):
    """A replacement for NCCL that uses sockets, counts groups and records the versions that it sent.

    Args:
        fails: the version that cannot be sent.
        notices: whether a send fails with an error if the other rank is lost. By default the send waits
            forever, as with NCCL.
    """

    def __init__(self, fails=None, notices=False):
        super().__init__(CPU, torch.float32, workers=1)
        self.fails, self.notices = fails, notices
        self.groups, self.sent, self.senders = 0, [], []

    def new_group(self):
        self.groups += 1
        self.server = socket.create_server(("127.0.0.1", 0))
        return {"port": self.server.getsockname()[1]}

    def join(self, group):
        self.senders.append(self.sender)
        with self.server as server:
            return Peer(server.accept()[0])

    def broadcast(self, communicator, weights):
        version = int(weights[0][1].flatten()[0])
        if version == self.fails:
            raise torch.OutOfMemoryError("no room to pack")
        try:
            for _, tensor in weights:
                communicator.send(tensor.numpy().tobytes())
                assert communicator.receive(5) == b"taken"  # a collective waits for all ranks
        except OSError:
            if not self.notices:
                communicator.destroyed.wait()
            raise
        time.sleep(0.1)  # the trainer's side may finish after the sampler's side
        self.sent.append(version)


class Receives:
    """A mixin with a `load` like vLLM's: it joins the group that the manifest names and receives weights."""

    def load(self, manifest):
        fault = self.made_by.strikes
        if fault("refuses", manifest.version):
            raise TransferError("weights of another model")
        if manifest.group is not None:
            if fault("dies before it joins", manifest.version):
                os.kill(os.getpid(), signal.SIGKILL)
            self.peer = Peer(socket.create_connection(("127.0.0.1", manifest.group["port"])))
        taken = {}
        for entry in manifest.entries:
            data = bytearray(self.peer.receive(entry.bytes))
            if fault("dies while it receives", manifest.version):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault("hangs while it receives", manifest.version):
                time.sleep(1000)
            tensor = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).view(entry.shape)
            taken[entry.name] = int(fingerprint(tensor)) % 2**64
            self.peer.send(b"taken")
        self.weight = tensor[0]
        if fault("takes another", manifest.version):
            taken["b"] ^= 1
        return taken

    def close(self):
        pass


class ReceivingSampler(Receives, test_worker.FakeSampler):
    pass


@dataclass
class Fake(test_worker.Fake):
    def build(self):
        return ReceivingSampler(self)


class ReceivingInFlight(Receives, test_in_flight.FakeSampler):
    pass


@dataclass
class FakeInFlight(test_in_flight.Fake):
    strikes = staticmethod(lambda fault, version: False)

    def build(self):
        return ReceivingInFlight(self)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a generator from a factory.

    After the test, the fixture checks that each generator closes in time and that its sender threads end.
    """
    made = []

    def make(factory, fails=None, notices=False, request_s=60, in_flight=False):
        limits = Limits(start_s=120, request_s=request_s, restarts=2)
        store, log = OverSocket(fails, notices), tmp_path / "generator.log"
        made.append(WorkerGenerator(factory, log, {"OMP_NUM_THREADS": "1"}, limits, in_flight, store))
        return made[-1]

    yield make
    for generator in made:
        begun = time.monotonic()
        generator.close()
        assert time.monotonic() - begun < SECONDS / 4 and not generator.store.snapshots
        for sender in generator.store.senders:
            sender.join(SECONDS / 4)
            assert not sender.is_alive()


def load(generator, version):
    """Load three tensors that are together larger than the buffer of a socket."""
    generator.load([(name, torch.full((100_000,), float(version))) for name in "abc"], version)


def test_each_request_is_sampled_by_the_last_weights_that_were_sent_before_it(start):
    generator = start(Fake())
    futures = between_loads(generator, load)
    assert generator.store.sent != [0, 1, 2, 3], "a version is sent only when its turn comes"
    assert answers(futures) == IN_TURN
    assert generator.store.sent == [0, 1, 2, 3] and generator.store.groups == 1
    assert list(generator.store.snapshots) == [3], "a snapshot is released once a later version is confirmed"


FAULTS = (
    ("dies before it joins", False),
    ("dies while it receives", False),
    ("dies while it receives", True),  # the trainer's side also fails with an error
    ("hangs while it receives", False),
    ("dies", False),  # while it samples
)


@pytest.mark.parametrize(("fault", "notices"), FAULTS)
def test_weights_are_sent_again_in_a_new_group_after_the_receiving_process_is_lost(
    start, tmp_path, fault, notices
):
    at = 0 if fault == "dies before it joins" else 1
    limit = 5 if "hangs" in fault else 60
    generator = start(Fake(fault, at=at, once=tmp_path), notices=notices, request_s=limit)
    load(generator, 0)
    futures = [ask(generator, 0)]
    load(generator, 1)
    futures += [ask(generator, 1)]
    assert answers(futures) == [(0, 0, 0), (1, 1, 1)]
    assert generator.store.groups == 2 and generator.restarts == 1
    if fault == "dies before it joins":
        # No process joins the first group. Its sender, a daemon thread, waits forever, as with NCCL.
        first = generator.store.senders.pop(0)
        assert first.is_alive() and first.daemon and first.abandoned


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", "weights of another model"),
        ("takes another", "must hold b of version 1 with the checksum"),
    ],
)
def test_a_process_that_rejects_weights_or_gets_others_stops_the_run(start, fault, message):
    generator = start(Fake(fault, at=1))
    load(generator, 0)
    load(generator, 1)
    with pytest.raises(TransferError, match=message):
        ask(generator, 0).result(SECONDS)
    assert generator.restarts == 0 and generator.store.sent[:1] == [0]


def test_weights_that_the_trainer_cannot_send_stop_the_run_with_the_reason(start):
    generator = start(Fake(), fails=1)
    load(generator, 0)
    before = ask(generator, 0)
    load(generator, 1)
    assert answers([before]) == [(0, 0, 0)]
    with pytest.raises(RunError, match="send weights by NCCL, got OutOfMemoryError: no room to pack"):
        ask(generator, 1).result(SECONDS)
    assert generator.restarts == 0


def test_in_flight_weights_are_sent_in_the_order_of_their_versions(start, tmp_path):
    generator = start(FakeInFlight(tmp_path), in_flight=True)
    load(generator, 0)
    running, waiting = ask(generator, 0, "until 2"), ask(generator, 0, "until 3")
    wait_for(tmp_path / "begun")
    load(generator, 1)
    load(generator, 2)
    versions = running.result(SECONDS).token_versions
    assert torch.equal(versions, running.result().response_ids) and {0, 2} <= set(versions.unique().tolist())
    load(generator, 3)
    assert waiting.result(SECONDS).versions() <= {2, 3}
    assert generator.store.sent == [0, 1, 2, 3] and list(generator.store.snapshots) == [3]


def test_weights_that_a_running_request_does_not_take_are_sent_after_the_request(start, tmp_path):
    generator = start(FakeInFlight(tmp_path), in_flight=True)
    load(generator, 0)
    running = ask(generator, 0, "deaf")
    wait_for(tmp_path / "begun")
    load(generator, 1)
    time.sleep(0.2)  # the process has the manifest, but the running request does not receive
    assert generator.store.sent == [0]
    (tmp_path / "go").touch()
    assert running.result(SECONDS).versions() == {0}
    assert generator.store.sent == [0, 1] and generator.confirmed.version == 1


def test_close_aborts_a_running_transfer(start, tmp_path):
    generator = start(Fake("hangs while it receives", at=1))
    load(generator, 0)
    ask(generator, 0).result(SECONDS)
    load(generator, 1)
    time.sleep(0.2)  # the fixture `start` checks that close returns in time
    assert generator.store.sent == [0] and generator.store.sender.is_alive()
