"""Tests of errors on the command line: one message with a remedy, exit code 2, no folder, no torch import."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.checks.machine import composed
from rlhf.core.errors import override
from rlhf.runs.folder import RunFolder
from rlhf.words.catalogue import groups
from rlhf.words.compose import compose, load_config
from rlhf.words.identity import digest

# Wrong arguments, the key that the message must name, and a command that follows the remedy (empty: it has
# no words to paste). The message must have each key of the remedy.
MISTAKES = (
    # names of keys and groups
    ("algo.beat=1", "algo.beat", "algo.beta=1"),
    ("+algo.beat=1", "algo.beat", "algo.beta=1"),
    ("++algo.beat=1", "algo.beat", "algo.beta=1"),
    ("algo=sft algo.beta=0.1", "algo.beta", "algo=dpo algo.beta=0.1"),
    ("algo=reward algo.loss_type=ipo", "algo.loss_type", "algo=dpo algo.loss_type=ipo"),
    ("algo.kl_ceof=1", "algo.kl_ceof", "algo=ppo algo.kl_coef=1"),
    ("algo.lr=1", "algo.lr", "optim.lr=1"),
    ("algo.dpo.beta=1", "algo.dpo.beta", "algo.beta=1"),
    ("lr=1", "lr", "optim.lr=1"),
    ("Optim.LR=1", "Optim.LR", "optim.lr=1"),
    ("eval.every=10", "eval.every", "schedule.eval_every=10"),
    ("schedule.epoch=3", "schedule.epoch", "schedule.epochs=3"),
    ("ALGO=dpo", "ALGO", "algo=dpo"),
    ("algoo=dpo", "algoo", "algo=dpo"),
    ("sft=true", "sft", "algo=sft"),
    ("scorer@glod=none", "scorer@glod", "scorer@gold=none"),
    ("foo@bar=1", "foo@bar", ""),
    ("model@generator=hf", "model@generator", ""),
    ("a.b.c=1", "a.b.c", ""),
    ("+foo=1", "foo", ""),
    ("~algo.beat", "algo.beat", ""),
    ("~seed", "seed", ""),
    ("~gold", "gold", ""),
    ("hydra.run.dirr=x", "hydra.run.dirr", "hydra.run.dir=x"),
    ("hydra.job.env_set.X=1", "hydra.job.env_set.X", "+hydra.job.env_set.X=1"),
    ("hydra/launcher=slurmm", "hydra/launcher", "hydra/launcher=slurm"),
    ("logger.wandb.project=x", "logger.wandb.project", "logger=wandb logger.wandb.project=x"),
    (
        "scorer=weighted scorer.parts.a.x=1",
        "scorer.parts.a",
        "scorer=weighted +scorer@scorer.parts.a=facts",
    ),
    ("algo.name=ppo", "algo.name", "algo=ppo"),
    ("model.name=x", "model.name", ""),
    ("gold.name=none", "gold.name", "scorer@gold=none"),
    # options of groups
    ("algo=dpoo", "algo", "algo=dpo"),
    ("algo=DPO", "algo", "algo=dpo"),
    ("algo=\U0001f642", "algo", ""),
    ("algo=reinforce++", "algo", "algo=rloo"),
    ("task=tldr-mini", "task", "task=tldr_mini"),
    ("model=pythia-1b", "model", "model=pythia_1b"),
    ("debug=true", "debug", "debug=tiny"),
    ("debug=null", "debug", ""),
    ("tuned=x", "tuned", ""),
    ("experiment=nope", "experiment", ""),
    ("algo=null", "algo", ""),
    ("algo={beat:1}", "algo.beat", "algo.beta=1"),
    ("~algo", "algo", ""),
    ("+algo=sft", "algo", "algo=sft"),
    ("++algo=sft", "algo", "algo=sft"),
    ("algo=[dpo,sft]", "algo", "algo=sft"),
    ("algo=dpo,sft", "algo", ""),
    ("gold=facts", "scorer@gold", "scorer@gold=facts"),
    ("scorer@gold=fact", "scorer@gold", "scorer@gold=facts"),
    ("logger=[wandb,foo]", "logger", ""),
    ("task=my.jsonl", "task", "task=local task.path=my.jsonl"),
    ("task=data/my.jsonl", "task", "task=local task.path=data/my.jsonl"),
    ("model=org/model", "model", "model.policy=org/model"),
    ("scorer=mine.py:brief", "scorer", "scorer=function scorer.path=mine.py:brief"),
    ("scorer@gold=http://h/x", "scorer@gold", "scorer@gold=http gold.url=http://h/x"),
    # values
    ("algo.beta=high", "algo.beta", "algo.beta=0.1"),
    ("algo.beta=null", "algo.beta", "algo.beta=0.1"),
    ("algo.beta=", "algo.beta", "algo.beta=0.1"),
    ("algo.beta=\u22121", "algo.beta", "algo.beta=0.1"),
    ("algo.beta.x=1", "algo.beta", ""),
    ("algo.beta=${nope}", "algo.beta", ""),
    ("algo.loss_type=ipoo", "algo.loss_type", "algo.loss_type=ipo"),
    ("logger=wandb logger.wandb.mode=of", "logger.wandb.mode", "logger=wandb logger.wandb.mode=offline"),
    ("model.dtype=fp16", "model.dtype", "model.dtype=float16"),
    ("seed=1.5", "seed", "seed=1"),
    ("schedule.total_episodes=1e4", "schedule.total_episodes", "schedule.total_episodes=10000"),
    ("schedule=5", "schedule", ""),
    ("optim=[1]", "optim", ""),
    ("optim.betas=0.9", "optim.betas", "optim.betas=[0.9,0.999]"),
    ("optim.betas=[0.9]", "optim.betas", "optim.betas=[0.9,0.999]"),
    ("optim.betas=[a,b]", "optim.betas", "optim.betas=[0.9,0.999]"),
    ("model.lora.targets=query", "model.lora.targets", "model.lora.targets=[query]"),
    ("task=local task.path=[a.jsonl,b.jsonl]", "task.path", "task=local task.path=a.jsonl"),
    ("task.data_seed=???", "task.data_seed", "task.data_seed=3"),
    ("output_dir=", "output_dir", "output_dir=outputs"),
    ("output_dir='~/x'", "output_dir", f"output_dir={Path.home()}/x"),
    ("algo.samples_per_prompt=1", "algo.samples_per_prompt", "algo.samples_per_prompt=2"),
    ("resume=must", "resume", "resume=auto"),
    ("model.policy=./nowhere", "model.policy", ""),
    ("model.tokenizer=./nowhere", "model.tokenizer", ""),
    ("scorer=reward_model scorer.path=./nowhere", "scorer.path", ""),
    ("scorer@gold=reward_model", "gold.path", ""),
    ("scorer@gold=reward_model gold.path=./nowhere", "gold.path", ""),
    # commas, blanks, brackets and quotes
    ("optim.lr=1e-3,1e-4", "optim.lr", "-m"),
    ("seed=range(1,3)", "seed", "-m"),
    ("optim.betas=0.9,0.99", "optim.betas", "optim.betas=[0.9,0.99]"),
    ("scorer=function scorer.path=a.py:f,b:g", "scorer.path", "scorer=function scorer.path=[a.py:f,b:g]"),
    ("output_dir=a,b", "output_dir", 'output_dir="a,b"'),
    ("optim.betas=[0.9, 0.99]", "optim.betas", "optim.betas=[0.9,0.99]"),
    ("optim.betas=(0.9,0.99)", "optim.betas", "optim.betas=[0.9,0.99]"),
    ("model.lora.rank=4,", "model.lora.rank", "model.lora.rank=4"),
    ("foo='", "foo", ""),
    ("algo = dpo", "algo", "algo=dpo"),
    ("optim.lr= 1e-3", "optim.lr", "optim.lr=1e-3"),
    ("optim.lr =1e-3", "optim.lr", "optim.lr=1e-3"),
    ("optim.lr 1e-3", "optim.lr", "optim.lr=1e-3"),
    ("algo ppo", "algo", "algo=ppo"),
    ("algo:dpo", "algo:dpo", "algo=dpo"),
    ("dpo", "dpo", "algo=dpo"),
    # flags
    ("--lr 1e-3", "--lr", "optim.lr=1e-3"),
    ("--algo=dpo", "--algo", "algo=dpo"),
    ("--max-lag 1", "--max-lag", "schedule.max_lag=1"),
    ("--fast", "--fast", ""),
    ("--mutlirun seed=1", "--mutlirun", "--multirun"),
    ("--cfg", "--cfg", "--cfg job"),
    ("--cfg=jobs", "--cfg", "--cfg job"),
    ("-c jobs seed=2", "-c", "-c job"),
    ("--config-path .", "--config-path", "--config-dir"),
    ("--config-name foo", "--config-name", ""),
    ("--config-dir ./nowhere", "--config-dir", ""),
    # names of other projects
    ("beta=0.1", "beta", "algo.beta=0.1"),
    ("algo=rloo beta=0.1", "beta", "algo=rloo algo.kl_coef=0.1"),
    ("algo=grpo algo.beta=0.1", "algo.beta", "algo=grpo algo.kl_coef=0.1"),
    ("algo=grpo algo.loss_type=dr_grpo", "algo.loss_type", "algo=dr_grpo"),
    ("model.lora.r=16", "model.lora.r", "model.lora.rank=16"),
    ("model.lora.target_modules=[q_proj]", "model.lora.target_modules", "model.lora.targets=[q_proj]"),
    ("target_modules=all-linear", "target_modules", "model.lora.targets=null"),
    ("temperature=1", "temperature", "generator.temperature=1"),
    ("generator.max_new_tokens=64", "generator.max_new_tokens", "generator.response_length=64"),
    ("generator.max_tokens=64", "generator.max_tokens", "generator.response_length=64"),
    ("generator.backend=vllm", "generator.backend", "generator=vllm"),
    ("generator.stop=x", "generator.stop", ""),
    ("batch_size=8", "batch_size", "schedule.prompts_per_update=8"),
    ("gradient_accumulation_steps=4", "gradient_accumulation_steps", "backend.micro_batch=4"),
    ("total_steps=100", "total_steps", "schedule.total_episodes=100"),
    ("actor_rollout_ref.rollout.n=5", "actor_rollout_ref.rollout.n", "algo.samples_per_prompt=5"),
    ("algo=ppo critic.adam.lr=1e-5", "critic.adam.lr", "algo=ppo algo.value_lr=1e-5"),
    ("epsilon=0.2", "epsilon", "algo=grpo algo.clip_low=0.2"),
    ("algo=ppo epsilon=0.2", "epsilon", "algo=ppo algo.clip_low=0.2"),
    ("deepspeed=zero3", "deepspeed", "backend=zero3"),
    ("wandb=true", "wandb", "logger=wandb"),
    ("reward=mine.py:brief", "reward", "scorer=function scorer.path=mine.py:brief"),
    ("reward_model=org/model", "reward_model", "model.reward=org/model"),
    ("reward.model_name_or_path=rm", "reward.model_name_or_path", "model.reward=rm"),
    ("model.load_in_4bit=true", "model.load_in_4bit", "model.lora.rank=16 model.dtype=bfloat16"),
    ("+load_in_4bit=true", "load_in_4bit", "model.lora.rank=16 model.dtype=bfloat16"),
    ("+trainer.n_gpus_per_node=1", "trainer.n_gpus_per_node", "backend.ranks=1"),
    ("vllm_mode=server", "vllm_mode", "generator=vllm_server"),
    ("vllm_mode=colocate", "vllm_mode", "generator=vllm_colocated"),
    (
        "vllm_server_base_url=http://127.0.0.1:8000",
        "vllm_server_base_url",
        "generator=vllm_server generator.urls=[http://127.0.0.1:8000]",
    ),
    ("vllm_gpu_memory_utilization=0.5", "vllm_gpu_memory_utilization", "generator=vllm generator.memory=0.5"),
    (
        "generator=vllm_colocated generator.vllm_gpu_memory_utilization=0.5",
        "generator.vllm_gpu_memory_utilization",
        "generator=vllm_colocated generator.memory=0.5",
    ),
    (
        "max_tool_calling_iterations=4",
        "max_tool_calling_iterations",
        "environment=tools environment.max_turns=4",
    ),
    ("rollout_func=own.py:f", "rollout_func", "environment=python environment.path=own.py:Class"),
    (
        "environment_factory=own.py:Db",
        "environment_factory",
        "environment=tools environment.functions=[own.py:Db]",
    ),
    ("tools=[own.py:f]", "tools", "environment=tools environment.functions=[own.py:f]"),
    ("--beta 0.1", "--beta", "algo.beta=0.1"),
    ("--beta 0.04 algo=rloo", "--beta", "algo=rloo algo.kl_coef=0.04"),
    (
        "--num_generations 4 --beta 0.04",
        "--num_generations",
        "algo=grpo algo.samples_per_prompt=4 algo.kl_coef=0.04",
    ),
    (
        "--rollout.n_samples_per_prompt=8 --algo.kl.init_coef=1e-3 algo=rloo",
        "--rollout.n_samples_per_prompt",
        "algo=rloo algo.samples_per_prompt=8 algo.kl_coef=1e-3",
    ),
    ("--use_vllm --load_in_4bit true", "--use_vllm", "generator=vllm"),
    (
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 4",
        "--per_device_train_batch_size",
        "backend.micro_batch=8",
    ),
    ("--advantage_estimator group_norm", "--advantage_estimator", "algo=grpo"),
    ("--zero_stage 3", "--zero_stage", "backend=zero3"),
    ("--gradient_checkpointing", "--gradient_checkpointing", "model.gradient_checkpointing=true"),
    ("--no_gradient_checkpointing", "--no_gradient_checkpointing", "model.gradient_checkpointing=false"),
    ("--save_strategy no", "--save_strategy", ""),
    ("--reward_funcs mine.py:brief", "--reward_funcs", "scorer=function scorer.path=mine.py:brief"),
    ("--dataset_name my.jsonl", "--dataset_name", "task=local task.path=my.jsonl"),
)

IN_FILES = {  # experiment file of `own_conf`: texts that the message must contain
    "typo": ("error: algo.beat must be", "in experiment/typo.yaml", "algo.beta"),
    "wrong_type": (
        "error: algo.beta must be",
        "in experiment/wrong_type.yaml",
        "got 'high'; set algo.beta=0.1",
    ),
    "chain": ("error: algo.beat must be", "in experiment/typo.yaml", "algo.beta"),
    "list": ("error: optim.betas must be", "in experiment/list.yaml", "set optim.betas=[0.9,0.999]"),
    "reference": ("error: algo.beta must refer to", "in experiment/reference.yaml", "got ${nope}"),
    "two": ("error: algo must have one option", "in experiment/two.yaml", "write override /algo: "),
    "wrong_group": ("error: algoo must be a group", "in experiment/wrong_group.yaml", "algo?"),
    "wrong_option": (
        "error: algo must be one of",
        "in experiment/wrong_option.yaml",
        "got 'dpoo'",
        "algo=dpo?",
    ),
    "named": ("error: algo.name must not be set", "got ppo; set algo=ppo"),
    "no_package": ("must begin with # @package _global_", "experiment/no_package.yaml"),
    "no_yaml": ("a config file is not YAML", "no_yaml.yaml"),
}


@pytest.mark.parametrize(("typed", "key", "remedy"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_refused_with_its_key_and_a_remedy_that_is_accepted(
    command, typed, key, remedy, tmp_path
):
    answer = command(*typed.split())
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert answer.err.startswith(f"error: {key}") and len(answer.err.splitlines()) == 1
    rule, got, after = answer.err.partition(", got ")
    assert re.search(" (must|needs) ", rule) and got and "; " in after
    words = remedy.split()
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        assert word in typed or name in after.partition("; ")[2] or f"{name}=" in rule, answer.err
        options = value and name in groups() and f"{name}={value}" not in typed
        assert not options or value in answer.err
    if words and not words[0].startswith("-"):
        composed(words)


@pytest.mark.parametrize("name", IN_FILES)
def test_error_in_an_experiment_file_names_the_file(command, own_conf, name):
    answer = command("--config-dir", str(own_conf), f"experiment={name}")
    assert answer.code == 2 and answer.err.startswith("error: ") and not answer.runs
    for part in IN_FILES[name]:
        assert part in answer.err


def test_valid_experiment_file_of_the_user_runs(command, own_conf):
    answer = command("--config-dir", str(own_conf), "experiment=fine")
    assert answer.code == 0 and answer.runs[0][0].algo.beta == 0.3


@pytest.mark.parametrize(
    "typed",
    [
        "--config-dir {run} --config-name config",
        "--config-dir={copy}",
        "-cd {copy} -cn copy seed=3",
        "{run}",
        "{run}/config.yaml",
        "--config {run}/config.yaml",
        "config={run}/config.yaml",
        "experiment={copy}/copy.yaml",
    ],
)
def test_a_saved_config_in_place_of_options_is_refused_with_its_command(command, tmp_path, typed):
    folder = RunFolder(tmp_path / "run, it's")
    folder.path.mkdir()
    folder.write_config(compose(["algo=rloo", override("task.path", "a, b"), "seed=7"]))
    (tmp_path / "copy").mkdir()
    shutil.copy(folder.config, tmp_path / "copy" / "copy.yaml")
    words = [word.format(run=folder.path, copy=tmp_path / "copy") for word in typed.split()]
    answer = command(*words)
    assert answer.code == 2 and not answer.runs
    words = shlex.split(answer.err.partition("to run it")[2].partition(": ")[2])
    assert digest(compose(words[3:])) == digest(load_config(folder.config))


def test_a_folder_without_options_is_no_config_folder(command, tmp_path):
    answer = command("--config-dir", str(tmp_path))
    assert answer.code == 2 and "without a folder of options" in answer.err


def test_all_problems_are_reported_together(command):
    answer = command("algo.beta=-1", "optim.lr=0", "schedule.total_episodes=1000", "seed=-1")
    assert answer.code == 2 and answer.err.startswith("error: 4 problems\n  - ")
    for key in ("algo.beta", "optim.lr", "schedule.total_episodes", "seed"):
        assert f"  - {key} must be" in answer.err


def test_unknown_added_keys_and_missing_values_are_reported_together(command):
    answer = command("+algo.beat=1", "+schedule.foo=1", "task.data_seed=???")
    assert "error: 3 problems" in answer.err


def test_warning_does_not_stop_the_run(command):
    answer = command("scorer=facts")
    assert answer.code == 0 and len(answer.runs) == 1
    assert "warning: scorer and scorer@gold are the same (facts)" in answer.err


@pytest.mark.process
def test_help_and_errors_do_not_import_torch_or_other_large_libraries(tmp_path, own_conf):
    commands = [
        ["--help"],
        ["--cfg", "job"],
        ["--cfg", "job", "--resolve", "logger=[wandb,tensorboard,mlflow,trackio]"],
        ["algo.beat=1"],
        ["+algo.beat=1"],
        ["algo.beta=high"],
        ["algo=dpoo"],
        ["algo.beta=-1"],
        ["--config-dir", str(own_conf), "experiment=typo"],
        ["resume=must"],
        ["-m", "seed=1,2", "algo.beta=0.1,-1"],
        ["scorer=function", "scorer.path=nowhere:nothing"],
        ["scorer=http", "scorer.url=nowhere"],
    ]
    script = """
import json, sys
from rlhf.train import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["train.py", *words]
    try:
        main()
        codes.append(0)
    except SystemExit as stop:
        codes.append(stop.code)
heavy = {"torch", "transformers", "datasets", "vllm", "deepspeed", "wandb", "tensorboard", "requests"}
heavy |= {"mlflow", "trackio", "matplotlib"}
heavy &= set(sys.modules)
print(json.dumps([codes, sorted(heavy)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)], cwd=tmp_path, capture_output=True, text=True
    )
    codes, heavy = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0] + [2] * 10 and heavy == [], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.process
def test_python_m_rlhf_train_reports_an_error(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", "algo.beta=high"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: algo.beta must be a number")
    assert done.stdout == "" and not list(tmp_path.iterdir())
