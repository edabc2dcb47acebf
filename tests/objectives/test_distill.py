"""Tests of distillation by enumeration of a vocabulary, and against whole logits of single sequences."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

from rlhf.assembly.parts import make
from rlhf.config.algorithms import DistillConfig, TeacherDivergence
from rlhf.config.models import Dtype, LoRAConfig
from rlhf.config.run import OptimConfig
from rlhf.core.batch import Batch, Budget, Outputs, Rollouts
from rlhf.engines.engine import EngineSettings, TorchEngine
from rlhf.generators.process import Annotator
from rlhf.models.divergence import divergence
from rlhf.models.forward import infer
from rlhf.models.modules import Policy, Teacher, adapt
from rlhf.processes.ranks import ALONE
from rlhf.text.encoding import pad_prompts
from tests.tiny_models import VOCABULARY, tiny_lm, tiny_rollouts

TEMPERATURE = 0.7


@pytest.mark.parametrize(("kind", "beta"), [("k1", 1.0), ("k2", 1.0), ("k3", 0.0)])
def test_the_expected_gradient_of_a_sampled_kind_is_that_of_a_kl(kind, beta):
    draw = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(9, generator=draw, dtype=torch.float64) for _ in range(2))
    logits, theirs = student.requires_grad_(), teacher.log_softmax(-1)
    (expected,) = torch.autograd.grad(divergence(logits.log_softmax(-1), theirs, beta), logits)
    objective = make(DistillConfig(divergence=TeacherDivergence(kind)))
    found = torch.zeros_like(expected)
    for token in range(9):  # each sampled with its probability
        logprob = logits.log_softmax(-1)[token].view(1, 1, 1)
        batch = one_token(logprob.detach(), theirs[token].view(1, 1, 1))
        loss, _ = objective.policy_loss(Outputs(logprobs=logprob), batch)
        (gradient,) = torch.autograd.grad(loss, logits)
        found += logprob.detach().exp().item() * gradient
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def one_token(behaviour: Tensor, ref: Tensor) -> Batch:
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    ids = torch.zeros(1, 1, 1, dtype=torch.int64)
    prompt = {"prompt_ids": ids[0], "prompt_mask": mask[0]}
    response = {"response_ids": ids, "response_mask": mask, "ended": mask[0]}
    given = {"behaviour_logprobs": behaviour, "ref_logprobs": ref, "advantages": torch.zeros(1, 1, 1)}
    texts = {"texts": [""], "references": [""]}
    return Batch(index=torch.zeros(1), scores=torch.zeros(1, 1), **texts, **prompt, **response, **given)


def episodes(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts with the second and third tokens as messages of an environment."""
    message = rollouts.response_mask.clone()
    message[..., 0], message[..., 3:] = False, False
    message &= rollouts.response_mask.sum(-1, keepdim=True) > 3  # a reply follows
    return replace(rollouts, response_mask=rollouts.response_mask & ~message, environment_mask=message)


def logprobs_of(policy: Policy, batch: Batch, row: int, k: int) -> Tensor:
    """Return the next-token log-probs [S, V] of a response of S tokens, from a forward of its own."""
    prompt = batch.prompt_ids[row][batch.prompt_mask[row]]
    real = batch.real[row, k]
    ids = torch.cat([prompt, batch.response_ids[row, k][real]])[None]
    with policy.chosen_adapters():
        states = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = policy.model.get_output_embeddings()(states[len(prompt) - 1 : -1]) / TEMPERATURE
    return logits.log_softmax(-1)[batch.response_mask[row, k][real]]


def policy_of(kind: str, shared: bool = True, **settings: int) -> Policy:
    return Policy(tiny_lm(kind, **settings), TEMPERATURE, shared, tokens=range(VOCABULARY))


