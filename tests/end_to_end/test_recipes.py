"""Tests that every recipe runs with debug=tiny: two updates with the code of its task, without the Hub."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from omegaconf import OmegaConf

from rlhf import inspect, relabel
from rlhf.assembly.parts import make
from rlhf.checks import check as validate
from rlhf.config.root import Config
from rlhf.config.scorers import judges
from rlhf.runs.folder import RunFolder
from rlhf.stages.prerequisites import complete
from rlhf.stages.run import run
from rlhf.words.catalogue import options
from rlhf.words.compose import compose
from tests.docs.snapshots import RELABELS
from tests.end_to_end.conftest import nightly, rows


def tiny_recipe(name: str, cache_dir: Path, *more: str) -> Config:
    return compose([f"experiment={name}", "debug=tiny", f"cache_dir={cache_dir}", "progress=off", *more])


def distinct() -> list[str]:
    """Return the names of the recipes whose settings differ by more than the size of Pythia.

    With debug=tiny all sizes of Pythia are the same tiny model. Of recipes that differ only in the size and
    in the number of sequences decoded in parallel, the 410m recipe or else the first by name is returned.
    """
    found: dict[str, str] = {}
    trained = set(options("experiment")) - set(RELABELS)
    for name in sorted(trained, key=lambda name: ("410m" not in name, name)):
        cfg = tiny_recipe(name, Path("cache"))
        family = cfg.model.name.partition("_")[0]
        cfg = replace(cfg, model=replace(cfg.model, name=family))
        if cfg.generator.decodes:
            cfg = replace(cfg, generator=replace(cfg.generator, batch_size=256))
        same = OmegaConf.to_yaml(OmegaConf.structured(cfg))
        found.setdefault(same, name)
    return sorted(found.values())


DISTINCT = [
    *("chat_8b_dpo", "chat_8b_dpo_async", "chat_8b_reward", "chat_8b_sft", "gsm8k_1b_dpo"),
    *("gsm8k_1b_dpo_async", "gsm8k_1b_ppo", "gsm8k_1b_ppo_async", "gsm8k_1b_rloo"),
    *("gsm8k_1b_rloo_async", "tldr_410m_bok", "tldr_410m_bok_async", "tldr_410m_dpo"),
    *("tldr_410m_dpo_async", "tldr_410m_dpo_offline", "tldr_410m_ppo", "tldr_410m_ppo_async"),
    *("tldr_410m_reward", "tldr_410m_rloo", "tldr_410m_rloo_async", "tldr_410m_sft"),
    *("countdown_qwen3_1_7b_grpo_async", "gsm8k_qwen3_0_6b_distill", "gsm8k_qwen3_0_6b_distill_served"),
    *("gsm8k_qwen3_0_6b_grpo", "gsm8k_qwen3_0_6b_grpo_async", "gsm8k_qwen3_4b_grpo_lora"),
    *("helpful_qwen2_5_1_5b_dpo", "helpful_qwen2_5_1_5b_dpo_judge", "helpful_qwen2_5_1_5b_reward"),
    *("helpful_qwen2_5_1_5b_sft", "lookup_qwen3_1_7b_grpo", "sums_smollm2_135m_grpo"),
]


def check(cfg: Config, folder: RunFolder, learns: bool = True) -> list[dict]:
    """Run `cfg`, check its two updates and three evaluations, and return the rows of the updates."""
    assert validate.problems(cfg) == []
    run(cfg, folder)
    assert folder.finished() and folder.model.is_dir()
    found = rows(folder)
    updates = [row for row in found if "lr" in row]
    assert [row["update"] for row in updates] == [1, 2]
    if learns:
        assert any(row.get("policy/grad_norm", 0) > 0 for row in updates), "every update has only ties"
    assert [row["update"] for row in found if any(key.startswith("eval/") for key in row)] == [0, 1, 2]
    return updates


@pytest.mark.nightly
def test_every_recipe_with_settings_of_its_own_runs():
    assert distinct() == sorted(DISTINCT)


# Recipes that differ in few settings from another one.
NIGHTLY = (
    *("chat_8b_dpo", "gsm8k_1b_dpo_async", "gsm8k_1b_ppo_async", "gsm8k_1b_rloo", "gsm8k_1b_rloo_async"),
    *("tldr_410m_bok_async", "tldr_410m_ppo_async", "tldr_410m_rloo_async"),
    *("countdown_qwen3_1_7b_grpo_async", "gsm8k_qwen3_0_6b_distill_served", "gsm8k_qwen3_0_6b_grpo_async"),
    *("gsm8k_qwen3_0_6b_grpo", "helpful_qwen2_5_1_5b_reward", "helpful_qwen2_5_1_5b_sft"),
    *("gsm8k_qwen3_0_6b_distill", "sums_smollm2_135m_grpo"),
)


TOO_HARD = ("lookup", "countdown", "sums")  # stand-ins never answer correctly


@pytest.mark.parametrize("name", [nightly(name) if name in NIGHTLY else name for name in DISTINCT])
def test_a_recipe_runs_offline_and_tiny(cache_dir, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # only one of the asynchronous recipes also starts an annotator process
    ahead = [] if name == "tldr_410m_dpo_async" or "async" not in name else ["generator.annotate=false"]
    cfg = tiny_recipe(name, cache_dir, *ahead)
    if cfg.generator.packages:  # servers of vLLM have no stand-in
        pytest.importorskip("vllm")
    folder = RunFolder(tmp_path / "run")
    updates = check(cfg, folder, learns=not name.startswith(TOO_HARD))
    assert cfg.backend.name == "torch" and cfg.backend.ranks is None
    if judges(cfg):
        assert all(row["judge/calls"] > 0 and row["judge/unreadable"] == 0 for row in updates)
        assert "random verdicts" in (folder.model / "README.md").read_text()
    if cfg.environment.tools:
        assert all(row["environment/turns"] > 1 for row in updates), "no reply calls a tool"
    if cfg.generator.samples:
        assert [row["lag"] for row in updates] == [0, 1 if "async" in name else 0]
        logs = [*folder.path.glob("generator.log"), *folder.path.glob("server-0.log")]
        assert bool(logs) == ("async" in name), "only asynchronous recipes have a generator process"
        assert updates[0]["objective/eos_rate"] > 0.3
    stored = json.loads((folder.path / "environment.json").read_text())
    assert "mnoukhov" not in json.dumps(stored)


CURRENT = [name for name in DISTINCT if not name.startswith(("tldr", "chat", "gsm8k_1b"))]
INSPECTED = "gsm8k_qwen3_4b_grpo_lora"  # the others are nightly


@pytest.mark.parametrize("name", [name if name == INSPECTED else nightly(name) for name in CURRENT])
def test_inspect_shows_the_prompts_of_a_recipe_in_the_format_of_its_family(called, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = called(inspect.main, f"experiment={name}", "debug=tiny")
    assert code == 0, err
    assert "chat template     yes" in out and "<|im_start|>|" in out and "no problem found" in out


@pytest.mark.parametrize("name", RELABELS)
def test_reward_recipe_trains_on_the_pairs_of_a_relabelling_recipe(cache_dir, tmp_path, name):
    words = [f"experiment={name}", "debug=tiny", f"cache_dir={cache_dir}", "progress=off"]
    cfg, output = relabel.pairs_of(words), tmp_path / "pairs"
    relabel.relabel(cfg, output)
    relabel.relabel(cfg, output)  # the output exists: nothing is relabelled
    told = json.loads((output / relabel.REPORT).read_text())
    assert all(one["swapped"] > 0 < one["agreed"] for one in told["splits"].values()), (
        "the random judge must agree with some pairs and swap others"
    )
    assert told["gold"].endswith("/judge"), "the report must name the stand-in, not the gold model"
    made = datasets.load_from_disk(str(output))
    assert all(row["chosen_score"] >= row["rejected_score"] for rows in made.values() for row in rows)
    reward = tiny_recipe("tldr_410m_reward", cache_dir, f"task.preferences_path={output}")
    check(reward, RunFolder(tmp_path / "run"))


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        nightly("schedule.minibatches=64", 64),
        ("schedule.epochs=3", 3),
        nightly("algo.samples_per_prompt=8", 1),
        ("schedule.max_lag=8", 1),
    ],
)
def test_largest_value_of_each_sweep_runs_with_debug_tiny(cache_dir, tmp_path, job, steps):
    cfg = tiny_recipe("tldr_410m_dpo", cache_dir, job)
    assert cfg.num_updates() == 2
    check(cfg, RunFolder(tmp_path / "run"))
    assert cfg.schedule.minibatches * cfg.schedule.epochs == steps


@pytest.mark.parametrize("task", ["tldr", "gsm8k", "chat"])
def test_stand_in_data_has_the_columns_of_the_real_data(cache_dir, task):
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
        assert set(pairs.column_names) - {"place"} == {"prompt", "chosen", "rejected"}
        assert all(row["chosen"] != row["rejected"] for row in pairs)


def test_models_and_data_set_by_the_user_are_not_replaced_by_stand_ins(cache_dir):
    made = complete(tiny_recipe("tldr_410m_dpo", cache_dir), run)
    own = [f"model.policy={made.model.policy}", f"task.path={made.task.path}"]
    cfg = complete(tiny_recipe("tldr_410m_dpo", cache_dir, *own), run)
    assert (cfg.model.policy, cfg.task.path) == (made.model.policy, made.task.path)
    assert cfg.task.preferences_path is None, "pairs are read from the folder of the user's data"
    assert cfg.model.reward != made.model.reward and "stand-ins-tldr" in str(cfg.model.reward)
    assert "stand-ins-tldr" in cfg.gold.path and cfg.gold.path != cfg.model.reward


def test_without_debug_no_hub_model_is_replaced_by_a_stand_in():
    cfg = compose(["experiment=tldr_410m_dpo"])
    assert complete(cfg, run) == cfg and cfg.model.policy == "mnoukhov/pythia410m-sft-tldr"


def test_embedded_tasks_need_no_stand_ins():
    cfg = compose(["debug=tiny"])
    assert cfg.stages.stand_ins and not cfg.stand_ins and cfg.makes_models
    assert tiny_recipe("tldr_410m_dpo", Path("cache")).stand_ins
