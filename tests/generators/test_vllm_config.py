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
from rlhf.generators.vllm.sampler import VLLMSampler, compare, tensors
from rlhf.generators.weights import CudaIpc, Nccl, SharedWeights, TransferError
from rlhf.processes.ranks import ALONE
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose, run_name
from tests.tiny_models import tiny_config, tiny_lm, tiny_tokenizer

MISTAKES = {
    "generator.memory=0": "generator.memory must be > 0 and <= 1",
    "generator.memory=1.5": "set generator.memory=null",
    "generator.max_num_seqs=0": "generator.max_num_seqs must be >= 1",
    "generator.tensor_parallel_size=0": "generator.tensor_parallel_size must be >= 1",
    "generator.devices=[1,2]": "generator.devices must name",
    "generator.devices=[-1]": "set generator.devices=null",
    "generator.temperature=0.001": "generator.temperature must be >= 0.01",
    "eval.temperature=0.005": "set eval.temperature=0.01",
    "generator.top_p=0.9": "generator.top_p must be off for training",
    "generator.transfer=ipc": "generator.transfer must not be ipc",
    "generator.transfer=nccl backend.device=cpu": "set generator.transfer=auto",
    "generator=vllm_colocated generator.tensor_parallel_size=2 generator.transfer=ipc": "transfer must",
    "generator=vllm_colocated generator.transfer=nccl": "set generator.transfer=auto",
    "generator=vllm_colocated schedule.max_lag=1": "schedule.max_lag must be 0",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_setting_is_reported_in_one_line_with_its_remedy(mistake):
    (problem,) = validate.problems(compose(["generator=vllm", *mistake.split()]))
    assert MISTAKES[mistake] in problem and "\n" not in problem


def test_default_settings_are_valid_and_several_ranks_or_a_missing_vllm_are_not(monkeypatch):
    for words in ("generator=vllm", "generator=vllm_colocated", "generator=vllm schedule.max_lag=1"):
        assert not validate.problems(compose(words.split()))
    names = {run_name(compose(["generator=vllm", f"generator.transfer={way}"])) for way in ("auto", "nccl")}
    assert len(names) == 1, "the transfer does not change the run name"
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone, each = (compose(["generator=vllm_colocated", f"generator.per_rank={x}"]) for x in (False, True))
    assert [text for text in validate.problems(alone) if "generator.per_rank=true" in text]
    assert not [text for text in validate.problems(each) if "per_rank" in text]
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = validate.problems(compose(["generator=vllm"]))
    assert "pip install -e '.[vllm]'" in problem


@pytest.mark.process
def test_composing_imports_no_torch_and_the_trainers_side_no_vllm():
    program = (
        "import sys; from rlhf.words.compose import compose; from rlhf.checks import check as validate;"
        "assert not validate.problems(compose(['generator=vllm', 'schedule.max_lag=1']));"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules);"
        "import rlhf.stages.run, rlhf.generators.vllm.generator; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def made_of(section, context=None):
    """Return the context of a generator instead of the generator; None for other parts."""
    return context if isinstance(context, GeneratorContext) else None


def context_of(words, folder, monkeypatch, model=None):
    """Return a config, and the context of its generator."""
    cfg = compose([*words, "model.policy=somewhere", "generator.response_length=20", "seed=5"])
    engine = SimpleNamespace(
        module=SimpleNamespace(model=model or tiny_lm()),
        borrow_policy=None,
        phases=None,
        tokenizer=tiny_tokenizer(),
    )
    monkeypatch.setattr("rlhf.assembly.training.make", made_of)
    return cfg, build_generator(cfg, engine, RunFolder(folder), ALONE)


def test_the_factory_takes_its_settings_from_the_run(monkeypatch, tmp_path):
    cfg, context = context_of(["generator=vllm"], tmp_path, monkeypatch)
    made, tokenizer = factory(cfg.generator, context, gpu=False), context.tokenizer
    assert made.max_model_len == cfg.task.max_prompt_tokens + 20
    assert (made.stop_ids, made.pad_id, made.seed) == ((tokenizer.eos_token_id,), tokenizer.pad_token_id, 5)
    assert (made.memory, made.enforce_eager, made.dtype, made.sleeps) == (0.1, True, "float32", False)
    made = factory(cfg.generator, context, gpu=True)
    assert (made.memory, made.enforce_eager, made.sleeps) == (0.9, False, False)
    assert made.environment is None
    environment = EnvironmentFactory(address="my_env:Game", turns=None)
    made = factory(cfg.generator, replace(context, environment=environment), gpu=False)
    assert made.environment is environment


@pytest.mark.parametrize(
    ("name", "gpus", "shared"),
    [("vllm_colocated", 1, True), ("vllm_colocated", 0, False), ("vllm", 2, False)],
)
def test_only_a_generator_on_the_trainers_gpu_frees_its_memory(monkeypatch, tmp_path, name, gpus, shared):
    device = torch.device("cuda" if gpus else "cpu", 0)
    model = SimpleNamespace(device=device, get_output_embeddings=lambda: None)
    cfg, context = context_of([f"generator={name}"], tmp_path, monkeypatch, model)
    assert factory(cfg.generator, context, gpu=gpus > 0).sleeps == shared
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("rlhf.generators.vllm.generator.start", lambda *arguments: arguments[-1])
    single = build(cfg.generator, context)
    assert (single.func, single.args) == (ColocatedGenerator, (device,)) if shared else single is None


def settings(name, size=1, devices=None, per_rank=False, replicas=1):
    generator = compose([f"generator={name}", f"generator.tensor_parallel_size={size}"]).generator
    generator.devices, generator.per_rank, generator.replicas = devices, per_rank, replicas
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
        # the second of two ranks
        (settings("vllm"), 3, (2,)),
        (settings("vllm", per_rank=True), 4, (3,)),
        (settings("vllm", 2, per_rank=True), 6, (4, 5)),
        (settings("vllm_colocated", per_rank=True), 2, (1,)),
    ],
)
def test_vllm_uses_the_gpus_after_the_trainers_or_shares_the_trainers_gpus(config, gpus, placed, monkeypatch):
    if config.per_rank or gpus == 3:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", "1")
    assert place(config, gpus) == placed
    assert visible((1, 2), None) == "1,2" and visible((1,), "4,7") == "7"


