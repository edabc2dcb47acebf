"""Tests of every algorithm in complete runs: on-policy, off-policy, resumed and offline."""

import json

import pytest
from datasets import Dataset, DatasetDict

from rlhf.generators.hf.generator import HFGenerator
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.conftest import UPDATES_ONLY, nightly, rows

ONLINE = ("dpo", "bok", "ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")  # also in test_matrix.py
STALE = ("m2po", "topr", "dppo", "scalerl", "oapl")  # for samples of an older policy
OPTIONS = (  # of objectives, which the first update must not notice either
    *("dpo algo.weighting=wpo", "grpo correction=m2po", "grpo algo.advantage=opo algo.scale=none"),
    *("ppo algo.covariance.kind=kl", "rloo algo.anchor=loglinear algo.off_policy_mask=0.1 algo.dual_clip=3"),
)
MORE_OPTIONS = (  # their losses are in tests/golden
    *("oapl algo.anchor=reference", "topr algo.level=token", "m2po algo.form=clip"),
    *("dppo algo.divergence=kl", "dapo algo.covariance.kind=clip algo.covariance.low=0"),
)
# In test_matrix.py every online algorithm trains on samples of an older policy.
OFF_POLICY = ("dpo", "ppo", "grpo", "topr", "oapl", "m2po", "dppo", "scalerl")
# The scores of this scorer differ more than those of an untrained reward model.
SCORED = ("scorer=facts", "scorer.missing_eos_score=null")


def updates(folder: RunFolder) -> list[dict]:
    return [row for row in rows(folder) if "lr" in row]


def assert_agreement(first: dict, folder: RunFolder) -> None:
    """Check that policy, reference and sampler agree in the first update of a run."""
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert first["policy/clipfrac"] == 0
    assert first["mismatch/kl"] == pytest.approx(0, abs=1e-6)
    assert first["mismatch/max_ratio"] == pytest.approx(1, abs=1e-3)
    for name in ("ess", "token_ess", "step_ess"):
        assert first[f"mismatch/{name}"] == pytest.approx(1, abs=1e-4)
    assert first["policy/grad_norm"] > 0
    assert first.keys() >= {"loss/policy", "objective/scores", "objective/tie_rate"}
    assert "must be" not in folder.log.read_text()


@pytest.mark.parametrize("algo", [*STALE, *OPTIONS, *map(nightly, MORE_OPTIONS)])
def test_policy_reference_and_sampler_agree_in_the_first_update(tiny, tmp_path, algo):
    folder = RunFolder(tmp_path / "run")
    words = [*f"algo={algo}".split(), "algo.samples_per_prompt=4", *SCORED, *UPDATES_ONLY]
    run(tiny(*words), folder)
    first, second = updates(folder)
    assert [first["lag"], second["lag"]] == [0, 0] and [first["episode"], second["episode"]] == [32, 64]
    assert "annotator/restarts" not in first
    assert_agreement(first, folder)


@pytest.mark.parametrize(
    "algo", [algo if algo in OFF_POLICY else nightly(algo) for algo in (*ONLINE, *STALE)]
)
def test_minibatches_epochs_and_lag_train_off_policy(tiny, tmp_path, algo):
    axes = ("schedule.minibatches=2", "schedule.epochs=2", "schedule.max_lag=1", "algo.samples_per_prompt=4")
    in_line = "generator.worker=false"  # the same tokens, without the start of a process
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", *axes, *SCORED, *UPDATES_ONLY, "schedule.total_episodes=96", in_line), folder)
    first, *_, last = updates(folder)
    assert [row["lag"] for row in updates(folder)] == [0, 1, 1]
    assert last["mismatch/max_ratio"] > 1, "the policy has changed since the sample was drawn"
    assert last["mismatch/ess"] < 1
    assert first["policy/approxkl"] > 0, "the policy changes between the steps on one batch"


@pytest.mark.parametrize("algo", ["dpo", nightly("grpo"), nightly("ppo")])
def test_wrong_sampler_logprobs_are_reported_in_the_log_with_metrics(tiny, tmp_path, algo, monkeypatch):
    sample = HFGenerator.submit

    def shifted(self, prompts, sampling):
        future = sample(self, prompts, sampling)
        rollouts = future.result()
        # as if sampled at a different temperature
        rollouts.behaviour_logprobs = rollouts.behaviour_logprobs * 1.1
        return future

    monkeypatch.setattr(HFGenerator, "submit", shifted)
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", "algo.samples_per_prompt=2", *SCORED, *UPDATES_ONLY), folder)
    told = folder.log.read_text()
    for figure in ("policy/ratio", "mismatch/kl", "objective/kl"):
        assert f"{figure} is" in told, figure


@pytest.mark.parametrize("start", ["reward", "policy"])
def test_value_model_starts_from_the_reward_model_or_at_zero(tiny, tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=ppo", f"algo.value_from={start}", *UPDATES_ONLY), folder)
    first = updates(folder)[0]
    assert (first["value/mean"] == 0) == (start == "policy")
    assert first["loss/value"] > 0


def test_offline_dpo_trains_on_a_dataset_of_prompt_chosen_and_rejected(finished, tmp_path):
    columns = {
        "prompt": [f"SUBREDDIT: r/{name} TL;DR:" for name in ("a", "b", "c", "d") * 8],
        "chosen": [" my friend moved to paris"] * 32,
        "rejected": [" i am sad"] * 32,
    }
    pairs = Dataset.from_dict(columns)
    DatasetDict({"train": pairs, "validation": pairs}).save_to_disk(tmp_path / "pairs")
    sft = finished("algo=sft")
    folder = RunFolder(tmp_path / "run")
    words = [
        *("debug=tiny", "progress=off", "algo=dpo", "generator=dataset", "task=preferences"),
        "optim.lr=1e-3",
    ]
    words.append("task.max_prompt_tokens=256")
    run(compose([*words, f"task.path={tmp_path / 'pairs'}", f"model.policy={sft.model}"]), folder)
    first, *_, last = updates(folder)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert last["rewards/accuracies"] == 1 and last["rewards/margins"] > 0
    assert last["loss/policy"] < first["loss/policy"]


def test_a_run_with_only_ties_skips_every_step_and_reports_the_tie_rate(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=dapo", "task=arithmetic", "algo.samples_per_prompt=2"), folder)
    for row in updates(folder):  # an untrained model is always wrong, so all scores are equal
        assert row["objective/tie_rate"] == 1 and row["policy/skipped_steps"] == 1
        assert "policy/grad_norm" not in row
    evaluated = [row for row in map(json.loads, folder.metrics.open()) if "eval/gold_score" in row]
    assert evaluated and all(row["eval/accuracy"] == row["eval/gold_score"] == 0 for row in evaluated)
