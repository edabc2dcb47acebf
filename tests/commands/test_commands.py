"""Tests of the arguments of evaluate, relabel and pipeline: error messages, and effects on the config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import evaluate, extend, pipeline, relabel
from rlhf.runs.folder import RunFolder
from rlhf.stages.evaluation import changed, fingerprint
from rlhf.stages.prerequisites import stage
from rlhf.words.compose import compose, load_config
from tests.model_folders import write_model

COMMANDS = {"evaluate": evaluate, "extend": extend, "relabel": relabel, "pipeline": pipeline}


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the folder of a finished run with a checkpoint."""
    folder = RunFolder(tmp_path / "run")
    folder.write_config(compose([]))
    folder.write_state({"update": 2, "episode": 32, "finished": True, "result": {}})
    checkpoint = folder.path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").write_text("{}")
    write_model(folder.model)
    return folder.path


@pytest.fixture
def call(monkeypatch, called, tmp_path, run):
    """`call("evaluate", "run={run}")` runs a command; `{run}` stands for the folder of the fixture `run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    return lambda name, *words: called(COMMANDS[name].main, *(word.format(run=run) for word in words))


MISTAKES = [
    ("evaluate", "", "run= is required (run folder), got no run=; add run=<...>"),
    ("evaluate", "runs=x", "did you mean run= instead of runs=?"),
    ("evaluate", "run=nowhere", "run= must be the folder of a run, with its config.yaml (no such folder)"),
    ("evaluate", "run=there", "(no config.yaml in it), got there"),
    ("evaluate", "run={run} run={run}", "run= must be given once"),
    ("evaluate", "run={run} split=train", "split= must be one of validation, test, got train"),
    ("evaluate", "run={run} only=checkpoint-9", "only= must name what the run has (checkpoint-1, model)"),
    ("evaluate", "run={run} algo.beta=1", "algo.beta must be something that an evaluation reads (eval, gen"),
    ("evaluate", "run={run} task=arithmetic", "got task=arithmetic; leave it out"),
    ("evaluate", "run={run} gold=facts", "got gold=facts; set scorer@gold=facts"),
    ("evaluate", "run={run} eval.promts=9", "eval.promts must be a setting of eval"),
    ("evaluate", "run={run} eval.prompts=many", "eval.prompts must be a whole number, got 'many'"),
    ("evaluate", "run={run} eval.prompts=0", "eval.prompts must be >= 1 (held-out prompts or pairs"),
    ("evaluate", "run={run} eval.prompts=1,2", "eval.prompts must be set to one value"),
    ("evaluate", "run={run} +eval.prompts=1", "must be set to one value"),
    ("evaluate", "run={run} generator=vlm", "did you mean generator=vllm?"),
    (
        "evaluate",
        "run={run} generator=dataset",
        "generator must be one of auto, hf, vllm, vllm_colocated, vllm_server, got 'da",
    ),
    ("evaluate", "run={run} scorer@gold=reward_model", "gold.path must name a reward model"),
    ("evaluate", "run={run} -m", "-m must be a flag of this command"),
    ("evaluate", "run={run}/model", "(no config.yaml in it), got {run}/model; set run={run}"),
    ("evaluate", "models=there task=local", "models must name a model on the hub or a folder with"),
    ("evaluate", "models={run}/model only=model", "only= must be used with run= (it names models of a run)"),
    ("evaluate", "models={run}/model eval.promts=9", "did you mean eval.prompts? set eval.prompts=9"),
    ("extend", "schedule.total_episodes=1", "run= is required (run folder), got no run=; add run=<...>"),
    ("extend", "run=there", "run= must be the folder of a run, with its config.yaml"),
    ("extend", "run={run}", "must be above 5120 (the length of the run so far), got no new length; set sche"),
    ("extend", "run={run} schedule.total_episodes=640", "got 640; set schedule.total_episodes=10240"),
    ("extend", "run={run} schedule.total_episodes=10241", "schedule.total_episodes must be divisible by the"),
    ("extend", "run={run} schedule.total_epochs=2", "must be set by schedule.total_episodes (its config.yam"),
    ("extend", "run={run} schedule.total_episodes=many", "schedule.total_episodes must be a whole number"),
    ("extend", "run={run} optim.lr=1", "optim.lr must stay as it is (an extension changes only the length"),
    ("extend", "run={run} algo=ppo", "algo must stay as it is"),
    ("extend", "run={run} resume=never", "resume must stay as it is"),
    ("extend", "run={run} total_episodes=10240", "did you mean schedule.total_episodes?"),
    ("extend", "run={run} schedule.total_episodes=640,1280", "schedule.total_episodes must be set to one"),
    ("extend", "{run} schedule.total_episodes=10240", "run= is required (run folder), got {run}; set run="),
    ("relabel", "", "output= is required (folder of the new data set)"),
    ("relabel", "output=x algo=dpo", "algo must not be chosen (nothing is trained here)"),
    ("relabel", "output=x", "task.preferences_path must name the pairs for task=tldr_mini"),
    ("relabel", "output=x task.preferences_path=no", "task.preferences_path must be a folder"),
    ("relabel", "output=x task=preferences task.path=no model.policy=a/b", "task.path must be a folder"),
    ("relabel", "output=x scorer@gold=none", "scorer@gold must be a scorer that judges"),
    ("relabel", "output=x push_to=name", "push_to= must be <owner>/<name>"),
    ("relabel", "output=x push_to=me/it", "push_to= needs a token that may write to me/it"),
    ("pipeline", "algo=sft", "algo must be one that trains a policy"),
    ("pipeline", "algo.beat=1", "did you mean algo.beta? set algo.beta=1"),
    ("pipeline", "resume=never", "resume must be auto (the chain resumes interrupted stages), got never"),
    ("pipeline", "task=tldr", "model.base must name the model that the SFT stage starts from"),
    ("pipeline", 'stages.sft=["algo.beta=1"]', "needs: algo.beta must be a setting of algo=sft"),
    ("pipeline", 'stages.reward=["optim.lr=-1"]', "in the stage algo=reward that this run needs: optim.lr"),
    ("pipeline", "task=gsm8k model=rho_1b task.path=no", "task.path must be a folder"),
    ("pipeline", "split=train", "split= must be one of validation, test"),
    ("pipeline", "push_to=me/it", "push_to= needs a token that may write to me/it"),
]


@pytest.mark.parametrize(("name", "words", "said"), MISTAKES, ids=lambda text: str(text)[:50])
def test_wrong_arguments_are_reported_with_exit_code_2(call, tmp_path, name, words, said):
    before = sorted(tmp_path.rglob("*"))
    code, _, err = call(name, *words.split())
    assert code == 2 and "error: " in err and said.format(run=tmp_path / "run") in err, err
    assert sorted(tmp_path.rglob("*")) == before, "a rejected command creates no file"


def test_a_current_folder_that_was_deleted_is_reported(call, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    code, _, err = call("evaluate")
    assert code == 2 and "the current folder must exist" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_argument_of_the_command(call, name):
    code, out, _ = call(name, "--help")
    assert code == 0 and out.startswith(f"Usage: python -m rlhf.{name} ")
    assert all(f"  {word}=" in out for word in COMMANDS[name].COMMAND.own)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.process
def test_wrong_arguments_are_reported_before_torch_is_imported(tmp_path, run):
    calls = [(name, words.format(run=run).split()) for name, words, _ in MISTAKES[::3]]
    script = (
        "import json, sys, importlib\n"
        "for name, words in json.loads(sys.argv[1]):\n"
        "    sys.argv = [name, *words]\n"
        "    try:\n"
        "        importlib.import_module('rlhf.' + name).main()\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 2\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_run_with_an_option_of_a_missing_package_is_reported(call, run):
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("schema/algo@algo: dpo", "schema/algo@algo: reinforce_mean"))
    code, _, err = call("evaluate", "run={run}")
    assert (
        code == 2 and "algo must be an option that is installed here" in err and "got reinforce_mean" in err
    )


def test_arguments_of_evaluate_change_only_the_named_settings(run):
    folder = RunFolder(run)
    before = load_config(folder.config)
    cfg = changed(folder, ["generator=vllm", "generator.memory=0.3", "eval.prompts=7", "gold.weight=1"])
    assert cfg.generator.name == "vllm" and cfg.generator.memory == 0.3 and cfg.eval.prompts == 7
    assert cfg.generator.response_length == before.generator.response_length == 40
    assert (cfg.algo, cfg.model, cfg.task, cfg.gold) == (before.algo, before.model, before.task, before.gold)
    assert changed(folder) == before


def test_evaluate_can_use_another_judge_with_its_settings(run, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def brief(prompt, response, reference): return -len(response)\n")
    cfg = changed(RunFolder(run), ["scorer@gold=function", f"gold.path={judge}:brief"])
    assert cfg.gold.name == "function" and cfg.gold.path == f"{judge}:brief"


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("eval.prompts=7", True),
        ("eval.temperature=0.5", True),
        ("generator=vllm", True),
        ("seed=3", True),
        ("eval.samples=0", False),
        ("progress=off", False),
        ("backend.threads=1", False),
    ],
)
def test_settings_that_change_results_change_the_fingerprint_of_an_evaluation(run, word, changes):
    before, after = changed(RunFolder(run)), changed(RunFolder(run), [word])
    assert (fingerprint(after, "validation") != fingerprint(before, "validation")) is changes
    assert fingerprint(before, "test") != fingerprint(before, "validation")


STORED = ["task=tldr", "model=pythia_410m"]


def stages(*words: str) -> list[str]:
    cfg, named = pipeline.config_of(list(words))
    return [stage.name for stage in pipeline.stages_before(cfg, named)[1]]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["SFT model", "preference pairs", "reward model"]),
        (["task=arithmetic"], ["SFT model"]),
        (["scorer=facts"], ["SFT model"]),
        (["generator=dataset"], ["SFT model", "preference pairs"]),
        (STORED, ["SFT model", "preference pairs", "reward model"]),
        ([*STORED, "model.policy=me/sft"], ["preference pairs", "reward model"]),
        ([*STORED, "model.reward=me/rm"], ["SFT model"]),
        ([*STORED, "scorer@gold=none"], ["SFT model", "reward model"]),
        (["task=gsm8k", "model=rho_1b"], ["SFT model"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_the_chain_has_the_stages_that_the_run_needs(words, names):
    assert stages(*words) == names


def test_each_stage_reads_the_output_of_the_previous_stage(monkeypatch):
    cfg, named = pipeline.config_of([*STORED, "model.lora.rank=8", "backend=zero2", "gold.path=me/judge"])
    made = []
    monkeypatch.setattr(pipeline, "train", lambda cfg, folder: made.append(cfg))
    cfg, (sft, pairs, reward) = pipeline.stages_before(cfg, named)
    sft.make(), reward.make()
    assert made[0].model.base == "EleutherAI/pythia-410m-deduped" and made[0].model.policy is None
    assert made[1].model.policy == cfg.model.policy == str(sft.folder / "model")
    assert made[1].task.preferences_path == str(pairs.folder) and cfg.task.preferences_path is None
    assert cfg.model.reward == str(reward.folder / "model")
    assert [made[0].algo.name, made[1].algo.name] == ["sft", "reward"]
    assert {one.backend.name for one in made} == {"zero2"} and {one.model.lora.rank for one in made} == {8}
    assert {one.gold.path for one in made} == {"me/judge"}
    assert sft.folder.name.startswith("tldr-pythia_410m_deduped-sft-dataset-lag0-seed0-")


def test_overrides_of_a_stage_apply_to_that_stage_only():
    words = [*STORED, "backend.micro_batch=8", 'stages.sft=["optim.lr=2e-5","backend.micro_batch=4"]']
    cfg, _ = pipeline.config_of(words)
    sft, reward = stage(cfg, "sft"), stage(cfg, "reward")
    assert (sft.optim.lr, sft.backend.micro_batch) == (2e-5, 4)
    assert (reward.optim.lr, reward.backend.micro_batch) == (1e-5, 8)
