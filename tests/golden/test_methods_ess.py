"""Tests of effective sample size and step scale against values that VCPO's code gives on fixed arrays."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.config.run import ESSScaling, OptimConfig
from rlhf.core.batch import Batch
from rlhf.core.metrics import merge, sample_size
from rlhf.engines.engine import ess_scale
from rlhf.objectives.objective import mismatch, response_weights
from tests import needs

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
PROMPTS, SAMPLES = 4, 4


@pytest.fixture(scope="module")
def figures():
    return json.loads((GOLDEN / "methods.json").read_text())["cases"]["vcpo_sqrt_mean_cap8"]["figures"]


def array(name: str) -> torch.Tensor:
    """Return a recorded array; its rows, which are in sample-major order, become [N, K, T]."""
    rows = torch.from_numpy(np.load(GOLDEN / "methods.npz")[name])
    return rows.view(SAMPLES, PROMPTS, -1).transpose(0, 1).contiguous()


def batch(**given) -> Batch:
    """Return a batch with the recorded log-probs of the sampler; the texts and the prompts are empty."""
    mask = array("k4_mask")
    return Batch(
        index=torch.arange(PROMPTS),
        texts=[""] * PROMPTS,
        references=[""] * PROMPTS,
        prompt_ids=torch.zeros(PROMPTS, 1, dtype=torch.int64),
        prompt_mask=torch.ones(PROMPTS, 1, dtype=torch.bool),
        response_ids=torch.zeros(mask.shape, dtype=torch.int64),
        response_mask=mask,
        ended=torch.ones(PROMPTS, SAMPLES, dtype=torch.bool),
        behaviour_logprobs=array("k4_behaviour"),
        scores=torch.zeros(PROMPTS, SAMPLES),
        **given,
    )


def test_sequence_weights_and_their_sample_sizes_equal_those_of_the_authors(figures):
    weights = response_weights(array("k4_policy") - array("k4_behaviour"), array("k4_mask"))
    assert weights.T.flatten().tolist() == pytest.approx(figures["sequence_weights"], rel=1e-5)
    truncated = sample_size(weights.clamp(max=8.0)).value()
    assert truncated == pytest.approx(figures["ess_ratio_clipped"], rel=1e-5)


def test_ess_of_the_metrics_and_the_scale_of_the_step_equal_those_of_the_authors(figures):
    whole = batch(old_logprobs=array("k4_old"))
    found: dict = {}
    for rows in (torch.tensor([0]), torch.tensor([1, 2, 3])):  # two micro-batches
        merge(found, mismatch(array("k4_policy")[rows], whole.select(rows)))
    ess = found["mismatch/step_ess"].value()
    assert ess == pytest.approx(figures["ess_ratio"], rel=1e-5)
    assert ess * PROMPTS * SAMPLES == pytest.approx(figures["ess"], rel=1e-5)
    config = OptimConfig(lr=1.0, ess_scaling=ESSScaling.sqrt)
    assert ess_scale(config, ess) == pytest.approx(figures["lr_scale"], rel=1e-5)


def test_ess_compares_the_trainer_before_the_update_with_the_sampler():
    weights = (array("k4_old") - array("k4_behaviour")).double().sum(-1).exp()
    expected = (weights.sum().square() / weights.square().sum() / weights.numel()).item()
    with_old = mismatch(array("k4_policy"), batch(old_logprobs=array("k4_old")))
    assert with_old["mismatch/ess"].value() == pytest.approx(expected, rel=1e-5)
    without = mismatch(array("k4_policy"), batch())
    assert without["mismatch/ess"].value() == without["mismatch/step_ess"].value()
