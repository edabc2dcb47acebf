"""Every recipe runs with debug=tiny: two updates through the code of its task, with nothing from the hub."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from omegaconf import OmegaConf

from rlhf.assembly.parts import make
from rlhf.checks import check as validate
from rlhf.config.catalogue import options
from rlhf.config.compose import compose
from rlhf.config.root import Config
from rlhf.runs.folder import RunFolder
from rlhf.stages import relabelling as relabel
from rlhf.stages.prerequisites import complete
from rlhf.stages.run import run
from tests.docs.snapshots import RELABELS
from tests.end_to_end.conftest import rows

pytestmark = pytest.mark.forks


def tiny_recipe(name: str, cache_dir: Path, *more: str) -> Config:
    return compose([f"experiment={name}", "debug=tiny", f"cache_dir={cache_dir}", "progress=off", *more])


def distinct() -> list[str]:
    """The recipes, but of those that differ in the size of Pythia alone, which is tiny here, the first."""
    found: dict[str, str] = {}
    trained = set(options("experiment")) - set(RELABELS)
    for name in sorted(trained, key=lambda name: ("410m" not in name, name)):
        cfg = tiny_recipe(name, Path("cache"))
        family = cfg.model.name.partition("_")[0]
        same = OmegaConf.to_yaml(OmegaConf.structured(replace(cfg, model=replace(cfg.model, name=family))))
        found.setdefault(same, name)
    return sorted(found.values())


DISTINCT = distinct()


def check(cfg: Config, folder: RunFolder) -> list[dict]:
    """Run it, and look whether it trained twice and was evaluated; returns the rows of the updates."""
    assert validate.problems(cfg) == []
    run(cfg, folder)
    assert folder.finished() and folder.model.is_dir()
    found = rows(folder)
    updates = [row for row in found if "lr" in row]
    assert [row["update"] for row in updates] == [1, 2]
    assert any(row.get("policy/grad_norm", 0) > 0 for row in updates), "not all are ties"
    assert [row["update"] for row in found if any(key.startswith("eval/") for key in row)] == [0, 1, 2]
    return updates


@pytest.mark.parametrize("name", DISTINCT)
def test_a_recipe_runs_offline_and_tiny(cache_dir, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # one recipe is annotated ahead as well, a third process
    ahead = [] if name == "tldr_410m_dpo_async" or "async" not in name else ["generator.annotate=false"]
    cfg = tiny_recipe(name, cache_dir, *ahead)
    folder = RunFolder(tmp_path / "run")
    updates = check(cfg, folder)
    assert cfg.backend.name == "torch" and cfg.backend.ranks is None
    if cfg.generator.samples:
        assert [row["lag"] for row in updates] == [0, 1 if "async" in name else 0]
        assert (folder.path / "generator.log").exists() == ("async" in name), "in a process of its own"
        assert updates[0]["objective/eos_rate"] > 0.5
    stored = json.loads((folder.path / "environment.json").read_text())
    assert "mnoukhov" not in json.dumps(stored)


@pytest.mark.parametrize("name", RELABELS)
def test_a_relabelling_recipe_makes_pairs_that_a_reward_recipe_is_trained_on(cache_dir, tmp_path, name):
    words = [f"experiment={name}", "debug=tiny", f"cache_dir={cache_dir}", "progress=off"]
    cfg, output = relabel.pairs_of(words), tmp_path / "pairs"
    relabel.relabel(cfg, output)
    relabel.relabel(cfg, output)  # is there already
    told = json.loads((output / relabel.REPORT).read_text())
    assert all(one["swapped"] > 0 < one["agreed"] for one in told["splits"].values()), "a judge at random"
    assert told["gold"].endswith("/judge"), "the stand-in is not passed off as the gold model"
    made = datasets.load_from_disk(str(output))
    assert all(row["chosen_score"] >= row["rejected_score"] for rows in made.values() for row in rows)
    reward = tiny_recipe("tldr_410m_reward", cache_dir, f"task.preferences_path={output}")
    check(reward, RunFolder(tmp_path / "run"))


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ("schedule.minibatches=64", 64),
        ("schedule.epochs=3", 3),
        ("algo.samples_per_prompt=8", 1),
        ("schedule.max_lag=8", 1),
    ],
)
def test_the_far_end_of_a_sweep_runs_tiny(cache_dir, tmp_path, job, steps):
    cfg = tiny_recipe("tldr_410m_dpo", cache_dir, job)
    assert cfg.num_updates() == 2
    check(cfg, RunFolder(tmp_path / "run"))
    assert cfg.schedule.minibatches * cfg.schedule.epochs == steps


@pytest.mark.parametrize("task", ["tldr", "gsm8k", "chat"])
def test_stand_ins_have_the_columns_of_the_data_that_they_stand_for(cache_dir, task):
    from datasets import load_dataset

    model = {"tldr": "pythia_410m", "gsm8k": "rho_1b", "chat": "llama_8b"}[task]
    words = [f"task={task}", f"model={model}", "debug=tiny", f"cache_dir={cache_dir}"]
    cfg = complete(compose(words), run)
    again = complete(compose(words), run)
    assert cfg == again
    columns = {
        "tldr": {"train": {"query", "reference_response"}, "validation": {"query", "reference_response"}},
        "gsm8k": {"train": {"question", "answer"}, "validation": {"question", "answer"}},
        "chat": {split: {"prompt", "prompt_id", "messages", "category"} for split in ("train", "test")},
    }[task]
    assert cfg.task.path is not None
    for split, names in columns.items():
        data = load_dataset("json", data_files=f"{cfg.task.path}/{split}.jsonl", split="train")
        assert set(data.column_names) == names and len(data) >= 32
    for split in ("train", "validation"):
        pairs = make(cfg.task).preferences(split)
        assert set(pairs.column_names) == {"prompt", "chosen", "rejected"}
        assert all(row["chosen"] != row["rejected"] for row in pairs)


def test_what_a_user_names_is_no_stand_in(cache_dir, tmp_path):
    made = complete(tiny_recipe("tldr_410m_dpo", cache_dir), run)
    own = [f"model.policy={made.model.policy}", f"task.path={made.task.path}"]
    cfg = complete(tiny_recipe("tldr_410m_dpo", cache_dir, *own), run)
    assert (cfg.model.policy, cfg.task.path) == (made.model.policy, made.task.path)
    assert cfg.task.preferences_path is None, "pairs are looked for where the user's data are"
    assert cfg.model.reward != made.model.reward and "stand-ins-tldr" in str(cfg.model.reward)
    assert "stand-ins-tldr" in cfg.gold.path and cfg.gold.path != cfg.model.reward


def test_without_debug_nothing_of_the_hub_is_replaced():
    cfg = compose(["experiment=tldr_410m_dpo"])
    assert complete(cfg, run) is cfg and cfg.model.policy == "mnoukhov/pythia410m-sft-tldr"


def test_embedded_tasks_need_no_stand_ins():
    cfg = compose(["debug=tiny"])
    assert cfg.stages.stand_ins and not cfg.stand_ins and cfg.makes_models
    assert tiny_recipe("tldr_410m_dpo", Path("cache")).stand_ins
