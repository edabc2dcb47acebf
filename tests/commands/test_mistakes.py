"""Tests of errors on the command line: one message with a remedy, exit code 2, no folder, no torch import."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.core.errors import override
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose, load_config
from rlhf.words.identity import digest

DPO_KEYS = (
    "samples_per_prompt, tie_tolerance, loss_type, beta, label_smoothing, length_normalised, ties, "
    "weighting, weighting_eps, weighting_clamp"
)

MISTAKES = {  # wrong arguments: texts that the message must contain
    "algo.beat=1": [f"algo.beat must be a setting of algo=dpo ({DPO_KEYS}), got algo.beat=1", "algo.beta?"],
    "+algo.beat=1": [
        "algo.beat must be a setting of algo=dpo",
        "got +algo.beat=1",
        "did you mean algo.beta?",
    ],
    "++algo.beat=1": ["algo.beat must be a setting of algo=dpo", "got ++algo.beat=1", "algo.beta?"],
    "algo.beta=high": ["algo.beta must be a number, got 'high'; set algo.beta=0.1"],
    "algo.beta=null": ["algo.beta must be a number, got 'null'"],
    "algo.beta=": ["algo.beta must be a number, got ''"],
    "algo.beta.x=1": ["algo.beta must be a number, with nothing inside it, got algo.beta.x=1"],
    "algo.loss_type=ipoo": [
        "must be one of sigmoid, ipo, hinge, robust, got 'ipoo'; did you mean algo.loss_type=ipo?"
    ],
    "algo=sft algo.beta=0.1": ["algo.beta must be a setting of algo=sft", "it belongs to algo=dpo"],
    "algo=reward algo.loss_type=ipo": ["algo.loss_type must be a setting of algo=reward", "algo=dpo"],
    "algo=dpoo": ["algo must be one of bok, cispo, dapo, dpo, ", "got 'dpoo'; did you mean algo=dpo?"],
    "algo=null": ["algo must be chosen (every run has one), got algo=null"],
    "~algo": ["algo must be chosen"],
    "+algo=sft": ["algo must have one option"],
    "algo=[dpo,sft]": ["algo must have one option"],
    "algo=dpo,sft": [
        "algo must have one value in a single run (commas separate the values of a sweep), got dpo,sft; add"
    ],
    "seed=range(1,3)": ["seed must have one value in a single run", "got range(1,3); add -m to run each\n"],
    "++algo=sft": ["algo must have one option"],
    "foo@bar=1": ["foo@bar must be a group (one of algo, "],
    "algo={beat:1}": ["algo.beat must be a setting of algo=dpo", "did you mean algo.beta?"],
    "optim=[1]": ["optim is a section of settings (optim.optimizer, ", "got optim=[1]"],
    "hydra.job.env_set.X=1": ["must be added with +", "write '+hydra.job.env_set.X=1'"],
    "~algo.beat": ["~algo.beat must name an existing key"],
    "~seed": ["seed must not be removed", "leave ~seed out"],
    "~gold": ["gold must not be removed"],
    "scorer=weighted scorer.parts.a.x=1": [
        "scorer.parts.a must be chosen before it is set",
        "got scorer.parts.a.x=1; choose it by scorer@scorer.parts.a=",
    ],
    "optim.lr=1,000": ["got 1,000; set optim.lr=1000, or add -m to run each"],
    "optim.lr=0,001": ["got 0,001; set optim.lr=0.001, or add -m to run each"],
    "optim.betas=0.9,0.99": ["write 'optim.betas=[0.9,0.99]' for a list, or add -m to run each"],
    "optim.lr=1e-3,1e-4": ["got 1e-3,1e-4; add -m to run each\n"],
    "optim.betas=[0.9, 0.99]": ["got [0.9,; write 'optim.betas=[0.9,0.99]'"],
    "optim.betas=(0.9,0.99)": ["got (0.9,0.99); write 'optim.betas=[0.9,0.99]'"],
    "optim.betas=[a,b]": ["must be a list of numbers, as [a,b], got '[a,b]'; set optim.betas=[0.9,0.999]"],
    "model.lora.targets=query": ["must be a list of texts", "set 'model.lora.targets=[query]'"],
    "model.lora.rank=4,": ["write model.lora.rank=4\n"],
    "algo = dpo": ["algo must have no blanks around '='", "got algo = dpo; write algo=dpo"],
    "optim.lr= 1e-3": ["got optim.lr= 1e-3; write optim.lr=1e-3"],
    "optim.lr 1e-3": ["write optim.lr=1e-3"],
    "algo ppo": ["write algo=ppo"],
    "debug=true": ["debug must be one of tiny, got 'true'; set debug=tiny"],
    "task=my.jsonl": ["for your own data set task=local task.path=my.jsonl"],
    "task=data/my.jsonl": ["got 'data/my.jsonl'; for your own data set task=local task.path=data/my.jsonl"],
    "model=org/model": ["got 'org/model'; for a folder or a name of the hub set model.policy=org/model"],
    "model=pythia-1b": ["did you mean model=pythia_1b?"],
    "scorer=mine.py:brief": ["for a Python function set scorer=function scorer.path=mine.py:brief"],
    "scorer@gold=http://h/x": ["for a service set scorer@gold=http gold.url=http://h/x"],
    "algo.kl_ceof=1": ["did you mean algo.kl_coef, a setting of algo=ppo, "],
    "model.lora.r=16": ["set model.lora.rank=16 (r in TRL)"],
    "algo=grpo algo.beta=0.1": ["set algo.kl_coef=0.1 (beta in TRL)"],
    "algo=grpo algo.loss_type=dr_grpo": ["set algo=dr_grpo (loss_type in TRL"],
    "generator.max_new_tokens=64": ["set generator.response_length=64 (max_new_tokens in TRL)"],
    "gradient_accumulation_steps=4": ["set backend.micro_batch=<value>", "accumulation steps follows"],
    "model.load_in_4bit=true": ["no key here", "set model.lora.rank=16 model.dtype=bfloat16"],
    "+load_in_4bit=true": ["no key here"],
    "total_steps=100": ["set schedule.total_episodes=<value>", "responses"],
    "actor_rollout_ref.rollout.n=5": ["set algo.samples_per_prompt=5 (rollout.n in verl)"],
    "--num_generations 4 --beta 0.04": [
        "write algo=grpo algo.samples_per_prompt=4 algo.kl_coef=0.04\n",
    ],
    "--rollout.n_samples_per_prompt=8 --algo.kl.init_coef=1e-3 algo=rloo": [
        "write algo.samples_per_prompt=8 algo.kl_coef=1e-3\n"
    ],
    "--beta 0.04 algo=rloo": ["write algo.kl_coef=0.04\n"],
    "--beta 0.1": ["write algo.beta=0.1\n"],
    "--use_vllm --load_in_4bit true": ["write generator=vllm; leave load_in_4bit out"],
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 4": ["write backend.micro_batch=8; "],
    "--advantage_estimator group_norm": ["write algo=grpo; "],
    "--zero_stage 3": ["write backend=zero3; "],
    "--gradient_checkpointing": ["write model.gradient_checkpointing=true\n"],
    "--no_gradient_checkpointing": ["write model.gradient_checkpointing=false\n"],
    "--save_strategy no": ["leave save_strategy out"],
    "--reward_funcs mine.py:brief": ["write scorer=function scorer.path=mine.py:brief; "],
    "--dataset_name my.jsonl": ["write task=local task.path=my.jsonl; "],
    "+trainer.n_gpus_per_node=1": ["(trainer.n_gpus_per_node in verl"],
    "generator.max_tokens=64": ["set generator.response_length=64 (max_tokens in other programs)"],
    "generator.backend=vllm": ["set generator=vllm\n"],
    "generator.stop=x": ["stop of other programs has no key here"],
    "eval.every=10": ["did you mean schedule.eval_every?"],
    "batch_size=8": ["set schedule.prompts_per_update=<value>"],
    "temperature=1": ["set generator.temperature=1 "],
    "deepspeed=zero3": ["set backend=zero3 "],
    "reward=mine.py:brief": ["set scorer=function scorer.path=mine.py:brief "],
    "reward_model=org/model": ["set model.reward=org/model "],
    "wandb=true": ["set logger=wandb "],
    "sft=true": ["did you mean algo=sft?"],
    "algo=rloo beta=0.1": ["set algo.kl_coef=0.1 (beta in TRL)"],
    "beta=0.1": ["set algo.beta=0.1 (beta in TRL)"],
    "algo=reinforce++": ["did you mean algo=rloo?"],
    "scorer=function scorer.path=a.py:f,b:g": ["write 'scorer.path=[a.py:f,b:g]' for several functions"],
    "output_dir=a,b": ["""add -m to run each, or write 'output_dir="a,b"' for one text\n"""],
    "algo.dpo.beta=1": ["did you mean algo.beta?"],
    "task=local task.path=[a.jsonl,b.jsonl]": [
        "set task.path=a.jsonl, one text; files of one data set belong in a folder\n"
    ],
    "output_dir=": ["output_dir must name a folder", "set output_dir=outputs"],
    "output_dir='~/x'": ["output_dir must be a path without ~", f"set output_dir={Path.home()}/x"],
    "algo=DPO": ["did you mean algo=dpo?"],
    "task=tldr-mini": ["did you mean task=tldr_mini?"],
    "ALGO=dpo": ["there is no ALGO", "did you mean algo?"],
    "Optim.LR=1": ["did you mean optim.lr?"],
    "--lr 1e-3": ["--lr must be written without dashes", "got --lr 1e-3; write optim.lr=1e-3"],
    "--algo=dpo": ["got --algo=dpo; write algo=dpo"],
    "--max-lag 1": ["write schedule.max_lag=1"],
    "--fast": ["--fast must be a flag of this command", "leave it out, or see --help"],
    "--cfg": ["--cfg must be followed by job, hydra, all (the config to print), got --cfg; write --cfg job"],
    "--cfg=jobs": ["got --cfg=jobs; write --cfg job"],
    "-c jobs seed=2": ["got -c jobs; write -c job"],
    "--mutlirun seed=1": ["did you mean --multirun?"],
    "--config-path .": ["--config-path must not be given", "--config-dir <folder>"],
    "algo:dpo": ["write algo=dpo"],
    "model.dtype=fp16": ["did you mean model.dtype=float16?"],
    "schedule.total_episodes=1e4": ["got '1e4'; set schedule.total_episodes=10000"],
    "algo.beta=\u22121": ["algo.beta must be a number, got '\u22121'; set algo.beta=-1"],
    "algo=\U0001f642": ["algo must be one of bok, "],
    "algo.name=ppo": ["algo.name must not be set (the option of algo sets it), got ppo; set algo=ppo"],
    "model.name=x": ["model.name must not be set", "choose an option with model=<option>"],
    "gold.name=none": ["set scorer@gold=none"],
    "scorer@glod=none": ["did you mean scorer@gold?"],
    "algoo=dpo": ["algoo must be a setting or a group (there is no algoo)", "did you mean algo?"],
    "algo.lr=1": ["algo.lr must be a setting of algo=dpo", "did you mean optim.lr?"],
    "lr=1": ["there is no lr", "did you mean optim.lr?"],
    "+foo=1": ["foo must be a setting or a group"],
    "a.b.c=1": ["a.b.c must be a setting or a group (there is no a)"],
    "schedule.epoch=3": ["did you mean schedule.epochs?"],
    "schedule=5": ["schedule is a section of settings (schedule.total_episodes,"],
    "seed=1.5": ["seed must be a whole number, got '1.5'; set seed=1"],
    "optim.betas=0.9": [
        "optim.betas must be a list of numbers, as [a,b], got '0.9'; set optim.betas=[0.9,0.999]"
    ],
    "optim.betas=[0.9]": ["optim.betas must be two numbers", "got [0.9]"],
    "dpo": ["dpo must read key=value or group=option (it has no '='), got dpo; did you mean algo=dpo?"],
    "foo='": ["foo must have a value that Hydra can read"],
    "gold=facts": ["set scorer@gold=facts"],
    "scorer@gold=fact": ["scorer@gold must be one of", "did you mean scorer@gold=facts?"],
    "logger=[wandb,foo]": ["logger must be one of jsonl, mlflow, tensorboard, trackio, wandb, got 'foo'"],
    "logger.wandb.project=x": ["logger.wandb.project needs the logger wandb", "add logger=wandb"],
    "logger=wandb logger.wandb.mode=of": ["must be one of online, offline or null, got 'of'"],
    "tuned=x": ["tuned must be one of", "got 'x'; write ~tuned"],
    "debug=null": ["debug must be an option, got null; write ~debug"],
    "experiment=nope": ["experiment must be one of its ", "got 'nope'; list them with --help experiment"],
    "hydra/launcher=slurmm": ["hydra/launcher must be one of", "got 'slurmm'"],
    "hydra.run.dirr=x": ["did you mean hydra.run.dir?"],
    "algo.beta=${nope}": ["algo.beta must refer to a key of the config (there is no nope), got ${nope}"],
    "task.data_seed=???": ["task.data_seed must be set"],
    "--config-name foo": ["--config-name must name a file"],
    "--config-dir ./nowhere": ["--config-dir must name a folder laid out like conf/", "nowhere"],
    "algo.samples_per_prompt=1": ["algo.samples_per_prompt must be >= 2 for dpo", "got 1"],
    "resume=must": ["resume=must needs a complete checkpoint to resume from (no such folder)"],
    "model.policy=./nowhere": ["model.policy must name a model on the hub or a folder", "'./nowhere'"],
    "scorer=reward_model scorer.path=./nowhere": ["scorer.path must name a model"],
    "scorer@gold=reward_model": ["gold.path must name a reward model"],
    "scorer@gold=reward_model gold.path=./nowhere": ["gold.path must name a model"],
    "model.tokenizer=./nowhere": ["model.tokenizer must name a tokenizer on the hub or a folder"],
}

IN_FILES = {  # experiment file of `own_conf`: texts that the message must contain
    "typo": ["algo.beat must be a setting of algo=dpo in experiment/typo.yaml", "did you mean algo.beta?"],
    "wrong_type": ["algo.beta must be a number in experiment/wrong_type.yaml, got 'high'"],
    "chain": ["algo.beat must be a setting of algo=dpo in experiment/typo.yaml"],
    "list": ["optim.betas must be a list of numbers, as [a,b] in experiment/list.yaml, got 'high'"],
    "reference": ["algo.beta must refer to a key of the config (there is no nope), got ${nope}"],
    "two": ["algo must have one option, got another one in experiment/two.yaml; write override /algo: "],
    "wrong_group": ["algoo must be a group in experiment/wrong_group.yaml", "did you mean algo?"],
    "wrong_option": ["got 'dpoo' (chosen by experiment=wrong_option); did you mean algo=dpo?"],
    "named": ["algo.name must not be set (the option of algo sets it), got ppo; set algo=ppo"],
    "no_package": ["must begin with # @package _global_", "experiment/no_package.yaml"],
    "no_yaml": ["a config file is not YAML", "no_yaml.yaml"],
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_wrong_arguments_give_one_message_and_create_no_folder(command, typed, tmp_path):
    answer = command(*typed.split())
    assert answer.code == 2
    assert answer.err.startswith("error: ") and len(answer.err.splitlines()) == 1
    for part in MISTAKES[typed]:
        assert part in answer.err
    assert "Traceback" not in answer.err and not answer.runs
    assert not list(tmp_path.iterdir())


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