def longer_prompts(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts with a hint of 1 to 3 tokens before the prompt that a teacher reads."""
    rows = zip(rollouts.unpadded(), cycle([3, 1, 2]), strict=False)
    ids, mask = pad_prompts([[7, 9, 8][:hint] + prompt for prompt, hint in rows], pad_id=0)
    return replace(rollouts, teacher_ids=ids, teacher_mask=mask)


WIDER = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": VOCABULARY + 7}


@pytest.mark.parametrize(
    ("kind", "teacher", "beta", "top", "changed", "shared"),
    [
        ("gpt_neox", WIDER, 1.0, None, None, True),
        ("gpt_neox", WIDER, 0.3, VOCABULARY, None, False),
        ("gpt_neox", {}, 0.0, None, episodes, True),
        ("llama", None, 0.0, None, None, True),  # the policy without its adapters
        ("llama", None, 1.0, None, episodes, False),
        ("llama", {}, 1.0, None, longer_prompts, True),
        ("llama", None, 0.3, None, longer_prompts, False),
        ("llama", None, 1.0, None, lambda rollouts: longer_prompts(episodes(rollouts)), True),
    ],
)
def test_loss_and_gradient_are_those_of_whole_logits(kind, teacher, beta, top, changed, shared):
    student = policy_of(kind, shared)
    if teacher is None:
        adapt(student.model, LoRAConfig(rank=4), seed=5)
        for name, parameter in student.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    frozen = student.before_adapters() if teacher is None else policy_of(kind, shared, **teacher)
    if teacher is not None:
        frozen.requires_grad_(False)
        torch.nn.init.normal_(frozen.model.get_output_embeddings().weight, std=0.2)
    config = DistillConfig(beta=beta, top=top, samples_per_prompt=2)
    optim, budget = OptimConfig(lr=1e-3, max_grad_norm=None), Budget(4)
    settings = EngineSettings(optim=optim, total_steps=9, steps_per_batch=1, budget=budget, inference=budget)
    engine, objective = TorchEngine(student, frozen, None, ALONE, settings), make(config)
    student.teacher = Teacher(frozen, config.beta, config.top)
    rollouts = tiny_rollouts(5, 2)
    rollouts = rollouts if changed is None else changed(rollouts)
    batch = rollouts.extend(Batch, scores=torch.rand(5, 2))
    batch = replace(batch, behaviour_logprobs=torch.zeros(rollouts.response_ids.shape))
    batch = objective.credit(engine.annotate(batch, objective.needs))
    trained = [each for each in student.parameters() if each.requires_grad]

    total, count = torch.zeros(()), 0
    for row in range(5):
        for k in range(2):
            with torch.no_grad():
                theirs = logprobs_of(frozen, batch.for_teacher(), row, k)[:, :VOCABULARY]
            ids = batch.response_ids[row, k][batch.response_mask[row, k]]
            at_tokens = batch.ref_logprobs[row, k][batch.response_mask[row, k]]
            torch.testing.assert_close(at_tokens, theirs.gather(-1, ids[:, None])[:, 0], atol=1e-4, rtol=0)
            total = total + divergence(logprobs_of(student, batch, row, k), theirs, beta).sum()
            count += len(ids)
    expected = torch.cat([each.flatten() for each in torch.autograd.grad(total / count, trained)])
    seen = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([each.grad.flatten() for each in trained])) and None
    )
    loss = engine.step(batch, objective)["loss/policy"].value()

    assert total > 0.1
    assert loss == pytest.approx((total / count).item(), rel=1e-5)
    assert (seen[0] - expected).norm() < 1e-5 * expected.norm()


def test_the_annotator_lets_the_teacher_read_its_own_prompts():
    frozen, rollouts = policy_of("llama"), longer_prompts(tiny_rollouts(5, 2))
    budget = Budget(4)

    def score(rollouts: Rollouts) -> Batch:
        return rollouts.extend(Batch, scores=torch.zeros(5, 2))

    found = Annotator(score, frozen, budget, ALONE, Dtype.float32).annotate(rollouts).ref_logprobs
    read = replace(rollouts, prompt_ids=rollouts.teacher_ids, prompt_mask=rollouts.teacher_mask)
    expected = infer(frozen, read, "logprobs", budget, ALONE, Dtype.float32)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert (found - infer(frozen, rollouts, "logprobs", budget, ALONE, Dtype.float32)).abs().max() > 0.01
