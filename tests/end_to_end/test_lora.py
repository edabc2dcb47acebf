"""Tests of LoRA runs: models in memory, saved files, and equal metrics with every way to compute them."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.assembly import training
from rlhf.assembly.models import build_device, build_module, build_tokenizer
from rlhf.core.errors import UserError
from rlhf.models import loading
from rlhf.runs.folder import RunFolder
from rlhf.stages.prerequisites import complete
from rlhf.stages.run import run
from tests.end_to_end.conftest import UPDATES_ONLY, nightly, rows

LORA = ("model.lora.rank=4", "optim.lr=1e-2", "algo.ties=keep")


@pytest.fixture
def loaded(monkeypatch):
    """Return a list to which each load of a causal LM appends its config key."""
    keys, load = [], loading.load_causal_lm

    def note(*args, **settings):
        keys.append(settings.get("key"))
        return load(*args, **settings)

    for module in (training, loading):
        monkeypatch.setattr(module, "load_causal_lm", note)
    return keys


def test_the_reference_is_the_policy_without_adapters_and_loads_no_second_model(tiny, tmp_path, loaded):
    cfg, folder = complete(tiny(*LORA, "schedule.eval_every=1"), run), RunFolder(tmp_path / "run")
    loaded.clear()
    run(cfg, folder)
    assert loaded == ["model.policy"]
    evaluations = [row for row in rows(folder) if "eval/kl" in row]
    assert evaluations[0]["eval/kl"] == 0 and abs(evaluations[-1]["eval/kl"]) > 1e-3
    first = next(row for row in rows(folder) if "lr" in row)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5) and first["mismatch/kl"] == pytest.approx(
        0, abs=1e-9
    )
    assert "trained parameters:     16,384 of" in folder.log.read_text()

    loaded.clear()
    other = RunFolder(tmp_path / "other")
    named = tiny(*LORA, f"model.policy={cfg.model.policy}", f"model.reference={folder.model}")
    run(named, other)
    assert loaded == ["model.policy", "model.reference"]
    assert next(row for row in rows(other) if "lr" in row)["objective/kl"] > 1e-3


@pytest.mark.smoke
def test_a_run_saves_the_merged_model_and_the_adapter(tiny, finished):
    cfg, folder = complete(tiny(*LORA), run), finished(*LORA)
    merged, before, base = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (folder.model, cfg.model.policy, cfg.model.policy)
    )
    beside = PeftModel.from_pretrained(base, folder.adapter)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, other, start = (model(ids).logits for model in (merged, beside, before))
    torch.testing.assert_close(found, other, rtol=0, atol=1e-4)
    assert (found - start).abs().max() > 1e-2
    files = sorted(file.name for file in folder.last_checkpoint().joinpath("model").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]


def test_reward_and_ppo_runs_save_adapters_of_reward_and_value_model(tiny, tmp_path):
    cfg, judge = complete(tiny("algo=reward", "model.lora.rank=4"), run), RunFolder(tmp_path / "reward")
    run(cfg, judge)
    merged = AutoModelForSequenceClassification.from_pretrained(judge.model)
    assert merged.config.reward_offset != 0
    base = AutoModelForSequenceClassification.from_pretrained(cfg.model.policy, num_labels=1)
    beside = PeftModel.from_pretrained(base, judge.adapter)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=0, atol=1e-4)

    folder = RunFolder(tmp_path / "ppo")
    run(tiny("algo=ppo", "model.lora.rank=4", f"model.reward={judge.model}", "schedule.save_every=1"), folder)
    assert (folder.last_checkpoint() / "critic" / "adapter_model.safetensors").is_file()
    assert rows(folder)[1]["policy/ratio"] == pytest.approx(1, abs=1e-5)


def test_sft_with_adapters_trains_from_the_base_model(tiny, tmp_path):
    base = complete(tiny(), run).model.policy
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=sft", f"model.base={base}", "model.lora.rank=4", "optim.lr=1e-2"), folder)
    losses = [row["eval/loss"] for row in rows(folder) if "eval/loss" in row]
    assert losses[-1] < losses[0] and folder.adapter.is_dir()


def test_the_generator_process_samples_the_same_tokens_as_the_trainer_with_adapters(finished):
    found = []
    for worker in ("false", "true"):
        words = [*LORA, *UPDATES_ONLY, "schedule.total_episodes=64", f"generator.worker={worker}"]
        folder = finished(*words)
        found.append([row for row in rows(folder) if "lr" in row])
    for ours, theirs in zip(*found, strict=True):
        assert theirs["mismatch/kl"] < 1e-9
        assert theirs["objective/scores"] == ours["objective/scores"], (
            "the generator process must sample the same tokens"
        )
        assert theirs["objective/kl"] == pytest.approx(ours["objective/kl"], abs=1e-5)
    assert abs(found[0][-1]["objective/kl"]) > 1e-3


@pytest.mark.parametrize("rank", [nightly(0), 4])
def test_gradient_checkpointing_changes_no_metric(tiny, tmp_path, rank):
    found = []
    for on in ("false", "true"):
        folder = RunFolder(tmp_path / on)
        run(
            tiny(f"model.lora.rank={rank}", f"model.gradient_checkpointing={on}", "algo=ppo", *UPDATES_ONLY),
            folder,
        )
        found.append(rows(folder))
    assert found[0] == found[1]


@pytest.mark.parametrize("algo", [nightly("dpo"), "ppo", "reward"])
def test_frozen_weights_have_the_model_dtype_and_trained_weights_are_float32(tiny, algo):
    for rank, frozen in ((4, {torch.bfloat16}), (0, set())):
        cfg = complete(tiny(f"algo={algo}", f"model.lora.rank={rank}", "model.dtype=bfloat16"), run)
        parameters = list(build_module(cfg, build_tokenizer(cfg)).parameters())
        assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in parameters if not p.requires_grad} == frozen


def test_a_bfloat16_policy_starts_equal_to_the_reference_and_is_saved_as_float32(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny(*LORA, "model.dtype=bfloat16", "schedule.eval_every=1"), folder)
    assert json.loads((folder.model / "config.json").read_text())["dtype"] == "float32"
    assert [row["eval/kl"] == 0 for row in rows(folder) if "eval/kl" in row] == [True, False, False]


def test_float16_without_a_gpu_is_rejected_before_loading(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"model.dtype must be float32 or bfloat16 without a GPU \(torch finds"
    ):
        build_device(tiny("model.dtype=float16"))


@pytest.mark.parametrize("backend", [nightly("zero2"), "zero3"])
def test_deepspeed_and_plain_torch_train_the_same_adapters(tiny, tmp_path, finished, backend):
    plain, divided = finished(*LORA), RunFolder(tmp_path / backend)
    run(tiny(*LORA, f"backend={backend}"), divided)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        expected, found = load_file(plain.path / file), load_file(divided.path / file)
        assert found.keys() == expected.keys()
        assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-5
