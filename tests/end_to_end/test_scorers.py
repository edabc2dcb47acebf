"""Test of a run with more than one scorer."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import load_config
from tests.end_to_end.conftest import rows

MIX = ["scorer=weighted", "+scorer@scorer.parts.model=reward_model", "+scorer@scorer.parts.words=function"]


@pytest.mark.parametrize("max_lag", [0, 1])  # 0: the trainer scores; 1: the annotator process scores
def test_run_trains_on_a_weighted_score_and_logs_its_parts(tiny, tmp_path, max_lag):
    file = tmp_path / "own_rewards.py"
    file.write_text(
        "def words(prompts, responses, references):\n    return [len(r.split()) for r in responses]\n"
    )
    settings = [f"path={file}:words", "batched=true", "weight=-0.5"]
    settings = [f"scorer.parts.words.{setting}" for setting in settings]
    cfg = tiny(*MIX, *settings, "scorer.missing_eos_score=null", f"schedule.max_lag={max_lag}")
    folder = RunFolder(tmp_path / "run")
    run(cfg, folder)
    trained = [row for row in rows(folder) if "lr" in row]
    assert len(trained) == 2 and all(("annotator/restarts" in row) == bool(max_lag) for row in trained)
    for row in trained:
        model, words = row["objective/scores/model"], row["objective/scores/words"]
        assert 0 < words <= 16 and row["objective/scores"] == pytest.approx(model - 0.5 * words, abs=1e-5)
    assert len({row["objective/scores/model"] for row in trained}) == 2, (
        "the reward model's score differs between the updates"
    )
    assert load_config(folder.config) == cfg
