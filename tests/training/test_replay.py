"""The replay buffer: drawn prompts, padding of joined batches, versions, and what is computed only once."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.run import ScheduleConfig
from rlhf.core.batch import Batch, trim
from rlhf.core.state import TrainState
from rlhf.engines.engine import Gradients
from rlhf.training.checkpoint import Checkpoints
from rlhf.training.loop import train
from rlhf.training.session import Parts, Session
from rlhf.training.stream import Replay, with_token_versions
from tests.tiny_models import sequences, tiny_rollouts

N, K, PAD = 4, 2, 96


def batch(update, **changed):
    """Return the new batch of an update, sampled by version `update`; its prompts are 10 x update + row."""
    rollouts = trim(tiny_rollouts(prompts=N + 1, samples=K, seed=update).select(torch.arange(1, N + 1)))
    numbers = 10 * update + torch.arange(N)
    logprobs = -torch.rand(rollouts.response_ids.shape, generator=torch.Generator().manual_seed(update))
    added = {
        "index": numbers,
        "texts": [f"prompt {number}" for number in numbers],
        "dialogues": [[{"role": "user", "content": f"prompt {number}"}] for number in numbers],
        "version": update,
        "trainer_version": update,
        "scores": numbers[:, None] + torch.tensor([0.0, 0.5]),
        "parts": {"length": -numbers[:, None].expand(N, K).float()},
        "behaviour_logprobs": logprobs * rollouts.response_mask,
    }
    return replace(rollouts.extend(Batch, scores=torch.zeros(N, K)), **{**added, **changed})


def replayed(size, updates, seed=1):
    """Return the new batches and the trained batches of a few updates."""
    replay, new = Replay(size, seed, PAD), [batch(update) for update in range(updates)]
    return new, [replay(each)[0] for each in new]


def test_without_a_buffer_every_update_trains_on_its_new_batch():
    replay, new = Replay(1, 1, PAD), batch(3)
    trained, figures = replay(new)
    assert trained is new and figures == {} and not replay.earlier


def test_tokens_without_versions_have_the_version_that_sampled_the_batch():
    late = batch(1, trainer_version=4)
    assert torch.equal(with_token_versions(late).token_versions, late.response_mask.long())
    versions = with_token_versions(replace(late, token_versions=7 * late.response_mask)).token_versions
    assert torch.equal(versions, 7 * late.response_mask)


@pytest.mark.parametrize("size", [2, 3])
def test_each_update_trains_on_n_different_prompts_of_the_last_batches(size):
    _, trained = replayed(size, 8)
    for update, each in enumerate(trained):
        numbers = each.index.tolist()
        assert len(set(numbers)) == N
        assert {number // 10 for number in numbers} <= set(range(max(0, update - size + 1), update + 1))
    assert trained[0].index.tolist() == [0, 1, 2, 3]
    places = {tuple((each.index - 10 * each.trainer_version).tolist()) for each in trained[size:]}
    assert len(places) > 1, "each update draws anew"


def test_every_prompt_of_the_buffer_is_drawn_equally_often():
    counts = Counter()
    for seed in range(600):
        counts.update(replayed(3, 3, seed)[1][-1].index.tolist())
    assert len(counts) == 3 * N and all(160 < count < 240 for count in counts.values()), counts


def test_a_drawn_prompt_keeps_its_samples_scores_and_texts():
    new, trained = replayed(3, 6)
    widths = {(each.prompt_ids.shape[-1], each.response_ids.shape[-1]) for each in new}
    assert len(widths) > 1, "the batches must differ in width"
    for each in trained:
        for row, number in enumerate(each.index.tolist()):
            source, at = new[number // 10], number % 10
            for (ids, answer), (its_ids, its_answer) in zip(
                sequences(each)[row], sequences(source)[at], strict=True
            ):
                assert torch.equal(ids, its_ids) and torch.equal(answer, its_answer)
            assert each.texts[row] == source.texts[at] and each.dialogues[row] == source.dialogues[at]
            assert torch.equal(each.scores[row], source.scores[at])
            assert torch.equal(each.parts["length"][row], source.parts["length"][at])
            kept, its = each.response_mask[row], source.response_mask[at]
            assert torch.equal(each.behaviour_logprobs[row][kept], source.behaviour_logprobs[at][its])


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    for each in replayed(3, 6)[1]:
        assert (each.prompt_mask.long().diff(dim=-1) >= 0).all() and each.prompt_mask[:, -1].all()
        assert (each.response_mask.long().diff(dim=-1) <= 0).all()
        wide = each.response_ids.shape[-1]
        assert each.token_versions.shape[-1] == each.behaviour_logprobs.shape[-1] == wide
        assert not each.behaviour_logprobs[~each.response_mask].any()
    short = batch(0, **narrow(batch(0)))
    replay = Replay(2, 1, PAD)
    replay.load([short])
    joined, _ = replay(batch(1))
    stale = joined.index < 10
    assert stale.any() and (joined.prompt_ids[stale][:, :-2] == PAD).all()
    assert (joined.response_ids[stale][..., 1:] == PAD).all()


def narrow(wide):
    """Return the fields of a batch with prompts of two tokens and responses of one token."""
    cut = {name: getattr(wide, name)[:, -2:] for name in ("prompt_ids", "prompt_mask")}
    names = ("response_ids", "response_mask", "behaviour_logprobs")
    return cut | {name: getattr(wide, name)[..., :1] for name in names}


def test_the_version_of_a_mixed_batch_is_its_oldest_and_every_token_has_its_own():
    for update, each in enumerate(replayed(3, 6)[1]):
        sampled_by = each.index // 10
        assert each.version == sampled_by.min() and each.trainer_version == update
        expected = sampled_by[:, None, None] * each.response_mask
        assert torch.equal(each.token_versions, expected)


def test_versions_of_tokens_that_were_updated_in_flight_are_kept():
    new = batch(5, version=4)
    versions = torch.where(torch.arange(new.response_ids.shape[-1]) < 2, 4, 5) * new.response_mask
    replay = Replay(2, 1, PAD)
    replay(replace(new, token_versions=versions))
    trained, _ = replay(batch(6))
    stale = trained.index < 60
    rows = trained.index[stale] % 10
    assert stale.any() and trained.version == 4
    assert torch.equal(trim(trained.select(stale.nonzero()[:, 0])).token_versions, trim_like(versions[rows]))


def trim_like(versions):
    """Remove the positions that are padding in every row."""
    return versions[..., : int((versions > 0).sum(-1).max())]


def test_age_is_the_mean_number_of_updates_since_the_prompts_were_sampled():
    replay = Replay(3, 1, PAD)
    for update in range(6):
        trained, figures = replay(batch(update, version=max(0, update - 2)))  # lag 2
        sampled_by = (trained.index // 10 - 2).clamp(min=0)
        assert figures["replay/age"].value() == pytest.approx(float((update - sampled_by).double().mean()))


def test_a_buffer_that_was_saved_and_loaded_draws_the_same_prompts():
    one, other = Replay(3, 1, PAD), Replay(3, 1, PAD)
    for update in range(4):
        one(batch(update))
    assert [each.trainer_version for each in one.earlier] == [2, 3], "the next update adds the third batch"
    other.load([Batch(**each.as_dict()) for each in one.earlier])
    a, b = one(batch(4))[0], other(batch(4))[0]
    names = [field.name for field in fields(Batch)]
    assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in names if torch.is_tensor(getattr(a, n)))
    assert a.texts == b.texts


def test_a_checkpoint_without_a_buffer_can_be_loaded(tmp_path):
    replay = Replay(3, 1, PAD)
    nothing = SimpleNamespace(
        save=lambda folder: None,
        saved=lambda folder, state: None,
        load=lambda saved: None,
        state_dict=dict,
        load_state_dict=lambda saved: None,
        in_flight=list,
    )
    checkpoints = Checkpoints(tmp_path, 1, nothing, replay, nothing, "the data")
    replay(batch(0))
    checkpoints.save(TrainState(num_updates=9, update=1), nothing, nothing, nothing)
    path, other = tmp_path / "checkpoint-1", Replay(3, 1, PAD)
    checkpoints.replay = other
    (path / "replay.pt").rename(tmp_path / "replay.pt")
    checkpoints.load(path, TrainState(num_updates=9), nothing, nothing)
    assert not other.earlier
    (tmp_path / "replay.pt").rename(path / "replay.pt")
    checkpoints.load(path, TrainState(num_updates=9), nothing, nothing)
    assert [each.index.tolist() for each in other.earlier] == [[0, 1, 2, 3]]


# -- the training loop -----------------------------------------------------------------------------


class CountingEngine:
    """An engine that counts for which prompts it computes reference log-probs, old log-probs and a step."""

    moving = None

    def __init__(self):
        self.reference, self.old, self.trained = [], [], []
        self.moving = None

    def annotate(self, batch, needs):
        filled = {}
        if "ref_logprobs" in needs and batch.ref_logprobs is None:
            self.reference += batch.index.tolist()
            filled["ref_logprobs"] = torch.zeros(batch.response_ids.shape)
        if "old_logprobs" in needs:
            assert batch.old_logprobs is None, "old log-probs of an earlier update must not be used"
            self.old += batch.index.tolist()
            filled["old_logprobs"] = torch.zeros(batch.response_ids.shape)
        return replace(batch, **filled)

    def forward_backward(self, minibatch, objective):
        self.trained += minibatch.index.tolist()
        return Gradients(minibatch, {}, {}, True)

    def optimizer_step(self, found):
        return {}

    def weights(self):
        return ()


def loop(updates, engine, scorer=lambda batch: batch, **generator):
    """Run the training loop with a buffer of 3 batches; return its state, its stream and the flushed rows."""
    flushed = []
    parts = Parts(
        prompts=SimpleNamespace(scored=lambda batch: {}),
        generator=SimpleNamespace(
            **{"wait": lambda: None, "load": lambda weights, version: None, **generator}
        ),
        scorer=scorer,
        replay=Replay(3, 1, PAD),
        engine=engine,
        objective=SimpleNamespace(
            needs=frozenset({"ref_logprobs", "old_logprobs"}),
            describe=lambda batch: {},
            credit=lambda batch: batch.samples(torch.zeros(N, 1, dtype=torch.int64)),
        ),
        recorder=SimpleNamespace(
            timer=lambda name: nullcontext(),
            add=lambda figures: None,
            flush=lambda state, batch, engine: flushed.append((state.lag, batch)),
        ),
        evaluator=None,
        checkpoints=None,
    )
    state = TrainState(num_updates=updates, unevaluated=False)
    schedule = ScheduleConfig(prompts_per_update=N, minibatches=2, eval_every=0, save_every=0)
    stream = [batch(update) for update in range(updates)]
    train(Session(parts, stream, state, schedule, SimpleNamespace(asked=lambda: False), seed=1))
    return state, stream, flushed


def test_scores_and_reference_logprobs_are_computed_once_and_old_logprobs_in_every_update():
    engine, scored = CountingEngine(), []

    def scorer(batch):
        scored.extend(batch.index.tolist())
        return batch

    state, stream, flushed = loop(6, engine, scorer)
    assert scored == engine.reference == [number for each in stream for number in each.index.tolist()]
    assert sorted(engine.old) == sorted(engine.trained) and len(engine.old) == 6 * N
    assert max(Counter(engine.old).values()) > 1, "some prompts are trained on several times"
    for update, (lag, trained) in enumerate(flushed):
        assert trained.response_ids.shape[:2] == (N, K), "not the samples that credit selects"
        assert lag == update - trained.version == update - min(trained.index // 10)
    assert state.episode == 6 * N * K


def test_the_loop_waits_for_the_generator_before_each_load():
    calls = []
    loop(
        3,
        CountingEngine(),
        wait=lambda: calls.append("wait"),
        load=lambda weights, version: calls.append(version),
    )
    assert calls == ["wait", 1, "wait", 2, "wait", 3]
