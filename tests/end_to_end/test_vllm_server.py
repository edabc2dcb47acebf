"""Tests of a real server of vLLM: its tokens are those of vLLM in a process, also after losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from torch import Tensor

from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.generators.servers.pool import ServerPool
from rlhf.generators.servers.process import GENERATE, LOAD, STATUS
from rlhf.generators.servers.server import Server, command, variables
from rlhf.generators.vllm.generator import visible
from rlhf.generators.weights import Nccl, SharedWeights
from rlhf.models.modules import Policy, set_head
from rlhf.processes.servers import Child
from rlhf.processes.signals import members
from tests import needs
from tests.end_to_end.conftest import wait_for
from tests.tiny_models import tiny_lm

pytest.importorskip("vllm", reason=needs.VLLM)

pytestmark = pytest.mark.forks(False)

from tests.end_to_end.test_vllm import (  # noqa: E402
    HEADS,
    LENGTH,
    OTHER_END,
    TOKENS,
    VOCABULARY,
    Process,
    difference,
    greedy,
    prompts,
)

KEY = "the key of the server"
LONG = 500  # tokens of a response that takes seconds
ROLES = ("servers.process", "VLLM::EngineCore", "VLLM::Worker")  # in the commands of its processes
VERSIONS = count(1)  # of the weights of the pool that owns the server; they rise in a run
ENDLESS = (VOCABULARY - 1,)  # no token: responses have the full length


def model_of(version: int) -> torch.nn.Module:
    """Return the model with the weights of a version."""
    model = tiny_lm("llama", **HEADS, eos_token_id=OTHER_END, max_position_embeddings=1024)
    set_head(model, float32=False, tokens=TOKENS)
    draw = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * min(version, 1) * torch.randn(parameter.shape, generator=draw)
    return model


def weights(version: int) -> Iterator[tuple[str, Tensor]]:
    yield from model_of(version).state_dict().items()


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Return the settings of the server."""
    factory = Process.factory(model_of(0), tmp_path_factory.mktemp("model"), "files")
    return replace(factory, in_flight=False, max_model_len=128 + LONG)


@contextmanager
def pool(settings, folder: Path, server: Server, in_flight=False, restarts=3, store=None):
    """Yield a pool with one server."""
    made = ServerPool(
        [server],
        store or SharedWeights(folder=folder / "weights"),
        settings,
        vocabulary=VOCABULARY,
        restarts=restarts,
        in_flight=in_flight,
    )
    try:
        yield made
    finally:
        made.close()
    assert not (folder / "weights").exists()


# The program of a server that kills one of its processes after a step of a load, if a file says so.
PROGRAM = """
import os, runpy, signal, sys
from pathlib import Path
import psutil
from rlhf.processes.signals import members
from vllm.v1.engine.async_llm import AsyncLLM

def struck(name):
    function = getattr(AsyncLLM, name)
    async def method(self, *words, **more):
        found = await function(self, *words, **more)
        order = Path(os.environ["ORDER"])
        if order.exists() and order.read_text().startswith(name):
            role = order.read_text().split()[1]
            order.unlink()
            for pid in members(os.getpgrp()):
                if role in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
        return found
    setattr(AsyncLLM, name, method)

for name in "pause_generation", "start_weight_update", "update_weights", "finish_weight_update":
    struck(name)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def order(tmp_path_factory) -> Path:
    """Return the file that tells the server which of its processes it kills, and when."""
    return tmp_path_factory.mktemp("order") / "order"


@pytest.fixture(scope="module")
def child(settings, order, tmp_path_factory):
    """Return the processes of the server of all tests; after its end the pool starts it again."""
    python, safe, _, *words = command(settings, "127.0.0.1")
    own = variables(settings, KEY) | {"OMP_NUM_THREADS": "1", "ORDER": str(order)}
    log = tmp_path_factory.mktemp("server") / "server.log"
    child = Child([python, safe, "-c", PROGRAM, *words], own, log)
    yield child
    child.stop()


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files in /dev/shm that processes have mapped."""
    found = {Path(each.path) for process in processes for each in process.memory_maps()}
    return {path for path in found if path.is_relative_to("/dev/shm")}


