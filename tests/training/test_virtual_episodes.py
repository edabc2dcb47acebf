"""Episodes in virtual time: equality with `Stream`, log-probs and masks under every rule, checkpoints."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf.core.batch import Begun, Prompts, Rollouts, Sampling, concatenated
from rlhf.core.errors import RunError
from rlhf.core.launched import derive
from rlhf.environments.environment import LIMITS
from rlhf.generators.hf.generator import uniforms
from rlhf.text.encoding import pad_prompts
from rlhf.training.stream import Stream, with_token_versions
from tests.environments.test_episodes import Judge, check_masks_and_rewards, settings, tokenizer
from tests.environments.test_many_turns import model
from tests.training.streams import context
from tests.training.test_virtual import RULES, UPDATES, B, Trainer, stored, stream, train

K, T, PAD = 2, 28, 1
ASKED = Sampling(samples=K, temperature=1.0, response_length=T, purpose="train")
HERE = "tests.training.test_virtual_episodes"
COSTS = {"slots": 10, "spread": 1.0, "prefill": 0.25, "sync_s": 2.0, "score_s": 1.0}


class Seeded(Judge):
    """Answers in an order that depends on the example."""

    def reset(self, example):
        super().reset(example)
        self.draw = random.Random(example.seed + example.sample)

    def step(self, reply):
        return super().step(reply)._replace(message=self.draw.choice((" yes", " no")))


class Changing(Judge):
    """Answers the same reply otherwise each time."""

    calls = itertools.count()

    def step(self, reply):
        return super().step(reply)._replace(message=" yes" if next(self.calls) % 2 else " no", done=False)


def trainer(version=0, name="Seeded", **limits):
    made = settings(max_turns=4, address=f"{HERE}:{name}", **limits)
    given = {name: getattr(made, name) for name in made.__slots__}
    return Trainer(version, model=model(len(tokenizer()), 0, num_hidden_layers=1), **given | {"seed": 3})


def prompts(first=0):
    """Yield batches of B prompts without end, of 2 to 5 tokens."""
    while True:
        rows = range(first, first + B)
        ids, mask = pad_prompts([[3, *(7 + row % 6,) * (row % 4 + 1)] for row in rows], PAD)
        yield Prompts(
            index=torch.tensor([*rows]), texts=["p"] * B, references=["r"] * B, prompt_ids=ids,
            prompt_mask=mask, records=[{"secret": row} for row in rows],
        )  # fmt: skip
        first += B


def virtual(made, rule="fifo", **settings):
    return stream(made, rule, **{"batches": prompts(), "asked": ASKED, "pad_id": PAD} | settings)


def assert_equal(one, other):
    """Check that two rollouts are equal to the bit, without seconds."""
    mine, theirs = one.as_dict(), other.as_dict()
    for fields in (mine, theirs):
        del fields["generate_s"]
        fields |= {
            f"episode/{name}": value for name, value in fields.pop("episode").items() if name != "seconds"
        }
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda x, y: x == y
        assert same(value, theirs[name]), name


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_fifo_with_slots_for_all_equals_the_stream_of_this_process(lag):
    mine, other = trainer(), trainer()
    plain = Stream(context(other.generator, prompts(), ASKED, lag, UPDATES, pad_id=PAD))
    made = virtual(mine, lag=lag)
    turns = []
    for one, two in zip(train(made, mine), train(plain, other), strict=True):
        assert_equal(one, two)
        turns += one.episode["turns"].flatten().tolist()
    assert {1, 2, 3, 4} == {*turns}


def joined(batches):
    return Rollouts(**concatenated([with_token_versions(each) for each in batches], PAD))


def log_probs(model, found):
    """Return the log-probs [N, K, T] of a plain forward pass over prompt and episode."""
    ids = torch.cat([found.prompt_ids.repeat_interleave(K, 0), found.response_ids.flatten(0, 1)], 1)
    real = torch.cat([found.prompt_mask.repeat_interleave(K, 0), found.real.flatten(0, 1)], 1)
    places = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=real.long(), position_ids=places).logits[:, -T - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -T:, None])[..., 0].view(found.response_ids.shape)


@pytest.mark.parametrize(("in_flight", "whole"), [(False, False), (True, True)])
@pytest.mark.parametrize("rule", [*RULES])
def test_every_token_of_an_episode_has_the_log_prob_of_its_version(rule, in_flight, whole):
    mine = trainer()
    made = virtual(mine, rule, in_flight=in_flight, whole=whole, **COSTS)
    found = joined(train(made, mine))
    check_masks_and_rewards(found)
    assert torch.equal(found.rewards.sum(-1), found.episode["words"]), "no turn that was lost counts"
    versions, own = found.token_versions, found.response_mask
    assert not versions[~own].any()
    for version in versions[own].unique().tolist():
        error = (log_probs(mine.models[version], found) - found.behaviour_logprobs).abs()
        assert error[own & (versions == version)].max() < 2e-5
    newest = versions.cummax(-1).values
    assert torch.equal(versions[own], newest[own]), "versions never fall within an episode"
    assert (versions[own] > versions[..., :1].expand_as(own)[own]).any() == in_flight
    lines = [line for line in made.context.recorder.lines if line["fate"] != "dropped"]
    assert [line["row"] for line in lines] == found.index.tolist()
    assert [line["lengths"] for line in lines] == own.sum(-1).tolist()
    cuts = sum(row["rollouts/cut"] for row in made.context.recorder.rows)
    assert (cuts > 0) == (rule == "cut")
    assert found.episode["cut"].sum() >= sum(line["fate"] == "cut" for line in lines)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rule", [*RULES])
def test_a_resumed_stream_plays_the_same_episodes(rule, in_flight):
    mine = trainer()
    made = virtual(mine, rule, in_flight=in_flight, **COSTS)
    expected = list(train(made, mine))
    first, stop, drawn = trainer(), 4, itertools.count()
    batches = (batch for batch, _ in zip(prompts(), drawn, strict=False))
    before = virtual(first, rule, in_flight=in_flight, batches=batches, **COSTS)
    for _ in train(before, first, stop):
        pass
    second = trainer(stop)
    saved = {"update": stop, "saved": stored(before)}
    after = virtual(second, rule, in_flight=in_flight, batches=prompts(next(drawn) * B), **saved, **COSTS)
    for one, two in zip(train(after, second), expected[stop:], strict=True):
        assert_equal(one, two)
    assert after.context.recorder.rows == made.context.recorder.rows[stop:]


def test_replies_have_at_most_reply_tokens_also_in_parts():
    mine = trainer(reply_tokens=5)
    found = joined(train(virtual(mine, "pace", in_flight=True, **COSTS), mine))
    starts = torch.nn.functional.pad(found.response_mask, (1, 0))[..., :-1]
    assert torch.equal((found.response_mask & ~starts).sum(-1).float(), found.episode["turns"])
    assert not found.response_mask.unfold(-1, 6, 1).all(-1).any()
    assert found.response_mask.unfold(-1, 5, 1).all(-1).any() and found.episode["cut"].any()


def test_an_environment_that_answers_otherwise_than_before_is_an_error_with_the_row():
    mine = trainer(name="Changing")
    with pytest.raises(
        RunError, match=r"Changing must answer .* sample \d of row \d+ of the data; .*clock=wall"
    ):
        list(train(virtual(mine, "pace", in_flight=True, **COSTS), mine))


@pytest.mark.parametrize("part", [1, 3, 20])
def test_an_episode_that_is_sampled_in_parts_is_that_sampled_at_once(part):
    mine, batch = trainer(reply_tokens=8), next(prompts())
    whole = mine.generator.submit(batch, replace(ASKED, request=2)).result()
    numbers = uniforms(derive(3, "sample", "train"), 2, batch.index, K, T).flatten(0, 1)
    names = ("response_ids", "response_mask", "behaviour_logprobs", "rewards")
    found = {i: ([], [], [], []) for i in range(B * K)}
    running = [*found]
    while running:
        rest = [numbers[i][len(found[i][0]) :] for i in running]
        asked = replace(
            ASKED,
            samples=1,
            numbers=pad_sequence(rest, batch_first=True)[:, None],
            most=torch.full((len(running), 1), part),
            begun=[Begun(2, i % K, *found[i][:2]) for i in running],
        )
        new = mine.generator.submit(batch.select(torch.tensor(running) // K), asked).result()
        assert 0 < new.response_mask.sum(-1).max() <= part
        for row, i in enumerate(running):
            for name, own in zip(names, found[i], strict=True):
                own += getattr(new, name)[row, 0][new.real[row, 0]].tolist()
        stopped = new.ended + sum(new.episode[name] for name in LIMITS)
        for row in stopped[:, 0].nonzero()[:, 0].tolist():
            place = divmod(running[row], K)
            for name, own in zip(names, found[running[row]], strict=True):
                expected = getattr(whole, name)[place][whole.real[place]]
                torch.testing.assert_close(
                    torch.tensor(own, dtype=expected.dtype), expected, rtol=0, atol=1e-5
                )
            assert new.ended[row, 0] == whole.ended[place]
            for name in whole.episode.keys() - {"seconds"}:
                assert new.episode[name][row, 0] == whole.episode[name][place], name
        running = [i for row, i in enumerate(running) if not stopped[row, 0]]
