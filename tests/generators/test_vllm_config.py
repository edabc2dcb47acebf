"""Tests of generator=vllm without vLLM: settings, GPUs, choice of the transfer, and checks of the weights."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf.assembly.training import build_generator
from rlhf.checks import check as validate
from rlhf.config.generators import Transfer
from rlhf.core.errors import UserError
from rlhf.environments.environment import EnvironmentFactory
from rlhf.generators.generator import GeneratorContext
from rlhf.generators.vllm.generator import (
    ColocatedGenerator,
    build,
    build_store,
    factory,
    place,
    route,
    visible,
)
from rlhf.generators.vllm.sampler import VLLMSampler, compare, pad, tensors
from rlhf.generators.weights import CudaIpc, Nccl, SharedWeights, TransferError
from rlhf.processes.ranks import ALONE
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose
from rlhf.words.identity import run_name
from tests.tiny_models import tiny_config, tiny_lm, tiny_tokenizer

MISTAKES = {
    "generator.memory=0": "generator.memory must be > 0 and <= 1",
    "generator.memory=1.5": "set generator.memory=null",
    "generator.max_num_seqs=0": "generator.max_num_seqs must be >= 1",
    "generator.tensor_parallel_size=0": "generator.tensor_parallel_size must be >= 1",
    "generator.devices=[1,2]": "generator.devices must name generator.tensor_parallel_size = 1 GPUs",
    "generator.devices=[-1]": "got [-1]; set generator.devices=null",
    "generator.temperature=0.001": "generator.temperature must be >= 0.01 with generator=vllm",
    "eval.temperature=0.005": "(vLLM raises lower values to 0.01), got 0.005; set eval.temperature=0.01",
    "generator.top_p=0.9": "generator.top_p must be off for training",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_setting_is_reported_in_one_line_with_its_remedy(mistake):
    (problem,) = validate.problems(compose(["generator=vllm", mistake]))
    assert MISTAKES[mistake] in problem and "\n" not in problem


@pytest.mark.parametrize("name", ["vllm", "vllm_colocated"])
def test_the_default_settings_are_valid(name):
    assert not validate.problems(compose([f"generator={name}"]))


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = validate.problems(compose(["generator=vllm"]))
    assert "generator=vllm needs the package vLLM" in problem and "pip install -e '.[vllm]'" in problem


def test_vllm_colocated_requires_max_lag_0():
    (problem,) = validate.problems(compose(["generator=vllm_colocated", "schedule.max_lag=1"]))
    assert "schedule.max_lag must be 0 with generator=vllm_colocated" in problem
    assert not validate.problems(compose(["generator=vllm", "schedule.max_lag=1"]))


@pytest.mark.process
def test_composing_imports_neither_vllm_nor_torch():
    program = (
        "import sys; from rlhf.words.compose import compose; from rlhf.checks import check as validate;"
        "assert not validate.problems(compose(['generator=vllm', 'schedule.max_lag=1']));"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.process
def test_the_trainers_side_imports_no_vllm():
    program = "import sys, rlhf.stages.run, rlhf.generators.vllm.generator; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def made_of(section, context=None):
    """Return the context of a generator instead of the generator; None for other parts."""
    return context if isinstance(context, GeneratorContext) else None


def test_the_factory_takes_its_settings_from_the_run(monkeypatch, tmp_path):
    cfg = compose(["generator=vllm", "model.policy=somewhere", "generator.response_length=20", "seed=5"])
    tokenizer = tiny_tokenizer()
    engine = SimpleNamespace(module=SimpleNamespace(model=tiny_lm()), borrow_policy=None, phases=None)
    monkeypatch.setattr("rlhf.assembly.training.make", made_of)
    context = build_generator(cfg, engine, tokenizer, RunFolder(tmp_path), ALONE)
    made = factory(cfg.generator, context, gpu=False)
    assert made.max_model_len == cfg.task.max_prompt_tokens + 20
    assert (made.stop_ids, made.pad_id, made.seed) == ((tokenizer.eos_token_id,), tokenizer.pad_token_id, 5)
    assert (made.memory, made.enforce_eager, made.dtype, made.sleeps) == (0.1, True, "float32", False)
    made = factory(cfg.generator, context, gpu=True)
    assert (made.memory, made.enforce_eager, made.sleeps) == (0.9, False, False)
    assert made.environment is None
    environment = EnvironmentFactory(address="my_env:Game", turns=None)
    made = factory(cfg.generator, replace(context, environment=environment), gpu=False)
    assert made.environment is environment
    shared = compose(["generator=vllm_colocated"]).generator
    assert factory(shared, context, gpu=True).sleeps
    assert not factory(shared, context, gpu=False).sleeps


@pytest.mark.parametrize(
    ("name", "gpus", "shared"),
    [("vllm_colocated", 1, True), ("vllm_colocated", 0, False), ("vllm", 2, False)],
)
def test_only_a_generator_on_the_trainers_gpu_frees_its_memory(monkeypatch, tmp_path, name, gpus, shared):
    cfg = compose([f"generator={name}", "model.policy=somewhere"])
    device = torch.device("cuda" if gpus else "cpu", 0)
    model = SimpleNamespace(device=device, get_output_embeddings=lambda: None)
    engine = SimpleNamespace(module=SimpleNamespace(model=model), borrow_policy=None, phases=None)
    monkeypatch.setattr("rlhf.assembly.training.make", made_of)
    context = build_generator(cfg, engine, tiny_tokenizer(), RunFolder(tmp_path), ALONE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("rlhf.generators.vllm.generator.start", lambda *arguments: arguments[-1])
    single = build(cfg.generator, context)
    assert (single.func, single.args) == (ColocatedGenerator, (device,)) if shared else single is None


def settings(
    name: str, size: int = 1, devices: list[int] | None = None, per_rank: bool = False, replicas: int = 1
):
    words = [f"generator={name}", f"generator.tensor_parallel_size={size}"]
    generator = compose(words).generator
    generator.devices = devices
    generator.per_rank = per_rank
    generator.replicas = replicas
    return generator


@pytest.mark.parametrize(
    ("config", "gpus", "placed"),
    [
        (settings("vllm"), 0, ()),
        (settings("vllm"), 2, (1,)),
        (settings("vllm", 2), 4, (1, 2)),
        (settings("vllm", 2, replicas=3), 8, (1, 2, 3, 4, 5, 6)),
        (settings("vllm", replicas=3), 0, ()),
        (settings("vllm", devices=[3]), 4, (3,)),
        (settings("vllm_colocated"), 1, (0,)),
        (settings("vllm_colocated", 2), 2, (0, 1)),
    ],
)
def test_vllm_uses_the_gpus_after_the_trainers_or_shares_the_trainers_gpus(config, gpus, placed):
    assert place(config, gpus) == placed


@pytest.mark.parametrize(
    ("config", "gpus", "placed"),
    [
        (settings("vllm"), 3, (2,)),
        (settings("vllm", per_rank=True), 4, (3,)),
        (settings("vllm", 2, per_rank=True), 6, (4, 5)),
        (settings("vllm_colocated", per_rank=True), 2, (1,)),
    ],
)
def test_vllm_gpus_of_the_second_of_two_ranks(monkeypatch, config, gpus, placed):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert place(config, gpus) == placed


def test_vllm_colocated_with_several_ranks_requires_per_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone, each = (compose(["generator=vllm_colocated", f"generator.per_rank={x}"]) for x in (False, True))
    assert [text for text in validate.problems(alone) if "generator.per_rank=true" in text]
    assert not [text for text in validate.problems(each) if "per_rank" in text]


@pytest.mark.parametrize(
    ("config", "gpus", "said"),
    [
        (settings("vllm"), 1, "set generator=vllm_colocated to share the trainer's"),
        (settings("vllm", 2), 2, "generator=vllm must have 2 of the 2 GPUs here, beside the first 1"),
        (
            settings("vllm", replicas=2),
            2,
            "generator=vllm must have 2 of the 2 GPUs here, beside the first 1",
        ),
        (settings("vllm", devices=[0]), 2, "got [0]"),
        (settings("vllm", devices=[2]), 2, "got [2]"),
        (
            settings("vllm_colocated", 2),
            1,
            "generator=vllm_colocated must have 2 of the 1 GPUs here, got [0, 1]",
        ),
        (settings("vllm", 2), 0, "without GPUs (torch finds no GPU), got null and 2"),
    ],
)
def test_missing_gpus_and_gpus_of_the_trainer_are_rejected(config, gpus, said):
    with pytest.raises(UserError) as error:
        place(config, gpus)
    assert said in str(error.value)


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def chosen(name, transfer, devices, trainer=CUDA, nccl=True):
    size = f"generator.tensor_parallel_size={max(1, len(devices))}"
    config = compose([f"generator={name}", f"generator.transfer={transfer}", size]).generator
    return route(config, devices, trainer, nccl).value


def test_replicas_receive_weights_through_shared_memory():
    assert route(settings("vllm"), (1, 2), CUDA, True).value == "nccl"
    assert route(settings("vllm", replicas=2), (1, 2), CUDA, True).value == "shared_memory"


@pytest.mark.parametrize(
    ("name", "devices", "trainer", "nccl", "way"),
    [
        ("vllm", (), CPU, False, "shared_memory"),
        ("vllm_colocated", (), CPU, False, "shared_memory"),
        ("vllm", (1,), CUDA, True, "nccl"),
        ("vllm", (1, 2), CUDA, True, "nccl"),
        ("vllm", (1,), CUDA, False, "shared_memory"),
        ("vllm", (1,), CPU, True, "shared_memory"),
        ("vllm_colocated", (0,), CUDA, True, "ipc"),
        ("vllm_colocated", (0,), CPU, True, "shared_memory"),
        ("vllm_colocated", (0, 1), CUDA, True, "shared_memory"),
    ],
)
def test_the_default_transfer_depends_on_the_devices(name, devices, trainer, nccl, way):
    assert chosen(name, "auto", devices, trainer, nccl) == way
    assert chosen(name, "shared_memory", devices, trainer, nccl) == "shared_memory"


def test_a_requested_transfer_is_used_or_rejected():
    assert chosen("vllm_colocated", "ipc", (0,), nccl=False) == "ipc"
    assert chosen("vllm", "nccl", (1,)) == "nccl"
    for words, said in (
        (("vllm_colocated", "ipc", (), CPU), "(the trainer is on cpu, vLLM on cpu), got ipc"),
        (("vllm", "nccl", (0,), CPU), "(the trainer is on cpu, vLLM on cuda), got nccl"),
        (("vllm", "nccl", (1,), CUDA, False), "must not be nccl where torch is built without NCCL"),
    ):
        with pytest.raises(UserError) as error:
            chosen(*words)
        assert said in str(error.value) and "set generator.transfer=auto" in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generator=vllm", "generator.transfer=ipc"], "not be ipc with generator=vllm (CUDA IPC shares"),
        (
            ["generator=vllm_colocated", "generator.transfer=ipc", "generator.tensor_parallel_size=2"],
            "not be ipc with generator.tensor_parallel_size above 1",
        ),
        (
            ["generator=vllm_colocated", "generator.transfer=nccl"],
            "not be nccl with generator=vllm_colocated",
        ),
        (
            ["generator=vllm", "generator.transfer=nccl", "backend.device=cpu"],
            "be auto or shared_memory with backend.device=cpu (ipc and nccl need weights on a GPU), got nccl",
        ),
    ],
)
def test_impossible_transfers_are_rejected_by_validation(words, said):
    (problem,) = validate.problems(compose(words))
    assert said in problem and problem.endswith("set generator.transfer=auto")


def test_the_transfer_does_not_change_the_run_name():
    names = {run_name(compose(["generator=vllm", f"generator.transfer={way}"])) for way in ("auto", "nccl")}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("way", "kind"), [("shared_memory", SharedWeights), ("ipc", CudaIpc), ("nccl", Nccl)]
)
def test_the_weight_store_matches_the_transfer(way, kind):
    assert type(build_store(Transfer[way], CPU, torch.bfloat16, workers=2)) is kind


def test_gpu_indices_refer_to_the_visible_gpus():
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
def test_weights_of_another_model_are_rejected_with_the_tensor_name(change, said):
    weights = tiny_lm().state_dict()
    change(weights)
    manifest = SharedWeights().write(weights.items(), 4)
    with pytest.raises(TransferError) as error:
        compare(manifest, *tensors(tiny_config("gpt_neox"), False))
    assert said in str(error.value) and "version 4" in str(error.value)


def test_ragged_completions_are_padded_on_the_right():
    replies = [(tokens, [-token / 2 for token in tokens]) for tokens in ((5, 1), (4, 6, 8))]
    ids, mask, logprobs = pad(replies, 3, pad_id=0)
    assert ids.tolist() == [[5, 1, 0], [4, 6, 8]] and ids.dtype == torch.int64
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert logprobs.tolist() == [[-2.5, -0.5, 0.0], [-2.0, -3.0, -4.0]] and logprobs.dtype == torch.float32


class Recorded:
    """A replacement for vLLM that records the calls of its methods."""

    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

    def __init__(self, manifest, lost=()):
        self.asked, self.told = [], []
        self.manifest, self.lost = manifest, lost

    def __getattr__(self, name):
        answers = {
            "get_weight_version": str(self.manifest.version),
            "reset_prefix_cache": True,
            "collective_rpc": [self.manifest.checksums()],
        }

        def answer(*words, **others):
            details = {"wake_up": words and words[0], "sleep": map(str, others.values())}.get(name, ())
            self.asked.append(" ".join([name, *details]))
            if words == ("unrestored",):
                return self.lost
            if name in ("init_weight_transfer_engine", "update_weights"):
                self.told.append((name, *words))
            return answers.get(name)

        return answer


@pytest.mark.parametrize("level", [None, 1, 2])
def test_a_sleeping_sampler_wakes_only_its_weights_for_a_load(level):
    model, shared = tiny_lm(), SharedWeights()
    manifest = shared.write(model.state_dict().items(), 3)
    sampler = object.__new__(VLLMSampler)
    sampler.settings, sampler.asleep = SimpleNamespace(sleeps=level is not None), set()
    sampler.tensors, sampler.llm, sampler.level = tensors(model.config, False), Recorded(manifest), level
    sampler.sleep()
    assert sampler.load(manifest) == manifest.checksums()
    assert sampler.level == level
    sampler.wake("weights", "kv_cache")
    load = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    asked = [name for name in sampler.llm.asked if name not in ("get_weight_version", "collective_rpc")]
    sleeping = [f"sleep {level}", "wake_up weights", *load, "wake_up kv_cache"]
    assert asked == (load if level is None else sleeping)
    shared.close()


def test_a_sampler_without_its_discarded_weights_answers_no_request():
    sampler = object.__new__(VLLMSampler)
    sampler.settings, sampler.level = SimpleNamespace(sleeps=True), 2
    sampler.llm = Recorded(SharedWeights().write(tiny_lm().state_dict().items(), 3))
    sampler.sleep()
    with pytest.raises(AssertionError, match="load weights before each request"):
        sampler.sample(None, None)


@pytest.mark.parametrize(("lost", "level"), [([[], []], 2), ([[], ["torch.float32 [12]"]], 1)])
def test_weights_are_discarded_only_if_a_load_restores_all_tensors(lost, level, caplog):
    model = tiny_lm()
    manifest = SharedWeights().write(model.state_dict().items(), 3)
    sampler = object.__new__(VLLMSampler)
    sampler.settings, sampler.asleep, sampler.level = SimpleNamespace(sleeps=True), set(), None
    sampler.tensors, sampler.llm = tensors(model.config, False), Recorded(manifest, lost)
    sampler.load(manifest)
    assert sampler.level == level
    assert ("torch.float32 [12]" in caplog.text) == (level == 1)


def test_vllm_joins_a_new_group_before_it_receives_the_described_weights():
    model, told = tiny_lm(), []
    weights = Nccl(torch.device("cpu"), torch.float32, workers=2)
    manifest = weights.write(model.state_dict().items(), 3)
    sampler = object.__new__(VLLMSampler)
    sampler.settings, sampler.asleep, sampler.level = SimpleNamespace(sleeps=False), set(), None
    sampler.tensors, sampler.llm = tensors(model.config, False), Recorded(manifest)
    sampler.llm.told = told
    sampler.load(replace(manifest, update={}, group={"world_size": 3}))
    sampler.load(replace(manifest, update={"ipc_handles": ["a handle"]}))
    names = list(model.state_dict())
    shapes = [list(tensor.shape) for tensor in model.state_dict().values()]
    info = {"names": names, "dtype_names": ["float32"] * len(names), "shapes": shapes}
    assert told == [
        ("init_weight_transfer_engine", {"init_info": {"world_size": 3}}),
        ("update_weights", {"update_info": info}),
        ("update_weights", {"update_info": {**info, "ipc_handles": ["a handle"]}}),
    ]
