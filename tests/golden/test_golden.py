"""Tests of losses and gradient norms against values that were recorded from other implementations."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rlhf.assembly.parts import make
from rlhf.config.algorithms import DPOConfig, Scale, Ties
from rlhf.config.run import LRSchedule, OptimConfig
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget
from rlhf.engines.engine import EngineSettings, TorchEngine
from rlhf.models.loading import load_causal_lm, load_reward_model
from rlhf.models.modules import ActorCritic, Policy, ValueModel
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.objective import Objective
from rlhf.processes.ranks import ALONE
from tests import needs

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
TEMPERATURE = 0.7 + 1e-7
PAD, EOS = 1, 0


@pytest.fixture(scope="module")
def cases():
    return json.loads((GOLDEN / "golden.json").read_text())["cases"]


def golden_batch(name: str) -> Batch:
    """Load a recorded batch; its rows, which are in sample-major order, become [N, K, T]."""
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


def kept_values(name: str) -> torch.Tensor:
    """Return the recorded values [N, K, T+1] from before the update.

    No model gives these values, so they are loaded. The recording lacks the last value, which is set to 0.
    """
    raw = torch.from_numpy(np.load(GOLDEN / f"{name}.npz")["values"])
    return F.pad(raw.view(int(name[-1]), -1, raw.shape[-1]).transpose(0, 1), (0, 1))


def golden_engine(optim: OptimConfig, micro_batch: int = 16, critic: bool = False) -> TorchEngine:
    def policy(name: str) -> Policy:
        return Policy(load_causal_lm(str(GOLDEN / "models" / name)), TEMPERATURE, shared_prefix=True)

    module = policy("policy")
    if critic:
        value = ValueModel(load_reward_model(str(GOLDEN / "models" / "value")), shared_prefix=True)
        module = ActorCritic(module, value)
    return TorchEngine(
        module,
        policy("ref"),
        None,  # tokenizer, which only `save` needs
        ALONE,
        EngineSettings(
            optim=optim,
            total_steps=100,
            steps_per_batch=1,
            budget=Budget(micro_batch),
            inference=Budget(micro_batch),
        ),
    )


def path_optim() -> OptimConfig:
    return OptimConfig(lr=1e-3, schedule=LRSchedule.constant, max_grad_norm=None)


def gradients(engine: TorchEngine) -> dict[str, float]:
    """Return gradient norms by their recorded names, with prefix "0." (policy) or "1." (critic)."""
    if not isinstance(engine.module, ActorCritic):
        return grad_norms(engine.module.model)
    parts = {"0": engine.module.actor.model, "1": engine.module.critic.model}
    return {f"{part}.{name}": norm for part, m in parts.items() for name, norm in grad_norms(m).items()}


def grad_norms(model) -> dict[str, float]:
    return {name: p.grad.norm().item() for name, p in model.named_parameters()}


def algorithm(name: str, **settings) -> Objective:
    objective: Objective = make(SCHEMAS[f"schema/algo/{name}"](**settings))
    return objective


# Case, batch, objective, and whether `old_logprobs` are the log-probs of the sampler (else of the policy).
CASES = [
    ("odpo_sigmoid", "batch_k2", algorithm("dpo", ties=Ties.keep), True),
    ("bok2", "batch_k2", algorithm("bok", ties=Ties.keep), True),
    ("rloo_k4", "batch_k4", algorithm("rloo", samples_per_prompt=4), True),
    ("rloo_k4_onpolicy", "batch_k4", algorithm("rloo", samples_per_prompt=4), False),
    ("ppo", "batch_k2", algorithm("ppo"), True),
    ("grpo_grpo_beta0.04", "batch_k4", algorithm("grpo"), True),
    ("grpo_dr_grpo_beta0.0", "batch_k4", algorithm("dr_grpo", scale=Scale.group), True),
    ("grpo_dapo_beta0.0", "batch_k4", algorithm("dapo", clip_high=0.2), True),
]


@pytest.mark.parametrize("micro_batch", [16, 4])
@pytest.mark.parametrize("name, file, objective, sampled_before", CASES, ids=[case[0] for case in CASES])
def test_loss_and_gradients_equal_the_recorded_values(
    cases, name, file, objective, sampled_before, micro_batch
):
    case = cases[name]
    engine = golden_engine(path_optim(), micro_batch, critic=name == "ppo")
    batch = golden_batch(file)
    old = batch.behaviour_logprobs if sampled_before else engine.infer(engine.policy, batch, "logprobs")
    batch = replace(engine.annotate(batch, objective.needs), old_logprobs=old)
    if name == "ppo":
        batch = replace(batch, values=kept_values(file))
    batch = objective.credit(batch)
    if "advantages" in case:
        assert batch.advantages[:, :, 0].flatten().tolist() == pytest.approx(
            case["advantages"], rel=1e-4, abs=1e-5
        )

    seen = {}
    engine.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(engine)))
    figures = {name: stat.value() for name, stat in engine.step(batch, objective).items()}

    loss = figures["loss/policy"] + objective.loss_weights.get("value", 0) * figures.get("loss/value", 0)
    assert loss == pytest.approx(case["loss"], rel=1e-4, abs=1e-7)
    assert figures["policy/grad_norm"] == pytest.approx(case["grad_norm"], rel=1e-4)
    theirs = {n.replace("embed_out", "lm_head"): norm for n, norm in case["per_param_grad_norm"].items()}
    assert seen == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    if name == "ppo":
        assert figures["loss/policy"] == pytest.approx(case["pg_loss"], rel=1e-4)
        assert figures["loss/value"] == pytest.approx(case["vf_loss"], rel=1e-4)
        assert figures["policy/clipfrac"] == pytest.approx(case["pg_clipfrac"])
        assert figures["value/clipfrac"] == pytest.approx(case["vf_clipfrac"])


def test_five_steps_of_online_dpo_equal_the_recorded_steps(cases):
    engine = golden_engine(path_optim())
    objective = OnlineDPO(DPOConfig(ties=Ties.keep))
    batch = objective.credit(engine.annotate(golden_batch("batch_k2"), objective.needs))

    steps = [engine.step(batch, objective) for _ in range(5)]

    case = cases["path_odpo_sigmoid"]
    assert [s["loss/policy"].value() for s in steps] == pytest.approx(case["losses"], rel=1e-4)
    assert [s["policy/grad_norm"].value() for s in steps] == pytest.approx(case["grad_norms"], rel=1e-4)
    norm = torch.stack([p.detach().norm() for p in engine.module.parameters()]).norm().item()
    assert norm == pytest.approx(case["param_l2"], rel=1e-5)


def test_reference_logprobs_equal_the_recorded_values():
    raw = np.load(GOLDEN / "batch_k2.npz")
    engine = golden_engine(path_optim())
    batch = golden_batch("batch_k2")
    found = engine.annotate(batch, frozenset({"ref_logprobs"})).ref_logprobs
    kept = torch.from_numpy(raw["ref_logprobs"]).view(2, 8, 16).transpose(0, 1)
    torch.testing.assert_close(found, kept * batch.response_mask, rtol=0, atol=1e-4)


def test_a_dropped_tie_is_excluded_from_the_loss_sum_and_the_count(cases):
    engine = golden_engine(path_optim())
    batch = engine.annotate(golden_batch("batch_k2"), frozenset({"ref_logprobs"}))
    kept, dropped = (OnlineDPO(DPOConfig(ties=ties)) for ties in (Ties.keep, Ties.drop))
    assert kept.count(kept.credit(batch)) == {"policy": 8}
    assert dropped.count(dropped.credit(batch)) == {"policy": 7}
    tied = batch.scores[:, 0] == batch.scores[:, 1]
    seven = batch.select(torch.nonzero(~tied)[:, 0])
    expected, _ = kept.loss(engine.forward, kept.credit(seven))
    figures = engine.step(dropped.credit(batch), dropped)
    assert figures["loss/policy"].value() == pytest.approx(expected["policy"].item() / 7, rel=1e-5)
