"""Tests of the hooks in docs/hooks/ without the frameworks: what they dump, translate and refuse."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.referee.verdicts import verdict

HOOKS = Path(__file__).parents[2] / "docs" / "hooks"
ROWS, TOKENS, PARTS = 8, 6, 2


def hook(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(HOOKS / f"{name}.py")))


def batch() -> dict[str, torch.Tensor]:
    """Return a batch whose responses differ in length, and whose groups are neighbours."""
    torch.manual_seed(0)
    lengths = torch.tensor([6, 2, 4, 3, 5, 6, 1, 2])
    logprobs = -torch.rand(ROWS, TOKENS) - 0.1
    rewards, group = torch.randn(ROWS), torch.arange(ROWS) // 4
    by_group = rewards.view(2, 4)
    advantages = (by_group - by_group.mean(1, keepdim=True)).flatten()
    return {
        "log_probs": logprobs,
        "old_log_probs": logprobs + 0.3 * torch.randn(ROWS, TOKENS),
        "advantages": advantages[:, None].expand(-1, TOKENS),
        "action_mask": torch.arange(TOKENS) < lengths[:, None],
        "rewards": rewards,
        "group": group,
    }


def policy_loss(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs=None, *, tokens=None):
    """A loss with the signature of OpenRLHF: clipped ratio, mean over the tokens of the step."""
    ratio = (log_probs - old_log_probs).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (losses * action_mask).sum() / (tokens or action_mask.sum()), None


CLAIMS = {"advantage": "mean", "scale": "none", "clip_low": 0.2, "clip_high": 0.2, "reduction": "token"}


def step(dump, loss, x, tokens=None):
    """Make the backward passes of the micro-batches of a step."""
    log_probs = x["log_probs"].clone().requires_grad_()
    names = ("old_log_probs", "advantages", "action_mask")
    for rows in torch.arange(ROWS).chunk(PARTS):
        given = {name: x[name][rows] for name in names}
        loss(log_probs[rows], **given, tokens=tokens)[0].backward()
    return log_probs.grad


@pytest.mark.parametrize("counts", ["step", "micro_batch"])
def test_the_generic_hook_dumps_the_gradient_as_autograd_has_it_and_the_audit_judges_it(counts, tmp_path):
    generic, x = hook("generic"), batch()
    dump = generic.Dump(generic.OPENRLHF)
    grads = step(dump, dump.wrap(policy_loss), x, x["action_mask"].sum() if counts == "step" else None)
    path = tmp_path / "step-3.safetensors"
    dump.finish(path, CLAIMS, header={"step": 3}, rewards=x["rewards"], group=x["group"])
    tensors = load_file(path)
    assert torch.equal(tensors["logprob_grads"], grads)
    assert tensors["micro_batch"].tolist() == [0] * 4 + [1] * 4 and len(tensors["losses"]) == PARTS
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["rlhf"])
    assert (header["schema"], header["step"], header["claims"]) == (1, 3, CLAIMS)
    if counts == "step":
        assert verdict([str(path)]) == "agrees"
    else:
        assert verdict([str(path)]).startswith("reduction: ")


def test_the_generic_hook_pads_lists_of_sequences(tmp_path):
    generic, x = hook("generic"), batch()
    lengths = x["action_mask"].sum(1)

    def compute_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask, loss_config, loss_scale):
        total = 0
        for now, old, a, mask in zip(
            trainer_logprobs, inference_logprobs, advantages, loss_mask, strict=True
        ):
            ratio = (now - old).exp()
            total = total - (torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask).sum()
        return total / loss_scale, {}

    dump = generic.Dump(generic.PRIME_RL)
    noted = dump.wrap(compute_loss)

    def cut(name, rows):
        return [x[name][i, : lengths[i]] for i in rows]

    for rows in torch.arange(ROWS).chunk(PARTS):
        now = [row.clone().requires_grad_() for row in cut("log_probs", rows)]
        others = (cut(name, rows) for name in ("old_log_probs", "advantages", "action_mask"))
        noted(now, *others, None, int(lengths.sum()))[0].backward()
    path = tmp_path / "step.safetensors"
    dump.finish(path, CLAIMS, rewards=x["rewards"], group=x["group"])
    assert load_file(path)["logprobs"].shape == (ROWS, TOKENS)
    assert verdict([str(path)]) == "agrees"


def test_a_backend_that_divides_after_autograd_is_told_to_the_generic_hook(tmp_path):
    generic, x = hook("generic"), batch()
    dump = generic.Dump(generic.OPENRLHF)
    step(
        dump, dump.wrap(policy_loss), x, x["action_mask"].sum() / PARTS
    )  # DeepSpeed divides by the parts later
    path = tmp_path / "step.safetensors"
    dump.finish(path, CLAIMS, later=1 / PARTS, rewards=x["rewards"], group=x["group"])
    assert verdict([str(path)]) == "agrees"


def test_the_generic_hook_refuses_a_step_without_backward_and_a_function_with_other_arguments(tmp_path):
    generic, x = hook("generic"), batch()
    dump = generic.Dump(generic.OPENRLHF)
    with pytest.raises(RuntimeError, match="was not called"):
        dump.finish(tmp_path / "step.safetensors")
    with pytest.raises(TypeError, match="action_mask"):
        dump.wrap(lambda log_probs, old_log_probs, advantages, mask, rollout_log_probs: None)
    names = ("old_log_probs", "advantages", "action_mask")
    dump.wrap(policy_loss)(x["log_probs"].clone().requires_grad_(), **{name: x[name] for name in names})
    with pytest.raises(RuntimeError, match="no gradient"):
        dump.finish(tmp_path / "step.safetensors")
    assert not list(tmp_path.iterdir())


class GRPOTrainer:
    """A trainer whose method for rewards has another name."""

    def _score(self): ...
    def _generate_and_score_completions(self, inputs): ...
    def _get_per_token_logps_and_entropies(self): ...
    def _compute_loss(self, model, inputs): ...


@pytest.mark.parametrize(
    ("name", "lost"), [("trl", "_calculate_rewards"), ("ms_swift", "_postprocess_batch")]
)
def test_a_renamed_method_is_an_error_before_training(name, lost, tmp_path):
    with pytest.raises(AttributeError, match=lost):
        hook(name).dump(GRPOTrainer(), tmp_path, {1})
    assert not list(tmp_path.iterdir())


def test_the_hook_of_trl_refuses_trainers_that_it_does_not_know(tmp_path):
    with pytest.raises(TypeError, match="not SimpleNamespace"):
        hook("trl").dump(SimpleNamespace(), tmp_path, {1})


def grpo_config(**changed) -> SimpleNamespace:
    """Return the settings that the claims of TRL and ms-swift depend on, with the defaults of TRL 1.16."""
    defaults = {"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None}
    defaults |= {"scale_rewards": "group", "importance_sampling_level": "token", "temperature": 1.0}
    defaults |= {"multi_objective_aggregation": "sum_then_normalize", "use_bias_correction_kl": True}
    defaults |= {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_completion_length": 16}
    defaults |= {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    defaults |= {"rollout_importance_sampling_mode": None, "off_policy_sequence_mask_delta": None}
    defaults |= {"advantage_estimator": "grpo", "kl_in_reward": False}
    return SimpleNamespace(**{**defaults, **changed})


@pytest.mark.parametrize("name", ["trl", "ms_swift"])
def test_the_cap_of_cispo_is_translated_into_a_distance_from_1(name):
    said = hook(name).claims(grpo_config(loss_type="cispo", epsilon_high=5.0))
    assert (said["surrogate"], said["clip_low"], said["clip_high"]) == ("cispo", 1.0, 4.0)
    assert hook(name).claims(grpo_config(epsilon_high=0.0))["clip_high"] == 0.0


def test_batches_that_are_generated_for_each_micro_batch_have_means_of_their_own():
    claims = hook("trl").claims
    assert claims(grpo_config())["over"] == "generation"
    assert claims(grpo_config(steps_per_generation=1))["over"] == "micro_batch"
    with pytest.raises(ValueError, match="steps_per_generation=2"):
        claims(grpo_config(gradient_accumulation_steps=4))


@pytest.mark.parametrize("name", ["trl", "ms_swift"])
def test_settings_without_words_are_refused_together(name):
    with pytest.raises(ValueError, match=r"loss_type=other.*top_entropy_quantile"):
        hook(name).claims(grpo_config(loss_type="other", top_entropy_quantile=0.8))


def test_claims_of_openrlhf_are_those_of_its_loss():
    loss = SimpleNamespace(
        clip_eps_low=0.1, clip_eps_high=0.3, dual_clip=3.0, token_level_loss=True, policy_loss_type="ppo",
        is_correction_level="off",
    )  # fmt: skip
    said = hook("generic").claims(loss, "group_norm", kl_coef=0.01, kl="k3")
    assert (said["reduction"], said["std_eps"], said["dual_clip"], said["kl"]) == ("token", 1e-9, 3.0, "k3")
    loss.is_correction_level = "token"
    with pytest.raises(ValueError, match="is_correction_level"):
        hook("generic").claims(loss)