@pytest.mark.parametrize(
    ("config", "gpus", "said"),
    [
        (settings("vllm"), 1, "set generator=vllm_colocated"),
        (settings("vllm", 2), 2, "must have 2 of the 2 GPUs"),
        (settings("vllm", replicas=2), 2, "must have 2 of the 2 GPUs"),
        (settings("vllm", devices=[0]), 2, "got [0]"),
        (settings("vllm", devices=[2]), 2, "got [2]"),
        (settings("vllm_colocated", 2), 1, "must have 2 of the 1 GPUs here, got [0, 1]"),
        (settings("vllm", 2), 0, "generator.tensor_parallel_size=1"),
    ],
)
def test_missing_gpus_and_gpus_of_the_trainer_are_rejected(config, gpus, said):
    with pytest.raises(UserError) as error:
        place(config, gpus)
    assert said in str(error.value)


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def chosen(name, transfer, devices, trainer=CUDA, nccl=True):
    size = f"generator.tensor_parallel_size={max(1, len(devices))}"
    config = compose([*f"generator={name}".split(), f"generator.transfer={transfer}", size]).generator
    return route(config, devices, trainer, nccl).value


@pytest.mark.parametrize(
    ("name", "devices", "trainer", "nccl", "way"),
    [
        ("vllm", (), CPU, False, SharedWeights),
        ("vllm_colocated", (), CPU, False, SharedWeights),
        ("vllm", (1,), CUDA, True, Nccl),
        ("vllm", (1, 2), CUDA, True, Nccl),
        ("vllm", (1,), CUDA, False, SharedWeights),
        ("vllm", (1,), CPU, True, SharedWeights),
        ("vllm_colocated", (0,), CUDA, True, CudaIpc),
        ("vllm_colocated", (0,), CPU, True, SharedWeights),
        ("vllm_colocated", (0, 1), CUDA, True, SharedWeights),
        ("vllm generator.replicas=2", (1,), CUDA, True, SharedWeights),
    ],
)
def test_the_default_transfer_depends_on_the_devices(name, devices, trainer, nccl, way):
    found = chosen(name, "auto", devices, trainer, nccl)
    assert type(build_store(Transfer[found], CPU, torch.bfloat16, workers=2)) is way
    assert chosen(name, "shared_memory", devices, trainer, nccl) == "shared_memory"


