"""Policy, reward and value models, loading and saving of models, and checks of model folders."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
)

from rlhf.config.models import NanoConfig
from rlhf.core.batch import Budget, Rollouts, microbatches
from rlhf.core.errors import UserError
from rlhf.models.folder import context_problem, folder_problem, is_local, on_this_machine
from rlhf.models.headers import ModelFacts
from rlhf.models.loading import (
    check_saved,
    load_causal_lm,
    load_reward_model,
    new_nano,
    new_reward_model,
    read_tokenizer,
    save,
)
from rlhf.models.modules import ActorCritic, Policy, RewardModel, ValueModel
from tests import needs
from tests.model_folders import write_weights
from tests.tiny_models import (
    KINDS,
    VOCABULARY,
    sequences,
    tiny_classifier,
    tiny_config,
    tiny_lm,
    tiny_rollouts,
    tiny_tokenizer,
)

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)


def golden_rollouts(name: str = "batch_k2") -> tuple[Rollouts, dict[str, np.ndarray]]:
    """Return a golden batch as rollouts, and its arrays in [N, K, ...] order (the files are sample-major)."""
    file = np.load(GOLDEN / f"{name}.npz")
    prompts = {"batch_k2": 8, "batch_k4": 4}[name]
    arrays = {
        key: file[key].reshape(-1, prompts, *file[key].shape[1:]).swapaxes(0, 1)
        for key in file.files
        if file[key].ndim
    }
    queries = torch.from_numpy(arrays["queries"][:, 0])
    lengths = torch.from_numpy(arrays["sequence_lengths"])
    responses = torch.from_numpy(arrays["postprocessed_responses"])
    return Rollouts(
        index=torch.arange(prompts),
        texts=[""] * prompts,
        references=[""] * prompts,
        prompt_ids=queries,
        prompt_mask=queries != 1,
        response_ids=responses,
        response_mask=torch.arange(responses.shape[-1]) <= lengths[..., None],
        ended=torch.from_numpy((arrays["postprocessed_responses"] == 0).any(-1)),
    ), arrays


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_log_softmax_of_the_models_own_logits(kind):
    batch, policy = tiny_rollouts(), Policy(tiny_lm(kind), temperature=0.7, shared_prefix=True)
    with torch.no_grad():
        found = policy(batch).logprobs
        for i, group in enumerate(sequences(batch)):
            for j, (prompt, response) in enumerate(group):
                logits = tiny_lm(kind)(input_ids=torch.cat([prompt, response])[None]).logits[0].float()
                all_logps = (logits / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
                expected = all_logps.gather(-1, response[:, None])[:, 0]
                torch.testing.assert_close(found[i, j, : len(response)], expected, rtol=0, atol=1e-5)


def test_logprobs_are_float32_and_zero_at_padding():
    batch = tiny_rollouts()
    logprobs = Policy(tiny_lm(), 0.7, True)(batch).logprobs
    assert logprobs.shape == batch.response_mask.shape and logprobs.dtype == torch.float32
    assert not logprobs[~batch.response_mask].any() and logprobs[batch.response_mask].all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_tokens_of_an_environment_are_read_but_have_no_logprob(shared):
    whole = tiny_rollouts()
    messages = whole.response_mask & (torch.arange(7) % 4 > 1)  # tokens 2, 3 and 6
    episodes = replace(whole, response_mask=whole.response_mask & ~messages, environment_mask=messages)
    policy, judge = Policy(tiny_lm(), 0.7, shared), RewardModel(tiny_classifier(), shared)
    policy.always_apart = judge.always_apart = shared
    found = policy(episodes).logprobs
    torch.testing.assert_close(found, policy(whole).logprobs * ~messages)
    torch.testing.assert_close(judge(episodes).rewards, judge(whole).rewards)
    (_, trimmed, _), *_ = microbatches(episodes, Budget(sequences=2))
    assert trimmed.response_ids.shape[-1] == 7  # also where message tokens are the last
    alone = policy(trimmed).logprobs
    torch.testing.assert_close(alone, found[:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_float32_outputs_close_to_the_outputs_without_autocast(kind):
    batch, policy = tiny_rollouts(), Policy(tiny_lm(kind), 0.7, True)
    judge = RewardModel(tiny_classifier(kind), True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, rewards = policy(batch).logprobs, judge(batch).rewards
    assert logprobs.dtype == rewards.dtype == torch.float32
    torch.testing.assert_close(logprobs, policy(batch).logprobs, rtol=0, atol=0.15)
    torch.testing.assert_close(rewards, judge(batch).rewards, rtol=0, atol=0.15)
    logprobs.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in policy.parameters())


def test_a_float32_head_computes_the_logits_of_16_bit_states_in_float32():
    batch, model = tiny_rollouts(), tiny_lm().to(torch.bfloat16)
    policy = Policy(model, 0.7, True, float32_head=True)
    found = policy(batch).logprobs[batch.response_mask]
    states = policy.states(batch, last=False)[batch.response_mask]
    logits = states.float() @ model.get_output_embeddings().weight.float().T / 0.7
    expected = logits.log_softmax(-1).gather(-1, batch.response_ids[batch.response_mask][:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    rounded = Policy(tiny_lm().to(torch.bfloat16), 0.7, True)(batch).logprobs[batch.response_mask]
    assert (rounded - expected).abs().max() > 1e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model.get_output_embeddings()(states) / 0.7, logits, rtol=0, atol=1e-5)


def test_outputs_are_a_tuple_whose_tensors_zero3_finds():
    found = Policy(tiny_lm(), 0.7, True)(tiny_rollouts())
    assert isinstance(found, tuple) and any(tensor is found.logprobs for tensor in found)


def test_the_head_computes_logits_only_at_real_response_positions():
    batch, model = tiny_rollouts(), tiny_lm()
    policy, rows = Policy(model, 0.7, True), []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(len(args[0]))
    )
    policy(batch)
    assert rows == [int(batch.response_mask.sum())]


@needs_golden
@pytest.mark.parametrize("batch_name", ["batch_k2", "batch_k4"])
@pytest.mark.parametrize(("model", "key"), [("old", "logprobs"), ("ref", "ref_logprobs")])
def test_log_probs_match_the_golden_files(batch_name, model, key):
    batch, arrays = golden_rollouts(batch_name)
    policy = Policy(load_causal_lm(str(GOLDEN / "models" / model)), 0.7, shared_prefix=True)
    with torch.no_grad():
        found = policy(batch).logprobs
    mask = batch.response_mask
    assert torch.equal(mask, torch.from_numpy(~arrays["padding_mask"]))
    torch.testing.assert_close(found[mask], torch.from_numpy(arrays[key])[mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize(
    ("config", "scale"),
    [(GraniteConfig, {"logits_scaling": 4.0}), (CohereConfig, {"logit_scale": 0.25})],
)
def test_log_probs_apply_the_logit_scale_of_the_model(config, scale, shared_prefix):
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**settings, **scale)).eval()
    batch = tiny_rollouts()
    policy = Policy(model, 0.7, shared_prefix)
    (prompt, response), *_ = sequences(batch)[0]
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(policy(batch).logprobs[0, 0], expected, rtol=0, atol=1e-5)
    assert policy.logit_scale == 0.25


def test_a_model_that_caps_its_logits_is_refused():
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        final_logit_softcapping=0.5,
    )
    with pytest.raises(ValueError, match="model.policy must .* got gemma2"):
        Policy(AutoModelForCausalLM.from_config(config), 0.7, shared_prefix=False)


def test_wrapping_changes_neither_state_dict_nor_tied_weights():
    model = tiny_lm("qwen2", tie_word_embeddings=True)
    names = list(model.state_dict())
    logits = model(torch.tensor([[5, 6, 7]])).logits
    Policy(model, 0.7, True)
    assert list(model.state_dict()) == names
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, logits)


def own_reward(model, prompt, response):
    """Return the reward of the Hugging Face forward of the sequence without padding."""
    return model(input_ids=torch.cat([prompt, response])[None]).logits[0, 0]


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rewards_equal_the_forward_of_the_hugging_face_classifier(kind, shared_prefix):
    model, batch = tiny_classifier(kind), tiny_rollouts()
    with torch.no_grad():
        found = RewardModel(model, shared_prefix)(batch).rewards
        expected = [[own_reward(model, *pair) for pair in group] for group in sequences(batch)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_rewards_are_centred_by_the_offset_in_the_config():
    model, batch = tiny_classifier(), tiny_rollouts()
    before = RewardModel(model, True)(batch).rewards
    model.config.reward_offset = 1.5
    torch.testing.assert_close(RewardModel(model, True)(batch).rewards, before - 1.5)
    values = ValueModel(model, True)(batch).values
    last = values.gather(-1, batch.response_mask.sum(-1, keepdim=True))[..., 0]
    torch.testing.assert_close(last, before - 1.5)


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_value_of_a_state_is_the_classifier_output_for_the_text_so_far(kind, shared_prefix):
    model, batch = tiny_classifier(kind), tiny_rollouts()
    with torch.no_grad():
        values = ValueModel(model, shared_prefix)(batch).values
        for n, group in enumerate(sequences(batch)):
            for k, (prompt, response) in enumerate(group):
                for t in range(len(response) + 1):
                    expected = own_reward(model, prompt, response[:t])
                    torch.testing.assert_close(values[n, k, t], expected, rtol=1e-4, atol=1e-4)
    assert values.shape == (*batch.response_ids.shape[:2], batch.response_ids.shape[2] + 1)


def test_actor_critic_outputs_equal_the_outputs_of_actor_and_critic():
    actor, critic = Policy(tiny_lm(), 0.7, True), ValueModel(tiny_classifier(), True)
    batch, both = tiny_rollouts(), ActorCritic(actor, critic)
    torch.testing.assert_close(both(batch).logprobs, actor(batch).logprobs)
    torch.testing.assert_close(both(batch).values, critic(batch).values)
    assert both.model is actor.model


@needs_golden
@pytest.mark.parametrize("shared_prefix", [False, True])
def test_golden_rewards_equal_the_hugging_face_forward_on_the_padded_batch(shared_prefix):
    batch, _ = golden_rollouts()
    model = load_reward_model(str(GOLDEN / "models" / "reward"))
    with torch.no_grad():
        found = RewardModel(model, shared_prefix)(batch).rewards
        n, k, t = batch.response_ids.shape
        ids = torch.cat([batch.prompt_ids.repeat_interleave(k, 0), batch.response_ids.reshape(n * k, t)], 1)
        mask = ids != 1
        own = model(
            input_ids=ids.masked_fill(~mask, 1),
            attention_mask=mask,
            position_ids=mask.long().cumsum(1) - mask.long(),
        ).logits.view(n, k)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a causal LM and its tokenizer."""
    save(tiny_lm(attention_dropout=0.1, hidden_dropout=0.1), tiny_tokenizer(), tmp_path)
    return str(tmp_path)


