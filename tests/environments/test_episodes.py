"""Episodes of a model of random weights, which replies until a limit or the environment ends them."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.core.batch import Begun, Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.core.launched import derive
from rlhf.environments.environment import Answer, EnvironmentFactory, Turns
from rlhf.environments.episodes import Episodes
from rlhf.generators.hf.generator import HFGenerator, HFSamplerFactory, HFSettings, uniforms
from rlhf.models.modules import Policy
from rlhf.tasks.source import word_tokenizer
from rlhf.text.chat import set_template
from rlhf.text.encoding import pad_prompts
from tests.tiny_models import tiny_lm

HERE = "tests.environments.test_episodes"
MARKS = ("<|user|>", "<|assistant|>", "<|tool|>", "\n")
WORDS = (" a", " b", " c", " stop", " yes", " no")
SAMPLING = Sampling(samples=3, temperature=1.0, response_length=48, purpose="train", request=2)


class Judge:
    """Says whether a reply has an even number of words; done if the reply contains "stop"."""

    def __init__(self, worth=1.0):
        self.worth = worth

    def reset(self, example):
        self.said, self.secret = [], example.record.get("secret", "")

    def step(self, reply):
        words = reply.split(" ")[1:]
        self.said.append(reply)
        even = len(words) % 2 == 0
        return Answer(
            " yes" if even else " no", self.worth * len(words), "stop" in words, even, {"words": len(words)}
        )


SEEN = []


@cache
def tokenizer():
    made = word_tokenizer((*MARKS, *WORDS), r"<\|[a-z]+\|>|\n| ?[A-Za-z]+")
    set_template(made, "plain")
    return made


@cache
def model():
    """Return a model that ends a reply often."""
    made = tiny_lm("llama", vocab_size=len(tokenizer()), pad_token_id=1, bos_token_id=0, eos_token_id=0)
    head = Policy(made, 1.0, True).model.get_output_embeddings()
    with torch.no_grad():
        head.weight[3 : 3 + len(MARKS)] *= 0.1
    return made


def prompts(count=5) -> Prompts:
    heads = [[3, 7 + i % 6, 6, 4, 6][:5] + [7] * (i % 3) for i in range(count)]
    ids, mask = pad_prompts(heads, 1)
    return Prompts(
        index=torch.arange(10, 10 + count), texts=["p"] * count, references=["r"] * count, prompt_ids=ids,
        prompt_mask=mask, records=[{"secret": i} for i in range(count)],
    )  # fmt: skip


def settings(name="Judge", batch_size=64, cached=True, role="tool", **limits) -> HFSettings:
    limits = {"address": f"{HERE}:{name}"} | limits
    return HFSettings(
        stop_ids=[0], pad_id=1, batch_size=batch_size, seed=7, cached=cached,
        environment=EnvironmentFactory(turns=Turns(tokenizer(), role, 16), **limits),
    )  # fmt: skip


def sampled(given=None, sampling=SAMPLING, **chosen) -> Rollouts:
    generator = HFGenerator(lambda: nullcontext(model()), settings(**chosen))
    return generator.submit(prompts() if given is None else given, sampling).result()


def same(one: Rollouts, other: Rollouts) -> bool:
    names = ("response_ids", "response_mask", "environment_mask", "rewards", "ended")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and torch.allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=1e-5)


def check_masks_and_rewards(found: Rollouts) -> None:
    """Check the layout of episodes that `Judge` played."""
    N, K, T = found.response_ids.shape
    model_tokens, messages, real = found.response_mask, found.environment_mask, found.real
    assert not (model_tokens & messages).any()
    assert torch.equal(real, torch.arange(T) < real.sum(-1, keepdim=True))  # from 0, without holes
    assert model_tokens[..., 0].all() and {1, 2, 3} <= {*found.episode["turns"].flatten().int().tolist()}
    for n in range(N):
        for k in range(K):
            ids, mask, rewards = (
                x[n, k][real[n, k]].tolist() for x in (found.response_ids, model_tokens, found.rewards)
            )
            ends = [t for t in range(len(ids)) if mask[t] and (t + 1 == len(ids) or not mask[t + 1])]
            assert ends[-1] == len(ids) - 1, "the last token is the model's"
            cut = bool(found.episode["cut"][n, k])
            assert [ids[t] for t in ends[: -1 if cut else None]] == [0] * (len(ends) - cut)
            assert {t for t, reward in enumerate(rewards) if reward} <= {*ends}
            assert len(ends) == found.episode["turns"][n, k]
            words = sum(i >= 7 for i, own in zip(ids, mask, strict=True) if own)
            if not cut:
                assert sum(rewards) == found.episode["words"][n, k] == words
    ways = found.episode["cut"] + found.episode["out_of_turns"] + found.episode["no_room"] + found.ended
    assert (ways == 1).all()
    assert not found.behaviour_logprobs[~model_tokens].any() and found.behaviour_logprobs[model_tokens].all()


def test_masks_rewards_ends_and_figures_of_episodes():
    check_masks_and_rewards(sampled(max_turns=4))


def test_messages_are_the_tokens_of_the_template_after_the_end_of_a_reply():
    found = sampled()
    for n, k in found.environment_mask.any(-1).nonzero().tolist():
        whole = tokenizer().decode(found.response_ids[n, k][found.real[n, k]].tolist())
        between = whole.split("<|endoftext|>")
        for message in between[1:-1]:
            assert message.startswith(
                ("\n<|tool|>\n yes\n<|assistant|>\n", "\n<|tool|>\n no\n<|assistant|>\n")
            )


def test_logprobs_of_the_sampler_are_those_of_a_plain_forward_over_prompt_and_episode():
    found = sampled()
    assert found.episode["turns"].max() >= 3
    with torch.no_grad():
        for n in range(5):
            for k in range(3):
                head, own = (
                    found.prompt_ids[n][found.prompt_mask[n]],
                    found.response_ids[n, k][found.real[n, k]],
                )
                logits = model()(input_ids=torch.cat([head, own])[None]).logits[0, len(head) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, own[:, None])[:, 0]
                mask = found.response_mask[n, k][: len(own)]
                torch.testing.assert_close(
                    found.behaviour_logprobs[n, k][: len(own)], expected * mask, rtol=0, atol=1e-5
                )
        trained = Policy(model(), 1.0, True)(found).logprobs
    torch.testing.assert_close(trained, found.behaviour_logprobs, rtol=0, atol=1e-5)


def test_an_episode_does_not_depend_on_the_batch_the_order_or_the_cache():
    found = sampled()
    assert same(found, sampled(batch_size=4)) and same(found, sampled(cached=False))
    rows = torch.tensor([3, 0])
    assert same(found.select(rows), sampled(prompts().select(rows)))
    assert not torch.equal(found.response_ids, sampled(sampling=replace(SAMPLING, request=3)).response_ids)


def test_the_sampler_of_a_process_plays_the_same_episodes_and_versions_tokens_in_flight():
    config = model().config.to_json_string(use_diff=False)
    factory = HFSamplerFactory(
        config=config, attention="sdpa", remote=None, device="cpu", dtype=Dtype.float32, settings=settings()
    )
    sampler = factory.build()
    sampler.model.load_state_dict(model().state_dict())
    assert same(sampled(), sampler.sample(prompts(), SAMPLING))
    steps = iter(range(10**6))
    found = sampler.sample(prompts(), SAMPLING, update=lambda: next(steps))
    versions = found.token_versions
    assert same(sampled(), found) and not versions[~found.response_mask].any()
    own = versions[0, 0][found.response_mask[0, 0]]
    assert (own[1:] > own[:-1]).all()


def test_one_turn_gives_the_tokens_of_a_run_without_an_environment():
    plain = HFGenerator(lambda: nullcontext(model()), replace(settings(), environment=None))
    expected = plain.submit(prompts(), SAMPLING).result()
    found = sampled(max_turns=1)
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.behaviour_logprobs, expected.behaviour_logprobs)
    assert torch.equal(found.response_mask, expected.response_mask) and not found.environment_mask.any()


def test_replies_have_at_most_reply_tokens_and_an_episode_at_most_all():
    found = sampled(reply_tokens=3)
    starts = torch.nn.functional.pad(found.response_mask, (1, 0))[..., :-1]
    replies = (found.response_mask & ~starts).sum(-1)
    assert torch.equal(replies.float(), found.episode["turns"])
    runs = found.response_mask.unfold(-1, 4, 1).all(-1)
    assert not runs.any() and found.response_mask.unfold(-1, 3, 1).all(-1).any()
    assert found.episode["cut"].any()


class Changing(Judge):
    """Notes the examples that it gets, and changes their records."""

    def reset(self, example):
        SEEN.append(deepcopy(example))
        example.record["secret"] = "changed"


def test_samples_of_a_prompt_begin_alike_and_a_class_may_change_the_record_of_its_episode():
    SEEN.clear()
    made, given = replace(settings().environment, address=f"{HERE}:Changing"), prompts(2)
    for request in (0, 1):
        with Episodes(given, replace(SAMPLING, samples=2, request=request), made, [0], 7) as found:
            assert [found.history(i) for i in range(4)] == [given.unpadded()[i // 2] for i in range(4)]
    assert [each.sample for each in SEEN] == [0, 1] * 4
    assert len({each.seed for each in SEEN}) == 4 and SEEN[0].seed == SEEN[1].seed
    assert [each.record["secret"] for each in SEEN] == [0, 0, 1, 1] * 2
    assert given.records == [{"secret": 0}, {"secret": 1}]
    assert (SEEN[0].prompt, SEEN[0].reference) == ("p", "r")


def test_a_class_that_cannot_be_made_is_an_error_of_reset():
    with pytest.raises(
        RunError, match="Judge must .* in reset .*TypeError.*the prompt 'p'; correct the class"
    ):
        sampled(arguments={"unknown": 1})


def test_token_t_of_an_episode_has_the_random_number_t():
    found = sampled()
    numbers = uniforms(derive(7, "sample", "train"), 2, prompts().index, 3, 48)
    with torch.no_grad():
        logits = (
            model()(
                input_ids=torch.cat([found.prompt_ids[0][found.prompt_mask[0]], found.response_ids[0, 0]])[
                    None
                ]
            )
            .logits[0]
            .log_softmax(-1)
            .exp()
            .double()
        )
    at = int(found.prompt_mask[0].sum()) - 1
    for t in found.response_mask[0, 0].nonzero()[:, 0].tolist():
        place = logits[at + t].cumsum(0) / logits[at + t].sum()
        token = int(found.response_ids[0, 0, t])
        below = float(place[token - 1]) if token else 0.0
        assert below - 1e-5 <= float(numbers[0, 0, t]) <= float(place[token]) + 1e-5


def played(given, sampling):
    return Episodes(given, sampling, settings().environment, [0], seed=7)


def test_a_message_after_which_no_token_fits_is_left_out():
    word, message = tokenizer().convert_tokens_to_ids(" a"), Turns(tokenizer(), "tool", 16).tokens(" no")
    for room in (0, 1):
        asked = replace(SAMPLING, samples=1, response_length=2 + len(message) + room)
        with played(prompts(1), asked) as episodes:
            episodes.reply(0, [word, 0], [0.0, 0.0])
            found = episodes.rollouts(1)
        assert found.episode["no_room"].item() == 1 - room
        assert found.environment_mask.sum() == room * len(message)


def test_a_reply_in_two_parts_is_one_turn_and_each_request_has_the_tokens_that_it_added():
    word, message = tokenizer().convert_tokens_to_ids(" a"), Turns(tokenizer(), "tool", 16).tokens(" no")
    one = replace(SAMPLING, samples=1, most=torch.tensor([[1]]))
    added = []
    for before, token in ([], word), ([word], 0):
        begun = [Begun(SAMPLING.request, 0, before, [True] * len(before))]
        with played(prompts(1), replace(one, begun=begun)) as episodes:
            episodes.reply(0, [token], [0.0])
            added.append(episodes.rollouts(1))
    first, second = added
    assert (first.response_mask.sum(), first.environment_mask.sum()) == (1, 0)
    assert (second.response_mask.sum(), second.environment_mask.sum()) == (1, len(message))
    assert second.response_ids[0, 0, : 1 + len(message)].tolist() == [0, *message]
    assert second.episode["turns"].item() == first.episode["turns"].item() == 1


def test_no_message_follows_a_reply_that_another_stop_token_than_the_end_token_ends():
    both = replace(settings(), stop_ids=[0, 7])
    found = HFGenerator(lambda: nullcontext(model()), both).submit(prompts(), SAMPLING).result()
    before = found.response_ids[..., :-1][found.environment_mask[..., 1:] & found.response_mask[..., :-1]]
    assert len(before) and (before == 0).all()
    last = found.response_ids.gather(-1, found.real.sum(-1, keepdim=True) - 1)[..., 0]
    assert ((last == 7) & ~found.ended & (found.episode["cut"] == 1)).any()


def test_a_column_seed_of_the_data_is_only_a_part_of_the_record():
    def examples(records):
        played = Episodes(replace(prompts(1), records=records), SAMPLING, settings().environment, [0], 7)
        played.close()
        return [each.example for each in played._all]

    plain, own = examples([{}]), examples([{"seed": "a"}])
    assert [each.seed for each in own] == [each.seed for each in plain] and own[0].record == {"seed": "a"}
    assert examples([{"seed": 5, "first_message": None}])[0].seed == 5
