"""Tests of in-flight weight updates: token versions, the kept cache, corrections, and the worker process."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from rlhf.config.algorithms import CorrectionConfig, CorrectionKind
from rlhf.config.models import Dtype
from rlhf.core.batch import Batch, Prompts, Rollouts, Sampling, trim
from rlhf.core.errors import RunError
from rlhf.generators.hf.generator import HFSamplerFactory, HFSettings, sample, uniforms
from rlhf.generators.process import WorkerGenerator
from rlhf.generators.weights import SharedWeights, TransferError, checksum, read
from rlhf.models.modules import Policy
from rlhf.objectives.correction import importance_weights
from rlhf.processes.worker import Limits
from tests.tiny_models import KINDS, logprobs_in_flight, tiny_lm, tiny_rollouts

pytestmark = [pytest.mark.process, pytest.mark.forks]

SWAP, LENGTH, TEMPERATURE = 4, 10, 0.7
STOPS, PAD = [3, 4, 5], 0
SECONDS = 120  # timeout of a wait, in seconds


def changed(kind="gpt_neox", seed=1, by=0.05):
    model = tiny_lm(kind)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=draw)
    return model


def prompts(count=6):
    batch = tiny_rollouts(prompts=count)
    names = ("index", "texts", "references", "prompt_ids", "prompt_mask")
    return Prompts(**{name: getattr(batch, name) for name in names})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # eager: one row per sample; sdpa: shared rows
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_before_a_swap_come_from_the_old_weights_and_later_tokens_from_the_new(kind, attention):
    """After the swap, decoding continues on the cache that the old weights computed."""
    old, new, model, given, steps = tiny_lm(kind), changed(kind), tiny_lm(kind), prompts(), []
    model.set_attn_implementation(attention)

    def swap():
        if len(steps) == SWAP:
            model.load_state_dict(new.state_dict())
        steps.append(1)

    def decode(model, before_forward=None):
        numbers = uniforms(1, 0, given.index, 3, LENGTH)
        ids, mask, logprobs, ended = sample(
            model,
            given.prompt_ids,
            given.prompt_mask,
            3,
            LENGTH,
            TEMPERATURE,
            numbers,
            STOPS,
            PAD,
            before_forward,
        )
        return given.extend(
            Rollouts, response_ids=ids, response_mask=mask, behaviour_logprobs=logprobs, ended=ended
        )

    mixed, plain, later = decode(model, swap), decode(old), decode(new)
    assert len(steps) == mixed.response_ids.shape[-1] == LENGTH
    assert torch.equal(mixed.response_ids[..., :SWAP], plain.response_ids[..., :SWAP])
    assert not torch.equal(mixed.response_ids[..., :SWAP], later.response_ids[..., :SWAP])
    assert not torch.equal(mixed.response_ids[..., SWAP:], plain.response_ids[..., SWAP:])
    expected = logprobs_in_flight(old, new, mixed, SWAP, TEMPERATURE)
    torch.testing.assert_close(mixed.behaviour_logprobs, expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        anew = Policy(new, TEMPERATURE, shared_prefix=False)(mixed).logprobs
    assert (anew - mixed.behaviour_logprobs)[..., SWAP:].abs().max() > 1e-3, (
        "the cache must not be recomputed"
    )


@pytest.mark.parametrize("dtype", Dtype)
def test_a_sampler_reports_the_version_that_sampled_each_token(dtype):
    old, new, given, shared = tiny_lm(), changed(by=0.2), prompts(), SharedWeights()
    sampler = HFSamplerFactory(
        config=old.config.to_json_string(use_diff=False),
        attention="sdpa",
        remote=None,
        device="cpu",
        dtype=dtype,
        settings=HFSettings(
            stop_ids=STOPS,
            pad_id=PAD,
            batch_size=9,  # two batches of three prompts
            seed=7,
        ),
    ).build()
    first, second = (shared.write(model.state_dict().items(), v) for v, model in ((3, old), (4, new)))
    sampling = Sampling(samples=3, temperature=TEMPERATURE, response_length=LENGTH, purpose="train")
    steps = []

    def update():
        if len(steps) == SWAP:
            assert sampler.load(second) == second.checksums()
        steps.append(1)
        return 3 if len(steps) <= SWAP else 4

    sampler.load(first)
    plain = sampler.sample(given, sampling)
    mixed = sampler.sample(given, sampling, update)
    later = sampler.sample(given, sampling)
    shared.close()
    mask, versions = mixed.response_mask, mixed.token_versions
    assert plain.token_versions is None and versions.shape == mask.shape and not versions[~mask].any()
    assert (
        versions[:3][mask[:3]] == torch.where(torch.arange(LENGTH) < SWAP, 3, 4).expand(3, 3, -1)[mask[:3]]
    ).all()
    assert (versions[3:][mask[3:]] == 4).all() and mixed.versions() == {3, 4}
    for field in ("response_ids", "behaviour_logprobs"):
        a, b, c = (getattr(rollouts, field) for rollouts in (mixed, plain, later))
        assert torch.equal(a[:3, :, :SWAP], b[:3, :, :SWAP]) and torch.equal(a[3:], c[3:])
        assert not torch.equal(a[:3, :, SWAP:], b[:3, :, SWAP:])


def mixed_batch(old, new):
    """Return rollouts whose tokens before `SWAP` were sampled by `old` and whose later tokens by `new`."""
    rollouts = tiny_rollouts(prompts=8, samples=2)
    logprobs = logprobs_in_flight(old, new, rollouts, SWAP, TEMPERATURE)
    versions = torch.where(torch.arange(rollouts.response_ids.shape[-1]) < SWAP, 3, 4)
    return replace(
        rollouts,
        behaviour_logprobs=logprobs,
        version=3,
        token_versions=versions * rollouts.response_mask,
    )


def test_corrections_use_the_weights_that_sampled_each_token():
    old, new = tiny_lm(), changed()
    rollouts = mixed_batch(old, new)
    mask, versions = rollouts.response_mask, rollouts.token_versions
    with torch.no_grad():
        before, trained = (Policy(m, TEMPERATURE, shared_prefix=True)(rollouts).logprobs for m in (old, new))
    weights, _ = importance_weights(
        trained, rollouts.behaviour_logprobs, mask, CorrectionConfig(kind=CorrectionKind.decoupled)
    )
    stale, fresh = mask & (versions == 3), mask & (versions == 4)
    ratio = (trained - before).exp()
    torch.testing.assert_close(weights[stale], ratio[stale], rtol=1e-4, atol=1e-5)
    assert (weights - ratio).abs()[fresh].max() > 0.1, "the old weights did not sample these tokens"
    off = [weights[tokens].log().abs().mean() for tokens in (stale, fresh)]
    assert off[0] > 1.5 * off[1] > 0, "the kept cache causes a smaller mismatch, which is also corrected"
    capped, figures = importance_weights(
        trained, rollouts.behaviour_logprobs, mask, CorrectionConfig(kind=CorrectionKind.truncate, cap=1.1)
    )
    assert capped.max() == pytest.approx(1.1) and 0 < figures["correction/truncated"].value() < 1
    assert torch.equal(capped, weights.clamp(max=1.1))


def test_token_versions_follow_selecting_trimming_and_saving_of_tokens(tmp_path):
    rollouts = mixed_batch(tiny_lm(), changed())
    versions, rows = rollouts.token_versions, torch.tensor([5, 2])
    batch = rollouts.extend(Batch, scores=torch.zeros(8, 2))
    assert torch.equal(batch.select(rows).token_versions, versions[rows])
    chosen = batch.samples(torch.ones(8, 1, dtype=torch.int64))
    assert torch.equal(chosen.token_versions, versions[:, 1:])
    short = trim(batch.select(rows))
    longest = int(rollouts.response_mask[rows].sum(-1).max())
    assert longest < versions.shape[-1] and torch.equal(short.token_versions, versions[rows][..., :longest])
    torch.save([rollouts.as_dict()], tmp_path / "in_flight.pt")
    (packed,) = torch.load(tmp_path / "in_flight.pt", weights_only=True)
    assert torch.equal(Rollouts(**packed).token_versions, versions) and packed["version"] == 3


@dataclass
class Fake:
    """A factory of samplers with one weight; each sampled token is the value of that weight.

    A request with purpose "until <version>" ends once that version is loaded. A request with purpose "deaf"
    ends once the file `go` exists and takes no newer weights. The file `begun` marks that sampling has begun.
    """

    folder: Path
    fault: str = ""

    def build(self):
        return FakeSampler(self)


class FakeSampler:
    def __init__(self, made_by):
        self.made_by, self.weight = made_by, None

    def sample(self, prompts, sampling, update=None):
        folder, tokens, versions = self.made_by.folder, [], []
        purpose, _, last = sampling.purpose.partition(" ")
        while not tokens or update is None or versions[-1] < int(last or 0):
            versions.append(update() if update is not None else -1)
            tokens.append(int(self.weight))
            (folder / "begun").touch()
            if self.made_by.fault == "dies" and tokens[-1] == 1 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if purpose == "deaf" or update is None:
                wait_for(folder / "go")
                break
            time.sleep(0.01)
        ids = torch.tensor(tokens).expand(len(prompts), 1, 100_000 if purpose == "deaf" else -1).contiguous()
        return prompts.extend(
            Rollouts,
            response_ids=ids,
            response_mask=ids > -1,
            ended=torch.ones(len(prompts), 1, dtype=torch.bool),
            token_versions=None if update is None else torch.tensor(versions).expand_as(ids),
        )

    def load(self, manifest):
        taken = {}
        for name, tensor in read(manifest):
            self.weight = tensor.clone()
            taken[name] = checksum(self.weight) + (self.made_by.fault == "takes another" and manifest.version)
        return taken

    def close(self):
        pass


def wait_for(path):
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"the file {path.name} must appear"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a generator with version 0 loaded; the fixture closes the generator."""
    made = []

    def make(fault="", in_flight=True):
        limits = Limits(start_s=120, request_s=SECONDS, restarts=2)
        environment = {"OMP_NUM_THREADS": "1"}
        made.append(WorkerGenerator(Fake(tmp_path, fault), tmp_path / "log", environment, limits, in_flight))
        load(made[0], 0)
        return made[0]

    yield make
    for generator in made:
        generator.close()


