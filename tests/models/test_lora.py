"""LoRA adapters: initialisation, training, merged weights, saving, and the reference without adapters."""

from copy import deepcopy
from dataclasses import fields

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.config.algorithms import DPOConfig, PPOConfig
from rlhf.config.models import Dtype, LoRAConfig
from rlhf.config.run import OptimConfig
from rlhf.core.batch import Budget, Prompts, Sampling
from rlhf.core.errors import RunError, UserError
from rlhf.engines.engine import OPTIMIZER_FILE, EngineSettings, TorchEngine, groups
from rlhf.generators.hf.generator import HFSamplerFactory, HFSettings, respond
from rlhf.generators.weights import SharedWeights
from rlhf.models.loading import save
from rlhf.models.modules import (
    ActorCritic,
    Policy,
    RewardModel,
    ValueModel,
    adapt,
    adapter_weights,
    load_adapter,
    save_adapter,
    whole_weights,
    without_adapters,
)
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.ppo import PPO
from rlhf.processes.ranks import ALONE
from tests.engines.test_engine import scored
from tests.tiny_models import KINDS, tiny_classifier, tiny_lm, tiny_rollouts, tiny_tokenizer


def adapted(kind="gpt_neox", moved=True, model=None, tied=False, **settings) -> Policy:
    policy = Policy(model or tiny_lm(kind, tie_word_embeddings=tied), 0.7, shared_prefix=True)
    adapt(policy.model, LoRAConfig(rank=4, **settings), seed=1)
    if moved:
        move(policy)
    return policy


