"""Test that the algorithm written in docs/python.md trains."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.docs.test_guide import reinforce  # noqa: F401
from tests.end_to_end.conftest import rows


@pytest.mark.smoke
def test_the_added_algorithm_of_the_docs_trains(tiny, tmp_path, reinforce):  # noqa: F811
    cfg = tiny("scorer=facts", "scorer.missing_eos_score=null")
    cfg.algo = reinforce(samples_per_prompt=2, kl_coef=0.1)
    folder = RunFolder(tmp_path / "run")
    run(cfg, folder)
    trained = [row for row in rows(folder) if "lr" in row]
    assert len(trained) == 2
    assert trained[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert trained[0]["policy/grad_norm"] > 0