def ask(generator, purpose):
    sampling = Sampling(samples=1, temperature=1.0, response_length=2, purpose=purpose)
    return generator.submit(prompts(2), sampling)


def load(generator, version):
    generator.load([("weight", torch.tensor(float(version)))], version)


def test_an_in_flight_load_takes_effect_during_a_request_and_is_confirmed(start, tmp_path):
    generator = start()
    running = ask(generator, "until 2")
    waiting = [ask(generator, "until 0"), ask(generator, "until 3")]
    wait_for(tmp_path / "begun")
    load(generator, 1)
    load(generator, 2)
    rollouts = running.result(SECONDS)
    versions = rollouts.token_versions
    assert torch.equal(versions, rollouts.response_ids), (
        "each token was sampled by the version that is reported for it"
    )
    assert rollouts.version == versions[0, 0, 0] == 0 and versions[0, 0, -1] == 2
    assert waiting[0].result(SECONDS).versions() == {2}
    assert generator.confirmed.version == 2 and not generator.loads
    load(generator, 3)
    assert waiting[1].result(SECONDS).version in (2, 3)
    assert generator.confirmed.version == 3
    for version in (4, 5, 6):
        load(generator, version)
        assert ask(generator, f"until {version}").result(SECONDS).versions() == {version}
    assert generator.store.kept + len(generator.store.free) <= 4, (
        "a file is released once a later version is confirmed"
    )


