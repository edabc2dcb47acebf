"""Runs of the embedded tasks with an environment, from the SFT on dialogues of pupils on."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.prerequisites import model_folder, stage
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.conftest import TINY, nightly, rows
from tests.end_to_end.test_algorithms import ONLINE, STALE

SFT = (
    *("schedule.total_epochs=null", "schedule.total_episodes=1024", "schedule.prompts_per_update=32"),
    *(
        *("optim.lr=2e-3", "optim.warmup=5", "backend.micro_batch=32", "schedule.eval_every=1.0"),
        "eval.prompts=16",
    ),
)
WORDS = ("algo.samples_per_prompt=4", "generator.response_length=40", f"stages.sft={[*SFT]}")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["task=calculator", "algo=grpo"], marks=pytest.mark.smoke),
        nightly(["task=calculator", "algo=ppo", "schedule.max_lag=1", "generator.worker=false"]),
        ["task=guess_number", "algo=dpo"],
    ],
    ids=" ".join,
)
def test_sft_and_rl_train_on_episodes_of_several_turns(finished, cache_dir, words):
    folder = finished(*words, *WORDS)
    trained = [row for row in rows(folder) if "lr" in row]
    assert trained[0]["mismatch/kl"] == pytest.approx(0, abs=1e-6)
    assert trained[0]["environment/turns"] > 1.2 and 0 < trained[0]["environment/token_share"] < 0.8
    assert all(row["policy/grad_norm"] > 0 for row in trained)
    assert rows(folder)[-1]["eval/score"] >= 0
    made = model_folder(stage(compose([*TINY, f"cache_dir={cache_dir}", *words, *WORDS]), "sft"))
    losses = [row["loss/policy"] for row in rows(made) if "lr" in row]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # the first run also trains the SFT model
@pytest.mark.parametrize("algo", [*ONLINE, *STALE])
def test_every_algorithm_learns_to_use_the_calculator_in_20_updates(cache_dir, tmp_path, algo):
    words = [f"algo={algo}", "algo.samples_per_prompt=4", "schedule.eval_every=20", "eval.prompts=128"]
    folder = RunFolder(tmp_path / "run")
    run(compose(["task=calculator", *words, f"cache_dir={cache_dir}", "progress=off"]), folder)
    scores = [row["eval/score"] for row in rows(folder) if "eval/score" in row]
    assert len([row for row in rows(folder) if "lr" in row]) == 20
    assert scores[0] < 0.1 and scores[-1] > 0.95