def test_a_saved_model_loads_with_auto_classes(folder):
    policy, batch = Policy(tiny_lm(), 0.7, True), tiny_rollouts()
    save(policy.model, tiny_tokenizer(), Path(folder))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(Policy(loaded, 0.7, True)(batch).logprobs, policy(batch).logprobs)
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<pad>"
    assert not list(Path(folder).glob("*.bin"))


def test_dropout_is_off_also_in_training_mode(folder):
    assert json.loads((Path(folder) / "config.json").read_text())["hidden_dropout"] == 0.1
    policy, batch = Policy(load_causal_lm(folder), 0.7, True).train(), tiny_rollouts()
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)
    config = policy.model.config
    assert config.hidden_dropout == config.attention_dropout == config.classifier_dropout == 0
    assert all(m.p == 0 for m in policy.modules() if isinstance(m, torch.nn.Dropout))


def test_a_model_loads_with_the_requested_dtype(folder):
    assert load_causal_lm(folder).dtype == torch.float32
    assert load_causal_lm(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_missing_folder_is_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"model.reference must .*no folder './nowhere'\), got"):
        load_causal_lm("./nowhere", key="model.reference")
    with pytest.raises(ValueError, match="model.policy must .*no folder .*set model.policy="):
        read_tokenizer("./nowhere")