def test_a_load_waits_for_earlier_requests_if_updates_are_not_in_flight(start, tmp_path):
    generator = start(in_flight=False)
    futures = [ask(generator, "train"), ask(generator, "train")]
    wait_for(tmp_path / "begun")
    load(generator, 1)
    futures.append(ask(generator, "train"))
    time.sleep(0.2)
    (tmp_path / "go").touch()
    found = [future.result(SECONDS) for future in futures]
    assert [(r.version, int(r.response_ids[0, 0, 0])) for r in found] == [(0, 0), (0, 0), (1, 1)]
    assert all(r.token_versions is None for r in found)


def test_a_load_and_an_answer_that_both_exceed_the_socket_buffer_do_not_deadlock(start, tmp_path):
    generator = start()
    running = ask(generator, "deaf")
    wait_for(tmp_path / "begun")
    many = [(f"{'a long name ' * 100} {i}", torch.tensor(1.0)) for i in range(1000)]  # over 1 MB of names
    generator.load(many, 1)
    time.sleep(0.2)  # the process reads the load only after it has sent the answer
    (tmp_path / "go").touch()
    answer = running.result(SECONDS)
    assert answer.versions() == {0} and answer.response_ids.nbytes > 1e6
    assert generator.confirmed.version == 1 and generator.restarts == 0


def test_a_restarted_process_receives_the_in_flight_weights_again(start, tmp_path):
    generator = start("dies")
    running, waiting = ask(generator, "until 1"), ask(generator, "until 1")
    wait_for(tmp_path / "begun")
    load(generator, 1)
    assert running.result(SECONDS).versions() == {1} and (tmp_path / "died").exists()
    assert waiting.result(SECONDS).versions() == {1}
    assert generator.figures()["generator/restarts"].value() == 1


def test_a_wrong_checksum_of_in_flight_weights_stops_the_run(start, tmp_path):
    generator = start("takes another")
    running, waiting = ask(generator, "until 1"), ask(generator, "until 0")
    wait_for(tmp_path / "begun")
    load(generator, 1)
    for future in (running, waiting):
        with pytest.raises(TransferError, match="must hold weight of version 1 with the checksum"):
            future.result(SECONDS)


def test_close_does_not_wait_for_a_running_in_flight_request(start, tmp_path):
    generator = start()
    futures = [ask(generator, "until 9"), ask(generator, "until 9")]
    wait_for(tmp_path / "begun")
    load(generator, 1)
    begun = time.monotonic()
    generator.close()
    assert time.monotonic() - begun < SECONDS / 4
    for future in futures:
        with pytest.raises(RunError, match="the generator was closed"):
            future.result(SECONDS)