def test_a_requested_transfer_is_used_or_rejected():
    assert chosen("vllm_colocated", "ipc", (0,), nccl=False) == "ipc"
    assert chosen("vllm", "nccl", (1,)) == "nccl"
    no_gpu = ("vllm_colocated", "ipc", (), CPU), ("vllm", "nccl", (0,), CPU)
    for words in (*no_gpu, ("vllm", "nccl", (1,), CUDA, False)):
        with pytest.raises(UserError, match="set generator.transfer=auto"):
            chosen(*words)


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
        ({"lm_head.weight": None}, "lm_head.weight: missing instead of [97, 32]"),
        ({"adapter": torch.zeros(2)}, "adapter: [2] instead of unknown"),
        ({"lm_head.weight": torch.zeros(97, 31)}, "lm_head.weight: [97, 31] instead of [97, 32]"),
        (dict.fromkeys(tiny_lm().state_dict()), "and 25 more"),
    ],
)
def test_weights_of_another_model_are_rejected_with_the_tensor_name(change, said):
    weights = {**tiny_lm().state_dict(), **change}
    manifest = SharedWeights().write(((k, v) for k, v in weights.items() if v is not None), 4)
    with pytest.raises(TransferError) as error:
        compare(manifest, *tensors(tiny_config("gpt_neox"), False))
    assert said in str(error.value) and "version 4" in str(error.value)


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


def sampler_of(manifest=None, level=None, lost=(), sleeps=True):
    """Return a sampler of the tiny model with a replaced vLLM, and the manifest of its weights."""
    model = tiny_lm()
    manifest = manifest or SharedWeights().write(model.state_dict().items(), 3)
    sampler = object.__new__(VLLMSampler)
    sampler.settings, sampler.asleep, sampler.level = SimpleNamespace(sleeps=sleeps), set(), level
    sampler.tensors, sampler.llm = tensors(model.config, False), Recorded(manifest, lost)
    return sampler, manifest


@pytest.mark.parametrize("level", [None, 1, 2])
def test_a_sleeping_sampler_wakes_only_its_weights_for_a_load(level):
    sampler, manifest = sampler_of(level=level, sleeps=level is not None)
    sampler.sleep()
    if level == 2:
        with pytest.raises(AssertionError, match="load weights before each request"):
            sampler.sample(None, None)
    assert sampler.load(manifest) == manifest.checksums()
    assert sampler.level == level
    sampler.wake("weights", "kv_cache")
    load = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    asked = [name for name in sampler.llm.asked if name not in ("get_weight_version", "collective_rpc")]
    sleeping = [f"sleep {level}", "wake_up weights", *load, "wake_up kv_cache"]
    assert asked == (load if level is None else sleeping)


@pytest.mark.parametrize(("lost", "level"), [([[], []], 2), ([[], ["torch.float32 [12]"]], 1)])
def test_weights_are_discarded_only_if_a_load_restores_all_tensors(lost, level, caplog):
    sampler, manifest = sampler_of(lost=lost)
    sampler.load(manifest)
    assert sampler.level == level
    assert ("torch.float32 [12]" in caplog.text) == (level == 1)


def test_vllm_joins_a_new_group_before_it_receives_the_described_weights():
    state = tiny_lm().state_dict()
    manifest = Nccl(torch.device("cpu"), torch.float32, workers=2).write(state.items(), 3)
    sampler, _ = sampler_of(manifest, sleeps=False)
    sampler.load(replace(manifest, update={}, group={"world_size": 3}))
    sampler.load(replace(manifest, update={"ipc_handles": ["a handle"]}))
    shapes = [list(tensor.shape) for tensor in state.values()]
    info = {"names": list(state), "dtype_names": ["float32"] * len(state), "shapes": shapes}
    assert sampler.llm.told == [
        ("init_weight_transfer_engine", {"init_info": {"world_size": 3}}),
        ("update_weights", {"update_info": info}),
        ("update_weights", {"update_info": {**info, "ipc_handles": ["a handle"]}}),
    ]
