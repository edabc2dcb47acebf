"""Tests of episodes that real vLLM samples: the facts of `tests/environments/test_episodes.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.encoding import pad_prompts
from rlhf.core.errors import RunError
from rlhf.environments.environment import EnvironmentFactory
from rlhf.environments.turns import Turns
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from tests import needs
from tests.end_to_end.test_vllm import HEADS, SAMPLER, Process, ask_in_flight
from tests.environments.test_episodes import Judge, check_masks_and_rewards, tokenizer
from tests.tiny_models import tiny_lm

pytest.importorskip("vllm", reason=needs.VLLM)

HERE = "tests.end_to_end.test_vllm_turns"
PROMPT, LENGTH, BLOCK = 150, 60, 128  # vLLM on a CPU caches keys in blocks of 128 tokens
SAMPLING = Sampling(samples=4, temperature=0.7, response_length=LENGTH, purpose="train", request=2)
STEPS: list[tuple[int, int, int]] = []  # (prompt, sample, turn) of each call of `Noted.step`


class Noted(Judge):
    """A judge that notes the calls of `step`, and raises an error in turn `fails`."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails

    def reset(self, example: Any) -> None:
        super().reset(example)
        self.owner = (int(example.record["secret"]), example.sample)

    def step(self, reply: str) -> Any:
        STEPS.append((*self.owner, len(self.said) + 1))
        if STEPS[-1][-1] == self.fails:
            raise KeyError("secret")
        return super().step(reply)


def prompts() -> Prompts:
    """Return prompts of 3 to 150 tokens; the keys of the last three are cached."""
    draw = torch.Generator().manual_seed(5)
    lengths = (3, 20, 60, 129, 140, PROMPT)
    ids, mask = pad_prompts([torch.randint(7, 13, (n,), generator=draw).tolist() for n in lengths], 1)
    count = len(lengths)
    return Prompts(
        index=torch.arange(10, 10 + count), texts=["p"] * count, references=["r"] * count, prompt_ids=ids,
        prompt_mask=mask, records=[{"secret": n} for n in range(count)],
    )  # fmt: skip


def judge(name: str = "Noted", **settings: Any) -> EnvironmentFactory:
    arguments = settings.pop("arguments", {})
    return EnvironmentFactory(address=f"{HERE}:{name}", arguments=arguments, **settings)


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Process]:
    """Start vLLM with a model that ends a reply often; the process gets the environment by pickling."""
    model = tiny_lm(
        "llama", **HEADS, vocab_size=len(tokenizer()), pad_token_id=1, bos_token_id=0, eos_token_id=0,
        max_position_embeddings=256,
    )  # fmt: skip
    with torch.no_grad():
        model.get_output_embeddings().weight[3:7] *= 0.1  # few role marks
        model.get_output_embeddings().weight[[0, 10]] *= 1.3
    process = Process(
        model, tmp_path_factory.mktemp("turns"), max_model_len=PROMPT + LENGTH, stop_ids=(0,), pad_id=1,
        environment=judge(), turns=Turns(tokenizer(), "tool", 16),
    )  # fmt: skip
    yield process
    process.end()


def choose(environment: EnvironmentFactory | None) -> None:
    sampler = SAMPLER[0]
    sampler.settings = replace(sampler.settings, environment=environment)
    STEPS.clear()


def play(
    process: Process,
    given: Prompts | None = None,
    environment: EnvironmentFactory | None = None,
    **changed: Any,
) -> Rollouts:
    """Return the episodes that vLLM samples with the loaded weights."""
    process.pool.submit(choose, environment or judge()).result()
    return process.ask("sample", given or prompts(), replace(SAMPLING, **changed))


def same(one: Rollouts, other: Rollouts, atol: float = 1e-4) -> bool:
    names = ("response_ids", "response_mask", "environment_mask", "rewards", "ended")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and torch.allclose(one.behaviour_logprobs, other.behaviour_logprobs, rtol=0, atol=atol)