def move(module):
    """Add noise to all trained parameters, as a replacement for training."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))


def logprobs(policy, batch=None):
    with torch.no_grad():
        return policy(tiny_rollouts() if batch is None else batch).logprobs


def engine_of(module, reference=None, **settings):
    options = {
        "optim": OptimConfig(lr=1e-2),
        "total_steps": 10,
        "steps_per_batch": 1,
        "budget": Budget(16),
        "inference": Budget(16),
        **settings,
    }
    return TorchEngine(module, reference, tiny_tokenizer(), ALONE, EngineSettings(**options))


def actor_critic():
    critic = ValueModel(tiny_classifier(), shared_prefix=True)
    adapt(critic.model, LoRAConfig(rank=4), seed=2)
    return ActorCritic(adapted(moved=False), critic)


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_start_the_policy_is_the_reference_bit_for_bit(kind):
    policy = adapted(kind, moved=False, modules_to_save=["lm_head"])
    found = logprobs(policy)
    assert torch.equal(found, logprobs(policy.before_adapters()))
    assert torch.equal(found, logprobs(Policy(tiny_lm(kind), 0.7, shared_prefix=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_without_adapters_gives_the_original_model_and_then_restores_the_adapters(kind):
    policy = adapted(kind, modules_to_save=["lm_head"])
    before, trained = logprobs(policy), [p.requires_grad for p in policy.parameters()]
    assert torch.equal(logprobs(policy.before_adapters()), logprobs(Policy(tiny_lm(kind), 0.7, True)))
    with pytest.raises(KeyError), without_adapters(policy.model):
        raise KeyError
    assert torch.equal(logprobs(policy), before)
    assert [p.requires_grad for p in policy.parameters()] == trained
    assert not torch.allclose(before, logprobs(policy.before_adapters()), atol=0.1)


def test_the_reference_at_another_temperature_shares_the_parameters_of_the_policy():
    policy = adapted()
    reference = policy.before_adapters()
    assert {id(p) for p in reference.parameters()} == {id(p) for p in policy.parameters()}
    expected = logprobs(Policy(tiny_lm(), 1.0, shared_prefix=True))
    assert torch.equal(logprobs(reference.at(1.0)), expected)
    assert (policy.temperature, reference.temperature) == (0.7, 0.7)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_in_a_plain_model_give_the_same_log_probs(kind, tied):
    policy = adapted(kind, tied=tied, modules_to_save=[] if tied else ["lm_head"])
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    weights = dict(whole_weights(policy.model))
    plain = tiny_lm(kind, tie_word_embeddings=tied)
    assert list(weights) == list(plain.state_dict())
    assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in weights.values())
    plain.load_state_dict(weights)
    torch.testing.assert_close(logprobs(Policy(plain, 0.7, True)), logprobs(policy), rtol=0, atol=2e-5)
    assert all(torch.equal(before[name], t) for name, t in policy.model.state_dict().items())


def test_the_weights_of_a_model_without_adapters_are_not_copied():
    model = tiny_lm()
    for (name, tensor), (own_name, own) in zip(whole_weights(model), model.state_dict().items(), strict=True):
        assert name == own_name and tensor.data_ptr() == own.data_ptr() and not tensor.requires_grad


def test_the_parameters_of_a_merged_tensor_are_gathered_together():
    policy, together = adapted(), []

    def gather(parameters):
        together.append([id(p) for p in parameters])
        return torch.no_grad()

    names = [name for name, _ in whole_weights(policy.model, gather)]
    parts = {id(p) for p in policy.model.parameters()}
    assert len(names) == len(together)
    assert {i for group in together for i in group} >= parts, "the parameters themselves, not detached views"
    assert sorted({len(group) for group in together}) == [1, 3]


def test_adapters_of_a_frozen_bfloat16_model_are_float32():
    policy = adapted(model=tiny_lm().bfloat16(), moved=False, modules_to_save=["lm_head"])
    types = {p.requires_grad: p.dtype for p in policy.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        policy(tiny_rollouts()).logprobs.sum().backward()
        assert torch.equal(logprobs(policy), logprobs(policy.before_adapters()))
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
    assert {t.dtype for _, t in whole_weights(policy.model)} == {torch.float32}, "generators receive float32"


def test_adapter_initialisation_depends_only_on_the_seed_and_keeps_the_global_rng_state():
    found = []
    for others, seed in ((1, 1), (2, 1), (2, 9)):
        model = tiny_lm()
        torch.manual_seed(others)
        state = torch.get_rng_state()
        adapt(model, LoRAConfig(rank=4), seed)
        assert torch.equal(torch.get_rng_state(), state)
        found.append({name: t for name, t in adapter_weights(model).items() if "lora_A" in name})
    one, two, other = found
    assert all(torch.equal(one[name], two[name]) and not torch.equal(one[name], other[name]) for name in one)


def test_default_targets_are_all_linear_layers_below_the_head():
    def layers(**settings):
        names = [name for name, p in adapted(**settings).named_parameters() if p.requires_grad]
        return {name.split(".lora_")[0].rpartition(".")[2] for name in names}

    assert layers() == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert layers(targets=["attention.dense", "query_key_value"]) == {"query_key_value", "dense"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["q_proj"]}, r"linear layers below the model's head \(dense, dense_4h_to_h, dense_h_to"),
        ({"targets": ["lm_head"]}, "got lm_head; set model.lora.targets=null"),
        ({"targets": ["dense", "k_proj"]}, "got k_proj"),
        (
            {"modules_to_save": ["mlp_head"]},
            r"must name modules of the model \(dense, .*lm_head.*got mlp_head",
        ),
        ({"modules_to_save": ["dense"]}, "no module with adapters, no list of modules"),
        ({"modules_to_save": ["layers"]}, "got layers"),
        (
            {"modules_to_save": ["embed_in"], "tied": True},
            "must not name the embeddings of a model whose input and output embeddings are tied",
        ),
    ],
)
def test_invalid_names_of_targets_and_saved_modules_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        adapted(**settings)


def test_the_optimizer_and_its_state_contain_only_adapters(tmp_path):
    module, objective = adapted(moved=False), OnlineDPO(DPOConfig())
    engine = engine_of(module, module.before_adapters())
    frozen = {name: p.clone() for name, p in module.named_parameters() if not p.requires_grad}
    (group,) = groups(module, 1e-3, None)
    assert {id(p) for p in group["params"]} == {id(t) for t in adapter_parameters(module.model)}
    engine.step(objective.credit(engine.annotate(scored(), objective.needs)), objective)
    engine.save(tmp_path)
    state = torch.load(tmp_path / OPTIMIZER_FILE, weights_only=True)["optimizer"]
    shapes = sorted(tuple(s["exp_avg"].shape) for s in state["state"].values())
    assert shapes == sorted(tuple(t.shape) for t in adapter_weights(module.model).values())
    assert all(torch.equal(p, frozen[name]) for name, p in module.named_parameters() if name in frozen)
    files = {file.name for file in (tmp_path / "model").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}


def adapter_parameters(model):
    return [p for name, p in model.named_parameters() if ".lora_" in name]


def test_an_adapted_actor_critic_resumes_from_its_checkpoint(tmp_path):
    objective = PPO(PPOConfig())
    engines = []
    for _ in range(2):
        module = actor_critic()
        engines.append(engine_of(module, module.actor.before_adapters(), value_lr=5e-3))
    first, again = engines
    batch = objective.credit(first.annotate(scored(), objective.needs))
    head = first.module.critic.model.get_submodule("score").weight.clone()
    first.step(batch, objective)
    assert not torch.equal(head, first.module.critic.model.get_submodule("score").weight)
    first.save(tmp_path)
    again.load(tmp_path)
    for engine in engines:
        engine.step(batch, objective)
    for one, other in zip(first.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_loading_adapters_with_other_target_modules_is_refused(tmp_path):
    save_adapter(adapted().model, tmp_path)
    with pytest.raises(RunError, match="must have the tensors of the adapters of this run"):
        load_adapter(adapted(targets=["dense"]).model, tmp_path)


def test_a_sampler_with_merged_weights_matches_the_trained_policy():
    policy, shared, end = adapted(modules_to_save=["lm_head"]), SharedWeights(), 7
    settings = HFSettings(stop_ids=[end], pad_id=0, batch_size=16, seed=7)
    sampler = HFSamplerFactory(
        config=policy.model.config.to_json_string(use_diff=False),
        attention="sdpa",
        remote=None,
        device="cpu",
        dtype=Dtype.float32,
        settings=settings,
    ).build()
    manifest = shared.write(engine_of(policy).weights(), 3)
    assert sampler.load(manifest) == manifest.checksums()
    sampling = Sampling(samples=2, temperature=0.7, response_length=9, purpose="train")
    given = tiny_rollouts().select(torch.arange(4))
    prompts = Prompts(**{field.name: getattr(given, field.name) for field in fields(Prompts)})
    found = sampler.sample(prompts, sampling)
    torch.testing.assert_close(found.behaviour_logprobs, logprobs(policy, found), rtol=0, atol=2e-5)
    with torch.no_grad():  # in the trainer's process
        ours = respond(policy.model, prompts, sampling, settings)
    assert torch.equal(ours.response_ids, found.response_ids)
    before = respond(tiny_lm(), prompts, sampling, settings)
    assert not torch.equal(before.response_ids, found.response_ids)
    shared.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_and_the_adapter_load_with_transformers_and_peft(kind, tied, dtype, tmp_path):
    """Both loaded models also give the log-probs of the trained policy."""
    tiny_lm(kind, tie_word_embeddings=tied).to(dtype).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    policy = adapted(model=base, modules_to_save=[] if tied else ["lm_head"])
    save(policy.model, tiny_tokenizer(), tmp_path / "model")
    save_adapter(policy.model, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert merged.dtype == torch.float32
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    beside = PeftModel.from_pretrained(base, tmp_path / "adapter").get_base_model()
    expected = logprobs(deepcopy(policy).float())
    torch.testing.assert_close(logprobs(Policy(merged, 0.7, True)), expected, rtol=0, atol=2e-5)
    ids = tiny_rollouts().prompt_ids
    torch.testing.assert_close(beside(ids).logits, merged(ids).logits, rtol=0, atol=1e-4)


def test_a_reward_model_and_its_adapter_load_with_transformers_and_peft(tmp_path):
    judge = RewardModel(tiny_classifier(), shared_prefix=True)
    adapt(judge.model, LoRAConfig(rank=4), seed=1)
    move(judge)
    with torch.no_grad():
        expected = judge(tiny_rollouts()).rewards
    save(judge.model, tiny_tokenizer(), tmp_path / "model")
    save_adapter(judge.model, tmp_path / "adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    base = tiny_classifier()
    torch.nn.init.zeros_(base.score.weight)  # the head is in the adapter
    beside = PeftModel.from_pretrained(base, tmp_path / "adapter").get_base_model()
    for model in (merged, beside):
        with torch.no_grad():
            found = RewardModel(model, shared_prefix=True)(tiny_rollouts()).rewards
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
