"""Names of runs, and the files of a run folder."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config.run import Resume
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.runs.folder import COMPLETE, RunFolder, complete_checkpoints, setup_logging
from rlhf.runs.resuming import earlier_name, folder_of, prepare, shorter_run
from rlhf.stages.prerequisites import stage_digest
from rlhf.words.compose import compose, differences, digest, load_config, run_name, what_counts


@pytest.fixture(scope="module")
def cfg():
    return compose([])


def test_run_name_contains_task_model_algorithm_generator_lag_seed_and_digest(cfg):
    named = replace(cfg, seed=3, schedule=replace(cfg.schedule, max_lag=2))
    assert run_name(named) == f"tldr_mini-pythia-dpo-hf-lag2-seed3-{digest(named)}"
    assert len(digest(cfg)) == 8 and int(digest(cfg), 16) >= 0


OWN = ["task=local", "task.path=data", "algo=rloo"]


@pytest.mark.parametrize(
    ("start", "label"),
    [
        ("models/smol", "smol"),
        ("models/smol/", "smol"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5_0.5B_Instruct"),
        ("mödel mit blank", "m_del_mit_blank"),
        ("outputs/local-smol-sft-dataset-lag0-seed1-0123abcd/model", "smol_sft"),
        ("outputs/local-smol-sft-dataset-lag0-seed1-0123abcd/checkpoint-40", "smol_sft"),
        ("outputs/my-run/model", "my_run"),
        ("outputs/artefacts/sft-x-0123abcd/model", "pythia"),
        ("..", "pythia"),
    ],
)
def test_run_name_contains_the_model_that_training_starts_from(start, label):
    named = compose([*OWN, f"model.policy='{start}'"])
    assert run_name(named) == f"local-{label}-rloo-hf-lag0-seed1-{digest(named)}"
    supervised = compose([*OWN, "algo=sft", f"model.base='{start}'", "model.policy=models/other"])
    assert run_name(supervised).startswith(f"local-{label}-sft-dataset-")


@pytest.mark.parametrize("name", ["long-" * 60, "dätä & mehr", "a b", "..", "1.5B-Instruct.v0"])
def test_run_names_are_short_and_safe_in_file_systems(name):
    found = run_name(compose([*OWN, f"model.policy='models/{name}'"]))
    assert len(found) <= 80 and found.startswith("local-") and not found.startswith("local-.")
    assert all(sign.isalnum() and sign.isascii() or sign in "._-" for sign in found)


def test_the_folder_of_a_run_under_an_earlier_name_is_found(tmp_path):
    cfg = compose([*OWN, "model.policy=models/smol", f"output_dir={tmp_path}"])
    assert folder_of(cfg) == tmp_path / run_name(cfg)
    earlier = tmp_path / f"local-pythia-rloo-hf-lag0-seed1-{digest(cfg)}"
    earlier.mkdir()
    assert folder_of(cfg) == tmp_path / run_name(cfg)  # an empty folder is no run
    assert earlier_name(folder_of(cfg), cfg) is None
    RunFolder(earlier).write_config(cfg)
    assert folder_of(cfg) == earlier and f"continues in {earlier}" in str(earlier_name(earlier, cfg))
    assert folder_of(replace(cfg, seed=2)) != earlier
    (tmp_path / run_name(cfg)).mkdir()
    assert folder_of(cfg) == tmp_path / run_name(cfg)


def test_run_name_of_a_config_composed_by_hydra_is_the_same(cfg):
    import hydra

    from rlhf.words.catalogue import conf_dir

    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert run_name(hydra.compose("config")) == run_name(cfg)


@pytest.mark.parametrize(
    "word", ["optim.lr=1e-5", "algo.beta=0.2", "task.difficulty=hard", "eval.prompts=16", "model.layers=3"]
)
def test_run_name_changes_with_settings_that_change_results(cfg, word):
    assert run_name(compose([word])) != run_name(cfg)


@pytest.mark.parametrize(
    "word",
    [
        "logger=[wandb,tensorboard]",
        "resume=never",
        "progress=off",
        "output_dir=elsewhere",
        "cache_dir=elsewhere",
        "save_total_limit=5",
        "schedule.save_every=1",
        "schedule.log_every=10",
        "backend.threads=1",
        "generator.threads=1",
        "generator.replicas=4",
        "generator.worker=true",
        "generator.start_limit_s=9",
        "generator.request_limit_s=9",
        "generator.restarts=9",
        "generator.annotate=false",
        "eval.samples=0",
        "objective_metric=eval/kl",
    ],
)
def test_run_name_does_not_change_with_settings_that_do_not_change_results(cfg, word):
    assert run_name(compose([word])) == run_name(cfg)


def test_a_saved_config_loads_unchanged(tmp_path):
    for words in (
        [],
        ["algo=sft", "logger=wandb", "schedule.max_lag=0"],
        ["model=pythia_1b", "scorer=facts"],
        ["scorer=reward_and_answer", "scorer@gold=weighted", "+scorer@gold.parts.x=http"],
    ):
        made = compose(words)
        folder = RunFolder(tmp_path / "run")
        folder.write_config(made)
        back = load_config(folder.config)
        assert back == made and type(back.model) is type(made.model) and run_name(back) == run_name(made)


def test_environment_file_contains_versions_hardware_and_command_but_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "seed=2", "x.api_key=hunter2", "--token", "hunter3"])
    monkeypatch.setenv("WANDB_API_KEY", "hunter4")
    folder = RunFolder(tmp_path)
    folder.write_environment(["a GPU"])
    text = folder.environment.read_text()
    found = json.loads(text)
    assert "hunter" not in text and found["command"][:2] == ["train.py", "seed=2"]
    assert {"rlhf-lab", "torch", "hydra-core"} <= found["packages"].keys() and found["devices"] == ["a GPU"]
    assert found["cores"] >= 1 and found["memory_gib"] > 0


def test_only_checkpoints_with_a_marker_are_listed_in_numeric_order(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-12-copy"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-12-copy"):
        (tmp_path / name / COMPLETE).touch()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert RunFolder(tmp_path).last_checkpoint() == tmp_path / "checkpoint-10"
    assert RunFolder(tmp_path / "nothing").last_checkpoint() is None


def test_a_failed_write_leaves_the_previous_state_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_state({"update": 1})
    with pytest.raises(TypeError):
        folder.write_state({"update": object()})
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(folder.state, "{")
    assert folder.read_state() == {"update": 1} and folder.finished() is None


def test_a_run_with_stand_ins_has_another_name(cfg):
    named = digest(replace(cfg, stages=replace(cfg.stages, stand_ins=True)))
    assert named != digest(cfg)


def test_a_run_with_a_chat_template_of_its_own_has_another_name(cfg):
    assert "chat_template" not in what_counts(cfg)["model"]  # so that names from before the key stay valid
    assert digest(replace(cfg, model=replace(cfg.model, chat_template="plain"))) != digest(cfg)


def test_stage_digest_uses_the_names_of_artefacts_and_the_paths_of_user_folders(cfg):
    def keys(*folders: str) -> set[str]:
        return {
            stage_digest(replace(cfg, model=replace(cfg.model, policy=f"{folder}/model")))
            for folder in folders
        }

    assert len(keys("a/sft", "b/sft")) == 2
    moved = replace(cfg, cache_dir="elsewhere")
    made = f"{cfg.cache_dir}/sft-1"
    there = replace(moved, model=replace(moved.model, policy="elsewhere/sft-1/model"))
    assert keys(made) == {stage_digest(there)}
    pairs = [replace(cfg, task=replace(cfg.task, preferences_path=f"{x}/pairs")) for x in "ab"]
    assert stage_digest(pairs[0]) != stage_digest(pairs[1])


def test_prepare_returns_the_result_of_a_finished_run_with_the_same_config(tmp_path, cfg):
    folder = RunFolder(tmp_path / "run")
    never, must = (replace(cfg, resume=resume) for resume in (Resume.never, Resume.must))
    assert prepare(folder, cfg) is None and not folder.path.exists()
    folder.write_config(cfg)
    folder.write_state({"finished": True, "result": {}})
    assert prepare(folder, cfg) == {"finished": True, "result": {}}
    with pytest.raises(UserError, match=r"with other settings.*config\.yaml has seed=1 instead of 7; set "):
        prepare(folder, replace(cfg, seed=7))
    assert prepare(folder, never) is None and not folder.path.exists()
    with pytest.raises(UserError, match="no such folder"):
        prepare(folder, must)


def lengthened(cfg, episodes):
    return replace(cfg, schedule=replace(cfg.schedule, total_episodes=episodes))


def test_a_command_with_another_length_for_the_folder_is_told_to_extend_the_run(tmp_path, cfg):
    folder = RunFolder(tmp_path / "run")
    folder.write_config(cfg)
    folder.write_state({"finished": True, "result": {}})
    with pytest.raises(UserError) as refused:
        prepare(folder, lengthened(cfg, 10240))
    assert "has schedule.total_episodes=5120 instead of 10240; " in str(refused.value)
    extend = f"python -m rlhf.extend run={folder.path} schedule.total_episodes=10240"
    assert str(refused.value).endswith(f"extend that run with: {extend}")


def test_the_original_command_accepts_a_finished_extension_and_refuses_an_unfinished_one(
    tmp_path, cfg, capsys
):
    folder = RunFolder(tmp_path / run_name(cfg))
    folder.write_config(lengthened(cfg, 10240))
    folder.write_state({"finished": True, "result": {}})
    assert prepare(folder, cfg) == {"finished": True, "result": {}}
    assert "was extended to schedule.total_episodes=10240" in capsys.readouterr().out
    folder.write_state({"finished": False})
    (folder.path / "checkpoint-1").mkdir()
    (folder.path / "checkpoint-1" / COMPLETE).touch()
    with pytest.raises(UserError, match=r"got schedule.total_episodes=5120 .* extended to .*=10240; resume"):
        prepare(folder, cfg)
    assert load_config(folder.config).schedule.total_episodes == 10240


def test_a_new_run_that_differs_only_by_a_larger_length_is_pointed_to_the_shorter_run(tmp_path, cfg):
    shorter = RunFolder(tmp_path / run_name(cfg))
    shorter.write_config(cfg)
    longer, other = lengthened(cfg, 10240), lengthened(replace(cfg, eval=replace(cfg.eval, prompts=9)), 10240)
    message = shorter_run(RunFolder(tmp_path / run_name(longer)), longer)
    extend = f"python -m rlhf.extend run={shorter.path} schedule.total_episodes=10240"
    assert message is not None and message.endswith(extend)
    assert shorter_run(RunFolder(tmp_path / run_name(other)), other) is None
    assert shorter_run(RunFolder(tmp_path / "chosen"), longer) is None
    assert shorter_run(shorter, cfg) is None


def test_at_most_four_differing_settings_are_named(tmp_path, cfg):
    other = compose(["seed=2", "optim.lr=1", "algo.beta=2", "eval.prompts=3", "task.max_prompt_tokens=9"])
    assert differences(cfg, other).keys() == {
        "seed", "optim.lr", "algo.beta", "eval.prompts", "task.max_prompt_tokens"
    }  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    folder.write_config(cfg)
    folder.write_state({"finished": True, "result": {}})
    with pytest.raises(UserError, match=" and 1 more; set resume=never"):
        prepare(folder, other)


@pytest.mark.parametrize("text", [": : [", "just text", "defaults: []\nno_key: 1\n", ""])
def test_a_damaged_config_is_a_user_error(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml must be the config that a run wrote"):
        load_config(file)


def test_the_log_is_written_to_the_folder_of_the_current_run(tmp_path):
    kept = logging.getLogger("rlhf").handlers
    try:
        for name in ("first", "second"):
            setup_logging(RunFolder(tmp_path / name)).info("in %s", name)
        assert "in first" in (tmp_path / "first" / "train.log").read_text()
        assert (tmp_path / "second" / "train.log").read_text().count("\n") == 1
    finally:
        log = logging.getLogger("rlhf")
        for handler in list(log.handlers):
            log.removeHandler(handler)
            handler.close()
        log.handlers, log.propagate = kept, True
        logging.captureWarnings(False)


def test_the_time_of_the_start_stays_when_a_run_is_resumed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_environment()
    written = json.loads(folder.environment.read_text())
    folder.environment.write_text(json.dumps(written | {"started": "2026-01-31T09:00:00"}))
    folder.write_environment()
    assert folder.started() == "2026-01-31T09:00:00"
    assert json.loads(folder.environment.read_text())["started"] == folder.started()
