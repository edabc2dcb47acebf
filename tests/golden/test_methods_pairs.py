"""Tests of the weights of preference pairs against losses and gradients recorded from the authors' code."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rlhf.config.algorithms import DPOConfig, DPOLoss, PairWeighting, Ties
from rlhf.core.batch import Batch, Outputs
from rlhf.objectives.dpo import OnlineDPO
from tests import needs
from tests.golden.test_golden import GOLDEN

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
SAMPLES = 2

# Case, settings of the weights, and the array with log sum p^2.
CASES = [
    ("wpo_0.1", {"weighting": PairWeighting.wpo}, "k2_model_log_sum_squares"),
    ("wpo_0.1_clamped", {"weighting": PairWeighting.wpo}, "k2_lower_log_sum_squares"),
    ("is_daa_sigmoid_0.1_0.25", {"weighting": PairWeighting["is"], "weighting_eps": 0.25}, None),
]
by_case = pytest.mark.parametrize("name, settings, squares", CASES, ids=[case[0] for case in CASES])


@pytest.fixture(scope="module")
def arrays() -> dict[str, torch.Tensor]:
    """Return the recorded arrays [rows, ...] of the batch with two samples of a prompt."""
    file = np.load(GOLDEN / "methods.npz")
    return {name: torch.from_numpy(file[name]) for name in file.files if name.startswith("k2_")}


@pytest.fixture(scope="module")
def cases() -> dict[str, dict]:
    return json.loads((GOLDEN / "methods.json").read_text())["cases"]


def recorded_batch(arrays: dict[str, torch.Tensor]) -> Batch:
    """Return the recorded batch [N, K, T]. The response ids are the numbers of the rows in the files."""

    def grouped(x: torch.Tensor) -> torch.Tensor:  # the files are sample-major
        return x.view(SAMPLES, -1, *x.shape[1:]).transpose(0, 1).contiguous()

    mask = grouped(arrays["k2_mask"])
    N = len(mask)
    return Batch(
        index=torch.arange(N),
        texts=[""] * N,
        references=[""] * N,
        prompt_ids=torch.ones(N, 2, dtype=torch.int64),
        prompt_mask=torch.ones(N, 2, dtype=torch.bool),
        response_ids=grouped(torch.arange(SAMPLES * N))[..., None].expand(mask.shape),
        response_mask=mask,
        ended=torch.ones(N, SAMPLES, dtype=torch.bool),
        behaviour_logprobs=grouped(arrays["k2_behaviour"]),
        ref_logprobs=grouped(arrays["k2_ref"]),
        scores=grouped(arrays["k2_scores"]),
    )


def test_sppo_equals_the_formula(arrays):
    case = json.loads((GOLDEN / "methods_more.json").read_text())["cases"]["sppo_0.1_wins_0.7"]
    objective = OnlineDPO(DPOConfig(beta=0.1, loss_type=DPOLoss.sppo, wins=0.7, ties=Ties.keep))
    logprobs = arrays[case["logprobs"]].clone().requires_grad_()
    pairs = objective.credit(recorded_batch(arrays))
    rows = pairs.response_ids[..., 0]
    sums, _ = objective.loss(lambda _: Outputs(logprobs=logprobs[rows] * pairs.response_mask), pairs)
    loss = sums["policy"] / objective.count(pairs)["policy"]
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    expected = torch.from_numpy(np.load(GOLDEN / "methods_more_grads.npz")["sppo_0.1_wins_0.7"]).float()
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-5, atol=1e-6)


@by_case
def test_loss_gradient_and_weights_equal_the_recorded_values(name, settings, squares, arrays, cases):
    case = cases[name]
    objective = OnlineDPO(DPOConfig(beta=0.1, ties=Ties.keep, **settings))
    logprobs = arrays[case["logprobs"]].clone().requires_grad_()

    def forward(batch: Batch) -> Outputs:
        rows = batch.response_ids[..., 0]
        extra = {} if squares is None else {"log_sum_squares": arrays[squares][rows]}
        return Outputs(logprobs=logprobs[rows] * batch.response_mask, **extra)

    pairs = objective.credit(recorded_batch(arrays))
    sums, figures = objective.loss(forward, pairs)
    loss = sums["policy"] / objective.count(pairs)["policy"]
    loss.backward()

    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    expected = torch.from_numpy(np.load(GOLDEN / "methods_grads.npz")[name]).float()
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-5, atol=1e-7)
    recorded = case["figures"]
    weights = np.array(recorded["weights"] if "weights" in recorded else recorded["ratio"])
    bound = 1.0 if "weights" in recorded else np.exp(0.5)
    assert figures["weighting/mean"].value() == pytest.approx(weights.mean(), rel=1e-5)
    assert figures["weighting/truncated"].value() == np.isclose(weights, bound).mean()
    ess = weights.sum() ** 2 / len(weights) / np.square(weights).sum()
    assert figures["weighting/ess"].value() == pytest.approx(ess, rel=1e-5)


@by_case
def test_the_recorded_gradient_is_that_of_the_formula_in_float64(name, settings, squares, arrays, cases):
    case = cases[name]
    chosen, rejected = (
        torch.tensor(cases["wpo_0.1"]["figures"][f"{which}_rows"]) for which in ("chosen", "rejected")
    )
    leaf = arrays[case["logprobs"]].double().requires_grad_()
    logprobs = leaf * arrays["k2_mask"]
    z = (logprobs - arrays["k2_ref"].double()).sum(1)
    if squares is None:
        logs = (logprobs - arrays["k2_behaviour"].double()).sum(1)
        weights = (logs[chosen] + logs[rejected]).clamp(max=2 * settings["weighting_eps"]).exp()
    else:
        logs = (logprobs - arrays[squares].double()).sum(1) / arrays["k2_mask"].sum(1)
        weights = (logs[chosen] + logs[rejected]).exp().clamp(max=1)
    loss = -(weights.detach() * F.logsigmoid(0.1 * (z[chosen] - z[rejected]))).mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-6)
    expected = torch.from_numpy(np.load(GOLDEN / "methods_grads.npz")[name]).double()
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-8)