@pytest.fixture(scope="module")
def owner(settings, child, tmp_path_factory):
    """Return a pool that owns the server, and whose responses all have the full length."""
    server, endless = Server("server 0", None, KEY, 500.0, 60.0, 60.0, child), (VOCABULARY - 1,)
    with pool(
        replace(settings, stop_ids=endless), tmp_path_factory.mktemp("owner"), server, restarts=100
    ) as made:
        made.load(weights(0), 0)
        sample(made, prompts(1))
        yield made


@pytest.fixture
def attached(settings, owner, tmp_path):
    """`attached(**settings)` returns a pool that uses the server, but does not own it."""

    def get(stop_ids=settings.stop_ids, **given):
        server = Server("it", owner.servers[0].url, KEY, 60.0, 60.0, 60.0)
        return pool(replace(settings, stop_ids=stop_ids), tmp_path, server, **given)

    return get


def sampling(request=0, **given) -> Sampling:
    default = {"samples": 3, "temperature": 0.7, "response_length": LENGTH, "purpose": "train"}
    return Sampling(**default | given, request=request)


def sample(pool: ServerPool, given: Prompts, **settings: Any) -> Rollouts:
    return pool.submit(given, sampling(**settings)).result(300)


def state(owner: ServerPool) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    return requests.get(f"{owner.servers[0].url}{STATUS}", headers=headers, timeout=60).json()


# -- tokens ----------------------------------------------------------------------------------------


def test_tokens_are_those_of_vllm_in_a_process_and_logprobs_those_of_the_trainer(
    attached, settings, tmp_path
):
    given, found = prompts(), {}
    with attached() as generator:
        for version in (1, 2):  # the prompts repeat, so the prefix cache has entries of the previous weights
            generator.load(weights(version), version)
            found[version] = sample(generator, given), sample(generator, given, request=3, purpose="eval")
            likely = sample(generator, given, samples=1, temperature=0.0)
            for rollouts, temperature in ((found[version][0], 0.7), (found[version][1], 0.7), (likely, 1.0)):
                assert rollouts.version == version and rollouts.token_versions is None
                assert difference(model_of(version), rollouts, temperature) < 1e-4
    process = Process(model_of(0), tmp_path, in_flight=False, max_model_len=settings.max_model_len)
    try:
        for version, asked in found.items():
            manifest = process.shared.write(weights(version), version)
            process.ask("load", manifest)
            process.shared.release(manifest)
            for rollouts, more in zip(asked, ({}, {"request": 3, "purpose": "eval"}), strict=True):
                expected = process.sample(given, **more)
                assert torch.equal(rollouts.response_ids, expected.response_ids)
                assert torch.equal(rollouts.response_mask, expected.response_mask)
                assert torch.equal(rollouts.ended, expected.ended)
                torch.testing.assert_close(rollouts.behaviour_logprobs, expected.behaviour_logprobs)
    finally:
        process.end()


def test_a_response_goes_on_with_weights_that_are_loaded_meanwhile(attached):
    """After the load, each token has the log-prob of the new weights, given all tokens before it."""
    given = prompts(2)
    with attached(stop_ids=ENDLESS, in_flight=True) as generator:
        generator.load(weights(1), 1)
        asked = generator.submit(given, sampling(samples=2, response_length=LONG))
        wait_for(lambda: generator.servers[0].running)
        time.sleep(0.3)
        generator.load(weights(2), 2)
        rollouts = asked.result(120)
        later = sample(generator, given)
    versions, mask = rollouts.token_versions, rollouts.response_mask
    assert versions is not None and set(versions[mask].tolist()) == {1, 2} and rollouts.version == 1
    assert (versions[..., 1:] >= versions[..., :-1])[mask[..., 1:]].all()
    for version in (1, 2):
        with torch.no_grad():
            logprobs = Policy(model_of(version), 0.7, shared_prefix=False)(rollouts).logprobs
        differences = (logprobs - rollouts.behaviour_logprobs).abs()[mask & (versions == version)]
        assert differences.numel() and differences.max() < 1e-4
        others = (logprobs - rollouts.behaviour_logprobs).abs()[mask & (versions != version)]
        assert others.max() > 1e-2
    assert later.version == 2 and difference(model_of(2), later, 0.7) < 1e-4, "the prefix cache is new"


