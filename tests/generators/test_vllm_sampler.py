"""Tests of the vLLM sampler with replacements of vLLM: its start, and the sequences of in-flight updates."""

import math
import sys
from collections import deque
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from rlhf.core.batch import Prompts, Sampling
from rlhf.core.errors import RunError
from rlhf.generators.vllm.sampler import Request, VLLMFactory, VLLMSampler, next_sequences, serve
from rlhf.memory.uses import GIB
from tests.tiny_models import tiny_config

# -- start -----------------------------------------------------------------------------------------


class Started:
    """A replacement for vLLM that records its arguments and the calls of its methods."""

    def __init__(self, **arguments):
        self.arguments, self.asked = arguments, []

    def __getattr__(self, name):
        def answer(*words, **others):
            self.asked.append(" ".join([name, *map(str, words), *map(str, others.values())]))

        return answer


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Return a function that starts a sampler on a replaced GPU of 16 GiB."""
    platform = SimpleNamespace(get_device_total_memory=lambda number: 16 * GIB)
    for name, contents in {
        "vllm": {"LLM": Started},
        "vllm.config": {"WeightTransferConfig": SimpleNamespace},
        "vllm.platforms": {"current_platform": platform},
        "rlhf.generators.vllm.worker_extension": {"NAME": "{}"},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    tiny_config("llama").save_pretrained(tmp_path)
    settings = {each.name: None for each in fields(VLLMFactory)} | {
        "model": str(tmp_path),
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "memory": 0.5,
        "tensor_parallel_size": 1,
        "gpu": True,
        "transfer": "nccl",
    }
    return lambda sleeps: VLLMSampler(VLLMFactory(**settings | {"sleeps": sleeps}))


def test_on_a_shared_gpu_vllm_starts_however_little_memory_is_free(start):
    found = start(sleeps=True).llm.arguments
    assert found["enable_sleep_mode"]
    assert 0 < found["kv_cache_memory_bytes"] < 8 * GIB
    assert 0 < 16 * GIB * found["gpu_memory_utilization"] < 1000, (
        "vLLM refuses to start with less free memory"
    )
    own = start(sleeps=False).llm.arguments
    assert own["gpu_memory_utilization"] == 0.5
    assert not own["enable_sleep_mode"] and "kv_cache_memory_bytes" not in own


def test_on_a_shared_gpu_vllm_frees_keys_and_values_from_its_start_to_the_first_request(start):
    sampler = start(sleeps=True)
    free = ["sleep 0", "release_kv_cache_memory"]
    assert sampler.llm.asked == free
    sampler.wake("weights")
    assert sampler.llm.asked == free, "the first load finds the weights in memory"
    sampler.wake("weights", "kv_cache")
    assert sampler.llm.asked == [*free, "wake_up ['kv_cache']"]
    assert start(sleeps=False).llm.asked == []


# -- in-flight updates -----------------------------------------------------------------------------


class Scheduling:
    """A replacement for vLLM that schedules like vLLM: running sequences first, prompts in chunks.

    Every step is one version of the weights: `sampler.version` is the number of the step.
    """

    def __init__(self, tokens, sequences):
        config = SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=sequences)
        self.vllm_config = SimpleNamespace(scheduler_config=config)
        self.tokens, self.sequences = tokens, sequences
        self.llm_engine = self
        self.versioned = True  # outputs have versions
        self.steps = 0
        self.unfinished = []
        self.most = 0  # largest number of sequences in a step
        self.late = {}  # prompt length of each sequence that did not start in the step after `enqueue`
        self.chunked = {}  # prompt length of each sequence whose prompt was encoded in several steps

    def get_weight_version(self):
        return str(self.steps)

    def reset_prefix_cache(self):
        return True

    def get_num_unfinished_requests(self):
        return len(self.unfinished)

    def has_unfinished_requests(self):
        return bool(self.unfinished)

    def enqueue(self, prompts, parameters, use_tqdm):
        for prompt, one in zip(prompts, parameters, strict=True):
            assert prompt.cache_salt == str(self.steps)
            prompt.left, prompt.out, prompt.length = len(prompt.prompt_token_ids), 0, one.max_tokens
            prompt.request_id, prompt.started = str(one.seed), False
            self.unfinished.append(prompt)
        return [f"{one.seed}-random" for one in parameters]

    def abort_request(self, request_ids):
        self.unfinished = [each for each in self.unfinished if each.request_id not in request_ids]

    def step(self):
        budget, done = self.tokens, []
        self.most = max(self.most, len(self.unfinished))
        assert self.most <= self.sequences
        for each in self.unfinished:
            size = len(each.prompt_token_ids)
            spent = min(each.left or 1, budget)
            if spent and not each.started and each.cache_salt != str(self.steps):
                self.late[each.request_id] = size
            each.started |= spent > 0
            budget -= spent
            if 0 < spent < each.left:
                self.chunked[each.request_id] = size
            each.left = max(0, each.left - spent)
            each.out += spent > 0 and each.left == 0
            if each.out == each.length:
                done.append(each)
        self.unfinished = [each for each in self.unfinished if each not in done]
        self.steps += 1
        return [finished(each, self.versioned) for each in done]


def finished(sequence, versioned):
    completion = SimpleNamespace(
        token_ids=[5] * sequence.length,
        logprobs=SimpleNamespace(logprobs=[-1.0] * sequence.length),
        weight_versions=[SimpleNamespace(version="7", start=0, end=sequence.length)] if versioned else None,
    )
    return SimpleNamespace(request_id=sequence.request_id, outputs=[completion])


def scheduled(monkeypatch, tokens, sequences):
    """Return a sampler with the replaced vLLM."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(TokensPrompt=SimpleNamespace))
    sampler = object.__new__(VLLMSampler)
    sampler.llm, sampler.level, sampler.asleep = Scheduling(tokens, sequences), None, set()
    sampler.settings = SimpleNamespace(pad_id=0, stop_ids=(1,), sleeps=False, environment=None)
    return sampler


