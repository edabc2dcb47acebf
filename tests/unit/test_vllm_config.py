"""generator=vllm before vLLM starts: its settings, its GPUs, and what it compares weights with."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rlhf import validate
from rlhf.compose import compose
from rlhf.errors import UserError
from rlhf.generators.transfer import SharedWeights, TransferError
from rlhf.generators.vllm import VLLMSampler, compare, pad, place, tensors, visible
from tests.unit.tiny_models import tiny_config, tiny_lm, tiny_tokenizer

MISTAKES = {
    "generator.memory=0": "generator.memory must be > 0 and <= 1",
    "generator.memory=1.5": "set generator.memory=null",
    "generator.max_num_seqs=0": "generator.max_num_seqs must be >= 1",
    "generator.tensor_parallel_size=0": "generator.tensor_parallel_size must be >= 1",
    "generator.devices=[1,2]": "generator.devices must name as many GPUs as generator.tensor_parallel_size",
    "generator.devices=[-1]": "got [-1]; set generator.devices=null",
    "generator.temperature=0.001": "generator.temperature must be >= 0.01 with generator=vllm",
    "eval.temperature=0.005": "(vLLM raises lower ones to that), got 0.005; set eval.temperature=0.01",
    "generator.top_p=0.9": "generator.top_p must be off for training",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_with_its_remedy(mistake):
    (problem,) = validate.problems(compose(["generator=vllm", mistake]))
    assert MISTAKES[mistake] in problem and "\n" not in problem


@pytest.mark.parametrize("name", ["vllm", "vllm_colocated"])
def test_the_defaults_are_sound(name):
    assert not validate.problems(compose([f"generator={name}"]))


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = validate.problems(compose(["generator=vllm"]))
    assert "generator=vllm needs vLLM" in problem and "pip install 'rlhf[vllm]'" in problem


def test_a_generator_that_sleeps_while_training_is_never_late():
    (problem,) = validate.problems(compose(["generator=vllm_colocated", "schedule.max_lag=1"]))
    assert "schedule.max_lag must be 0 with generator=vllm_colocated" in problem
    assert not validate.problems(compose(["generator=vllm", "schedule.max_lag=1"]))


def test_composing_imports_neither_vllm_nor_torch():
    program = (
        "import sys; from rlhf.compose import compose; from rlhf import validate;"
        "assert not validate.problems(compose(['generator=vllm', 'schedule.max_lag=1']));"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_trainers_side_imports_no_vllm():
    program = "import sys, rlhf.run, rlhf.generators.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_factory_takes_its_sizes_from_the_run():
    cfg = compose(["generator=vllm", "model.policy=somewhere", "generator.response_length=20", "seed=5"])
    tokenizer = tiny_tokenizer()
    made = cfg.generator.factory(cfg, tokenizer, gpu=False)
    assert made.max_model_len == cfg.task.max_prompt_tokens + 20
    assert (made.stop_ids, made.pad_id, made.seed) == ((tokenizer.eos_token_id,), tokenizer.pad_token_id, 5)
    assert (made.memory, made.enforce_eager, made.dtype, made.sleeps) == (0.1, True, "float32", False)
    made = cfg.generator.factory(cfg, tokenizer, gpu=True)
    assert (made.memory, made.enforce_eager, made.sleeps) == (0.9, False, False)
    shared = compose(["generator=vllm_colocated"]).generator
    assert shared.factory(cfg, tokenizer, gpu=True).sleeps
    assert not shared.factory(cfg, tokenizer, gpu=False).sleeps


def settings(name: str, size: int = 1, devices: list[int] | None = None):
    words = [f"generator={name}", f"generator.tensor_parallel_size={size}"]
    generator = compose(words).generator
    generator.devices = devices
    return generator


@pytest.mark.parametrize(
    ("config", "gpus", "placed"),
    [
        (settings("vllm"), 0, ()),
        (settings("vllm"), 2, (1,)),
        (settings("vllm", 2), 4, (1, 2)),
        (settings("vllm", devices=[3]), 4, (3,)),
        (settings("vllm_colocated"), 1, (0,)),
        (settings("vllm_colocated", 2), 2, (0, 1)),
    ],
)
def test_gpus_are_those_after_the_trainers_or_its_own(config, gpus, placed):
    assert place(config, gpus) == placed


@pytest.mark.parametrize(
    ("config", "gpus", "said"),
    [
        (settings("vllm"), 1, "set generator=vllm_colocated to share the trainer's"),
        (settings("vllm", 2), 2, "generator=vllm must have 2 of the 2 GPUs here, beside the first 1"),
        (settings("vllm", devices=[0]), 2, "got [0]"),
        (settings("vllm", devices=[2]), 2, "got [2]"),
        (
            settings("vllm_colocated", 2),
            1,
            "generator=vllm_colocated must have 2 of the 1 GPUs here, got [0, 1]",
        ),
        (settings("vllm", 2), 0, "without GPUs (torch finds none), got null and 2"),
    ],
)
def test_gpus_that_are_not_there_or_taken_are_refused(config, gpus, said):
    with pytest.raises(UserError) as error:
        place(config, gpus)
    assert said in str(error.value)


def test_gpus_are_counted_among_those_that_are_visible():
    assert visible((1, 2), None) == "1,2"
    assert visible((1,), "4,7") == "7"


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_trainers_weights_are_those_that_vllm_expects(kind, tied):
    model = tiny_lm(kind, tie_word_embeddings=tied)
    shapes, required = tensors(model.config, False)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert required == {name for name, _ in model.named_parameters()}
    assert tied == ("lm_head.weight" not in required)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("lm_head.weight"), "lm_head.weight: missing"),
        (lambda weights: weights.update({"adapter": torch.zeros(2)}), "adapter: unknown"),
        (
            lambda weights: weights.update({"lm_head.weight": torch.zeros(97, 31)}),
            "lm_head.weight: shape [97, 31] instead of [97, 32]",
        ),
        (lambda weights: weights.clear(), "and 25 more"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(change, said):
    weights = tiny_lm().state_dict()
    change(weights)
    manifest = SharedWeights().write(weights.items(), 4)
    with pytest.raises(TransferError) as error:
        compare(manifest, *tensors(tiny_config("gpt_neox"), False))
    assert said in str(error.value) and "version 4" in str(error.value)


def test_ragged_completions_are_padded_on_the_right():
    def completion(*tokens):
        return SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=[-t / 2 for t in tokens]))

    ids, mask, logprobs = pad([completion(5, 1), completion(4, 6, 8)], 3, pad_id=0)
    assert ids.tolist() == [[5, 1, 0], [4, 6, 8]] and ids.dtype == torch.int64
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert logprobs.tolist() == [[-2.5, -0.5, 0.0], [-2.0, -3.0, -4.0]] and logprobs.dtype == torch.float32


class Recorded:
    """In place of vLLM: takes note of what it is asked."""

    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

    def __init__(self, manifest):
        self.asked = []
        self.manifest = manifest

    def __getattr__(self, name):
        answers = {
            "get_weight_version": str(self.manifest.version),
            "reset_prefix_cache": True,
            "collective_rpc": [self.manifest.checksums()],
        }

        def answer(*_, **__):
            self.asked.append(name)
            return answers.get(name)

        return answer


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_sampler_that_shares_the_gpu_is_awake_for_a_load_alone(sleeps):
    model, shared = tiny_lm(), SharedWeights()
    manifest = shared.write(model.state_dict().items(), 3)
    sampler = object.__new__(VLLMSampler)
    sampler.settings, sampler.sleeping = SimpleNamespace(sleeps=sleeps), False
    sampler.tensors, sampler.llm = tensors(model.config, False), Recorded(manifest)
    sampler.sleep()
    assert sampler.load(manifest) == manifest.checksums()
    load = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    asked = [name for name in sampler.llm.asked if name not in ("get_weight_version", "collective_rpc")]
    assert asked == (["sleep", "wake_up", *load, "sleep"] if sleeps else load)
    shared.close()