def replies(rollouts: Rollouts) -> Iterator[tuple[int, int, int, int]]:
    """Yield prompt, sample, first token and end of each reply."""
    before = torch.nn.functional.pad(rollouts.response_mask, (1, 1))
    for n, k, start in (before[..., 1:-1] & ~before[..., :-2]).nonzero().tolist():
        yield n, k, start, start + int((~before[n, k, start + 1 :]).nonzero()[0])


@torch.no_grad()
def reply_logprobs(
    old: PreTrainedModel,
    new: PreTrainedModel,
    rollouts: Rollouts,
    reply: tuple[int, int, int, int],
    swap: int,
) -> Tensor:
    """Return the log-probs of a reply that `new` continues with the cache of `old` from its token `swap`."""
    n, k, start, end = reply
    whole = torch.cat([rollouts.prompt_ids[n][rollouts.prompt_mask[n]], rollouts.response_ids[n, k, :end]])
    first = len(whole) - (end - start)
    seen = first + swap - 1 if swap else 0  # the token before `swap` is the first that `new` reads
    parts, cache = [], None
    if seen:
        found = old(whole[None, :seen], use_cache=True)
        parts, cache = [found.logits], found.past_key_values
    parts.append(new(whole[None, seen:], past_key_values=cache).logits)
    logits = torch.cat(parts, 1)[0, first - 1 : -1] / SAMPLING.temperature
    return logits.log_softmax(-1).gather(-1, whole[first:, None])[:, 0]


def test_episodes_have_the_masks_rewards_and_logprobs_of_a_plain_forward(process):
    for version in (0, 1):
        process.load(version)
        found = play(process, environment=judge(max_turns=4))
        check_masks_and_rewards(found)
        assert found.version == version and found.generate_s > 0 and found.token_versions is None
        assert found.episode["turns"].max() == 4
        for reply in replies(found):
            expected = reply_logprobs(process.model, process.model, found, reply, 0)
            n, k, start, end = reply
            torch.testing.assert_close(found.behaviour_logprobs[n, k, start:end], expected, rtol=0, atol=1e-4)


def test_greedy_episodes_are_those_of_the_hugging_face_sampler(process):
    process.load(1)
    found = play(process, samples=1, temperature=0.0, purpose="eval")
    settings = HFSettings(
        stop_ids=[0], pad_id=1, batch_size=64, seed=7,
        environment=judge(), turns=Turns(tokenizer(), "tool", 16),
    )  # fmt: skip
    other = HFGenerator(lambda: nullcontext(process.model), settings)
    expected = other.submit(prompts(), replace(SAMPLING, samples=1, temperature=1e-6)).result()
    assert same(found, expected, atol=float("inf")) and found.episode.keys() == expected.episode.keys()
    assert all(torch.equal(found.episode[name], expected.episode[name]) for name in found.episode)
    assert found.episode["turns"].max() > 1


def test_an_episode_does_not_depend_on_the_order_or_on_other_prompts(process):
    process.load(1)
    found, rows = play(process), torch.tensor([5, 3, 0])
    assert same(found.select(rows), play(process, prompts().select(rows)))
    assert same(found, play(process)), "the cache has the keys of the first run"
    assert not torch.equal(found.response_ids, play(process, request=3).response_ids)


def test_turns_and_samples_have_random_numbers_of_their_own(process):
    process.load(0)
    flat = {name: torch.zeros_like(tensor) for name, tensor in process.start.items()}
    flat["model.embed_tokens.weight"] = process.start["model.embed_tokens.weight"]
    manifest = process.shared.write(flat.items(), 1)  # all tokens are equally likely
    process.ask("load", manifest)
    process.shared.release(manifest)
    found = play(process, environment=judge("Friendly"), response_length=LENGTH)
    said = [found.response_ids[n, k, start:end].tolist() for n, k, start, end in replies(found)]
    long = [tuple(each[:5]) for each in said if len(each) >= 5]
    assert len(long) > 40 and len({*long}) == len(long)