def test_a_hub_name_that_cannot_be_reached_is_an_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_causal_lm, read_tokenizer):
        with pytest.raises(ValueError, match=r"model.policy must .*HF_HUB_OFFLINE=1 is set.* got 'nobody/"):
            load("nobody/nothing")


def test_weights_with_nan_are_refused(tmp_path):
    model = tiny_lm()
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 5] = float("nan")
    save(model, tiny_tokenizer(), tmp_path)
    with pytest.raises(UserError, match=r"finite weights .* in gpt_neox.embed_in.weight; write or copy"):
        load_causal_lm(str(tmp_path))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"hidden_size": "many"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "nonsense"}, "KeyError: 'nonsense'"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_invalid_values_of_a_config_are_user_errors(tmp_path, value, reason):
    save(tiny_lm("llama"), tiny_tokenizer(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **value}))
    with pytest.raises(UserError, match=f"model.policy must .*could not be read: .*{reason}"):
        load_causal_lm(str(tmp_path))


def test_a_folder_without_config_is_never_loaded_as_the_default_model_of_a_class(tmp_path):
    save(tiny_lm(), tiny_tokenizer(), tmp_path)
    check_saved(tmp_path)
    (tmp_path / "config.json").unlink()
    for load in (check_saved, lambda folder: load_causal_lm(str(folder))):
        with pytest.raises(UserError, match="no config.json"):
            load(tmp_path)


