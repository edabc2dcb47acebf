"""Tests of episodes that real vLLM samples: the facts of `tests/environments/test_episodes.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.environments.environment import EnvironmentFactory, Turns
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.models.forward import cache_argument
from rlhf.text.encoding import pad_prompts
from tests.end_to_end.test_vllm import HEADS, SAMPLER, Process, ask_in_flight
from tests.environments.test_episodes import Judge, check_masks_and_rewards, tokenizer
from tests.tiny_models import cache_of, tiny_lm

pytestmark = pytest.mark.forks(False)

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
    return EnvironmentFactory(
        address=f"{HERE}:{name}", turns=Turns(tokenizer(), "tool", 16), arguments=arguments, **settings
    )


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
        environment=judge(),
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
def check_logprobs(rollouts: Rollouts, old: PreTrainedModel, new: PreTrainedModel) -> None:
    """Check that `new` has sampled the tokens of version 1, and reads the cache of `old` in its replies only.

    Without versions, `new` has sampled all tokens.
    """
    for n, k, start, end in replies(rollouts):
        olds = 0
        if rollouts.token_versions is not None:
            versions = rollouts.token_versions[n, k, start:end].tolist()
            olds = versions.count(0)
            assert versions == [0] * olds + [1] * (len(versions) - olds)
        whole = torch.cat(
            [rollouts.prompt_ids[n][rollouts.prompt_mask[n]], rollouts.response_ids[n, k, :end]]
        )
        first = len(whole) - (end - start)
        seen = first + olds - 1 if olds else 0  # the token before is the first that `new` reads
        parts, cache = [], None
        if seen:
            found = old(whole[None, :seen], use_cache=True)
            parts, cache = [found.logits], cache_of(found)
        parts.append(new(whole[None, seen:], **cache_argument(new, cache)).logits)
        logprobs = (torch.cat(parts, 1)[0, first - 1 : -1] / SAMPLING.temperature).log_softmax(-1)
        expected = logprobs.gather(-1, whole[first:, None])[:, 0]
        sampled = rollouts.behaviour_logprobs[n, k, start:end]
        torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-4)


def test_episodes_have_the_masks_rewards_and_logprobs_of_a_plain_forward(process):
    for version in (0, 1):
        process.load(version)
        found = play(process, environment=judge(max_turns=4))
        check_masks_and_rewards(found)
        assert found.version == version and found.generate_s > 0 and found.token_versions is None
        assert found.episode["turns"].max() == 4
        check_logprobs(found, process.model, process.model)


def test_greedy_episodes_are_those_of_the_hugging_face_sampler(process):
    process.load(1)
    found = play(process, samples=1, temperature=0.0, purpose="eval")
    settings = HFSettings(
        stop_ids=[0], pad_id=1, batch_size=64, seed=7,
        environment=judge(),
    )  # fmt: skip
    other = HFGenerator(lambda: nullcontext(process.model), settings)
    expected = other.submit(prompts(), replace(SAMPLING, samples=1, temperature=1e-6)).result()
    assert same(found, expected, atol=float("inf")) and found.episode.keys() == expected.episode.keys()
    assert all(
        torch.equal(found.episode[name], expected.episode[name])
        for name in found.episode.keys() - {"seconds"}
    )
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


def in_flight(process: Process, swap: int, samples: int) -> tuple[Rollouts, PreTrainedModel]:
    """Return episodes with version 0 loaded first and version 1 before step `swap`, and the last model."""
    process.load(0)
    manifest, sampling = process.write(1), replace(SAMPLING, samples=samples)
    try:
        asked = process.pool.submit(ask_in_flight, manifest, swap, prompts(), sampling)
        return asked.result(), deepcopy(process.model)
    finally:
        process.shared.release(manifest)
        process.write(0)


@pytest.mark.parametrize(("swap", "samples"), [(3, 4), (9, 12)])  # 72 episodes: 64 start at the first step
def test_with_in_flight_updates_a_turn_reads_no_keys_of_the_weights_before_its_start(process, swap, samples):
    process.pool.submit(choose, judge()).result()
    found, new = in_flight(process, swap, samples)
    check_masks_and_rewards(found)
    check_logprobs(found, process.model, new)
    versions, kinds, after = found.token_versions, set(), set()
    assert not versions[~found.response_mask].any()
    for n, k, start, end in replies(found):
        olds = versions[n, k, start:end].tolist().count(0)
        if not start and n * samples + k < 64:
            assert olds == min(swap, end), "the first reply starts at the first step"
        kinds.add((olds > 0, olds < end - start))
        if not olds and versions[n, k, 0] == 0:
            after.add(int(found.prompt_mask[n].sum()) >= BLOCK)
    assert kinds == {(True, False), (True, True), (False, True)}, "old, mixed and new replies"
    assert after == {False, True}, "new replies after old ones, also where the cache has keys of the prompt"
    later = play(process)
    assert later.version == 1
    check_logprobs(later, new, new)


@pytest.mark.parametrize("late", [False, True])  # the error comes after a load
def test_an_error_of_the_class_reaches_the_caller_and_the_sampler_stays_usable(process, late):
    process.load(1)
    before = play(process)
    process.pool.submit(choose, judge(arguments={"fails": 2})).result()
    with pytest.raises(RunError, match="Noted must .* in step .*KeyError: 'secret'.*correct the class"):
        if late:
            in_flight(process, 2, 4)
        else:
            process.ask("sample", prompts(), SAMPLING)
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
