"""Tests of the pool of servers with fake servers: every call, and every fault of a call."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.generators import most_versions
from rlhf.core.batch import Begun, Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.core.launched import derive
from rlhf.generators.servers import server as servers
from rlhf.generators.servers.pool import ServerPool
from rlhf.generators.servers.process import ABORT, GENERATE, LOAD, STATUS
from rlhf.generators.servers.server import Server
from rlhf.generators.vllm.sampler import VLLMFactory
from rlhf.generators.weights import SharedWeights, checksum
from tests.generators import fake_server
from tests.generators.fake_server import STOP, VOCABULARY, FakeChild, FakeServer, changes, says, token

LIMIT_S = 0.4  # of a call to a server that hangs
PATIENT_S = 10.0  # of all other calls
LENGTH, SAMPLES, PROMPTS = 6, 2, 3
KEY = "the key of the run"
SumOf = Callable[[torch.Tensor], int]  # checksum of a tensor


@pytest.fixture(scope="module")
def loop():
    with fake_server.loop_in_a_thread() as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Look at servers often."""
    monkeypatch.setattr(servers, "_WATCH_S", 0.02)
    monkeypatch.setattr(servers, "_PING_S", 0.1)
    monkeypatch.setattr(servers, "_POLL_S", 0.02)


def settings(**given: Any) -> VLLMFactory:
    """Return the settings of the servers that the pool needs."""
    return VLLMFactory(
        **{f.name: None for f in fields(VLLMFactory)} | {"stop_ids": (STOP,), "pad_id": 0, "seed": 7} | given
    )


