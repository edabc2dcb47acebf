"""Tests of every algorithm in complete runs: on-policy, off-policy, with corrections, weights and offline."""

import json

import pytest
from datasets import Dataset, DatasetDict

from rlhf.generators.hf.generator import HFGenerator
from rlhf.report.__main__ import main as report
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.training.recorder import Limits
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
COLLAPSE = "warning/collapse"
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


BANDS = ("algo.correction.reject_low=0.9", "algo.correction.reject_high=1.1")
MINIBATCHES = "schedule.minibatches=2"


@pytest.mark.parametrize(
    "plain, corrected",
    [
        (["algo=grpo"], ["algo=grpo", "correction=truncate"]),
        nightly(["algo=grpo"], ["algo=grpo", "correction=icepop", "algo.correction.normalise=true"]),
        (["algo=grpo"], ["algo=grpo", "correction=seq_mask_tis", *BANDS]),
        (["algo=grpo"], ["algo=grpo", "algo.correction.kind=decoupled", "algo.correction.level=sequence"]),
        (["algo=grpo"], ["algo=grpo", "algo.anchor=behaviour"]),
        (["algo=grpo"], ["algo=grpo", "algo.anchor=loglinear", "algo.correction.kind=decoupled"]),
        (["algo=grpo"], ["algo=grpo", "algo.off_policy_mask=1e-9"]),
        (["algo=dapo"], ["algo=m2po", "algo.limit=1e-12"]),
        nightly(["algo=dapo"], ["algo=m2po", "algo.form=clip", "algo.limit=1e-12"]),
        (["algo=dapo"], ["algo=dppo", "algo.limit_high=1e-9", "algo.limit_low=1e-9"]),
        (["algo=dapo", "algo.scale=none"], ["algo=topr", "algo.level=token"]),
        (["algo=dpo"], ["algo=dpo", "algo.weighting=is"]),
        (["algo=grpo", MINIBATCHES], ["algo=grpo", MINIBATCHES, "correction=truncate"]),
        nightly(["algo=grpo", MINIBATCHES], ["algo=grpo", MINIBATCHES, "correction=seq_mask_tis", *BANDS]),
    ],
)
def test_an_on_policy_run_is_the_uncorrected_run(finished, tiny, tmp_path, plain, corrected):
    expected = finished(*plain, *SCORED, *UPDATES_ONLY)
    folder = RunFolder(tmp_path / "run")
    run(tiny(*corrected, *SCORED, *UPDATES_ONLY), folder)
    trained, uncorrected = ((each.model / "model.safetensors").read_bytes() for each in (folder, expected))
    assert trained == uncorrected