@pytest.mark.nightly
def test_weights_come_by_nccl_with_a_socket_in_its_place(settings, tmp_path):
    """The server is lost between two versions, so its next start joins another group."""
    from tests.generators import nccl_over_socket

    settings = replace(settings, transfer="nccl")
    words = command(settings, "127.0.0.1")
    words[words.index("--worker-extension-cls") + 1] = f"{nccl_over_socket.__name__}.Extension"
    own = variables(settings, KEY) | {"OMP_NUM_THREADS": "1"}
    child = Child(words, own, tmp_path / "server.log")
    server = Server("server 0", None, KEY, 500.0, 60.0, 60.0, child)
    store = nccl_over_socket.Nccl(torch.device("cpu"), torch.float32, 1)
    with nccl_over_socket.in_place(), pool(settings, tmp_path, server, store=store) as generator:
        for version in (1, 2, 3):
            generator.load(weights(version), version)
            rollouts = sample(generator, prompts())
            assert rollouts.version == version and difference(model_of(version), rollouts, 0.7) < 1e-4
            if version == 2:
                processes(child)["VLLM::Worker"].kill()
        assert generator.figures()["generator/restarts"].total == 1


@pytest.mark.gpu
def test_on_gpus_weights_come_by_nccl(settings, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(needs.GPU)
    gpu = torch.device("cuda", 0)
    settings = replace(settings, transfer="nccl", gpu=True, memory=0.2)
    visible_gpu = {"CUDA_VISIBLE_DEVICES": visible((1,), os.environ.get("CUDA_VISIBLE_DEVICES"))}
    child = Child(command(settings, "127.0.0.1"), variables(settings, KEY) | visible_gpu, None)
    server = Server("server 0", None, KEY, 900.0, 120.0, 120.0, child)
    with pool(settings, tmp_path, server, store=Nccl(gpu, torch.float32, 1)) as generator:
        for version in (1, 2):
            generator.load(((name, tensor.to(gpu)) for name, tensor in weights(version)), version)
            rollouts = sample(generator, prompts(), samples=1, temperature=0.0)
            assert rollouts.version == version
            same = rollouts.response_ids == greedy(model_of(version), prompts())
            assert same.float().mean() > 0.85, "more than rounding differences"


# -- losses ----------------------------------------------------------------------------------------


def processes(child: Child) -> dict[str, psutil.Process]:
    """Return the processes of a server by role."""
    assert child.process is not None
    every = [psutil.Process(pid) for pid in members(child.process.pid)]
    return {role: each for role in ROLES for each in every if role in " ".join(each.cmdline())}


def strike(owner: ServerPool, child: Child, number: int, role: str) -> None:
    """Send a signal to a process of a server that samples, and check that the responses are the same.

    The trainer has sent other weights meanwhile, but the new server samples with those of the request.
    """
    given, more = prompts(4), {"request": 8, "response_length": LONG}
    old, new = next(VERSIONS), next(VERSIONS)
    owner.load(weights(old), old)
    expected = sample(owner, given, **more)
    owner.figures()
    struck, scratch = processes(child), child.process.scratch
    files = shared_memory(struck.values())
    assert set(struck) == {*ROLES} and files
    asked = owner.submit(given, sampling(samples=3, **more))
    owner.load(weights(new), new)
    later = owner.submit(given, sampling())
    wait_for(lambda: owner.servers[0].running)
    time.sleep(0.1)
    struck[role].send_signal(number)
    found = asked.result(300)
    assert torch.equal(found.response_ids, expected.response_ids) and found.version == old
    torch.testing.assert_close(found.behaviour_logprobs, expected.behaviour_logprobs)
    assert later.result(60).version == new and difference(model_of(new), later.result(), 0.7) < 1e-4
    figures = {name: stat.total for name, stat in owner.figures().items()}
    assert figures["generator/restarts"] == 1 and 1 <= figures["generator/requeued"] <= 12
    assert not [each for each in struck.values() if each.is_running()], "nothing of the lost server runs"
    assert scratch is not None and not Path(scratch).exists()
    assert not [path for path in files if path.exists()]


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("number", "role"),
    [
        (signal.SIGKILL, "VLLM::EngineCore"),
        *(nightly(signal.SIGKILL, role) for role in ("servers.process", "VLLM::Worker")),
        *(nightly(signal.SIGSTOP, role) for role in ROLES),
    ],
)
def test_the_responses_of_a_lost_server_are_sampled_again_with_the_same_tokens(number, role, owner, child):
    strike(owner, child, number, role)


