"""Tests of the rules between config sections, of the warnings, and of the sizes derived from a config."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlhf.checks import check, generators
from rlhf.config import root
from rlhf.config.backends import TorchConfig
from rlhf.stages import words as summary
from rlhf.words.compose import compose
from rlhf.words.identity import run_name
from tests.model_folders import write_model

STORED = "generator=dataset"
SERVERS = "generator=vllm_server"

PROBLEMS = {  # overrides: text that one of the problems must contain
    "schedule.total_episodes=null": "schedule.total_episodes or schedule.total_epochs must be set",
    "algo=reward schedule.total_epochs=null": "schedule.total_episodes or schedule.total_epochs must be set",
    "schedule.total_episodes=640 schedule.total_epochs=1": "must not both be set (each is the length",
    "generator=dataset generator.path=x schedule.total_epochs=1 schedule.total_episodes=null": "saved "
    "rollouts count as episodes",
    "schedule.total_episodes=1000": "(schedule.prompts_per_update x algo.samples_per_prompt = 64 x 2 = 128), "
    "got 1000; set schedule.total_episodes=1024",
    "schedule.total_episodes=10": "set schedule.total_episodes=128",
    "schedule.total_episodes=0": "schedule.total_episodes must be >= 1",
    "schedule.prompts_per_update=0": "schedule.prompts_per_update must be >= 1",
    "schedule.minibatches=3": "must be divisible by schedule.minibatches (minibatches are equal parts of the "
    "prompts), got 64 and 3; set schedule.prompts_per_update=63",
    "schedule.minibatches=0": "schedule.minibatches must be >= 1",
    "schedule.epochs=0": "schedule.epochs must be >= 1",
    "backend.micro_batch=7": "must be divisible by algo.samples_per_prompt (the samples of one prompt are "
    "never split), got 7 and 2; set backend.micro_batch=8",
    "backend.micro_batch=1": "set backend.micro_batch=2",
    "backend.micro_batch=0": "backend.micro_batch must be >= 1",
    "schedule.max_lag=-1": "schedule.max_lag must be >= 0",
    "schedule.update=in_flight": "schedule.max_lag must be >= 1 with schedule.update=in_flight",
    "schedule.update=in_flight schedule.max_lag=1 generator.worker=false": "schedule.update must be between",
    f"schedule.max_lag=1 {STORED}": "schedule.max_lag must be 0 with generator=dataset",
    "schedule.eval_every=2.5": "schedule.eval_every must be whole if it is 1 or more: then it counts updates",
    "schedule.save_every=-1": "schedule.save_every must be >= 0",
    "schedule.log_every=inf": "schedule.log_every must be finite",
    "optim.warmup=1.5": "optim.warmup must be whole if it is 1 or more: then it counts optimizer steps (",
    "optim.lr=nan": "optim.lr must be finite and > 0",
    "optim.eps=0": "optim.eps must be > 0",
    "optim.max_grad_norm=0": "optim.max_grad_norm must be > 0",
    "optim.weight_decay=-1": "optim.weight_decay must be >= 0",
    "eval.prompts=0": "eval.prompts must be >= 1",
    "eval.temperature=0": "eval.temperature must be > 0",
    "save_total_limit=0": "save_total_limit must be >= 1",
    "algo=sft generator=hf": "generator must be dataset for algo=sft (it trains on stored responses), got hf",
    "scorer=labels": "scorer must not be labels with generator=hf (new samples have no labels)",
    "scorer@gold=labels": "scorer@gold must not be labels",
    "scorer=none": "scorer must not be none (training needs scores), got none; set scorer=reward_model",
    "scorer=facts task=tldr": "scorer must not be facts for task=tldr",
    "scorer@gold=facts model=pythia_410m task=tldr": "scorer@gold must not be facts for task=tldr",
    "scorer=answer": "scorer must not be answer for task=tldr_mini",
    "algo=sft algo.samples_per_prompt=2": "algo.samples_per_prompt must be 1 for algo=sft generator=dataset "
    "(an example has one reference response), got 2",
    f"{STORED} algo.samples_per_prompt=4": "algo.samples_per_prompt must be 2 for algo=dpo generator=dataset",
    "task.max_prompt_tokens=600": "must be <= 512 (the context length of the model)",
    "model.context=100": "must be <= 100",
    "model.heads=3": "model.hidden_size must be divisible by model.heads",
    "model.heads=0": "model.hidden_size must be divisible by model.heads",
    "model.lora.rank=-1": "model.lora.rank must be >= 0",
    "model.lora.rank=4 model.lora.alpha=0": "model.lora.alpha must be >= 1",
    "model.lora.rank=4 model.lora.targets=[]": "model.lora.targets must name a layer",
    "algo=sft model.lora.rank=4": "model.lora.rank must be 0 for algo=sft without model.base",
    "model.dtype=float16 backend.device=cpu": "model.dtype must be float32 or bfloat16 without a GPU",
    "task=tldr": "model.policy must name a model for task=tldr (only embedded tasks make their own)",
    "generator.top_p=0.9": "generator.top_p must be off for training",
    "generator.threads=0": "generator.threads must be >= 1",
    "generator.replicas=0": "generator.replicas must be >= 1",
    "generator.replicas=2": "set schedule.max_lag=1 or generator.replicas=1",
    "schedule.max_lag=2 generator.replicas=4": "generator.replicas must be <= schedule.max_lag + 1",
    "generator.worker=true generator.replicas=2": "generator.replicas must be <= schedule.max_lag + 1",
    "schedule.max_lag=2 generator.worker=false generator.replicas=2": "generator.replicas must be 1 without",
    "schedule.max_lag=2 generator.replicas=2 generator.per_rank=true": "generator.per_rank must be false",
    "schedule.max_lag=2 generator.replicas=2 generator.threads=9999": "+ 9999 x 2 on",
    "generator=vllm_colocated generator.replicas=2": "generator.replicas must be 1 with generator=vllm_coloc",
    "generator=vllm schedule.max_lag=2 generator.replicas=2 generator.transfer=nccl": "with "
    "generator.replicas above 1 (all replicas read one snapshot",
    "generator=vllm schedule.max_lag=2 generator.replicas=2 generator.devices=[1]": "must name "
    "generator.tensor_parallel_size x generator.replicas = 2 GPUs",
    f"{SERVERS} generator.replicas=2": "generator.replicas must be 1 with generator=vllm_server",
    f"{SERVERS} generator.per_rank=true": "generator.per_rank must be false with generator=vllm_server",
    f"{SERVERS} generator.transfer=ipc": "generator.transfer must be auto (servers read weights",
    f"{SERVERS} generator.transfer=nccl backend.device=cpu": "generator.transfer must be auto or",
    f"{SERVERS} generator.urls=[http://node:80]": "generator.key_variable must name an environment variable",
    f"{SERVERS} generator.urls=[node:80]": "generator.urls must",
    f"{SERVERS} generator.urls=[http://a:80,http://a:80]": "generator.urls must name each",
    f"{SERVERS} generator.servers=0": "generator.servers must be >= 1",
    "generator.start_limit_s=0": "generator.start_limit_s must be >= 1",
    "generator.request_limit_s=0": "generator.request_limit_s must be >= 1",
    "generator.restarts=-1": "generator.restarts must be >= 0",
    "generator.annotate=true": "generator.annotate must be null or false without a generator in a process",
    "generator.annotate=true schedule.max_lag=1 generator.worker=false": "generator.annotate must be null or",
    "schedule.max_lag=1 generator.threads=9999": "backend.threads + generator.threads must be <= the cores",
    "schedule.max_lag=1 backend.threads=9999": "set backend.threads=null",
    "generator.temperature=0": "generator.temperature must be > 0",
    "algo=sft scorer=reward_model": "scorer must be labels for algo=sft (it maximises no score)",
    "algo.label_smoothing=0.5": "algo.label_smoothing must be >= 0 and < 0.5",
    "algo.weighting=is generator=dataset": "algo.weighting must be none or wpo with generator=dataset",
    "algo.weighting=is algo.weighting_eps=-1": "algo.weighting_eps must be >= 0",
    "algo.weighting=wpo algo.weighting_clamp=0": "algo.weighting_clamp must be > 0",
    "algo=bok algo.samples_per_prompt=1": "algo.samples_per_prompt must be >= 2 for bok",
    "algo=rloo algo.samples_per_prompt=1": "algo.samples_per_prompt must be >= 2 for rloo",
    "algo=grpo generator=dataset": "generator must be one that samples for algo=grpo",
    "algo=grpo algo.clip_low=2": "algo.clip_low must be >= 0 and <= 1",
    "algo=dapo algo.clip_high=0": "algo.clip_high must be > 0",
    "algo=rloo algo.kl_coef=-0.1": "algo.kl_coef must be >= 0",
    "algo=grpo algo.clip_scores=0": "algo.clip_scores must be > 0",
    "algo=ppo algo.gamma=1.5": "algo.gamma must be >= 0 and <= 1",
    "algo=ppo algo.lam=-1": "algo.lam must be >= 0 and <= 1",
    "algo=ppo algo.clip_value=0": "algo.clip_value must be > 0",
    "algo=ppo algo.vf_coef=-1": "algo.vf_coef must be >= 0",
    "algo=ppo algo.value_lr=0": "algo.value_lr must be > 0",
    "algo=ppo algo.kl_coef=0 algo.kl_target=6": "algo.kl_coef must be > 0 with algo.kl_target",
    "algo=ppo algo.value_from=reward scorer=facts": "model.reward must name a reward model",
    "algo=ppo algo.correction.cap=0": "algo.correction.cap must be > 0",
    "algo=ppo algo.correction.low=1.5": "algo.correction.low must be",
    "algo=rloo algo.loss_type=reinforce algo.anchor=behaviour": "algo.anchor must be old with algo.loss_type",
    "algo=m2po algo.anchor=old": "algo.anchor must not be set for algo=m2po",
    "algo=dppo algo.limit_low=0": "algo.limit_low must be > 0",
    "algo=gspo algo.covariance.kind=kl": "algo.covariance.kind must be none for algo=gspo",
    "algo=grpo algo.covariance.kind=clip algo.covariance.low=5": "algo.covariance.low must be < algo.cov",
    "objective_metric=eval/kl schedule.eval_every=0": "schedule.eval_every must be > 0 with objective_metric",
}

WARNINGS = {  # overrides: text that one of the warnings must contain
    "scorer=facts": "scorer and scorer@gold are the same (facts)",
    "model.lora.targets=[dense]": "model.lora.targets has no effect with model.lora.rank=0",
    "model.lora.alpha=8": "model.lora.alpha has no effect with model.lora.rank=0",
    "model.lora.modules_to_save=[lm_head]": "model.lora.modules_to_save has no effect",
    "generator.threads=1": "generator.threads=1 has no effect without a process of its own",
    "schedule.max_lag=1 generator.worker=false generator.threads=1": "generator.threads=1 has no effect",
    "generator.annotate=true generator.worker=true": "generator.annotate=true saves no time",
    "schedule.max_lag=1 generator.replicas=2": "schedule.max_lag=2 keeps all busy",
    "schedule.max_lag=999 generator.replicas=1000": "more processes than cores save no time",
    "algo=sft schedule.epochs=2": "schedule.epochs=2 repeats each batch",
    "algo=sft model.reference=x/y": "model.reference has no effect with algo=sft",
    "schedule.total_episodes=256 schedule.max_lag=2": "schedule.max_lag=2 is never reached in a run of 2",
    "algo.loss_type=ipo algo.label_smoothing=0.1": "algo.label_smoothing has no effect with algo.loss_type",
    "algo.weighting_eps=2": "algo.weighting_eps has no effect with algo.weighting=none",
    "algo.weighting=wpo algo.weighting_eps=2": "algo.weighting_eps has no effect with algo.weighting=wpo",
    "algo.weighting=is algo.weighting_clamp=2": "algo.weighting_clamp has no effect with algo.weighting=is",
    "algo=grpo algo.kl_estimator=k1 algo.kl_unbiased=false": "has a gradient of 0 on average",
    "algo=gspo algo.correction.kind=mask": "set algo.correction.level=sequence",
    "algo=grpo algo.correction.cap=3": "algo.correction.cap has no effect with algo.correction.kind=none",
    "algo=grpo algo.covariance.share=0.1": "algo.covariance.share has no effect with algo.covariance.kind",
    "algo=grpo algo.advantage=opo": "algo.advantage=opo with algo.scale=group is not OPO",
    "schedule.max_lag=1 schedule.update=in_flight": "two runs with the same config will differ",
    "schedule.total_episodes=256 optim.warmup=2": "lasts the whole run of 2 optimizer steps",
}


@pytest.mark.parametrize("overrides", PROBLEMS)
def test_problem_is_found_with_its_rule_value_and_remedy(overrides):
    found = check.problems(compose(overrides.split()))
    assert any(PROBLEMS[overrides] in text for text in found), found
    assert all(", got " in text and "; " in text for text in found)


@pytest.mark.parametrize("overrides", WARNINGS)
def test_warning_is_reported_and_is_not_a_problem(overrides):
    cfg = compose(overrides.split())
    assert any(WARNINGS[overrides] in text for text in check.warnings(cfg))
    assert not check.problems(cfg)


@pytest.mark.parametrize(
    "overrides",
    [
        "optim.max_grad_norm=null",
        "schedule.eval_every=0 schedule.save_every=0",
        "schedule.minibatches=64",
        "schedule.max_lag=1 generator.threads=1 backend.threads=1",
        "generator.worker=true generator.threads=9999",
        "schedule.max_lag=1 generator.annotate=true",
        "generator.annotate=false",
        "algo=ppo algo.value_from=policy scorer=facts scorer@gold=none",
        "algo=ppo algo.correction.kind=decoupled schedule.max_lag=1 schedule.epochs=2",
        "algo=sft schedule.total_episodes=6400",
        "scorer=answer task=tldr_mini scorer=reward_model",
        f"{STORED} schedule.total_episodes=null schedule.total_epochs=0.5",
    ],
)
def test_valid_configs_have_neither_problems_nor_warnings(overrides):
    cfg = compose(overrides.split())
    assert not check.problems(cfg) and not check.warnings(cfg)


def test_adapters_need_peft(monkeypatch):
    cfg = compose(["model.lora.rank=4"])
    assert not check.problems(cfg)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = check.problems(cfg)
    assert "model.lora.rank=4 needs the package PEFT" in problem and "pip install -e '.[lora]'" in problem


def test_float16_needs_a_backend_that_scales_the_loss(monkeypatch):
    cfg = compose(["model.dtype=float16"])
    assert not check.problems(cfg)
    monkeypatch.setattr(TorchConfig, "scales_loss", False)
    assert "model.dtype must be float32 or bfloat16 with backend=torch" in check.problems(cfg)[0]


def test_gradient_checkpointing_does_not_change_the_run_name():
    names = {
        run_name(compose([f"model.gradient_checkpointing={on}", f"model.lora.rank={rank}"]))
        for on in ("false", "true")
        for rank in (0, 4)
    }
    assert len(names) == 2


@pytest.mark.parametrize("key", ["lr=-1", "lr=0"])
def test_rules_do_not_crash_on_values_that_another_rule_rejects(key):
    words = [
        "schedule.prompts_per_update=0",
        "schedule.minibatches=0",
        "backend.micro_batch=0",
        f"optim.{key}",
    ]
    found = check.problems(compose([*words, "algo.samples_per_prompt=0", "model.heads=0"]))
    assert len(found) == 6


def test_local_model_needs_weight_files_and_a_sufficient_context_length(tmp_path):
    folder = Path(write_model(tmp_path / "policy", max_position_embeddings=128))
    found = check.problems(compose([f"model.policy={folder}"]))
    assert len(found) == 1 and "must be <= 128 (the context length of the model), got 192 + 40" in found[0]
    assert not check.problems(compose([f"model.policy={folder}", "task.max_prompt_tokens=88"]))
    (folder / "model.safetensors").unlink()
    assert any("no *.safetensors" in text for text in check.problems(compose([f"model.policy={folder}"])))


def test_sizes_are_computed_from_the_config_alone():
    words = [
        "schedule.minibatches=2",
        "schedule.epochs=2",
        "backend.micro_batch=16",
        "schedule.total_episodes=1280",
    ]
    rows = dict(summary.counts(compose([*words, "schedule.eval_every=0.5", "schedule.save_every=4"])))
    assert rows == {
        "episodes per update": "128 = 64 prompts x 2 samples",
        "updates": "10 = 1,280 episodes / 128",
        "passes over the data": "0.0781 of 8,192 prompts",
        "optimizer steps": "40 = 10 updates x 2 minibatches x 2 epochs",
        "sequences per forward": "16, 4 per optimizer step",
        "evaluations": "3, after updates 0 5 10",
        "checkpoints": "2, after updates 4 8",
    }


def test_thread_counts_of_trainer_and_generator_processes_are_shown():
    rows = dict(summary.describe(compose(["schedule.max_lag=1", "backend.threads=1", "generator.threads=1"])))
    assert rows["CPU threads"] == "trainer 1, generator process 1"
    rows = dict(
        summary.describe(compose(["schedule.max_lag=2", "generator.replicas=2", "generator.threads=1"]))
    )
    assert rows["CPU threads"].endswith(", each of 2 generator processes 1")


def test_updates_of_a_run_in_epochs_are_computed_from_the_size_of_the_data():
    sft = [
        "algo=sft",
        "task.train_size=640",
        "schedule.total_episodes=null",
        "schedule.prompts_per_update=64",
    ]
    rows = dict(summary.describe(compose([*sft, "schedule.total_epochs=2"])))
    assert rows["updates"] == "20 = 2 epochs of 640 examples / 64"
    assert "known when the data are read" in dict(summary.describe(compose(["algo=reward"])))["updates"]
    pairs = dict(summary.describe(compose(["algo=reward"]), examples=128))
    assert pairs["updates"] == "32 = 2 epochs of 128 examples / 8"


@pytest.mark.parametrize(
    ("overrides", "environment", "trainer", "generator"),
    [
        ("", "", None, None),
        ("backend.threads=3", "", 3, None),
        ("schedule.max_lag=1", "", 4, 4),
        ("schedule.max_lag=1 generator.threads=1", "", 7, 1),
        ("schedule.max_lag=1 backend.threads=6", "", 6, 2),
        ("schedule.max_lag=1 backend.threads=1 generator.threads=2", "", 1, 2),
        ("schedule.max_lag=1", "1", 1, 1),
        ("schedule.max_lag=1", "6,2", 3, 3),
        ("schedule.max_lag=3 generator.replicas=3", "", 2, 2),
        ("schedule.max_lag=4 generator.replicas=4", "", 4, 1),
        ("schedule.max_lag=3 generator.replicas=3 backend.threads=4", "", 4, 1),
        ("schedule.max_lag=3 generator.replicas=3 generator.threads=2", "", 2, 2),
        ("schedule.max_lag=20 generator.replicas=20", "", 1, 1),
        ("generator.worker=true", "", None, 8),
        ("schedule.max_lag=1 generator.worker=false", "", None, None),
    ],
)
def test_trainer_and_generator_share_the_cores(monkeypatch, overrides, environment, trainer, generator):
    for module in (root, generators):
        monkeypatch.setattr(module, "cpu_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    cfg = compose(overrides.split())
    assert root.threads(cfg) == (trainer, generator)
    assert not check.problems(cfg)
