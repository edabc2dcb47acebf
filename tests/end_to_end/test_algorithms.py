"""Every algorithm, through the whole loop, on all axes of off-policyness."""

import pytest
from datasets import Dataset, DatasetDict

from rlhf.config.compose import compose
from rlhf.generators.hf.generator import HFGenerator
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import rows

ONLINE = ("dpo", "bok", "ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
SMOKE = pytest.mark.smoke
SCORED = ("scorer=facts", "scorer.missing_eos_score=null")  # finer than an untrained reward model


def updates(folder: RunFolder) -> list[dict]:
    return [row for row in rows(folder) if "lr" in row]


@pytest.mark.parametrize(
    "algo", [pytest.param(algo, marks=SMOKE if algo in ("ppo", "grpo") else ()) for algo in ONLINE]
)
def test_the_first_update_starts_from_one_model(tiny, tmp_path, algo):
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", "algo.samples_per_prompt=4", *SCORED), folder)
    first, second = updates(folder)
    assert [first["lag"], second["lag"]] == [0, 0] and [first["episode"], second["episode"]] == [32, 64]
    assert "annotator/restarts" not in first
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert first["policy/clipfrac"] == 0
    assert first["mismatch/kl"] == pytest.approx(0, abs=1e-6)
    assert first["mismatch/max_ratio"] == pytest.approx(1, abs=1e-3)
    assert first["mismatch/ess"] == pytest.approx(1, abs=1e-4)
    assert first["policy/grad_norm"] > 0
    assert first.keys() >= {"loss/policy", "objective/scores", "objective/tie_rate"}
    assert "must be" not in folder.log.read_text()


@pytest.mark.parametrize("algo", ONLINE)
def test_every_axis_of_off_policyness_works(tiny, tmp_path, algo):
    axes = ("schedule.minibatches=2", "schedule.epochs=2", "schedule.max_lag=1", "algo.samples_per_prompt=4")
    in_line = "generator.worker=false"  # the same tokens, without the time that a process takes to start
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", *axes, *SCORED, "schedule.total_episodes=96", in_line), folder)
    first, *_, last = updates(folder)
    assert [row["lag"] for row in updates(folder)] == [0, 1, 1]
    assert last["mismatch/max_ratio"] > 1, "the trainer has moved on since the sample was drawn"
    assert last["mismatch/ess"] < 1
    assert first["policy/approxkl"] > 0, "later steps on a batch find another policy"


@pytest.mark.parametrize("algo", ["dpo", "grpo", "ppo"])
def test_a_sampler_that_computes_otherwise_is_warned_of_with_figures(tiny, tmp_path, algo, monkeypatch):
    sample = HFGenerator.submit

    def shifted(self, prompts, sampling):
        future = sample(self, prompts, sampling)
        rollouts = future.result()
        rollouts.behaviour_logprobs = rollouts.behaviour_logprobs * 1.1  # as if at another temperature
        return future

    monkeypatch.setattr(HFGenerator, "submit", shifted)
    folder = RunFolder(tmp_path / "run")
    run(tiny(f"algo={algo}", "algo.samples_per_prompt=2", *SCORED), folder)
    told = folder.log.read_text()
    for figure in ("policy/ratio", "mismatch/kl", "objective/kl"):
        assert f"{figure} is" in told, figure


@pytest.mark.parametrize("settings", [[], ["algo.kl_target=0.5"]], ids=["fixed", "adaptive"])
def test_ppo_goes_on_where_it_was_interrupted(tiny, tmp_path, finished, settings, monkeypatch):
    words = ["algo=ppo", *settings, *SCORED, "schedule.save_every=1", "schedule.total_episodes=48"]
    whole = finished(*words)

    from rlhf.training.checkpoint import Checkpoints

    class Stopped(Exception):
        pass

    save = Checkpoints.save

    def stop_after_saving(self, *parts):
        save(self, *parts)
        raise Stopped

    folder = RunFolder(tmp_path / "interrupted")
    monkeypatch.setattr(Checkpoints, "save", stop_after_saving)
    with pytest.raises(Stopped):
        run(tiny(*words), folder)
    monkeypatch.undo()
    run(tiny(*words), folder)
    assert rows(folder) == rows(whole)
    coefficients = [row["objective/kl_coef"] for row in updates(whole)]
    assert (len(set(coefficients)) == 1) == (not settings)


@pytest.mark.parametrize("start", ["reward", "policy"])
def test_the_value_model_starts_as_the_reward_model_or_at_0(tiny, tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=ppo", f"algo.value_from={start}"), folder)
    first = updates(folder)[0]
    assert (first["value/mean"] == 0) == (start == "policy")
    assert first["loss/value"] > 0


def test_offline_dpo_trains_on_any_pairs_of_prompt_chosen_and_rejected(finished, tmp_path):
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
        "debug=tiny",
        "progress=off",
        "algo=dpo",
        "generator=dataset",
        "task=preferences",
        "optim.lr=1e-3",
    ]
    words.append("task.max_prompt_tokens=256")
    run(compose([*words, f"task.path={tmp_path / 'pairs'}", f"model.policy={sft.model}"]), folder)
    first, *_, last = updates(folder)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert last["rewards/accuracies"] == 1 and last["rewards/margins"] > 0
    assert last["loss/policy"] < first["loss/policy"]


def test_a_run_of_ties_says_so(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=dapo", "task=arithmetic", "algo.samples_per_prompt=2"), folder)
    for row in updates(folder):  # a model that has learned nothing is always wrong
        assert row["objective/tie_rate"] == 1 and row["policy/skipped_steps"] == 1
        assert "policy/grad_norm" not in row