@dataclass
class Started:
    """A pool with its fake servers, which the run started (`children`) or which run anywhere."""

    loop: Any
    folder: Path
    count: int = 1
    children: bool = True
    restarts: int = 3
    in_flight: bool = False
    key: str | None = KEY
    limit_s: float = PATIENT_S
    store: Any = None
    fake: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.fakes = [FakeServer(self.loop, KEY, **self.fake) for _ in range(self.count)]
        self.store = self.store or SharedWeights(folder=self.folder / "weights")

    def __enter__(self):
        made, limits = [], (max(1.0, self.limit_s), self.limit_s, self.limit_s)
        for i, fake in enumerate(self.fakes):
            child = FakeChild(fake) if self.children else None
            fake.comes_back = not self.children
            url = None if self.children else fake.start()
            made.append(Server(f"server {i}", url, self.key, *limits, child))
        own = {"vocabulary": VOCABULARY, "restarts": self.restarts, "in_flight": self.in_flight}
        self.pool = ServerPool(made, self.store, settings(), **own)
        return self

    def __exit__(self, *_):
        self.pool.close()
        for fake in self.fakes:
            if not self.children:
                assert fake.runner is not None, "the run does not end a server that it did not start"
                fake.kill()
            assert fake.runner is None
            fake.place.close()

    def figures(self) -> tuple[float, float]:
        found = self.pool.figures()
        return tuple(found[f"generator/{name}"].total for name in ("restarts", "requeued"))


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a version."""
    return [("a", torch.full((3, 2), float(version))), ("b", torch.arange(4.0) + version)]


def prompts(lengths=(4, 2, 3)) -> Prompts:
    size, draw = max(lengths), torch.Generator().manual_seed(1)
    mask = torch.arange(size) >= size - torch.tensor(lengths)[:, None]
    return Prompts(
        index=torch.arange(len(lengths)) + 40,
        texts=[""] * len(lengths),
        references=[""] * len(lengths),
        prompt_ids=torch.randint(2, VOCABULARY, mask.shape, generator=draw) * mask,
        prompt_mask=mask,
    )


def sampling(request: int = 0, samples: int = SAMPLES, length: int = LENGTH) -> Sampling:
    return Sampling(
        samples=samples, temperature=0.7, response_length=length, purpose="train", request=request
    )


def error_of(pool: ServerPool) -> BaseException | None:
    """Return the error of a request, which is raised at once if the servers have failed already."""
    try:
        return pool.submit(prompts(), sampling()).exception(10)
    except RunError as error:
        return error


def expected(
    given: Prompts, asked: Sampling, versions: torch.Tensor, sum_of: SumOf = checksum
) -> torch.Tensor:
    """Return response ids, [N, K, T], whose tokens were sampled by `versions` ([N, K, T]) of the weights."""
    found = torch.zeros(versions.shape, dtype=torch.int64)
    sums = {v: {name: sum_of(each) for name, each in weights(v)} for v in versions.unique().tolist()}
    for i, example in enumerate(given.index.tolist()):
        seed = derive(7, "sample", asked.purpose, asked.request, example)
        ids = given.prompt_ids[i][given.prompt_mask[i]].tolist()
        for k in range(asked.samples):
            for t in range(asked.response_length):
                found[i, k, t] = token(sums[int(versions[i, k, t])], ids, seed + k, t)
                if found[i, k, t] == STOP:
                    break
    return found


def check(
    rollouts: Rollouts, given: Prompts, asked: Sampling, version: int, sum_of: SumOf = checksum
) -> None:
    """Check that rollouts are those of a version of the weights."""
    shape = len(given), asked.samples, asked.response_length
    ids = expected(given, asked, torch.full(shape, version), sum_of)
    assert torch.equal(rollouts.response_ids, ids)
    assert torch.equal(rollouts.response_mask, ids > 0) and rollouts.version == version
    assert torch.equal(rollouts.ended, (ids == STOP).any(-1))
    torch.testing.assert_close(rollouts.behaviour_logprobs, -ids / 100)
    assert rollouts.token_versions is None and rollouts.generate_s > 0


def limit(fault: fake_server.Fault) -> float:
    """Return the limit of the calls in a test of a fault."""
    return LIMIT_S if fault in HANGS.values() else PATIENT_S


def play(pool: ServerPool, seconds: float = 10.0, sum_of: SumOf = checksum) -> None:
    """Sample with three versions of the weights, of which two wait, and check all rollouts."""
    asked, given = [], prompts()
    for number in range(3):
        pool.load(weights(number), number)
        asked += [
            (number, each, pool.submit(given, each)) for each in (sampling(number), sampling(number + 10))
        ]
    for version, each, future in asked:
        check(future.result(seconds), given, each, version, sum_of)


def choice(**changed: Any) -> fake_server.Fault:
    """Return a fault of a request for tokens: some entries of the answer are others."""
    return changes(lambda answer: answer["choices"][0].update(changed))


def tokens(count: int, logprob: Any = -1.0, **spans: Any) -> fake_server.Fault:
    """Return a fault of a request for tokens: the answer has other tokens."""
    return choice(
        token_ids=[5] * count,
        logprobs={"content": [{"token_id": 5, "logprob": logprob}] * count},
        weight_versions=[{"version": "0", "start": 0, "end": count} | spans],
    )


def version(i: int, found: str) -> fake_server.Fault:
    """Return a fault of a request for tokens: token `i` has another version."""
    return changes(lambda answer: answer["choices"][0]["weight_versions"][i].update(version=found))


def spoilt(answer: dict[str, Any]) -> None:
    answer["checksums"] = {**answer["checksums"], "a": 5}


HANGS = {"hangs": fake_server.hangs, "drips": fake_server.drips}
RESETS = {"resets": fake_server.resets, "answers too late": fake_server.answers_too_late}
WRONG = {
    "truncates": fake_server.truncates,
    "redirects": fake_server.redirects,
    "answers 500": says(500, '{"error": "engine is dead"}'),
    "answers 503 with HTML": says(503, "<html>busy</html>"),
    "answers 404": says(404),
    "answers 200 with HTML": says(200, "<html>welcome</html>"),
    "answers a list": says(200, "[1, 2]"),
    "answers an empty object": says(200, "{}"),
    "answers half a JSON": says(200, '{"start": "3", "choices": [{"tok'),
}
NO_ANSWER = HANGS | RESETS | WRONG
LOST = {"dies": fake_server.dies, "is started again": fake_server.is_started_again}
SLOW = {"is slow": fake_server.is_slow}
REPLIES = {
    "is aborted": choice(finish_reason="abort"),
    "has no ids": choice(token_ids=None),
    "has no token": tokens(0),
    "has other ids": choice(token_ids=[5] * LENGTH),
    "is too long": tokens(LENGTH + 1),
    "has a NaN": tokens(LENGTH, float("nan")),
    "has text as a log-prob": tokens(LENGTH, "high"),
    "has no versions": choice(weight_versions=None),
    "has versions of some tokens": tokens(LENGTH, start=3),
    "has the version of random weights": tokens(LENGTH, version="default"),
    "has no choice": changes(lambda answer: answer.update(choices=[])),
    "has two choices": changes(lambda answer: answer.update(choices=answer["choices"] * 2)),
}
OTHER_VERSIONS = {"has a later version": version(-1, "1"), "has an unknown version": version(0, "-3")}
LOADS = {
    "confirms another version": changes(lambda answer: answer.update(version=7)),
    "confirms no version": changes(lambda answer: answer.update(version=None)),
    "confirms a wrong checksum": changes(spoilt),
    "confirms too few tensors": changes(lambda answer: answer["checksums"].pop("b")),
    "confirms no checksums": changes(lambda answer: answer.update(checksums=None)),
    "confirms a list of checksums": changes(lambda answer: answer.update(checksums=[1, 2])),
}
STATES = {
    "has no start": changes(lambda answer: answer.pop("start")),
    "has another start": changes(lambda answer: answer.update(start="another")),
    "has no slots": changes(lambda answer: answer.pop("max_num_seqs")),
}


def table(*groups: tuple[dict[str, fake_server.Fault], int, int]) -> list[Any]:
    """Return a parameter for each fault: the fault, and the expected restarts and requests sent again."""
    return [
        pytest.param(fault, restarts, again, id=name)
        for faults, restarts, again in groups
        for name, fault in faults.items()
    ]


anywhere = pytest.mark.parametrize("children", [True, False], ids=["started", "anywhere"])
later_anywhere = pytest.mark.parametrize(
    "children", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["started", "anywhere"]
)


@later_anywhere
@pytest.mark.parametrize(
    ("fault", "restarts", "again"),
    table((NO_ANSWER | REPLIES, 0, 1), (LOST | OTHER_VERSIONS, 1, 1), (SLOW, 0, 0)),
)
def test_a_request_whose_answer_is_lost_is_sent_again_with_the_same_result(
    fault, restarts, again, children, loop, tmp_path
):
    with Started(loop, tmp_path, children=children, limit_s=limit(fault)) as one:
        one.fakes[0].faults[GENERATE] = [None, None, fault]
        play(one.pool)
        found = one.figures()
        assert found[0] == restarts
        assert (found[1] == again) if not restarts else (found[1] >= again)


@pytest.mark.parametrize(
    ("children", "before"), [(True, 0), (False, 1)], ids=["started, first load", "anywhere, second load"]
)
@pytest.mark.parametrize(
    ("fault", "restarts", "again"), table((NO_ANSWER | LOADS, 1, 0), (LOST, 1, 0), (SLOW, 0, 0))
)
def test_a_load_that_is_not_confirmed_is_a_restart(fault, restarts, again, before, children, loop, tmp_path):
    with Started(loop, tmp_path, children=children, limit_s=limit(fault)) as one:
        one.fakes[0].faults[LOAD] = [None] * before + [fault]
        play(one.pool)
        assert one.figures() == (restarts, again)


@anywhere
@pytest.mark.parametrize(
    ("fault", "restarts", "again"), table((HANGS | WRONG | STATES | LOST, 1, 1), (RESETS | SLOW, 0, 1))
)
def test_a_server_that_does_not_state_that_it_is_well_is_lost(
    fault, restarts, again, children, loop, tmp_path
):
    """A request has no answer, so the pool asks for the state; after a reset it asks twice."""
    with Started(loop, tmp_path, children=children, limit_s=limit(fault)) as one:
        fake = one.fakes[0]

        async def unwell(*given):
            fake.faults[STATUS] = [fault]
            return await says(500)(*given)

        fake.faults[GENERATE] = [None, unwell]
        play(one.pool)
        found = one.figures()
        assert found[0] == restarts and found[1] >= again


@later_anywhere
@pytest.mark.parametrize(
    "fault",
    [*NO_ANSWER.values(), STATES["has no start"], STATES["has no slots"]],
    ids=[*NO_ANSWER, "has no start", "has no slots"],
)
def test_a_server_is_asked_until_it_is_ready(fault, children, loop, tmp_path):
    one = Started(loop, tmp_path, children=children, limit_s=limit(fault))
    one.fakes[0].faults[STATUS] = [fault, None]
    with one:
        play(one.pool)


FOR_EVER = {**HANGS, **RESETS, "dies": fake_server.dies, "answers 500": says(500, "broken")}


@anywhere
@pytest.mark.parametrize("route", [GENERATE, LOAD])
@pytest.mark.parametrize("fault", FOR_EVER.values(), ids=FOR_EVER)
def test_a_fault_without_end_is_an_error_of_all_requests(fault, route, children, loop, tmp_path):
    with Started(loop, tmp_path, children=children, restarts=1, limit_s=limit(fault)) as one:
        one.fakes[0].always[route] = fault
        started = time.monotonic()
        one.pool.load(weights(0), 0)
        asked, errors = [], []
        for number in range(3):
            try:
                asked.append(one.pool.submit(prompts(), sampling(number)))
            except RunError as error:  # the server has failed already
                errors.append(error)
        errors += [future.exception(10) for future in asked]
        took = time.monotonic() - started
        assert {*map(type, errors)} == {RunError}
        assert "generator.restarts" in str(errors[0]) and "server 0 at http://127.0.0.1:" in str(errors[0])
        assert took < 10  # each limit is below one second
        for call in (lambda: one.pool.load(weights(1), 1), lambda: one.pool.submit(prompts(), sampling(9))):
            with pytest.raises(RunError, match="generator.restarts"):
                call()


def test_a_server_that_is_never_ready_is_an_error(loop, tmp_path):
    one = Started(loop, tmp_path, children=False, limit_s=LIMIT_S)
    one.fakes[0].always[STATUS] = fake_server.hangs
    with one:
        one.pool.load(weights(0), 0)
        error = error_of(one.pool)
        assert isinstance(error, RunError) and "generator.urls" in str(error) and "limit, 1 s" in str(error)


@pytest.mark.parametrize("key", [None, "another key", KEY])
def test_a_server_that_refuses_the_key_is_an_error_of_all_requests(key, loop, tmp_path):
    with Started(loop, tmp_path, count=2, fake={"slots": 1}, children=False, key=key) as two:
        if key != KEY:
            with pytest.raises(RunError, match="generator.key_variable"):
                play(two.pool)
            assert all(fake.calls == {STATUS: 1} for fake in two.fakes), "no try with the same key"
            return
        for fake in two.fakes:  # one server refuses the key while another one samples
            fake.always[GENERATE] = fake_server.hangs
        two.pool.load(weights(0), 0)
        asked = [two.pool.submit(prompts((3,)), sampling(number, samples=1)) for number in range(2)]
        wait_until(lambda: all(fake.calls[GENERATE] for fake in two.fakes))
        two.fakes[0].key = "another key"
        for future in asked:
            assert "generator.key_variable" in str(future.exception(10))


def test_a_request_that_meets_an_error_does_not_wait(loop, tmp_path, monkeypatch):
    """The servers fail after `submit` has looked, and before it queues its responses."""
    with Started(loop, tmp_path) as one:
        one.pool.load(weights(0), 0)
        call = one.pool._call
        monkeypatch.setattr(one.pool, "_call", lambda *given: (one.pool.close(), call(*given)))
        with pytest.raises(RunError, match="closed"):
            one.pool.submit(prompts(), sampling())


def test_close_ends_open_requests(loop, tmp_path):
    with Started(loop, tmp_path) as one:
        one.fakes[0].always[GENERATE] = fake_server.hangs
        one.pool.load(weights(0), 0)
        asked = one.pool.submit(prompts(), sampling())
        wait_until(lambda: one.fakes[0].calls[GENERATE] == one.fakes[0].slots)
        one.pool.close()
        assert "closed" in str(asked.exception(1))
        assert not one.store.folder.exists()


def test_an_error_of_the_pool_itself_ends_all_requests(loop, tmp_path, monkeypatch):
    with Started(loop, tmp_path) as one:
        monkeypatch.setattr(Server, "generate", lambda *_: 1 / 0)
        one.pool.load(weights(0), 0)
        error = error_of(one.pool)
        assert isinstance(error, RunError) and isinstance(error.__cause__, ZeroDivisionError)


def test_an_id_beyond_the_vocabulary_reaches_no_server(loop, tmp_path):
    with Started(loop, tmp_path) as one:
        one.pool.load(weights(0), 0)
        given = prompts()
        given.prompt_ids[1, -1] = VOCABULARY
        with pytest.raises(RunError, match=f"must be < {VOCABULARY}.*got {VOCABULARY}"):
            one.pool.submit(given, sampling())
        assert not one.fakes[0].calls[GENERATE]
        play(one.pool)


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


@anywhere
@pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
def test_the_requests_of_a_lost_server_go_to_another(fault, children, loop, tmp_path):
    stays_away = not children and fault is fake_server.dies
    limit_s = LIMIT_S if stays_away else PATIENT_S
    own = {"children": children, "limit_s": limit_s, "fake": {"step_s": 0.005}}
    with Started(loop, tmp_path, count=2, **own) as two:
        two.fakes[1].comes_back &= not stays_away
        two.fakes[1].faults[GENERATE] = [None, fault]
        play(two.pool)
        restarts, again = two.figures()
        assert restarts >= 1 if stays_away else restarts == 1
        assert 1 <= again <= two.fakes[1].slots and two.fakes[0].calls[GENERATE] > 4
        if stays_away:
            assert two.fakes[1].runner is None
            two.fakes[1].start()  # for the end of the test


def test_the_server_with_the_fewest_outstanding_tokens_gets_a_response(loop, tmp_path):
    lengths = (40, 3, 9, 30, 5, 7, 2, 21)
    with Started(loop, tmp_path, count=2, fake={"slots": 8}, children=False) as two:
        for fake in two.fakes:
            fake.always[GENERATE] = holds
        two.pool.load(weights(0), 0)
        wait_until(
            lambda: all(fake.loads for fake in two.fakes) and all(s.version == 0 for s in two.pool.servers)
        )
        two.pool.submit(prompts(lengths), sampling(samples=1))
        wait_until(lambda: sum(len(fake.running) for fake in two.fakes) == len(lengths))
        sums = [0, 0]
        for length in lengths:
            sums[sums.index(min(sums))] += length + LENGTH
        assert sorted(sum(fake.running.values()) for fake in two.fakes) == sorted(sums)


async def holds(fake, request, body):
    """Keep a request for tokens open."""
    fake.running[fake.calls[GENERATE]] = len(body["token_ids"]) + body["sampling_params"]["max_tokens"]
    await fake_server.hangs(fake, request, body)


@pytest.mark.parametrize("count", [1, 2])
def test_each_request_has_the_weights_of_the_load_before_it_and_few_versions_are_kept(count, loop, tmp_path):
    """Loads and requests change in many orders; a server is lost in between."""
    with Started(loop, tmp_path, count=count, fake={"step_s": 0.002}) as started:
        most, asked, given = most_versions(count, in_flight=False), [], prompts()
        started.fakes[-1].faults[GENERATE] = [None] * 10 + [fake_server.dies]
        for number in range(8):
            started.pool.load(weights(number), number)
            files = list(started.store.folder.iterdir())
            assert started.store.kept <= most and len(files) <= most
            for each in range(number % 3):
                one = sampling(10 * number + each)
                asked.append((number, one, started.pool.submit(given, one)))
        for version, one, future in asked:
            check(future.result(10), given, one, version)
        assert started.figures()[0] == 1
        wait_until(lambda: started.store.kept == 1)
        assert [file.name for file in started.store.folder.iterdir()] == ["step-7"]
    assert not started.store.folder.exists()


def test_a_version_is_kept_while_a_server_loads_it(loop, tmp_path):
    with Started(loop, tmp_path) as one:
        fake, given = one.fakes[0], prompts()
        fake.faults[LOAD] = [None, fake_server.is_slow]
        for number in range(2):
            one.pool.load(weights(number), number)
            wait_until(lambda number=number: fake.calls[LOAD] > number)
        one.pool.load(weights(2), 2)
        check(one.pool.submit(given, sampling()).result(10), given, sampling(), 2)
        assert one.figures() == (0, 0) and fake.loads == [0, 1, 2]


def check_in_flight(rollouts: Rollouts, given: Prompts, asked: Sampling) -> set[int]:
    """Check that every token is one of the version that it names, and return the versions."""
    versions, mask = rollouts.token_versions, rollouts.response_mask
    assert versions is not None and torch.equal(
        rollouts.response_ids, expected(given, asked, versions) * mask
    )
    assert (versions[..., 1:] >= versions[..., :-1])[mask[..., 1:]].all()
    found = set(versions[mask].tolist())
    assert rollouts.version == min(found)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_in_flight_every_token_has_the_version_of_its_weights(count, loop, tmp_path):
    with Started(loop, tmp_path, count=count, in_flight=True, fake={"step_s": 0.02}) as started:
        given, asked = prompts(), sampling(length=20)
        started.pool.load(weights(0), 0)
        future = started.pool.submit(given, asked)
        wait_until(lambda: any(fake.running for fake in started.fakes))
        time.sleep(0.1)
        started.pool.load(weights(1), 1)
        assert check_in_flight(future.result(10), given, asked) == {0, 1}
        wait_until(lambda: started.store.kept == 1)
        again = started.pool.submit(given, sampling(1))
        assert check_in_flight(again.result(10), given, sampling(1)) == {1}


@anywhere
@pytest.mark.parametrize(
    ("fault", "restarts", "again"),
    table((RESETS | WRONG | LOADS | LOST, 1, 1), (HANGS, 1, 0), (SLOW, 0, 0)),
)
def test_in_flight_a_load_that_is_not_confirmed_is_a_restart(
    fault, restarts, again, children, loop, tmp_path
):
    with Started(
        loop, tmp_path, children=children, in_flight=True, fake={"step_s": 0.01}, limit_s=limit(fault)
    ) as one:
        one.fakes[0].faults[LOAD] = [None, fault]
        given, asked = prompts(), sampling(length=15)
        one.pool.load(weights(0), 0)
        future = one.pool.submit(given, asked)
        wait_until(lambda: len(one.fakes[0].running) == one.fakes[0].slots)
        one.pool.load(weights(1), 1)
        assert 1 in check_in_flight(future.result(10), given, asked)
        found = one.figures()
        assert found[0] == restarts and (found[1] > 0) == bool(again)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("fault", [None, fake_server.dies])
def test_in_flight_an_evaluation_is_sampled_by_the_weights_before_it(fault, count, loop, tmp_path):
    with Started(loop, tmp_path, count=count, in_flight=True, fake={"step_s": 0.01}) as one:
        given, asked = prompts(), replace(sampling(), purpose="eval")
        one.fakes[0].faults[GENERATE] = [None, None, fault]
        one.pool.load(weights(0), 0)
        future = one.pool.submit(given, asked)
        one.fakes[0].faults[LOAD] = [fake_server.is_slow]
        one.pool.load(weights(1), 1)
        later = one.pool.submit(given, sampling(1))
        assert check_in_flight(future.result(10), given, asked) == {0}
        assert max(check_in_flight(later.result(10), given, sampling(1))) <= 1
        asked = replace(sampling(2), purpose="eval")
        assert check_in_flight(one.pool.submit(given, asked).result(10), given, asked) == {1}
        wait_until(lambda: one.store.kept == 1)
        assert one.figures()[0] == bool(fault)


def test_in_flight_a_server_that_names_an_older_version_than_it_confirmed_is_lost(loop, tmp_path):
    with Started(loop, tmp_path, in_flight=True) as one:
        for number in (0, 1):
            one.pool.load(weights(number), number)
            wait_until(lambda number=number: one.pool.servers[0].version == number)
        one.fakes[0].faults[GENERATE] = [version(0, "0")]
        assert check_in_flight(one.pool.submit(prompts(), sampling()).result(10), prompts(), sampling()) == {
            1
        }
        assert one.figures()[0] == 1


CUT = 40  # tokens of a response that is cut; without a cut, it has all of them


ENDLESS = 2  # of a request whose response has no stop token


def single() -> Sampling:
    """Return the settings of a single response."""
    return replace(sampling(ENDLESS, samples=1, length=CUT), begun=[Begun(ENDLESS, 0, [], [])])


def check_cut(rollouts: Rollouts, given: Prompts, least: int, most: int) -> None:
    """Check that a response is the begin of the response that would not be cut."""
    count = int(rollouts.response_mask.sum())
    whole = expected(given, single(), torch.zeros(1, 1, CUT, dtype=torch.int64))
    assert torch.equal(rollouts.response_ids[0, 0, :count], whole[0, 0, :count])
    assert least <= count <= most


# A response of 40 tokens of 25 ms is cut after 0.2 s
@pytest.mark.parametrize(
    ("route", "fault", "least", "most"),
    [
        pytest.param(GENERATE, None, 2, 30, id="is well"),
        pytest.param(ABORT, says(500), 2, CUT - 1, id="does not abort"),  # it is asked again
        pytest.param(ABORT, fake_server.resets, 2, CUT - 1, id="resets"),
        pytest.param(ABORT, fake_server.hangs, CUT, CUT, id="hangs"),
        pytest.param(ABORT, fake_server.dies, 1, 1, id="dies"),
    ],
)
def test_a_response_that_is_cut_has_the_tokens_of_that_time(route, fault, least, most, loop, tmp_path):
    """If the server is lost, the response has one token."""
    with Started(loop, tmp_path, fake={"step_s": 0.025}) as one:
        one.fakes[0].faults[route] = [fault]
        given = prompts((3,))
        one.pool.load(weights(0), 0)
        asked = one.pool.submit(given, single())
        wait_until(lambda: one.fakes[0].running)
        time.sleep(0.2)
        one.pool.cut(asked)
        check_cut(asked.result(10), given, least, most)
        wait_until(lambda: not one.pool.servers[0].running)
        assert one.pool.servers[0].tokens == 0 and not one.pool.requests
        one.pool.cut(asked)  # which has ended


def test_a_response_that_waits_or_has_no_token_is_cut_to_one_token(loop, tmp_path):
    with Started(loop, tmp_path, fake={"slots": 1, "step_s": 0.02}) as one:
        given = prompts((3,))
        one.pool.load(weights(0), 0)
        asked = [one.pool.submit(given, single()) for _ in range(2)]
        one.fakes[0].aborted.add("generate-tokens-0")  # before its first token
        for each in asked:
            one.pool.cut(each)
        for each in asked:
            check_cut(each.result(10), given, 1, 1)
        wait_until(lambda: not one.pool.servers[0].running)
        assert one.pool.servers[0].tokens == 0


@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_a_damaged_file_is_an_error_that_names_it(damage, loop, tmp_path):
    with Started(loop, tmp_path, restarts=1) as one:
        write = one.store.write

        def spoil(given, version):
            manifest = write(given, version)
            path = one.store.folder / f"step-{version}"
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content if damage == "changed" else content[:-3])
            if damage == "removed":
                path.unlink()
            return manifest

        one.store.write = spoil
        one.pool.load(weights(0), 0)
        error = error_of(one.pool)
        assert isinstance(error, RunError) and "step-0" in str(error) and one.fakes[0].loads == [0, 0]


def test_a_full_disk_is_an_error_of_the_load_and_requests_go_on(loop, tmp_path):
    with Started(loop, tmp_path) as one:
        one.pool.load(weights(0), 0)
        given, asked = prompts(), sampling()
        future = one.pool.submit(given, asked)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))  # no file may be larger
        try:
            with pytest.raises(RunError, match="generator.folder"):
                one.pool.load([("a", torch.zeros(2**19))], 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [file.name for file in one.store.folder.iterdir()] == ["step-0"]
        check(future.result(10), given, asked, 0)
        play(one.pool)


def test_a_store_removes_the_versions_of_a_killed_run_and_no_other_file(tmp_path):
    other = tmp_path / "of the user"
    for name in (other.name, "step-3"):
        (tmp_path / name).write_text("")
    store = SharedWeights(folder=tmp_path)
    assert [*tmp_path.iterdir()] == [other] and store.kept == 0
    store.write(weights(5), 5)
    assert {*tmp_path.iterdir()} == {other, tmp_path / "step-5"}
    store.close()
    assert [*tmp_path.iterdir()] == [other]
