"""The memory that each device needs, part by part: ranks, generators, annotators, messages, optimizers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.generators import Reserved, WorkerConfig
from rlhf.config.models import Footprint, TorchConfig, zero
from rlhf.config.run import OptimConfig, Optimizer
from rlhf.core.machine import Machine
from rlhf.engines.deepspeed_engine import DeepSpeedEngine, hollow
from rlhf.engines.engine import build_optimizer, hidden_matrices
from rlhf.memory.plan import plan
from rlhf.memory.sizes import config_size, matrix_parameters, models
from rlhf.memory.uses import CONTEXT, EIGHT_BIT, GIB, GROUP, PROCESS, Part, Phase, Use
from rlhf.models import folder
from rlhf.models.modules import Policy, whole_weights
from rlhf.processes.ranks import ALONE, BUCKET
from rlhf.words.compose import compose
from tests.memory.plans import COUNT_2_8B, LAPTOP, PYTHIA_2_8B, TWO_GPUS, gpus, local_model, needs
from tests.tiny_models import KINDS, tiny_config, tiny_lm

BY_SEQUENCES = "backend.tokens=1000000"  # more than any micro-batch has: backend.micro_batch is the limit
LAG, ANNOTATE = "schedule.max_lag=1", "generator.annotate=true"
HEAD = 2560 * 50304  # parameters of the output head of Pythia 2.8b
MATRICES = 32 * 12 * 2560**2  # parameters of its matrices
ADAPTERS = 32 * ((2560 + 3 * 2560) + 2 * 2560 + 2 * (2560 + 10240))  # parameters of its adapters of rank 1


def test_the_default_run_needs_less_than_2_gib_of_ram():
    (use,) = plan(compose([])).uses
    assert use.device == "RAM" and use.fits and 0.6 * GIB < use.bytes < 2 * GIB
    ram = needs("")["RAM"]
    assert ram["policy: optimizer"] == 2 * ram["policy: weights"] == 2 * ram["reference: weights"]
    assert [phase.name for phase in use.phases] == ["training", "log-probs and scores", "sampling"]


def test_ppo_trains_a_second_model():
    ram = needs("algo=ppo")["RAM"]
    assert ram["value model: optimizer"] == 2 * ram["reward model: weights"]
    assert {f"training / {role}: {part}" for role in ("policy", "value model") for part in (
        "gradients", "activations")} <= ram.keys()  # fmt: skip


def test_each_kind_of_run_names_the_models_that_it_loads(tmp_path):
    judge = local_model(tmp_path / "judge", PYTHIA_2_8B)
    for words, roles in {
        "": ["policy", "reference", "reward model"],
        "algo=ppo": ["policy", "value model", "reference", "reward model"],
        "scorer=facts": ["policy", "reference"],
        "algo=sft": ["policy"],
        "algo=reward": ["reward model"],
        f"scorer@gold=reward_model gold.path={judge}": ["policy", "reference", "reward model", "judge"],
        "scorer=reward_and_answer task=arithmetic": ["policy", "reference", "reward model"],
        "stages.members=2 scorer.combine=worst": ["policy", "reference", "reward model", "reward model"],
        "stages.members=3 scorer.combine=weights": ["policy", "reference", "reward model"],
        f"scorer@gold=reward_model gold.path=[{judge},{judge}] scorer=facts": [
            "policy",
            "reference",
            "judge",
            "judge",
        ],
    }.items():
        assert [model.role for model in models(compose(words.split()))] == roles


def test_weights_and_optimizer_of_a_large_model_are_counted(pythia):
    use = plan(compose(pythia), TWO_GPUS).uses[0]
    gpu = needs(pythia, TWO_GPUS)["GPU 0"]
    assert use.total == 80 * GIB and gpu["policy: weights"] == 4 * COUNT_2_8B
    assert gpu["policy: optimizer"] == 8 * COUNT_2_8B and gpu["reference: weights"] == 2 * COUNT_2_8B
    assert gpu["training / policy: gradients"] == 4 * COUNT_2_8B
    assert gpu["optimizer step"] == 8 * COUNT_2_8B, "gradients, and updates of all tensors"


def test_fewer_and_shorter_sequences_need_less_memory(pythia):
    def training(*words: str) -> float:
        return needs([*pythia, BY_SEQUENCES, *words], TWO_GPUS)["GPU 0"]["training"]

    assert training() > training("backend.micro_batch=2")
    assert training("task.max_prompt_tokens=64") < training() < training("generator.response_length=128")
    for more in ("model.dtype=float32", "model.attention=eager", "model.shared_prefix=false"):
        assert training(more) > training()
    wide = "backend.micro_batch=64"
    few, many = (f"schedule.prompts_per_update={count}" for count in (4, 64))
    assert training(few, wide) < training(many, wide), "a micro-batch has at most as many rows as the batch"
    assert needs(f"{few} schedule.eval_every=0")["RAM"]["sampling"] < (
        needs(f"{many} schedule.eval_every=0")["RAM"]["sampling"] / 4
    ), "at most the requested prompts are sampled at the same time"
    gradients = 4 * COUNT_2_8B
    assert training("model.gradient_checkpointing=true") - gradients < 0.5 * (training() - gradients)


def test_a_micro_batch_of_bok_has_more_prompts_than_that_of_dpo():
    """bok trains on 1 sample of a prompt, and dpo on 2."""
    words = "algo.samples_per_prompt=8 backend.micro_batch=16 schedule.prompts_per_update=64"
    bok, dpo = (needs(f"algo={algo} {words}")["RAM"]["training"] for algo in ("bok", "dpo"))
    assert bok > dpo


def test_shorter_prompts_never_need_more_memory_on_a_gpu(pythia):
    # the length from which 32 prompts are encoded in a separate pass
    edge = int(folder.prompt_pass_pays_from(2, 2560) / 32)
    words = [*pythia, BY_SEQUENCES, "backend.micro_batch=64", "algo.samples_per_prompt=2"]
    plans = [
        needs([*words, f"task.max_prompt_tokens={prompt}"], TWO_GPUS)["GPU 0"]
        for prompt in (edge // 2, edge - 1, edge + 1, 2 * edge)
    ]
    for phase in ("training", "log-probs and scores"):
        needed = [each[phase] for each in plans]
        assert needed == sorted(needed) and needed[0] < needed[3]


def test_a_generator_process_has_weights_of_its_own_and_versions_in_transfer():
    ram = needs(LAG)["RAM"]
    weights = ram["policy: weights"]
    assert ram["generator: weights"] == weights and ram["generator: KV cache and logits"] > 0
    assert "sampling" not in ram
    for words, versions in {
        LAG: 2,
        "schedule.max_lag=64": 2,
        "schedule.max_lag=2 schedule.update=in_flight": 3,
        "schedule.max_lag=64 schedule.update=in_flight": 4,
        "schedule.max_lag=1 generator.replicas=2": 3,
        "schedule.max_lag=64 generator.replicas=2": 4,
    }.items():
        assert needs(words)["RAM"]["weights in transfer"] == versions * weights


def test_each_replica_is_a_process_with_its_own_weights(pythia):
    lag = "schedule.max_lag=3"
    one, three = needs(lag)["RAM"], needs(f"{lag} generator.replicas=3")["RAM"]
    for name in ("generator's process", "generator: weights", "generator: KV cache and logits"):
        assert three[name] == 3 * one[name]
    assert three["weights in transfer"] == 6 / 2 * one["weights in transfer"]
    vllm = f"{lag} generator=vllm"
    three = needs(f"{vllm} generator.replicas=3")["RAM"]
    assert three["vLLM: keys and values"] == 3 * needs(vllm)["RAM"]["vLLM: keys and values"]
    one, three = needs(lag, gpus(3)), needs(f"{lag} generator.replicas=3", gpus(3))
    assert three["GPU 2"]["generator: weights"] == 2 * one["GPU 2"]["generator: weights"], (
        "2 of the 3 replicas share a GPU"
    )
    assert "vLLM's share of GPU 1 2" in needs(f"{vllm} generator.replicas=2", gpus(3))


def test_vllm_uses_its_configured_share_of_ram_or_of_a_gpu(pythia):
    ram = needs("generator=vllm generator.memory=0.2")["RAM"]
    assert ram["vLLM: keys and values"] == pytest.approx(0.2 * LAPTOP.ram)
    found, share = needs([*pythia, "generator=vllm"], TWO_GPUS), "vLLM's share of GPU 1"
    assert list(found) == [share, "GPU 0", "RAM"]
    assert plan(compose([*pythia, "generator=vllm"]), TWO_GPUS).uses[0].total == int(0.9 * 40 * GIB)
    assert found[share]["vLLM: weights"] == 2 * COUNT_2_8B
    versions = 2 * 2 * COUNT_2_8B  # in the dtype of vLLM
    assert found["GPU 0"]["weights in transfer"] == versions and "weights in transfer" not in found["RAM"]
    found = needs([*pythia, "generator=vllm", "generator.transfer=shared_memory"], TWO_GPUS)
    assert found["RAM"]["weights in transfer"] == versions and "weights in transfer" not in found["GPU 0"]


def test_colocated_vllm_uses_its_share_of_the_gpu_only_during_sampling(pythia):
    words = [*pythia, BY_SEQUENCES, "generator=vllm_colocated"]
    found = needs(words, TWO_GPUS)
    vllm, trainer = found["vLLM's share of GPU 0"], found["GPU 0"]
    assert vllm["vLLM: working memory"] > 1.5 * GIB and trainer["vLLM: CUDA"] == CONTEXT
    assert trainer["sampling / vLLM"] == pytest.approx(0.45 * 80 * GIB)
    kept = trainer["sampling / trainer: memory torch cannot return"]
    assert kept == trainer["training"] / 4, "segments that the trainer cannot return"
    assert not any(name.startswith("vLLM") for name in found["RAM"]), "vLLM discards its weights"
    fits = (
        plan(compose([*words, f"generator.memory={part}"]), TWO_GPUS).uses[0].fits for part in (0.45, 0.05)
    )
    assert list(fits) == [True, False], "the weights alone are more than 4 GiB"


def test_while_colocated_vllm_samples_zero_3_keeps_its_gradients(monkeypatch, pythia):
    monkeypatch.setattr(TorchConfig, "footprint", lambda *_: zero(3, False, bfloat16=True))
    trainer = needs([*pythia, "generator=vllm_colocated"], TWO_GPUS)["GPU 0"]
    assert trainer["sampling / policy: gradients"] == 2 * COUNT_2_8B
    assert "sampling / policy: one layer" not in trainer


def test_an_annotator_process_has_its_own_reference_and_reward_model():
    def annotator(words: str) -> dict[str, float]:
        return {name: held for name, held in needs(words)["RAM"].items() if name.startswith("annotator")}

    alone = needs("")["RAM"]
    assert annotator(LAG) == {
        "annotator's process": PROCESS,
        "annotator: reference": alone["reference: weights"],
        "annotator: reward model": alone["reward model: weights"],
    }
    assert "annotator: reference" in annotator(f"{LAG} model.lora.rank=4")
    assert not annotator("") and not annotator(f"{LAG} generator.annotate=false")


def on_gpus(words: str, count: int) -> dict[str, dict[str, float]]:
    return needs(f"backend.device=cuda {LAG} {words}", gpus(count))


def test_a_generator_process_is_counted_on_its_own_gpu():
    one, two = on_gpus("", 1), on_gpus("", 2)
    assert list(one) == ["GPU 0", "RAM"] and list(two) == ["GPU 0", "GPU 1", "RAM"]
    assert "generator: weights" in one["GPU 0"] and "generator: weights" not in two["GPU 0"]
    assert two["GPU 1"]["generator: weights"] == one["GPU 0"]["generator: weights"]
    assert on_gpus(ANNOTATE, 2)["GPU 1"]["CUDA"] == 2 * CONTEXT, "the generator's and the annotator's"


@pytest.mark.parametrize(
    ("words", "count", "device"),
    [("", 1, "GPU 0"), ("", 2, "GPU 1"), ("", 3, "GPU 1"), ("generator=vllm", 2, "GPU 0")],
)
def test_the_models_of_an_annotator_are_counted_on_its_gpu(words, count, device):
    without, found = on_gpus(words, count), on_gpus(f"{words} {ANNOTATE}", count)
    added = found[device].keys() - without.get(device, {}).keys()
    assert added >= {"annotator: reference", "annotator: reward model", "annotator: log-probs and scores"}
    assert found["RAM"]["annotator's process"] > 0
    others = [name for name in found if name not in (device, "RAM")]
    assert not any(part.startswith("annotator") for name in others for part in found[name])


@dataclass(kw_only=True, slots=True)
class OtherEngine(WorkerConfig):
    """A generator that no module of the package knows."""

    def reserves(self, on_gpu):
        return Reserved(engine="engine", share=0.5)

    def reserved_gpus(self, ranks):
        return range(ranks, ranks + 1)


def test_a_new_generator_is_planned_from_the_answers_of_its_section():
    cfg = replace(compose(["backend.device=cuda"]), generator=OtherEngine(name="other"))
    uses = plan(cfg, gpus(2)).uses
    assert [use.device for use in uses] == ["engine's share of GPU 1", "GPU 0", "RAM"]
    assert uses[0].total == 40 * GIB
    (ram,) = plan(replace(cfg, backend=compose([]).backend), LAPTOP).uses
    assert {part.name: part.bytes for part in ram.parts}["engine: keys and values"] == 8 * GIB


def test_a_generator_per_rank_is_planned_for_each_rank(ranks, pythia):
    ranks(2, local=2)
    own = "generator.per_rank=true"
    one, two = needs(LAG)["RAM"], needs(f"{LAG} {own}")["RAM"]
    for name in ("weights in transfer", "generator's process", "generator: weights"):
        assert two[name] == 2 * one[name]
    found = needs([*pythia, "generator=vllm", own], gpus(4))
    assert list(found) == ["vLLM's share of GPU 2 3", "GPU 0 1", "RAM"]
    one, each = on_gpus("", 2), on_gpus(own, 2)
    assert list(one) == list(each) == ["GPU 0 1", "RAM"]
    assert one["GPU 0 1"]["generator: weights"] == each["GPU 0 1"]["generator: weights"]


def test_ranks_on_one_machine_share_its_ram_and_have_a_gpu_each(ranks, pythia):
    words = ["schedule.eval_every=0", "schedule.eval_every=0 schedule.minibatches=2"]
    alone = [needs(each)["RAM"] for each in ("", *words)]
    ranks(1, local=2)
    assert needs("")["RAM"]["policy: weights"] == 2 * alone[0]["policy: weights"]
    ranks(4, local=2)
    for whole, shared in zip(alone[1:], (needs(each)["RAM"] for each in words), strict=True):
        name = "training / policy: activations"
        assert shared[name] == pytest.approx(2 * whole[name] / 4, rel=0.05)
        assert shared["sampling"] < whole["sampling"], "a part does not depend on the number of sequences"
    use = plan(compose(pythia), TWO_GPUS).uses[0]
    assert use.device == "GPU 0 1" and use.total == 40 * GIB


@pytest.mark.parametrize(
    ("stage", "offload", "each"),  # bytes per parameter on 4 GPUs: weights, gradients, optimizer; in RAM
    [
        (0, False, (2, 2, 12, 0)),
        (1, False, (2, 2, 3, 0)),
        (2, False, (2, 0.5, 3, 0)),
        (3, False, (0.5, 0.5, 3, 0)),
        (2, True, (2, 0, 0, 4)),
        (3, True, (0, 0, 0, 4.5)),
    ],
)
def test_zero_partitions_and_offloads_by_stage(stage, offload, each):
    footprint, kinds = zero(stage, offload, bfloat16=True), ("weights", "gradients", "optimizer")
    *device, ram = each
    assert [footprint.on_device(kind, 100, 4) for kind in kinds] == [100 * one for one in device]
    assert sum(footprint.in_ram(kind, 100, 4) for kind in kinds) == 100 * ram


def test_a_backend_that_partitions_and_offloads_changes_the_plan(monkeypatch, ranks, pythia):
    ranks(2, local=2)
    monkeypatch.setattr(TorchConfig, "footprint", lambda *_: zero(3, True, bfloat16=True))
    gpu, ram = needs(pythia, gpus(2)).values()
    assert not {"policy: optimizer", "policy: weights", "optimizer step"} & gpu.keys()
    assert "training / policy: one layer" in gpu
    assert ram["policy: offloaded"] == pytest.approx(2 * 18 / 2 * COUNT_2_8B)


def test_float32_under_zero_keeps_a_copy_of_the_weights_from_stage_1_on():
    assert zero(0, False, bfloat16=False) == Footprint()
    assert zero(1, False, bfloat16=False).optimizer == 12


def test_lora_needs_gradients_and_optimizer_states_for_adapters_and_no_reference_weights(pythia):
    words = [*pythia, "model.lora.rank=16"]
    gpu = needs(words, TWO_GPUS)["GPU 0"]
    assert gpu["policy: weights"] == 2 * COUNT_2_8B and gpu["policy: adapters"] == 4 * 16 * ADAPTERS
    assert gpu["policy: optimizer"] == 2 * gpu["training / policy: gradients"] == 8 * 16 * ADAPTERS
    assert "reference: weights" not in gpu
    other = Path(words[0].partition("=")[2]) / ".." / "pythia"
    gpu = needs([*words, f"model.reference={other}"], TWO_GPUS)["GPU 0"]
    assert gpu["reference: weights"] == 2 * COUNT_2_8B
    gpu = needs([*words, "algo=ppo"], TWO_GPUS)["GPU 0"]
    assert gpu["value model: adapters"] == gpu["policy: adapters"] + 4 * 2560, "the head is trained whole"


def test_zero3_also_partitions_frozen_models(ranks, pythia):
    ranks(2, local=2)
    gpu = needs([*pythia, "backend=zero3"], gpus(2))["GPU 0 1"]
    assert gpu["reference: weights"] == 2 * COUNT_2_8B / 2 == gpu["policy: weights"] / 2
    gpu, ram = needs([*pythia, "backend=zero3_offload"], gpus(2)).values()
    assert "reference: weights" not in gpu and ram["reference: offloaded"] == 2 * (2 * COUNT_2_8B / 2)


def copies(words: list[str], machine: Machine) -> dict[str, float]:
    """Return the bytes of the whole copies of the policy in the plan, by the phase that needs them."""
    return {
        name.partition(" / ")[0]: size
        for parts in needs(words, machine).values()
        for name, size in parts.items()
        if name.endswith(" / policy: whole copy")
    }


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        ("backend=zero3", "sampling"),
        ("backend=zero3_offload", "sampling"),
        ("backend=zero3 algo=sft model.base={policy}", "sampling"),  # evaluations sample
        ("backend=zero3 schedule.max_lag=1", "comparison of sampling"),
        ("backend=zero3 generator=vllm", None),
        ("backend=zero3 generator=vllm_colocated generator.per_rank=true", None),
        ("backend=zero3 algo=reward", None),
        ("backend=zero2", None),
        ("backend=torch", None),
    ],
)
def test_each_rank_samples_from_a_whole_copy_of_the_policy_with_zero_3(ranks, pythia, words, phase):
    ranks(2, local=2)
    words = words.format(policy=pythia[0].partition("=")[2]).split()
    words, whole = [*pythia, "model.dtype=float32", *words], 4 * COUNT_2_8B
    assert copies(words, gpus(2)) == ({phase: whole} if phase else {}), "one copy on each GPU"
    assert copies(words, LAPTOP) == ({phase: 2 * whole} if phase else {}), "2 ranks share the RAM"


@pytest.mark.parametrize("settings", [{"kind": "gpt_neox"}, {"kind": "llama", "tie_word_embeddings": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["model.float32_head=false", "model.float32_head=true"])
def test_the_whole_copy_of_zero_3_is_as_large_as_that_of_the_engine(tmp_path, settings, dtype, head):
    tiny_lm(**settings).save_pretrained(tmp_path)
    words = [f"model.policy={tmp_path}", "scorer=facts", "backend=zero3", f"model.dtype={dtype}", head]
    cfg = compose(words)
    model = Policy(tiny_lm(**settings), 0.7, True, float32_head=cfg.model.float32_head).model
    engine_settings = SimpleNamespace(dtype=cfg.model.dtype)
    engine = SimpleNamespace(settings=engine_settings, ranks=ALONE, weights=lambda: whole_weights(model))
    copy = DeepSpeedEngine.whole(engine, hollow(model))
    assert copies(words, LAPTOP) == {"sampling": sum(each.nbytes for each in copy.parameters())}


@pytest.mark.parametrize(
    ("words", "loads"),
    [
        (["backend=zero3"], 1),
        (["backend=zero3_offload"], 1),
        (["backend=zero3", "model.trust_remote_code=true"], 2),
        (["backend=zero2"], 2),
        (["backend=torch"], 2),
    ],
)
def test_ranks_that_get_placeholders_load_no_models(ranks, pythia, words, loads):
    words = [*pythia, "scorer=facts", *words]
    alone = needs(words, TWO_GPUS)["RAM"]["loading"]
    assert alone == (4 + 2) * COUNT_2_8B, "the policy in float32 and the reference in bfloat16"
    ranks(4, local=2)
    assert needs(words, TWO_GPUS)["RAM"]["loading"] == loads * alone


def test_messages_of_nccl_need_buffers_for_each_group_of_processes(ranks, pythia):
    def nccl(*words: str) -> list[float]:
        return [parts.get("NCCL", 0) for parts in needs([*pythia, *words], gpus(4)).values()]

    vllm = "generator=vllm"
    assert nccl() == [0, 0] and nccl(vllm) == [GROUP, GROUP, 0], "weights are sent by NCCL"
    assert nccl(vllm, "generator.transfer=shared_memory") == [0, 0, 0]
    assert nccl(vllm, "generator.replicas=2") == [0, 0, 0], "replicas read one snapshot in shared memory"
    assert nccl("generator=vllm_colocated") == [0, 0, 0]
    assert nccl(vllm, "generator.tensor_parallel_size=2") == [2 * GROUP, GROUP, 0]
    ranks(2)
    assert nccl() == [GROUP, 0] and 0.5 * GIB < GROUP < 0.7 * GIB
    assert "NCCL" not in needs("")["RAM"], "ranks without GPUs"


def test_ranks_sum_gradients_in_two_copies_of_a_bucket(ranks, pythia):
    def bucket(*words: str) -> float:
        found = next(iter(needs([*pythia, *words], TWO_GPUS).values()))
        return found.get("training / gradient bucket", 0)

    assert bucket() == 0, "one rank"
    ranks(2)
    assert bucket() == 2 * 4 * BUCKET < 2 * 4 * COUNT_2_8B
    assert bucket("backend=zero2") == 2 * 4 * 50_000_000, "DeepSpeed's reduce_bucket_size"
    assert bucket("model.lora.rank=1") == 2 * 4 * ADAPTERS < 2 * 4 * BUCKET


def state_bytes(name: str, module: Policy) -> int:
    """Return the bytes of the state of a real optimizer after one step, without step counts and tables."""
    optimizer = build_optimizer(module, OptimConfig(optimizer=Optimizer(name), lr=1e-3), None)
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    found = [value for state in optimizer.state.values() for key, value in state.items() if "map" not in key]
    tensors = [each for each in found if isinstance(each, torch.Tensor) and each.dim()]
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_muon_updates_the_counted_matrices(kind):
    module, size = Policy(tiny_lm(kind), 0.7, True), config_size(tiny_config(kind).to_dict())
    assert sum(each.numel() for each in hidden_matrices(module)) == matrix_parameters(size)


def test_muon_has_one_float32_momentum_per_element_of_a_matrix(pythia):
    words = [*pythia, "optim.optimizer=muon"]
    gpu = needs(words, TWO_GPUS)["GPU 0"]
    others = COUNT_2_8B - MATRICES
    assert gpu["policy: optimizer"] == pytest.approx(4 * MATRICES + 8 * others)
    assert gpu["optimizer step / updates"] == 4 * others + 10 * 2560 * 10240, "one matrix at a time"
    lora = [*pythia, "model.lora.rank=16"], [*words, "model.lora.rank=16"]
    adamw, muon = (needs(each, TWO_GPUS)["GPU 0"]["policy: optimizer"] for each in lora)
    assert muon == adamw / 2, "adapters are matrices"
    module = Policy(tiny_lm(), 0.7, True)
    every, matrices = (
        sum(each.numel() for each in found) for found in (module.parameters(), hidden_matrices(module))
    )
    assert state_bytes("muon", module) == 4 * matrices + 8 * (every - matrices)


def test_a_step_with_8_bit_moments_has_no_temporary_tensors(pythia):
    gpu = needs([*pythia, "optim.optimizer=adamw_8bit"], TWO_GPUS)["GPU 0"]
    assert gpu["policy: optimizer"] == EIGHT_BIT * COUNT_2_8B and gpu["optimizer step / updates"] == 0


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_8_bit_moments_have_two_bytes_per_parameter_and_the_scales_of_blocks():
    module = Policy(tiny_lm(hidden_size=64, vocab_size=256), 0.7, True)
    small = sum(each.numel() for each in module.parameters() if each.numel() < 4096)
    large = sum(each.numel() for each in module.parameters()) - small
    assert state_bytes("adamw_8bit", module) == EIGHT_BIT * large + 8 * small


def test_eval_batch_size_sets_the_sampling_memory_of_supervised_runs():
    default, small = (needs(f"algo=sft {words}")["RAM"] for words in ("", "eval.batch_size=32"))
    assert default["sampling"] > 3 * small["sampling"], "256 by default"


def test_a_run_on_a_device_of_unknown_memory_is_not_rejected(pythia):
    gpu = plan(compose([*pythia, "backend.device=cuda"]), LAPTOP).uses[0]
    assert gpu.device == "GPU 0" and gpu.total is None and gpu.fits


def test_a_run_is_rejected_only_if_half_of_the_estimated_memory_does_not_fit():
    def fits(counted: float, estimated: float) -> bool:
        phase = Phase("training", (Part("activations", estimated * GIB, estimated=True),))
        return Use("RAM", 16 * GIB, (Part("weights", counted * GIB),), (phase,)).fits

    assert fits(12, 6) and not fits(12, 10) and not fits(17, 0)


@pytest.fixture
def judged(tmp_path) -> list[str]:
    """Return the overrides of relabelling with a judge of 2.8 billion parameters."""
    folder = local_model(tmp_path / "judge", PYTHIA_2_8B)
    return ["algo=reward", f"model.policy={folder}", "scorer@gold=reward_model", f"gold.path={folder}"]


def test_relabelling_needs_the_judge_alone(judged, ranks):
    count = COUNT_2_8B - HEAD + 2560  # the head is replaced by a head with one output
    (ram,) = needs(judged, trains=False).values()
    reads = {name for name in ram if name.startswith("log-probs and scores")}
    assert ram.keys() - reads == {"process", "judge: weights"}
    assert ram["judge: weights"] == 4 * count and ram["log-probs and scores"] > 0
    wide = needs([*judged, "gold.batch_size=64"], trains=False)["RAM"]
    assert wide["log-probs and scores"] > ram["log-probs and scores"]
    (gpu,) = needs([*judged, "model.dtype=bfloat16"], gpus(1), trains=False).values()
    assert (gpu["CUDA"], gpu["judge: weights"]) == (CONTEXT, 2 * count) and "NCCL" not in gpu
    ranks(2)
    assert needs(judged, gpus(1), trains=False)["GPU 0"]["NCCL"] == GROUP


def test_relabelling_has_no_plan_without_a_judge_that_is_a_model(judged):
    assert needs("algo=reward", trains=False) == {}
    found = plan(compose([*judged[:-1], "gold.path=someone/judge"]), LAPTOP, trains=False)
    assert found.uses == () and found.unknown == {"gold.path": "someone/judge"}
