"""Losses and gradient norms of other implementations, met by the objective and the engine that train."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.batch import Batch
from rlhf.config import LRSchedule, OptimConfig
from rlhf.engines.torch_engine import TorchEngine
from rlhf.models import Policy, load_causal_lm
from rlhf.objectives.config import DPOConfig, Ties
from rlhf.objectives.dpo import OnlineDPO

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the golden numbers of other implementations are not beside this checkout"
)
TEMPERATURE = 0.7 + 1e-7
PAD, EOS = 1, 0


@pytest.fixture(scope="module")
def cases():
    return json.loads((GOLDEN / "golden.json").read_text())["cases"]


def golden_batch(name: str) -> Batch:
    """The fixed batch, sample-major rows turned into [N, K, T]."""
    raw = np.load(GOLDEN / f"{name}.npz")
    context = int(raw["context_length"])
    rows = len(raw["queries"])
    samples = int(name[-1])
    prompts = rows // samples

    def grouped(x: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(x)
        return x.view(samples, prompts, *x.shape[1:]).transpose(0, 1).contiguous()

    mask = ~grouped(raw["padding_mask"])
    queries = torch.from_numpy(raw["queries"][:prompts])
    assert context == queries.shape[1]
    return Batch(
        index=torch.arange(prompts),
        texts=[""] * prompts,
        references=[""] * prompts,
        prompt_ids=queries,
        prompt_mask=queries != PAD,
        response_ids=grouped(raw["postprocessed_responses"]),
        response_mask=mask,
        ended=grouped(raw["postprocessed_responses"] == EOS).any(-1),
        behaviour_logprobs=grouped(raw["logprobs"]) * mask,
        scores=grouped(raw["scores"]),
    )


def golden_engine(optim: OptimConfig, micro_batch: int = 16) -> TorchEngine:
    def policy(name: str) -> Policy:
        return Policy(load_causal_lm(str(GOLDEN / "models" / name)), TEMPERATURE, shared_prefix=True)

    return TorchEngine(
        policy("policy"),
        policy("ref"),
        None,  # nothing is saved
        optim,
        total_steps=100,
        steps_per_batch=1,
        micro_batch=micro_batch,
        device=torch.device("cpu"),
    )


def path_optim() -> OptimConfig:
    return OptimConfig(lr=1e-3, schedule=LRSchedule.constant, max_grad_norm=None)


def gradients(engine: TorchEngine) -> dict[str, float]:
    """Gradient norms by the names of the golden file, which are those of the files on disk."""
    norms = {name: p.grad.norm().item() for name, p in engine.module.model.named_parameters()}
    norms["embed_out.weight"] = norms.pop("lm_head.weight")
    return norms


@pytest.mark.parametrize("micro_batch", [16, 2])
def test_online_dpo_meets_the_original(cases, micro_batch):
    engine = golden_engine(path_optim(), micro_batch)
    objective = OnlineDPO(DPOConfig(ties=Ties.keep))
    batch = objective.credit(engine.annotate(golden_batch("batch_k2"), objective.needs))

    seen = {}
    engine.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(engine)))
    figures = engine.step(batch, objective)

    case = cases["odpo_sigmoid"]
    assert figures["loss/policy"].value() == pytest.approx(case["loss"], rel=1e-4)
    assert figures["policy/grad_norm"].value() == pytest.approx(case["grad_norm"], rel=1e-4)
    assert seen == pytest.approx(case["per_param_grad_norm"], rel=1e-4)


def test_five_steps_of_online_dpo_follow_the_original(cases):
    engine = golden_engine(path_optim())
    objective = OnlineDPO(DPOConfig(ties=Ties.keep))
    batch = objective.credit(engine.annotate(golden_batch("batch_k2"), objective.needs))

    steps = [engine.step(batch, objective) for _ in range(5)]

    case = cases["path_odpo_sigmoid"]
    assert [s["loss/policy"].value() for s in steps] == pytest.approx(case["losses"], rel=1e-4)
    assert [s["policy/grad_norm"].value() for s in steps] == pytest.approx(case["grad_norms"], rel=1e-4)
    norm = torch.stack([p.detach().norm() for p in engine.module.parameters()]).norm().item()
    assert norm == pytest.approx(case["param_l2"], rel=1e-5)


def test_reference_logprobs_are_those_of_the_original():
    raw = np.load(GOLDEN / "batch_k2.npz")
    engine = golden_engine(path_optim())
    batch = golden_batch("batch_k2")
    found = engine.annotate(batch, frozenset({"ref_logprobs"})).ref_logprobs
    kept = torch.from_numpy(raw["ref_logprobs"]).view(2, 8, 16).transpose(0, 1)
    torch.testing.assert_close(found, kept * batch.response_mask, rtol=0, atol=1e-4)


def test_a_tie_that_is_dropped_leaves_sum_and_count(cases):
    engine = golden_engine(path_optim())
    batch = engine.annotate(golden_batch("batch_k2"), frozenset({"ref_logprobs"}))
    kept, dropped = (OnlineDPO(DPOConfig(ties=ties)) for ties in (Ties.keep, Ties.drop))
    assert kept.count(kept.credit(batch)) == 8
    assert dropped.count(dropped.credit(batch)) == 7
    tied = batch.scores[:, 0] == batch.scores[:, 1]
    seven = batch.select(torch.nonzero(~tied)[:, 0])
    expected, _ = kept.loss(engine.forward, kept.credit(seven))
    figures = engine.step(dropped.credit(batch), dropped)
    assert figures["loss/policy"].value() == pytest.approx(expected.item() / 7, rel=1e-5)