MOMENTS = ("pause_generation", "start_weight_update", "update_weights", "finish_weight_update")


@pytest.mark.nightly
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_is_killed_in_a_load_is_started_again_and_loads(moment, role, owner, child, order):
    """The process is killed after a step of the load, between pause and resume."""
    sample(owner, prompts(1))
    owner.figures()
    before, new = processes(child), next(VERSIONS)
    order.write_text(f"{moment} {role}")
    owner.load(weights(new), new)
    rollouts = sample(owner, prompts())
    assert rollouts.version == new and difference(model_of(new), rollouts, 0.7) < 1e-4
    assert owner.figures()["generator/restarts"].total == 1 and not order.exists()
    assert not [each for each in before.values() if each.is_running()]


def test_a_server_that_finds_a_wrong_checksum_ends_and_is_started_again(owner, child, monkeypatch):
    write, (lost, *_) = owner.store.write, processes(child).values()
    owner.figures()

    def spoil(given, version):
        monkeypatch.undo()
        manifest = write(given, version)
        path, right = Path(manifest.path), Path(manifest.path).read_bytes()
        path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        repaired.append(lambda: path.write_bytes(right))
        return manifest

    repaired: list[Callable[[], int]] = []
    new = next(VERSIONS)
    monkeypatch.setattr(owner.store, "write", spoil)
    owner.load(weights(new), new)
    wait_for(lambda: not lost.is_running())
    repaired[0]()
    assert difference(model_of(new), sample(owner, prompts()), 0.7) < 1e-4
    assert owner.figures()["generator/restarts"].total == 1


# -- routes ----------------------------------------------------------------------------------------

ROUTES = """
import json, os, sys
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser, statuses, errors = make_arg_parser(FlexibleArgumentParser()), {}, {}
def app(*words):
    return build_app(parser.parse_args([*sys.argv[1:], *words]), ("generate",))
client = TestClient(app(), raise_server_exceptions=False)
for route in client.app.router.routes:
    for method in getattr(route, "methods", None) or {"GET"}:
        for headers in {}, {"Authorization": "Bearer another"}:
            status = client.request(method, route.path, headers=headers, json={}).status_code
            statuses.setdefault(f"{method} {route.path}", []).append(status)
del os.environ["VLLM_API_KEY"]
for host in "0.0.0.0", "::", "10.0.0.7", "127.0.0.1", "localhost":
    try:
        app("--host", host)
    except ValueError as error:
        errors[host] = str(error)
print(json.dumps([statuses, errors]))
"""


def test_every_route_that_does_more_than_report_asks_for_the_key(settings):
    """A server without a key is refused, unless it listens on this machine only."""
    _, _, _, _, *flags = command(settings, "127.0.0.1")
    done = subprocess.run(
        [sys.executable, "-c", ROUTES, *flags],
        env={**os.environ, **variables(settings, KEY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    statuses, errors = json.loads(done.stdout.splitlines()[-1])
    guarded = {route for route, found in statuses.items() if {*found} == {401}}
    assert guarded == {
        *("GET /v1/rlhf/status", "POST /v1/rlhf/load", "POST /inference/v1/generate"),
        "POST /inference/v1/abort_requests",
    }
    reports = {"GET /health", "GET /metrics", "GET /version", "GET /ping", "POST /ping"}
    assert statuses.keys() - guarded == reports
    assert errors.keys() == {"0.0.0.0", "::", "10.0.0.7"}
    assert all("VLLM_API_KEY must be set" in error for error in errors.values())


def test_a_running_server_answers_401_without_the_key(owner):
    url = owner.servers[0].url
    for method, path in (("GET", STATUS), ("POST", LOAD), ("POST", GENERATE)):
        for headers in {}, {"Authorization": "Bearer another"}:
            assert (
                requests.request(method, f"{url}{path}", headers=headers, json={}, timeout=20).status_code
                == 401
            )
    assert requests.get(f"{url}/health", timeout=20).ok
    for path in "/pause", "/update_weights", "/collective_rpc", "/docs", "/openapi.json", "/v1/completions":
        headers = {"Authorization": f"Bearer {KEY}"}
        assert requests.post(f"{url}{path}", headers=headers, json={}, timeout=20).status_code == 404