def sampled(monkeypatch, lengths, tokens, sequences, response=20):
    """Return the replaced vLLM after in-flight sampling of 2 responses to prompts of the given lengths."""
    sampler = scheduled(monkeypatch, tokens, sequences)
    sampler.parameters = lambda sampling, example, k: SimpleNamespace(
        n=1, seed=2 * example + k, max_tokens=response - example % 3
    )
    longest, count = max(lengths), len(lengths)
    prompts = Prompts(
        index=torch.arange(count),
        texts=[""] * count,
        references=[""] * count,
        prompt_ids=torch.full((count, longest), 3),
        prompt_mask=torch.arange(longest) >= longest - torch.tensor(lengths)[:, None],
    )
    sampling = Sampling(samples=2, temperature=1.0, response_length=response, purpose="train")
    rollouts = sampler.sample(prompts, sampling, lambda: 0)
    expected = response - prompts.index[:, None].expand(-1, 2) % 3
    assert torch.equal(rollouts.response_mask.sum(-1), expected), "each sample has its own output"
    assert torch.equal(rollouts.token_versions, 7 * rollouts.response_mask)
    return sampler.llm


def test_with_in_flight_updates_each_prompt_is_encoded_in_the_step_after_its_start(monkeypatch):
    for lengths in ([512] * 64, [90, 1, 700, 33] * 16, [1024 - 32] * 8):
        found = sampled(monkeypatch, lengths, tokens=1024, sequences=32)
        assert not found.late and not found.chunked
    assert sampled(monkeypatch, [4] * 64, tokens=1024, sequences=32).most == 32, (
        "short prompts run in parallel"
    )


def test_with_in_flight_updates_a_prompt_of_several_steps_delays_no_other_sequence(monkeypatch):
    lengths = [100, 2500, 100, 100, 1000, 500] * 8
    found = sampled(monkeypatch, lengths, tokens=1024, sequences=32)
    assert not found.late
    assert 2500 in found.chunked.values() and set(found.chunked.values()) <= {1000, 2500}


def test_the_next_sequences_have_prompts_that_fit_into_the_step():
    waiting = deque(Request(number, [0] * length, None) for number, length in enumerate((3, 4, 9, 2, 2)))

    def numbers(count, tokens, longest):
        return [each.owner for each in next_sequences(waiting, count, tokens, longest)]

    assert numbers(4, 8, longest=10) == [0, 1], "7 of 8 tokens"
    assert numbers(0, 8, longest=10) == numbers(4, 0, longest=10) == numbers(4, 8, longest=10) == []
    assert numbers(4, 8, longest=7) == [2], "the first 8 of 9 tokens"
    assert numbers(1, math.inf, longest=math.inf) == [3]
    assert numbers(4, math.inf, longest=math.inf) == [4]


# -- a source of requests --------------------------------------------------------------------------


class Conversation:
    """A source whose owners ask again `pause` steps after each output, up to three times in all."""

    def __init__(self, vllm, pauses):
        self.vllm, self.pauses = vllm, pauses
        self.due = {(owner, 1): 0 for owner in range(len(pauses))}  # step at which each request is made
        self.outputs, self.waits = [], []

    def ask(self, wait):
        self.waits.append((wait, len(self.vllm.unfinished)))
        if wait and self.due:
            self.vllm.steps = max(self.vllm.steps, min(self.due.values()))  # time passes
        ready = [each for each, step in self.due.items() if step <= self.vllm.steps]
        for owner, turn in ready:
            del self.due[owner, turn]
            length = 30 if (owner, turn) == (0, 1) else 3
            yield Request(owner, [3] * 10 * turn, SimpleNamespace(seed=10 * turn + owner, max_tokens=length))

    def take(self, owner, output):
        turn = int(output.request_id) // 10
        self.outputs.append((owner, turn, self.vllm.steps))
        if turn < 3:
            self.due[owner, turn + 1] = self.vllm.steps + self.pauses[owner]


@pytest.mark.parametrize("in_flight", [False, True])
def test_no_request_waits_for_a_long_output_or_a_slow_answer_of_another(monkeypatch, in_flight):
    llm = scheduled(monkeypatch, tokens=1024, sequences=32).llm
    source = Conversation(llm, pauses=[0, 0, 5, 200])
    llm.versioned = in_flight
    serve(llm, source.ask, source.take, (lambda: 0) if in_flight else None)
    ends = {(owner, turn): step for owner, turn, step in source.outputs}
    assert len(ends) == 12 and not llm.late
    assert [ends[1, turn] for turn in (1, 2, 3)] == [3, 6, 9], "the next step follows each output"
    assert [ends[2, turn] for turn in (1, 2, 3)] == [3, 11, 19] and ends[0, 1] == 30
    assert ends[3, 2] == 3 + 200 + 3
    assert all(wait == (unfinished == 0) for wait, unfinished in source.waits), "it waits if nothing runs"


def test_after_an_error_of_the_source_vllm_has_no_unfinished_request(monkeypatch):
    llm = scheduled(monkeypatch, tokens=1024, sequences=32).llm
    source = Conversation(llm, pauses=[0, 0])

    def take(owner, output):
        raise RunError("the class fails")

    with pytest.raises(RunError, match="the class fails"):
        serve(llm, source.ask, take, lambda: 0)
    assert not llm.unfinished