def test_noise_of_the_sampler_is_measured_as_mismatch_and_expected(tiny, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=grpo", "generator.noise=0.3", *SCORED, *UPDATES_ONLY), folder)
    assert "at the first update" not in capsys.readouterr().out
    half_variance = (0.3 / 0.7) ** 2 / 2  # mismatch/kl if all tokens are equally likely; otherwise it is less
    found = [row["mismatch/kl"] for row in rows(folder) if "lr" in row]
    assert len(found) == 2 and all(half_variance / 4 < value < 1.1 * half_variance for value in found)


COMMON = ("algo=dpo", *SCORED, *UPDATES_ONLY)


def test_the_first_update_with_importance_weights_is_that_of_plain_dpo(finished, tiny, tmp_path):
    plain = updates(finished(*COMMON))[0]
    folder = RunFolder(tmp_path / "run")
    run(tiny(*COMMON, "algo.weighting=is"), folder)
    first = updates(folder)[0]
    for name in ("loss/policy", "policy/grad_norm"):
        assert first[name] == pytest.approx(plain[name], rel=1e-4)
    for name, expected in (("mean", 1), ("truncated", 0), ("ess", 1)):
        assert first[f"weighting/{name}"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("weighting", ["is", "wpo"])
def test_pairs_of_an_older_policy_have_unequal_weights(tiny, tmp_path, weighting):
    stale = ("schedule.max_lag=1", "schedule.minibatches=2", "generator.worker=false")
    folder = RunFolder(tmp_path / "run")
    run(tiny(*COMMON, *stale, f"algo.weighting={weighting}", "schedule.total_episodes=96"), folder)
    last = updates(folder)[-1]
    assert last["lag"] == 1 and 0 < last["weighting/ess"] < 1


def test_offline_pairs_are_weighted_by_wpo(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=dpo", "generator=dataset", "algo.weighting=wpo", *UPDATES_ONLY), folder)
    assert all(0 < row["weighting/ess"] <= 1 for row in updates(folder))


def test_saved_rollouts_are_weighted_by_the_log_probs_that_they_contain(finished, tiny, tmp_path):
    saved = finished(*COMMON, "save_generations=true")
    folder = RunFolder(tmp_path / "run")
    source = ("generator=dataset", f"generator.path={saved.path}/generations")
    run(tiny(*COMMON, *source, "scorer=labels", "algo.weighting=is", "generator.temperature=0.7"), folder)
    assert updates(folder)[0]["weighting/ess"] == pytest.approx(1, abs=1e-3)


AHEAD = ("schedule.max_lag=2", "generator.worker=false", "schedule.total_episodes=96", *UPDATES_ONLY)


def test_at_lag_0_the_run_is_the_run_without_scaling(finished, tiny, tmp_path):
    plain = finished("algo=rloo", *SCORED, *UPDATES_ONLY)
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=rloo", *SCORED, *UPDATES_ONLY, "optim.ess_scaling=sqrt"), folder)
    scaled = rows(folder)
    assert [row.pop("policy/lr_scale") for row in scaled if "lr" in row] == [1.0] * len(updates(folder))
    assert scaled == rows(plain)
    trained, expected = ((each.model / "model.safetensors").read_bytes() for each in (folder, plain))
    assert trained == expected


@pytest.mark.parametrize("algo", ["dpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_a_stale_batch_lowers_the_rate_of_its_step(finished, tiny, tmp_path, algo):
    plain = updates(finished(f"algo={algo}", *SCORED, *AHEAD))
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", *SCORED, *AHEAD, "optim.ess_scaling=sqrt"), folder)
    scaled = updates(folder)
    assert scaled[0]["policy/lr_scale"] == 1 > scaled[-1]["policy/lr_scale"]
    for row, other in zip(scaled, plain, strict=True):
        assert row["policy/lr_scale"] == pytest.approx(row["mismatch/step_ess"] ** 0.5, abs=1e-6)
        assert row["lr"] == pytest.approx(other["lr"] * row["policy/lr_scale"])


def test_the_warning_of_a_collapse_is_in_the_terminal_the_rows_and_the_report(
    tiny, finished, tmp_path, monkeypatch, capsys
):
    quiet = finished("algo=dpo", *SCORED)
    assert not any(COLLAPSE in row for row in rows(quiet))
    monkeypatch.setattr("rlhf.assembly.training.LIMITS", Limits(entropy=100.0))  # every row is beyond it
    folder = RunFolder(tmp_path / "runs" / "run")
    run(tiny("algo=dpo", *SCORED), folder)
    text = "the policy may collapse: entropy per token at 1 of its first value, limit 1e+02, at update 1; "
    log = folder.log.read_text()
    assert log.count("the policy may collapse") == 1 and text in log and "set optim.lr=" in log
    assert text in " ".join(capsys.readouterr().out.split())
    assert [row.pop(COLLAPSE) for row in updates(folder)] == [1.0] * len(updates(folder))
    bare = [{name: value for name, value in row.items() if name != COLLAPSE} for row in rows(folder)]
    assert bare == rows(quiet), "the warning changes no other metric"
    report([str(tmp_path / "runs"), "--out", str(tmp_path / "report")])
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Runs that warned of a collapse of the policy: run (update 1)" in page
