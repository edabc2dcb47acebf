"""The memory plan: the memory that each device needs, and the rejection of runs that do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf import plan
from rlhf.config.backends import Footprint, TorchConfig, zero
from rlhf.core.machine import Machine
from rlhf.engines.deepspeed_engine import DeepSpeedEngine, hollow
from rlhf.memory import plan as advice
from rlhf.memory import plan as memory
from rlhf.memory import sizes
from rlhf.memory.uses import CONTEXT, GIB, PROCESS, Part, Phase, Use
from rlhf.models import folder
from rlhf.models.modules import Policy, whole_weights
from rlhf.processes.ranks import ALONE
from rlhf.stages.words import describe
from rlhf.words.compose import compose
from tests.model_folders import write_model
from tests.tiny_models import tiny_lm

LAPTOP = Machine(ram=16 * GIB)
BY_SEQUENCES = "backend.tokens=1000000"  # more than any micro-batch has: backend.micro_batch is the limit
TWO_GPUS = Machine(ram=256 * GIB, gpus=(80 * GIB, 40 * GIB))
LLAMA_70B = {
    "model_type": "stablelm",  # as llama, but without a check of the names of its tensors
    "vocab_size": 128256,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
PYTHIA_2_8B = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 10240,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
COUNT_2_8B = 2_775_208_960  # parameters, as EleutherAI publish them


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """Replace this machine by a laptop with 16 GiB of RAM and no GPU, and this run by a single rank."""
    monkeypatch.setattr(memory, "this_machine", lambda: LAPTOP)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def local_model(folder: Path, config: dict) -> str:
    """Write a model folder whose weights have no tensors, so that its size follows from its config."""
    return write_model(folder, config, tensors={})


@pytest.fixture
def pythia(tmp_path) -> list[str]:
    """Return overrides that set policy and reward model to a folder of Pythia 2.8b with empty weights."""
    folder = local_model(tmp_path / "pythia", PYTHIA_2_8B)
    return [f"model.policy={folder}", f"model.reward={folder}", "model.dtype=bfloat16"]


def parts(use: Use) -> dict[str, float]:
    return {part.name: part.bytes for part in use.parts}


def phases(use: Use) -> dict[str, Phase]:
    return {phase.name: phase for phase in use.phases}


def test_the_default_run_needs_less_than_2_gib_of_ram():
    (use,) = memory.plan(compose([])).uses
    assert use.device == "RAM" and use.fits and 0.6 * GIB < use.bytes < 2 * GIB
    weights = parts(use)["policy: weights"]
    assert parts(use)["policy: optimizer"] == 2 * weights == 2 * parts(use)["reference: weights"]
    assert set(phases(use)) == {"training", "log-probs and scores", "sampling"}


def test_ppo_trains_a_second_model():
    (use,) = memory.plan(compose(["algo=ppo"])).uses
    assert parts(use)["value model: optimizer"] == 2 * parts(use)["reward model: weights"]
    named = [part.name for part in phases(use)["training"].parts]
    assert named == ["policy: gradients", "value model: gradients", "policy: activations",
                     "value model: activations"]  # fmt: skip


def test_each_kind_of_run_names_the_models_that_it_loads(tmp_path):
    def roles(*words: str) -> list[str]:
        return [model.role for model in sizes.models(compose(list(words)))]

    assert roles() == ["policy", "reference", "reward model"]
    assert roles("algo=ppo") == ["policy", "value model", "reference", "reward model"]
    assert roles("scorer=facts") == ["policy", "reference"]
    assert roles("algo=sft") == ["policy"] and roles("algo=reward") == ["reward model"]
    judge = local_model(tmp_path / "judge", PYTHIA_2_8B)
    assert roles("scorer@gold=reward_model", f"gold.path={judge}")[-1] == "judge"
    assert roles("scorer=reward_and_answer", "task=arithmetic")[-1] == "reward model"


def test_weights_and_optimizer_of_a_large_model_are_counted(pythia):
    use = memory.plan(compose(pythia), TWO_GPUS).uses[0]
    assert use.device == "GPU 0" and use.total == 80 * GIB
    assert parts(use)["policy: weights"] == 4 * COUNT_2_8B
    assert parts(use)["policy: optimizer"] == 8 * COUNT_2_8B
    assert parts(use)["reference: weights"] == 2 * COUNT_2_8B
    assert phases(use)["training"].parts[0].bytes == 4 * COUNT_2_8B
    assert phases(use)["optimizer step"].bytes == 8 * COUNT_2_8B, "gradients, and updates of all tensors"


def test_fewer_and_shorter_sequences_need_less_memory(pythia):
    def training(*words: str) -> float:
        return phases(memory.plan(compose([*pythia, BY_SEQUENCES, *words]), TWO_GPUS).uses[0])[
            "training"
        ].bytes

    assert training() > training("backend.micro_batch=2")
    assert training("task.max_prompt_tokens=64") < training() < training("generator.response_length=128")
    assert training("model.dtype=float32") > training()
    assert training("model.attention=eager") > training()
    assert training("model.shared_prefix=false") > training()
    eight = ["algo.samples_per_prompt=8", "backend.micro_batch=16", "schedule.prompts_per_update=64"]
    bok, dpo = (memory.plan(compose([f"algo={algo}", *eight])).uses[0] for algo in ("bok", "dpo"))
    assert phases(bok)["training"].bytes > phases(dpo)["training"].bytes, (
        "bok trains on 1 sample of a prompt and dpo on 2, so a micro-batch of bok has more prompts"
    )
    assert training("schedule.prompts_per_update=4", "backend.micro_batch=64") < training(
        "schedule.prompts_per_update=64", "backend.micro_batch=64"
    ), "a micro-batch has at most as many rows as the batch"

    def sampling(prompts: int) -> float:
        words = [f"schedule.prompts_per_update={prompts}", "schedule.eval_every=0"]
        return phases(memory.plan(compose(words)).uses[0])["sampling"].bytes

    assert sampling(4) < sampling(64) / 4, "at most the requested prompts are sampled at the same time"


def test_shorter_prompts_never_need_more_memory_on_a_gpu(pythia):
    def bytes_of(prompt: int, phase: str) -> float:
        words = ["backend.micro_batch=64", f"task.max_prompt_tokens={prompt}", "algo.samples_per_prompt=2"]
        return phases(memory.plan(compose([*pythia, BY_SEQUENCES, *words]), TWO_GPUS).uses[0])[phase].bytes

    # the length from which 32 prompts are encoded in a separate pass
    edge = int(folder.prompt_pass_pays_from(2, 2560) / 32)
    for phase in ("training", "log-probs and scores"):
        needed = [bytes_of(prompt, phase) for prompt in (edge // 2, edge - 1, edge + 1, 2 * edge)]
        assert needed == sorted(needed) and needed[0] < needed[3]


def test_a_generator_process_needs_its_own_weights_and_weight_versions_in_transfer():
    (use,) = memory.plan(compose(["schedule.max_lag=1"])).uses
    weights = parts(use)["policy: weights"]
    assert parts(use)["generator: weights"] == weights
    assert parts(use)["weights in transfer"] == 2 * weights
    assert "sampling" not in phases(use) and parts(use)["generator: KV cache and logits"] > 0
    for words, versions in (
        ("schedule.max_lag=64", 2),
        ("schedule.max_lag=2 schedule.update=in_flight", 3),
        ("schedule.max_lag=64 schedule.update=in_flight", 4),
        ("schedule.max_lag=1 generator.replicas=2", 3),
        ("schedule.max_lag=64 generator.replicas=2", 4),
    ):
        (more,) = memory.plan(compose(words.split())).uses
        assert parts(more)["weights in transfer"] == versions * weights


def test_each_replica_is_a_process_with_its_own_weights(pythia):
    def needs(words: str, machine: Machine = LAPTOP) -> dict[str, float]:
        plan = memory.plan(compose([*words.split(), "schedule.max_lag=3"]), machine)
        return {f"{use.device}: {name}": size for use in plan.uses for name, size in parts(use).items()}

    one, three = needs(""), needs("generator.replicas=3")
    for name in ("generator's process", "generator: weights", "generator: KV cache and logits"):
        assert three[f"RAM: {name}"] == 3 * one[f"RAM: {name}"]
    assert three["RAM: weights in transfer"] == 6 / 2 * one["RAM: weights in transfer"]
    one, three = needs("generator=vllm"), needs("generator=vllm generator.replicas=3")
    assert three["RAM: vLLM: keys and values"] == 3 * one["RAM: vLLM: keys and values"]
    gpus = Machine(ram=256 * GIB, gpus=(80 * GIB,) * 3)
    one, three = needs("", gpus), needs("generator.replicas=3", gpus)
    assert three["GPU 2: generator: weights"] == 2 * one["GPU 2: generator: weights"], (
        "2 of the 3 replicas share a GPU"
    )
    assert "vLLM's share of GPU 1 2: vLLM: weights" in needs("generator=vllm generator.replicas=2", gpus)


def test_vllm_uses_its_configured_share_of_ram_or_of_a_gpu(pythia):
    (use,) = memory.plan(compose(["generator=vllm", "generator.memory=0.2"])).uses
    assert parts(use)["vLLM: keys and values"] == pytest.approx(0.2 * LAPTOP.ram)
    vllm, trainer, ram = memory.plan(compose([*pythia, "generator=vllm"]), TWO_GPUS).uses
    assert vllm.device == "vLLM's share of GPU 1" and vllm.total == int(0.9 * 40 * GIB)
    assert parts(vllm)["vLLM: weights"] == 2 * COUNT_2_8B
    assert trainer.device == "GPU 0" and ram.device == "RAM"
    assert parts(trainer)["weights in transfer"] == 2 * 2 * COUNT_2_8B, (
        "NCCL sends the weights in the dtype of vLLM"
    )
    assert "weights in transfer" not in parts(ram)
    shared = [*pythia, "generator=vllm", "generator.transfer=shared_memory"]
    _, trainer, ram = memory.plan(compose(shared), TWO_GPUS).uses
    assert parts(ram)["weights in transfer"] == 2 * 2 * COUNT_2_8B
    assert "weights in transfer" not in parts(trainer)


def test_colocated_vllm_uses_its_share_of_the_gpu_only_during_sampling(pythia):
    words = [*pythia, BY_SEQUENCES, "generator=vllm_colocated"]
    vllm, trainer, ram = memory.plan(compose(words), TWO_GPUS).uses
    assert vllm.device == "vLLM's share of GPU 0" and vllm.fits
    assert parts(vllm)["vLLM: working memory"] > 1.5 * GIB
    share, rest = phases(trainer)["sampling"].parts
    assert share.bytes == pytest.approx(0.45 * 80 * GIB)
    assert rest.bytes == phases(trainer)["training"].bytes / 4, "segments that the trainer cannot return"
    assert parts(trainer)["vLLM: CUDA"] == CONTEXT
    assert not [name for name in parts(ram) if name.startswith("vLLM")], "vLLM discards its weights"
    small = memory.plan(compose([*words, "generator.memory=0.05"]), TWO_GPUS).uses[0]
    assert not small.fits, "the weights alone are more than 4 GiB"


def test_while_colocated_vllm_samples_zero_3_keeps_its_gradients(monkeypatch, pythia):
    monkeypatch.setattr(TorchConfig, "footprint", lambda *_: zero(3, False, bfloat16=True))
    trainer = memory.plan(compose([*pythia, "generator=vllm_colocated"]), TWO_GPUS).uses[1]
    kept = {part.name: part.bytes for part in phases(trainer)["sampling"].parts}
    assert kept["policy: gradients"] == 2 * COUNT_2_8B and "policy: one layer" not in kept


def test_a_share_of_colocated_vllm_that_does_not_fit_gets_the_nearest_share_that_fits(monkeypatch, pythia):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(ram=256 * GIB, gpus=(80 * GIB,)))
    words = [*pythia, "generator=vllm_colocated", "backend.micro_batch=2"]
    for share in (0.8, 0.05):
        problems = advice.problems(compose([*words, f"generator.memory={share}"]))
        assert f"got {share}; set generator.memory=0." in problems[0]
        fitting = problems[0].rpartition("=")[2]
        assert advice.problems(compose([*words, f"generator.memory={fitting}"])) == []


def test_an_annotator_process_has_its_own_reference_and_reward_model(pythia):
    def annotator(*words: str) -> dict[str, float]:
        (use,) = memory.plan(compose([*words])).uses
        return {name: held for name, held in parts(use).items() if name.startswith("annotator")}

    (alone,) = memory.plan(compose([])).uses
    assert annotator("schedule.max_lag=1") == {
        "annotator's process": PROCESS,
        "annotator: reference": parts(alone)["reference: weights"],
        "annotator: reward model": parts(alone)["reward model: weights"],
    }
    assert annotator("schedule.max_lag=1", "model.lora.rank=4").keys() >= {"annotator: reference"}
    assert not annotator() and not annotator("schedule.max_lag=1", "generator.annotate=false")


def test_generator_per_rank_plans_one_generator_for_each_rank(monkeypatch, pythia):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    lag, own = ["schedule.max_lag=1"], "generator.per_rank=true"
    one, two = (parts(memory.plan(compose([*lag, *more])).uses[0]) for more in ([], [own]))
    for name in ("weights in transfer", "generator's process", "generator: weights"):
        assert two[name] == 2 * one[name]
    four = Machine(ram=256 * GIB, gpus=(80 * GIB,) * 4)
    plan = memory.plan(compose([*pythia, "generator=vllm", own]), four)
    assert [use.device for use in plan.uses] == ["vLLM's share of GPU 2 3", "GPU 0 1", "RAM"]


def test_ranks_on_one_machine_share_its_ram_and_have_a_gpu_each(monkeypatch, pythia):
    (one,) = memory.plan(compose([])).uses
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (two,) = memory.plan(compose([])).uses
    assert parts(two) == {name: 2 * held for name, held in parts(one).items()}
    for words in (["schedule.eval_every=0"], ["schedule.eval_every=0", "schedule.minibatches=2"]):
        shared = phases(memory.plan(compose(words)).uses[0])
        monkeypatch.delenv("WORLD_SIZE")
        whole = phases(memory.plan(compose(words)).uses[0])
        monkeypatch.setenv("WORLD_SIZE", "4")
        few, all_ = (
            {part.name: part.bytes for part in phase["training"].parts}["policy: activations"]
            for phase in (shared, whole)
        )
        assert few == pytest.approx(all_ / 4, rel=0.05)
        assert shared["sampling"].bytes < whole["sampling"].bytes / 2, (
            "a part of the sampling memory does not depend on the number of sequences"
        )
    gpus = memory.plan(compose(pythia), TWO_GPUS).uses[0]
    assert gpus.device == "GPU 0 1" and gpus.total == 40 * GIB


# (stage, offload): bytes per parameter on each of 4 GPUs (weights, gradients, optimizer), and in RAM
SHARES = {
    (0, False): (2, 2, 12, 0),
    (1, False): (2, 2, 3, 0),
    (2, False): (2, 0.5, 3, 0),
    (3, False): (0.5, 0.5, 3, 0),
    (2, True): (2, 0, 0, 4),
    (3, True): (0, 0, 0, 4.5),
}


@pytest.mark.parametrize("case", SHARES)
def test_zero_partitions_and_offloads_by_stage(case):
    footprint = zero(*case, bfloat16=True)
    kinds = ("weights", "gradients", "optimizer")
    *device, ram = SHARES[case]
    assert [footprint.on_device(kind, 100, 4) for kind in kinds] == [100 * each for each in device]
    assert sum(footprint.in_ram(kind, 100, 4) for kind in kinds) == 100 * ram


def test_a_backend_that_partitions_and_offloads_changes_the_plan(monkeypatch, pythia):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(TorchConfig, "footprint", lambda *_: zero(3, True, bfloat16=True))
    gpu, ram = memory.plan(compose(pythia), TWO_GPUS).uses
    assert "policy: optimizer" not in parts(gpu) and "policy: weights" not in parts(gpu)
    assert "policy: one layer" in [part.name for part in phases(gpu)["training"].parts]
    assert "optimizer step" not in phases(gpu)
    assert parts(ram)["policy: offloaded"] == pytest.approx(2 * 18 / 2 * COUNT_2_8B), (
        "2 ranks run on this machine"
    )


def test_float32_under_zero_keeps_a_copy_of_the_weights_from_stage_1_on():
    assert zero(0, False, bfloat16=False) == Footprint()
    assert zero(1, False, bfloat16=False).optimizer == 12


def test_lora_needs_gradients_and_optimizer_states_for_adapters_and_no_reference_weights(pythia):
    words = [*pythia, "model.lora.rank=16"]
    use = memory.plan(compose(words), TWO_GPUS).uses[0]
    adapters = 32 * 16 * ((2560 + 3 * 2560) + 2 * 2560 + 2 * (2560 + 10240))
    assert parts(use)["policy: weights"] == 2 * COUNT_2_8B
    assert parts(use)["policy: adapters"] == 4 * adapters
    assert parts(use)["policy: optimizer"] == 8 * adapters
    assert phases(use)["training"].parts[0].bytes == 4 * adapters
    assert "reference: weights" not in parts(use)
    other = memory.plan(
        compose([*words, f"model.reference={Path(words[0].partition('=')[2]) / '..' / 'pythia'}"]), TWO_GPUS
    )
    assert parts(other.uses[0])["reference: weights"] == 2 * COUNT_2_8B


def test_lora_trains_all_weights_of_the_value_head(pythia):
    use = memory.plan(compose([*pythia, "algo=ppo", "model.lora.rank=16"]), TWO_GPUS).uses[0]
    assert parts(use)["value model: adapters"] == parts(use)["policy: adapters"] + 4 * 2560


def test_gradient_checkpointing_needs_less_activation_memory(pythia):
    def training(*words: str) -> float:
        return phases(memory.plan(compose([*pythia, BY_SEQUENCES, *words]), TWO_GPUS).uses[0])[
            "training"
        ].bytes

    gradients = 4 * COUNT_2_8B
    assert training("model.gradient_checkpointing=true") - gradients < 0.5 * (training() - gradients)


def test_zero3_also_partitions_frozen_models(monkeypatch, pythia):
    monkeypatch.setenv("WORLD_SIZE", "2")
    use = memory.plan(compose([*pythia, "backend=zero3"]), TWO_GPUS).uses[0]
    assert parts(use)["reference: weights"] == 2 * COUNT_2_8B / 2
    assert parts(use)["policy: weights"] == 4 * COUNT_2_8B / 2
    offloaded = memory.plan(compose([*pythia, "backend=zero3_offload"]), TWO_GPUS).uses
    assert "reference: weights" not in parts(offloaded[0])
    assert parts(offloaded[1])["reference: offloaded"] == 2 * (2 * COUNT_2_8B / 2), (
        "2 ranks run on this machine"
    )


def copies(cfg, machine: Machine) -> dict[str, list[float]]:
    """Return the bytes of the whole copies of the policy in the plan, by the phase that needs them."""
    found: dict[str, list[float]] = {}
    for use in memory.plan(cfg, machine).uses:
        for phase in use.phases:
            sizes = [part.bytes for part in phase.parts if part.name == "policy: whole copy"]
            if sizes:
                found.setdefault(phase.name, []).extend(sizes)
    return found


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
def test_each_rank_samples_from_a_whole_copy_of_the_policy_with_zero_3(monkeypatch, pythia, words, phase):
    monkeypatch.setenv("WORLD_SIZE", "2")
    policy = pythia[0].partition("=")[2]
    cfg = compose([*pythia, "model.dtype=float32", *words.format(policy=policy).split()])
    whole = 4 * COUNT_2_8B
    assert copies(cfg, TWO_GPUS) == ({phase: [whole]} if phase else {}), "one copy on each GPU"
    assert copies(cfg, LAPTOP) == ({phase: [2 * whole]} if phase else {}), "2 ranks share the RAM"


@pytest.mark.parametrize("settings", [{"kind": "gpt_neox"}, {"kind": "llama", "tie_word_embeddings": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["model.float32_head=false", "model.float32_head=true"])
def test_the_whole_copy_of_zero_3_is_as_large_as_that_of_the_engine(tmp_path, settings, dtype, head):
    tiny_lm(**settings).save_pretrained(tmp_path)
    cfg = compose([f"model.policy={tmp_path}", "scorer=facts", "backend=zero3", f"model.dtype={dtype}", head])
    model = Policy(tiny_lm(**settings), 0.7, True, float32_head=cfg.model.float32_head).model
    engine_settings = SimpleNamespace(dtype=cfg.model.dtype)
    engine = SimpleNamespace(settings=engine_settings, ranks=ALONE, weights=lambda: whole_weights(model))
    copy = DeepSpeedEngine.whole(engine, hollow(model))
    assert copies(cfg, LAPTOP) == {"sampling": [sum(each.nbytes for each in copy.parameters())]}


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
def test_ranks_that_get_placeholders_load_no_models(monkeypatch, pythia, words, loads):
    def loading() -> float:
        return phases(memory.plan(compose([*pythia, "scorer=facts", *words]), TWO_GPUS).uses[-1])[
            "loading"
        ].bytes

    alone = loading()
    assert alone == (4 + 2) * COUNT_2_8B, "the policy in float32 and the reference in bfloat16"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert loading() == loads * alone


def test_the_plan_is_unknown_if_models_are_not_downloaded(monkeypatch):
    monkeypatch.setattr(sizes, "named_size", lambda name: None)
    cfg = compose(["model=pythia_410m", "task=tldr"])
    made = memory.plan(cfg)
    assert not made.uses and made.unknown["model.policy"] == "mnoukhov/pythia410m-sft-tldr"
    assert advice.problems(cfg) == advice.warnings(cfg) == []
    ((_, told),) = advice.rows(memory.plan(cfg))
    assert told.startswith("unknown until these models are downloaded: model.policy=mnoukhov/")


def test_a_run_on_a_device_of_unknown_memory_is_not_rejected(pythia):
    cfg = compose([*pythia, "backend.device=cuda"])
    gpu = memory.plan(cfg, LAPTOP).uses[0]
    assert gpu.device == "GPU 0" and gpu.total is None and gpu.fits


def test_a_run_is_rejected_only_if_half_of_the_estimated_memory_does_not_fit():
    def use(counted: float, estimated: float) -> Use:
        phase = Phase("training", (Part("activations", estimated * GIB, estimated=True),))
        return Use("RAM", 16 * GIB, (Part("weights", counted * GIB),), (phase,))

    assert use(12, 6).fits and not use(12, 10).fits and not use(17, 0).fits


def test_a_run_that_may_not_fit_gives_a_warning(monkeypatch):
    cfg = compose(["backend.tokens=1000000"])
    needed = memory.plan(cfg).uses[0].bytes
    assert advice.warnings(cfg) == []
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(ram=int(needed * 1.05)))
    (warning,) = advice.warnings(cfg)
    assert warning.startswith("the run may need about 1.") and "RAM (process 0.6 GiB, " in warning
    assert advice.problems(cfg) == []


def test_the_error_for_a_too_large_micro_batch_suggests_a_size_that_fits():
    cfg = compose(["backend.micro_batch=16384", "schedule.prompts_per_update=8192",
                   "schedule.total_episodes=163840", "backend.tokens=100000000"])  # fmt: skip
    (problem,) = advice.problems(cfg)
    assert problem.startswith("backend.micro_batch must be small enough for the 16.0 GiB of RAM")
    fitting = int(problem.rpartition("set backend.micro_batch=")[2])
    assert not advice.problems(replace(cfg, backend=replace(cfg.backend, micro_batch=fitting)))
    assert 256 <= fitting < 16384 and "got 16384;" in problem


def test_a_limit_of_tokens_bounds_the_sequences_of_the_plan():
    words = ["backend.micro_batch=1024", "schedule.prompts_per_update=512", "schedule.total_episodes=10240"]
    length = sum((compose(words).task.max_prompt_tokens, compose(words).generator.response_length))
    sizes = {}
    for tokens in (None, 64 * length, 0):
        cfg = compose([*words, f"backend.tokens={'null' if tokens is None else tokens}"])
        (use,) = memory.plan(cfg).uses
        phases = {phase.name: phase.bytes for phase in use.phases}
        sizes[tokens] = phases["training"], phases["log-probs and scores"]
    (use,) = memory.plan(compose([*words[1:], "backend.micro_batch=64"])).uses
    few = {phase.name: phase.bytes for phase in use.phases}
    assert sizes[64 * length][0] == few["training"] < sizes[None][0]
    assert few["log-probs and scores"] < sizes[64 * length][1] <= sizes[None][1]
    assert sizes[0][0] == sizes[None][0], "all 1,024 sequences fit"


def test_the_automatic_limit_of_tokens_fits_the_machine():
    words = ["backend.micro_batch=16384", "schedule.prompts_per_update=8192",
             "schedule.total_episodes=163840", "backend.tokens=0"]  # fmt: skip
    cfg = memory.with_token_limit(compose(words))
    (use,) = memory.plan(cfg).uses
    assert use.bytes <= 0.9 * 16 * GIB and advice.problems(compose(words)) == []
    assert ("sequences per forward", "at most 16384, and at most what fits into the memory") in describe(
        compose(words)
    )
    on_gpus = memory.with_token_limit(compose(words[:3]), TWO_GPUS).backend.tokens
    assert on_gpus == memory.with_token_limit(compose(words), TWO_GPUS).backend.tokens, "the default on a GPU"
    assert memory.with_token_limit(compose(words[:3])) == cfg, "the default on a CPU with too little memory"
    assert memory.with_token_limit(compose([])).backend.tokens is None, "no limit if the memory suffices"
    double = replace(cfg, backend=replace(cfg.backend, tokens=2 * cfg.backend.tokens))
    assert memory.plan(double).uses[0].bytes > 0.9 * 16 * GIB, "the next larger limit does not fit"


def test_a_small_model_and_your_own_data_fit_a_laptop_with_the_defaults(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(9)))
    for model, forward in (("HuggingFaceTB/SmolLM2-135M-Instruct", 8), ("Qwen/Qwen2.5-0.5B-Instruct", 2)):
        cfg = compose(["task=local", f"task.path={prompts}", "algo=rloo", f"model.policy={model}",
                       "scorer=facts", "generator=hf"])  # fmt: skip
        assert advice.problems(cfg) == []
        assert memory.with_token_limit(cfg).backend.tokens == forward * (512 + 256)


def test_settings_that_need_less_memory_are_named_with_the_memory_that_they_need():
    words = ["model.hidden_size=512", "model.layers=8", "backend.tokens=1000000"]
    cfg = compose(words)
    device, sizes = advice.savings(cfg)
    assert device == "RAM" and list(sizes) == sorted(sizes, key=sizes.get)
    assert {"model.gradient_checkpointing", "backend.micro_batch"} <= {each.split("=")[0] for each in sizes}
    for override, size in sizes.items():
        (use,) = memory.plan(compose([*words, override])).uses
        assert use.bytes == size < memory.plan(cfg).uses[0].bytes


def test_the_error_for_a_too_large_model_names_settings_that_fit_together():
    words = ["model=pythia_1b", "model.policy=EleutherAI/pythia-1b", "scorer=facts", "generator=hf"]
    (problem,) = advice.problems(compose(words))
    remedy = problem.rpartition("; set ")[2].split()
    assert "model.lora.rank=16" in remedy
    assert advice.problems(compose([*words, *remedy])) == []


def test_the_error_for_a_too_large_generator_batch_suggests_another_size():
    words = ["generator.batch_size=16384", "eval.prompts=16384", "model.layers=8"]
    (problem,) = advice.problems(compose(words))
    assert (
        problem.startswith("generator.batch_size must be small enough for")
        and "set generator.batch_size=" in problem
    )


def test_eval_batch_size_sets_the_sampling_memory_of_supervised_runs():
    def sampling(*words: str) -> float:
        return phases(memory.plan(compose(["algo=sft", *words])).uses[0])["sampling"].bytes

    assert sampling() > 3 * sampling("eval.batch_size=32"), "256 by default"
    (problem,) = advice.problems(
        compose(["algo=sft", "eval.batch_size=16384", "eval.prompts=16384", "model.layers=8"])
    )
    assert (
        problem.startswith("eval.batch_size must be small enough for") and "set eval.batch_size=" in problem
    )


def test_the_error_for_a_too_large_embedded_model_names_hidden_size():
    (problem,) = advice.problems(compose(["model.hidden_size=8192", "model.layers=32"]))
    assert problem.startswith("model.hidden_size must be small enough for")
    assert "got 8192; set model.hidden_size=" in problem


@pytest.mark.process
def test_a_70b_model_is_rejected_before_torch_is_imported_and_leaves_no_files(tmp_path):
    folder = local_model(tmp_path / "llama", LLAMA_70B)
    script = f"""
