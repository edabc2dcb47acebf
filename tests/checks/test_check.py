"""Rules between config sections and warnings: the rows of rules.txt; the threads of processes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from rlhf.checks import check, settings
from rlhf.config import root
from rlhf.config.models import TorchConfig
from rlhf.stages import words as summary
from rlhf.words.compose import compose, run_name, what_counts
from rlhf.words.mistakes import readable
from tests.model_folders import write_model

ROWS = Path(__file__).with_name("rules.txt").read_text().split("# A run ")[1:]
GAME = "task=reasoning_gym task.chat=true algo=grpo scorer=environment scorer@gold=none"
REFUSED, DOUBTFUL, VALID = (text.splitlines()[1:] for text in ROWS)


def remedies(message: str) -> list[list[str]]:
    """Return the alternative settings of a remedy that can be pasted, as arguments."""
    _, _, texts = message.rpartition("; ")[2].partition("set ")
    found = [shlex.split(text.removeprefix("set ")) for text in re.split(",? or ", texts)]
    return [words for words in found if words and all(re.fullmatch(r"[\w.@]+=[^<]+", word) for word in words)]


@pytest.mark.parametrize("row", REFUSED)
def test_a_wrong_setting_is_refused_with_rule_value_and_a_remedy_that_works(row):
    words, key = row.split(" -> ")
    found = check.problems(compose(words.split()))
    assert all(re.search(r" (must|needs) .+, got .*; .", text) for text in found), found
    said = [text for text in found if re.match(rf"{re.escape(key)}[ :]", text)]
    assert said, found
    for remedy in remedies(said[0]):
        dropped = [".parts."] if "scorer=" in remedy[0] else []  # a scorer without parts
        dropped += [f"{key}="] if key.startswith("backend.deepspeed.") else []  # set another key instead
        kept = [word for word in words.split() if not any(each in word for each in dropped)]
        assert said[0] not in check.problems(compose(readable([*kept, *remedy]))), remedy


@pytest.mark.parametrize("row", DOUBTFUL)
def test_a_setting_that_is_doubtful_or_has_no_effect_gives_a_warning_and_is_not_refused(row):
    words, key = row.split(" -> ")
    cfg = compose(words.split())
    assert any(re.match(rf"{re.escape(key)}[ =]", text) for text in check.warnings(cfg))
    assert not check.problems(cfg)


@pytest.mark.parametrize("words", VALID)
def test_valid_configs_have_neither_problems_nor_warnings(words):
    cfg = compose(words.split())
    assert not check.problems(cfg) and not check.warnings(cfg)


@pytest.mark.parametrize(
    ("words", "module", "command"),
    [
        ("model.lora.rank=4", "peft", "pip install -e '.[lora]'"),
        ("optim.optimizer=adamw_8bit", "bitsandbytes", "pip install -e '.[bnb]'"),
        ("backend=zero2", "deepspeed", "pip install -e '.[deepspeed]'"),
        ("logger=wandb", "wandb", "pip install -e '.[wandb]'"),
        ("logger=mlflow", "mlflow", "pip install -e '.[mlflow]'"),
        ("logger=mlflow", "sqlalchemy", "pip install -e '.[mlflow]'"),
        ("logger=trackio", "trackio", "pip install -e '.[trackio]'"),
        ("task=reasoning_gym", "reasoning_gym", "pip install -e '.[reasoning]'"),
        (f"{GAME} environment=gymnasium environment.id=X-v1", "gymnasium", "pip install -e '.[gymnasium]'"),
        (f"{GAME} environment=openenv environment.url=http://h", "websockets", "pip install -e '.[openenv]'"),
    ],
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch, words, module, command):
    cfg, find = compose(words.split()), importlib.util.find_spec
    assert not check.problems(cfg)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    (problem,) = check.problems(cfg)
    assert command in problem


def test_fsdp2_needs_no_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    assert not check.problems(compose(["backend=fsdp2"]))


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


@pytest.mark.parametrize("lr", [-1, 0])
def test_rules_do_not_crash_on_values_that_another_rule_rejects(lr):
    zeros = "schedule.prompts_per_update schedule.minibatches backend.micro_batch algo.samples_per_prompt"
    words = [f"{key}=0" for key in [*zeros.split(), "model.heads"]]
    assert len(check.problems(compose([*words, f"optim.lr={lr}"]))) == 6


def test_local_model_needs_weight_files_and_a_sufficient_context_length(tmp_path):
    folder = Path(write_model(tmp_path / "policy", max_position_embeddings=128))
    (found,) = check.problems(compose([f"model.policy={folder}"]))
    assert "<= 128" in found and "192 + 40" in found
    assert not check.problems(compose([f"model.policy={folder}", "task.max_prompt_tokens=88"]))
    (folder / "model.safetensors").unlink()
    assert any("no *.safetensors" in text for text in check.problems(compose([f"model.policy={folder}"])))


def test_sizes_are_computed_from_the_config_alone():
    words = "schedule.minibatches=2 schedule.epochs=2 backend.micro_batch=16 schedule.total_episodes=1280"
    more = ["schedule.eval_every=0.5", "schedule.save_every=4"]
    assert dict(summary.counts(compose([*words.split(), *more]), examples=8192)) == {
        "episodes per update": "128 = 64 prompts x 2 samples",
        "updates": "10 = 1,280 episodes / 128",
        "passes over the data": "0.0781 of 8,192 prompts",
        "optimizer steps": "40 = 10 updates x 2 minibatches x 2 epochs",
        "sequences per forward": "16, 4 per optimizer step",
        "evaluations": "3, after updates 0 5 10",
        "checkpoints": "2, after updates 4 8",
    }


def test_updates_of_a_run_in_epochs_are_computed_from_the_size_of_the_data():
    sft = "algo=sft schedule.total_episodes=null schedule.prompts_per_update=64 schedule.total_epochs=2"
    rows = dict(summary.describe(compose(sft.split()), examples=640))
    assert rows["updates"] == "20 = 2 epochs of 640 examples / 64"
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
def test_trainer_and_generator_share_the_cores_and_the_summary_shows_the_threads(
    monkeypatch, overrides, environment, trainer, generator
):
    for module in (root, settings):
        monkeypatch.setattr(module, "cpu_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    cfg = compose(overrides.split())
    assert root.threads(cfg) == (trainer, generator) and not check.problems(cfg)
    shown = dict(summary.describe(cfg, examples=8192)).get("CPU threads", "")
    assert (
        trainer is None or generator is None or (f"trainer {trainer}, " in shown and f" {generator}" in shown)
    )


@pytest.mark.parametrize("words", ["schedule.minibatches=64", "eval.prompts=3"])
def test_a_batch_with_fewer_prompts_than_ranks_is_refused(monkeypatch, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (problem,) = check.problems(compose([words]))
    (remedy,) = remedies(problem)
    assert "4 ranks" in problem and check.problems(compose([words, *remedy])) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert check.problems(compose([words])) == []


def test_groups_are_not_refilled_if_several_ranks_sample(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = check.problems(compose(["algo=bok", "generator=hf", "schedule.refill=2"]))
    assert problem.startswith("schedule.refill must be 0 with several ranks")


@pytest.mark.parametrize(
    ("key", "rollouts"), [("algo.weighting", "algo.weighting=is"), ("optim.ess", "optim.ess_scaling=sqrt")]
)
def test_saved_rollouts_have_the_log_probs_of_their_sampler(key, rollouts):
    words = ["generator=dataset", rollouts]
    assert any(text.startswith(key) for text in check.problems(compose(words)))
    found = check.problems(compose([*words, "generator.path=run/generations"]))
    assert not any(text.startswith(key) for text in found)


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("backend.compile=true", "backend.compile"),
        ("optim.ess_scaling=sqrt", "optim.ess_scaling optim.ess_on_policy"),
        ("optim.optimizer=muon", "optim.optimizer optim.momentum"),
        ("schedule.replay=2", "schedule.replay"),
        ("schedule.refill=1", "schedule.refill"),
    ],
)
def test_a_key_of_a_later_version_is_in_the_name_of_a_run_only_if_it_is_set(word, keys):
    plain, cfg = compose(["algo=grpo"]), compose(["algo=grpo", word])
    assert (
        not {each.rpartition(".")[2] for each in keys.split()}
        & what_counts(plain)[keys.partition(".")[0]].keys()
    )
    assert run_name(cfg) != run_name(plain)


@pytest.mark.parametrize("group", ["algo", "task", "generator", "scorer", "model"])
def test_a_section_with_the_name_of_another_option_is_refused(group):
    cfg = compose([])
    getattr(cfg, group).name = "other"
    assert f"{group}.name must not be set" in " ".join(check.problems(cfg))


def test_more_threads_than_cores_give_a_warning(monkeypatch):
    monkeypatch.setattr(settings, "cpu_cores", lambda: 2)
    for threads, warned in ((64, True), (2, False)):
        found = check.warnings(compose([f"backend.threads={threads}"]))
        assert any(text.startswith("backend.threads") for text in found) == warned


@pytest.mark.parametrize("key", ["output_dir", "cache_dir"])
def test_a_file_in_place_of_a_folder_is_refused_unless_the_run_is_only_evaluated(tmp_path, key):
    (tmp_path / "o").touch()
    cfg = compose([f"{key}={tmp_path}/o"])
    (found,) = check.problems(cfg)
    assert found.startswith(f"{key} must be a folder") and not check.problems(cfg, training=False)


@pytest.mark.parametrize(
    ("free", "said"),
    [(2**16, "neither can be saved"), (2**21, "checkpoints may not be saved"), (2**40, None)],
)
def test_a_disk_without_room_for_model_or_checkpoint_gives_a_warning(tmp_path, monkeypatch, free, said):
    from shutil import _ntuple_diskusage

    monkeypatch.setattr("shutil.disk_usage", lambda _: _ntuple_diskusage(0, 0, free))
    found = check.warnings(compose([f"output_dir={tmp_path}/new"]))
    assert [said in text for text in found] == ([True] if said else [])
