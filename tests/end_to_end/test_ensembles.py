"""A run with an ensemble that it makes first: as scorer, by annotator, resumed, evaluated; the best of n."""

import pytest

from rlhf import Experiment
from rlhf.core.files import read_lines
from tests.end_to_end.conftest import TINY

WORDS = (
    *TINY,
    "algo=rloo",
    "task=tldr_mini",
    "stages.members=2",
    "stages.label_noise=0.5",
    "schedule.max_lag=1",
)


@pytest.mark.parametrize("combine", ["worst", "weights"])
def test_an_ensemble_is_made_once_scores_in_the_annotator_and_judges_the_finished_run(tmp_path, combine):
    words = (*WORDS, f"scorer.combine={combine}", f"output_dir={tmp_path}", f"cache_dir={tmp_path}/cache")
    experiment = Experiment(*words, "eval.best_of=8")
    result = experiment.run()
    models = sorted((tmp_path / "cache").glob("reward-*/model"))
    assert len(models) == 2
    rows = experiment.metrics().to_dict("records")
    (measured,) = experiment.evaluate(only=["model"]).to_dict("records")
    assert measured["eval/score"] == pytest.approx(result["eval/score"])
    trained = [row for row in rows if row.get("objective/scores") == row.get("objective/scores", 0)]
    if combine == "weights":
        assert "eval/score_std" not in result and not any("objective/score_std" in row for row in rows)
    else:
        assert result["eval/score_std"] > 0 and trained
        for row in trained:
            each = row["objective/scores/1"], row["objective/scores/2"]
            assert row["objective/score_std"] > 0 and row["objective/scores"] <= min(each) + 1e-6
    best = read_lines(experiment.folder / "best_of.jsonl", ["n", "score", "gold_score", "kl", "distinct"])
    assert [row["n"] for row in best] == [1, 2, 4, 8]
    assert best[0]["score"] < best[-1]["score"] and best[0]["kl"] == 0