import sys
from rlhf.memory import plan as memory
from rlhf.core.machine import Machine
memory.this_machine = lambda: Machine(ram=64 * 2**30)
sys.argv = ["train.py", "model.policy={folder}", "scorer=facts"]
from rlhf.train import main
try:
    main()
except SystemExit as stop:
    print(stop.code, sorted({{"torch", "transformers", "vllm", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "2 []\n"
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert error.startswith("error: model.policy must be small enough for the 64.0 GiB of RAM")
    for said in ("policy 788 GiB", f"got {folder}; ", "set model.policy to a smaller model", "model.dtype"):
        assert said in error
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_sweep_job_that_does_not_fit_is_rejected_with_exit_code_2(command, tmp_path):
    folder = local_model(tmp_path / "llama", LLAMA_70B)
    answer = command("-m", f"model.policy={folder}", "scorer=facts", "seed=1")
    assert answer.code == 2 and not answer.runs
    assert "model.policy must be small enough for the 16.0 GiB of RAM" in answer.err


def test_a_finished_run_is_reported_on_a_machine_with_too_little_memory(command, monkeypatch):
    assert command().code == 0
    folder = next(Path("outputs").iterdir())
    (folder / "trainer_state.json").write_text(json.dumps({"finished": True, "result": {}}))
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(ram=GIB // 2))
    assert "finished already" in command().out
    assert command("resume=never").code == 2 and folder.is_dir(), (
        "the run is rejected before its folder is moved aside"
    )


def test_the_summary_has_one_memory_row_for_each_device(monkeypatch, pythia):
    rows = dict(describe(compose([])))
    assert rows["memory (RAM)"].startswith("about 1.0 GiB of 16.0 GiB: process 0.6 GiB, training 0.4 GiB")
    monkeypatch.setattr(memory, "this_machine", lambda: TWO_GPUS)
    names = [name for name, _ in advice.rows(memory.plan(compose([*pythia, "generator=vllm"])))]
    assert names == ["memory (vLLM's share of GPU 1)", "memory (GPU 0)", "memory (RAM)"]


# -- the command python -m rlhf.plan ---------------------------------------------------------------


def planned(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["plan.py", *words])
    code = 0
    try:
        plan.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_each_part_and_creates_no_files(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = planned(monkeypatch, capsys, "algo=ppo")
    assert code == 0 and err == "" and not list(tmp_path.iterdir())
    for said in ("RAM: about ", " of 16.0 GiB", "value model: optimizer", "while training", "the most",
                 "x (192 + 40) tokens", "million parameters x 8 bytes"):  # fmt: skip
        assert said in out


def test_the_command_prints_the_table_before_the_error(monkeypatch, capsys, tmp_path):
    folder = local_model(tmp_path / "llama", LLAMA_70B)
    code, out, err = planned(monkeypatch, capsys, f"model.policy={folder}", "scorer=facts")
    assert code == 2 and "70.55 billion parameters x 4 bytes" in out
    assert err.startswith("error: model.policy must be small enough for the 16.0 GiB of RAM")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algo.beat=1"], "did you mean algo.beta?"),
        (["algo.beta=-1"], "algo.beta must be > 0"),
        (["-m"], "-m must be a flag of this command"),
        (["--config-dir", "nowhere"], "--config-dir must name a folder laid out like conf/"),
    ],
)
def test_the_command_reports_config_errors_with_exit_code_2(monkeypatch, capsys, words, said):
    code, out, err = planned(monkeypatch, capsys, *words)
    assert code == 2 and out == "" and err.startswith("error: ") and said in err


def test_the_command_accepts_a_config_folder_of_the_user(monkeypatch, capsys, own_conf):
    words = ["--config-dir", str(own_conf), "experiment=fine"]
    assert planned(monkeypatch, capsys, *words)[0] == 0


@pytest.mark.process
def test_the_command_imports_neither_torch_nor_libraries_that_import_torch(tmp_path):
    script = (
        "import sys; sys.argv = ['plan.py', 'algo=ppo']; from rlhf.plan import main; main();"
        "print(sorted({'torch', 'transformers', 'datasets', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    assert not list(tmp_path.iterdir())


def test_the_help_of_the_command_prints_its_usage(monkeypatch, capsys):
    code, out, _ = planned(monkeypatch, capsys, "--help")
    assert code == 0 and out.startswith("Usage: python -m rlhf.plan")