class Friendly:
    """Answers each reply with the same word."""

    def reset(self, example: Any) -> None:
        pass

    def step(self, reply: str) -> tuple[str, float, bool]:
        return " yes", 0.0, False


def test_one_turn_gives_the_tokens_of_a_run_without_an_environment(process):
    process.load(1)
    process.pool.submit(choose, None).result()
    expected = process.ask("sample", prompts(), SAMPLING)
    process.load(1)
    found = play(process, environment=judge(max_turns=1))
    assert expected.environment_mask is None and not found.environment_mask.any()
    for name in ("response_ids", "response_mask", "behaviour_logprobs"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_replies_have_at_most_reply_tokens(process):
    process.load(1)
    found = play(process, environment=judge(reply_tokens=3))
    lengths = [end - start for *_, start, end in replies(found)]
    assert max(lengths) == 3 and len(lengths) == found.episode["turns"].sum()


def test_an_episode_does_not_wait_for_the_replies_of_others(process):
    process.load(1)
    found = play(process)
    steps = process.pool.submit(noted).result()
    assert len(steps) == len({*steps}) == found.episode["turns"].sum() - found.episode["cut"].sum()
    last_of_first_turns = max(i for i, (_, _, turn) in enumerate(steps) if turn == 1)
    assert max(turn for _, _, turn in steps[:last_of_first_turns]) >= 3


@pytest.mark.parametrize("swap", [3, 9])
def test_with_in_flight_updates_a_turn_reads_no_keys_of_the_weights_before_its_start(process, swap):
    process.load(1)
    new = deepcopy(process.model)
    process.load(0)
    process.pool.submit(choose, judge()).result()
    manifest = process.shared.write(new.state_dict().items(), 1)
    found = process.pool.submit(ask_in_flight, manifest, swap, prompts(), SAMPLING).result()
    process.shared.release(manifest)
    check_masks_and_rewards(found)
    versions = found.token_versions
    assert not versions[~found.response_mask].any()
    kinds, after = set(), set()
    for reply in replies(found):
        n, k, start, end = reply
        own = versions[n, k, start:end].tolist()
        olds = own.count(0)
        assert own == [0] * olds + [1] * (len(own) - olds)
        assert start or olds == min(swap, len(own)), "the first reply starts at the first step"
        expected = reply_logprobs(process.model, new, found, reply, olds)
        torch.testing.assert_close(found.behaviour_logprobs[n, k, start:end], expected, rtol=0, atol=1e-4)
        kinds.add((olds > 0, olds < len(own)))
        if start and not olds and versions[n, k, 0] == 0:
            after.add(int(found.prompt_mask[n].sum()) >= BLOCK)
    assert kinds == {(True, False), (True, True), (False, True)}, "old, mixed and new replies"
    assert after == {False, True}, "also of prompts with keys in the cache"
    later = play(process)
    assert later.version == 1
    for reply in replies(later):
        n, k, start, end = reply
        expected = reply_logprobs(new, new, later, reply, 0)
        torch.testing.assert_close(later.behaviour_logprobs[n, k, start:end], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fails", [1, 2])
def test_an_error_of_the_class_reaches_the_caller_and_the_sampler_stays_usable(process, fails):
    process.load(1)
    before = play(process)
    with pytest.raises(RunError, match="Noted must .* in step .*KeyError: 'secret'.*correct the class"):
        play(process, environment=judge(arguments={"fails": fails}))
    assert process.pool.submit(unfinished).result() == 0
    assert same(before, play(process))
    process.load(0)
    assert play(process).version == 0


def noted() -> list[tuple[int, int, int]]:
    return STEPS


def unfinished() -> int:
    engine = SAMPLER[0].llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    return int(engine.get_num_unfinished_requests() + scheduler.get_num_unfinished_requests())
