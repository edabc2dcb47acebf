"""Tests of distillation against losses and gradients of TRL and of the formulas, through an engine."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rlhf.assembly.parts import make
from rlhf.config.algorithms import DistillConfig, TeacherDivergence
from rlhf.config.run import LRSchedule, OptimConfig
from rlhf.core.batch import Batch, Budget, Outputs
from rlhf.engines.engine import EngineSettings, TorchEngine
from rlhf.models.divergence import tiled_divergence
from rlhf.processes.ranks import ALONE
from tests import needs
from tests.golden.test_golden import GOLDEN

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
K1, K2, K3 = (TeacherDivergence(kind) for kind in ("k1", "k2", "k3"))
FREE = 1e9  # a cap without effect

# Case -> settings, temperature, whether the policy sampled
CASES = {
    "reverse": ({}, 1.0, False),
    "forward": ({"beta": 0.0}, 1.0, False),
    "jsd_0.5": ({"beta": 0.5}, 1.0, False),
    "jsd_0.1": ({"beta": 0.1}, 1.0, False),
    "reverse_temperature_0.7": ({}, 0.7, False),
    "jsd_0.5_temperature_0.7": ({"beta": 0.5}, 0.7, False),
    "forward_top_8": ({"beta": 0.0, "top": 8}, 1.0, False),
    "reverse_top_8": ({"top": 8}, 1.0, False),
    "jsd_0.5_top_8": ({"beta": 0.5, "top": 8}, 1.0, False),
    "k1": ({"divergence": K1, "cap": FREE}, 1.0, True),
    "k2": ({"divergence": K2, "cap": FREE}, 1.0, True),
    "k3": ({"divergence": K3, "cap": FREE}, 1.0, True),
    "k1_gamma_0.9": ({"divergence": K1, "gamma": 0.9, "cap": FREE}, 1.0, True),
    "k1_gamma_1": ({"divergence": K1, "gamma": 1.0, "cap": FREE}, 1.0, True),
    "k1_cap_1.5": ({"divergence": K1, "cap": 1.5}, 1.0, False),
    "k2_cap_1.5": ({"divergence": K2, "cap": 1.5}, 1.0, False),
    "k3_cap_1.5": ({"divergence": K3, "cap": 1.5}, 1.0, False),
    "k1_cap_1.5_reward_0.5_teacher_0.3": (
        {"divergence": K1, "cap": 1.5, "reward_coef": 0.5, "teacher_coef": 0.3},
        1.0,
        False,
    ),
    "k2_cap_5_reward_1": ({"divergence": K2, "reward_coef": 1.0}, 1.0, False),
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, torch.Tensor]:
    file = np.load(GOLDEN / "distill.npz")
    found = {name: torch.from_numpy(file[name]) for name in file.files}
    return {name: x.double() if x.is_floating_point() else x for name, x in found.items()}


class Table(nn.Module):
    """A policy whose logits [R, T, V] are its parameters."""

    def __init__(self, arrays, temperature: float, config: DistillConfig) -> None:
        super().__init__()
        self.logits = nn.Parameter(arrays["student"].clone())
        self.teacher, self.temperature, self.config = arrays["teacher"], temperature, config

    def forward(self, batch: Batch, *extras: str) -> Outputs:
        ids, mask = batch.response_ids[:, 0], batch.response_mask[:, 0]
        logits, theirs = (x[batch.index, : ids.shape[-1]] for x in (self.logits, self.teacher))
        logprobs = at(logits, ids, self.temperature) * mask
        if not extras:
            return Outputs(logprobs=logprobs[:, None])
        hidden, states = logits.flatten(0, 1), theirs.flatten(0, 1)
        given = (self.scaled, hidden, self.scaled, states, self.config.beta, self.config.top)
        found = tiled_divergence(*given).view(mask.shape) * mask
        return Outputs(logprobs=logprobs[:, None], divergence=found[:, None])

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.temperature


def at(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


@pytest.mark.parametrize("micro", [16, 1])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_recorded_values(name, micro, arrays):
    settings, temperature, on_policy = CASES[name]
    case = json.loads((GOLDEN / "distill.json").read_text())["cases"][name]
    config = DistillConfig(samples_per_prompt=1, **settings)
    objective, module = make(config), Table(arrays, temperature, config)
    ids, mask = arrays["ids"], arrays["mask"].bool()
    rows = len(ids)
    own, theirs = (at(arrays[name], ids, temperature) * mask for name in ("student", "teacher"))
    batch = Batch(
        index=torch.arange(rows),
        texts=[""] * rows,
        references=[""] * rows,
        prompt_ids=torch.ones(rows, 2, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        response_ids=ids[:, None],
        response_mask=mask[:, None],
        ended=torch.ones(rows, 1, dtype=torch.bool),
        scores=torch.zeros(rows, 1),
        behaviour_logprobs=(own if on_policy else arrays["behaviour"])[:, None],
        ref_logprobs=theirs[:, None],
    )
    advantages = (arrays["advantages"][:, None] * mask)[:, None]
    batch = replace(objective.credit(batch), advantages=advantages)
    optim = OptimConfig(lr=1.0, schedule=LRSchedule.constant, max_grad_norm=None)
    budget = Budget(micro)
    engine_settings = EngineSettings(
        optim=optim, total_steps=9, steps_per_batch=1, budget=budget, inference=budget, stale=not on_policy
    )
    engine = TorchEngine(module, None, None, ALONE, engine_settings)
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(module.logits.grad.clone()) and None)

    loss = engine.step(batch, objective)["loss/policy"].value()

    assert loss == pytest.approx(case["loss"], rel=1e-5, abs=1e-7)
    expected = torch.from_numpy(np.load(GOLDEN / "distill_grads.npz")[name]).double()
    assert (seen[0] - expected).norm() < 1e-5 * expected.norm()
