"""Tests of the optimizers of a torch engine: Muon beside AdamW, and AdamW with 8-bit moments."""

import importlib.util
from copy import deepcopy

import pytest
import torch

from rlhf.config.algorithms import PPOConfig, SFTConfig
from rlhf.config.models import LoRAConfig
from rlhf.config.run import OptimConfig, Optimizer
from rlhf.core.batch import Budget
from rlhf.engines.engine import EngineSettings, TorchEngine, hidden_matrices
from rlhf.models.modules import ActorCritic, Policy, RewardModel, ValueModel, adapt
from rlhf.objectives.ppo import PPO
from rlhf.objectives.sft import SFT
from rlhf.processes.ranks import ALONE
from tests.engines.test_engine import scored
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_tokenizer

EIGHT_BIT = pytest.param(
    "adamw_8bit",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
    ),
)
NAMES = ["muon", EIGHT_BIT]


def engine_of(name, module=None, value_lr=None, **settings):
    module = module or Policy(tiny_lm(hidden_size=64), 0.7, shared_prefix=True)
    return TorchEngine(
        module,
        Policy(tiny_lm(), 0.7, shared_prefix=True).requires_grad_(False),
        tiny_tokenizer(),
        ALONE,
        EngineSettings(
            optim=OptimConfig(optimizer=Optimizer(name), **{"lr": 1e-2, **settings}),
            total_steps=10,
            steps_per_batch=1,
            budget=Budget(16),
            inference=Budget(16),
            value_lr=value_lr,
        ),
    )


def steps(engine, count, objective=None):
    objective = objective or SFT(SFTConfig())
    batch = objective.credit(engine.annotate(scored(), objective.needs))
    return [engine.step(batch, objective)["loss/policy"].value() for _ in range(count)]


def weights(engine):
    return [each.detach().clone() for each in engine.module.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls(name):
    losses = steps(engine_of(name), 6)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_same_weights_in_every_bit(name, tmp_path):
    whole, first = engine_of(name), engine_of(name)
    steps(whole, 4)
    steps(first, 2)
    first.save(tmp_path)
    second = engine_of(name)
    second.load(tmp_path)
    steps(second, 2)
    assert all(map(torch.equal, weights(whole), weights(second)))


def test_muon_gets_the_matrices_between_embeddings_and_head():
    module = Policy(tiny_lm(), 0.7, shared_prefix=True)
    names = {name for name, each in module.named_parameters() if each in hidden_matrices(module)}
    kinds = {name.split(".")[-2] for name in names}
    assert kinds == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert len(names) == 4 * module.model.config.num_hidden_layers


def test_the_heads_of_reward_and_value_models_are_not_for_muon():
    for module in (RewardModel(tiny_classifier(), True), ValueModel(tiny_classifier(), True)):
        assert module.model.score.weight not in hidden_matrices(module)


def test_the_update_of_a_matrix_has_the_size_of_an_update_of_adamw():
    engine = engine_of("muon", lr=1e-3)
    matrices = hidden_matrices(engine.module)
    before = {each: each.detach().clone() for each in engine.module.parameters()}
    steps(engine, 1)
    sizes = {p: (p.detach() - old).square().mean().sqrt().item() / 1e-3 for p, old in before.items()}
    for p, size in sizes.items():
        if p in matrices:  # 0.2 is the usual root mean square of AdamW's updates, in units of lr
            assert size == pytest.approx(0.2, rel=0.25)
        else:  # AdamW's first update is lr times the sign of the gradient
            assert 0.3 < size < 1.01


def test_a_learning_rate_of_the_value_model_applies_to_both_parts_of_muon():
    module = ActorCritic(
        Policy(tiny_lm(), 0.7, shared_prefix=True), ValueModel(tiny_classifier(), shared_prefix=True)
    )
    engine = engine_of("muon", module, value_lr=1e-9)
    critic = deepcopy(list(module.critic.parameters()))
    actor = deepcopy(list(module.actor.parameters()))
    steps(engine, 1, PPO(PPOConfig()))

    def change(parameters, old):
        return max(float((a - b).detach().abs().max()) for a, b in zip(parameters, old, strict=True))

    assert change(module.critic.parameters(), critic) < 1e-6
    assert change(module.actor.parameters(), actor) > 1e-4


def test_muon_trains_adapters():
    model = tiny_lm()
    adapt(model.requires_grad_(False), LoRAConfig(rank=4), seed=0)
    engine = engine_of("muon", Policy(model, 0.7, shared_prefix=True))
    losses = steps(engine, 6)
    assert losses[-1] < losses[0] and len(engine.optimizer.param_groups[0]["params"]) == 8 * 2


def test_the_momentum_of_muon_changes_the_second_step():
    found = []
    for momentum in (0.95, 0.5):
        engine = engine_of("muon", momentum=momentum)
        steps(engine, 2)
        found.append(weights(engine))
    assert not all(map(torch.equal, *found))


@pytest.mark.parametrize("name", [EIGHT_BIT])
def test_8_bit_moments_of_large_matrices_use_one_byte_per_element(name):
    engine = engine_of(name)
    steps(engine, 1)
    large = [p for p in engine.module.parameters() if p.numel() >= 4096]
    states = [engine.optimizer.state[p] for p in large]
    assert states and all(s["state1"].dtype == s["state2"].dtype == torch.uint8 for s in states)
    assert all(len(s["absmax1"]) == -(-p.numel() // 256) for p, s in zip(large, states, strict=True))