def test_a_causal_lm_as_reward_model_and_a_classifier_as_policy_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model.reward must .*score.weight"):
        load_reward_model(folder)
    tiny_classifier().save_pretrained(tmp_path / "reward")
    assert load_reward_model(str(tmp_path / "reward")).config.num_labels == 1
    with pytest.raises(ValueError, match=r"model.policy must .*lm_head.weight"):
        load_causal_lm(str(tmp_path / "reward"))


def test_a_reward_model_with_two_labels_is_refused(tmp_path):
    config = tiny_classifier().config
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model.reward must name a reward model with one label"):
        load_reward_model(str(tmp_path))


def test_a_new_reward_model_has_the_backbone_of_the_lm_and_a_random_head(tmp_path):
    lm = tiny_lm(hidden_size=1024, num_hidden_layers=1)
    lm.save_pretrained(tmp_path)
    drawn = [
        new_reward_model(str(tmp_path), pad_token_id=0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    head = drawn[0].score.weight
    assert abs(head.std() * (1024 + 1) ** 0.5 - 1) < 0.1 and abs(head.mean()) < 0.003
    assert torch.equal(head, drawn[1].score.weight) and not torch.equal(head, drawn[2].score.weight)
    for name, tensor in lm.base_model.state_dict().items():
        assert torch.equal(drawn[0].base_model.state_dict()[name], tensor)
    assert drawn[0].config.num_labels == 1 and drawn[0].config.pad_token_id == 0


def test_a_nano_model_has_the_configured_size_and_special_tokens():
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = new_nano(NanoConfig(name="pythia", hidden_size=64, layers=3, heads=2, context=128), tokenizer)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 3, 2)
    assert config.max_position_embeddings == 128 and config.vocab_size == len(tokenizer)
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert model.dtype == torch.float32 and config.hidden_dropout == 0
    logits = model(torch.arange(2, 20)[None]).logits
    assert 0.7 < logits.std() < 1.4  # unit scale, so that the first loss is near log V + 1 / 2


def test_a_local_folder_is_distinguished_from_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert is_local("mine") and is_local("./x") and is_local("/x/y") and is_local("a/b/c") and is_local("~/x")
    assert not is_local("gpt2") and not is_local("EleutherAI/pythia-410m-deduped")


def test_hub_names_and_folders_of_unknown_types_have_no_problem(folder, tmp_path):
    assert folder_problem("model.policy", folder) is None
    assert folder_problem("model.policy", "EleutherAI/pythia-410m") is None
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    write_weights(tmp_path / "model.safetensors", {"weight": (2, 2)})
    assert folder_problem("model.policy", str(tmp_path)) is None


def check_context(config, *lengths):
    facts = ModelFacts(config if isinstance(config, dict) else config.to_dict())
    return context_problem(facts.context, *lengths, facts.original_context)


def test_prompt_and_response_must_fit_the_context(folder):
    assert on_this_machine(folder).context == 128 and on_this_machine("EleutherAI/pythia-410m") is None
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    dynamic = tiny_config("llama", rope_parameters=rope)
    assert check_context(dynamic, 100, 28) is None and "<= 128" in check_context(dynamic, 100, 29)
    config = tiny_lm().config
    assert check_context(config, 100, 28) is None
    assert check_context(config, 100, 29).endswith("got 100 + 29 = 129; set generator.response_length=28")
    assert check_context(config, 200, 28).endswith("set task.max_prompt_tokens=100")
    both = "set task.max_prompt_tokens=64 generator.response_length=64"
    assert check_context(config, 200, 128).endswith(both)
    assert context_problem(None, 10**6, 10**6) is None


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}, "max_position_embeddings": 64},
        {"text_config": {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}},
    ],
)
def test_a_sequence_must_fit_the_original_context_of_longrope(config):
    config = {"max_position_embeddings": 4096, **config}
    original = ModelFacts(config).original_context
    assert context_problem(None, 40, 24, original) is None
    problem = context_problem(None, 40, 25, original)
    assert "must be <= 64" in problem and "longrope" in problem
    assert problem.endswith("set generator.response_length=24")


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"rope_type": "llama3", "factor": 8.0}])
def test_other_position_encodings_have_no_original_context(rope):
    assert ModelFacts({"rope_scaling": rope, "max_position_embeddings": 64}).original_context is None
