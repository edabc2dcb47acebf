"""On-policy distillation: the policy samples, and a frozen teacher (`model.reference`) judges each token.

Agarwal et al., arXiv 2306.13649 (GKD); Gu et al., arXiv 2306.08543 (MiniLLM); Lu, "On-Policy Distillation",
Thinking Machines Lab, 2025.

    loss = mean over tokens of  teacher_coef D - reward_coef w A logp
    w    = stopgrad(min(exp(logp - behaviour), cap)), with `algo.cap=0` 1

| `algo.divergence` | D of a token                         | gradient of on-policy samples, on average       |
|-------------------|--------------------------------------|-------------------------------------------------|
| `exact`           | the divergence over the vocabulary   | its own, whoever sampled the token              |
| `k1`              | w stopgrad(sum_j gamma^j k_t+j) logp | that of KL(policy || teacher); gamma 1: MiniLLM |
| `k2`              | w k^2 / 2                            | the same as `k1` with gamma 0                   |
| `k3`              | w (exp(-k) - 1 + k)                  | that of KL(teacher || policy), the *forward* KL |

`algo.beta` and `algo.top` select the exact divergence (`rlhf.models.divergence`).
k = logp - teacher, with the current policy. `exact` needs no w, because only the prefixes are those of the
sampler. A is the advantage of GRPO; with `algo.reward_coef=0` (default) the scores serve metrics only.

Needs: the teacher's log-probs; `exact` its hidden states in the training forward, or the candidates that its
server sent. All prompts have signal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.algorithms import DistillConfig, TeacherDivergence
from rlhf.core.batch import Batch, Outputs
from rlhf.core.metrics import Metrics, mean, selected
from rlhf.objectives.advantages import gae
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.objective import bounded, mismatch, sampler_logprobs


class Distill(GRPO):
    """The distillation objective: a divergence from the teacher, and rewards if they have a weight."""

    config: DistillConfig
    shows_loss = True
    skips_ties = False  # the teacher gives every prompt a signal

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.needs = frozenset({"ref_logprobs"})
        if config.divergence is TeacherDivergence.exact:
            self.needs |= {"divergence"}

    def policy_loss(self, out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the sum of both terms over a micro-batch, and metrics."""
        assert out.logprobs is not None and batch.ref_logprobs is not None and batch.advantages is not None
        config, mask = self.config, batch.response_mask
        logprobs = selected(out.logprobs, mask)
        ratio = bounded(selected(logprobs.detach() - sampler_logprobs(logprobs, batch), mask)).exp()
        weight = ratio.clamp(max=config.cap) if config.cap else torch.ones_like(ratio)
        truncated = (ratio > config.cap).float() * bool(config.cap)
        k = selected(logprobs - batch.ref_logprobs, mask)
        if config.divergence is TeacherDivergence.exact:
            assert out.divergence is not None
            losses = out.divergence
        elif config.divergence is TeacherDivergence.k1:
            to_go = gae(k.detach(), torch.zeros_like(k), config.gamma, 1.0, mask)
            losses = weight * to_go * logprobs
        elif config.divergence is TeacherDivergence.k2:
            losses = weight * 0.5 * k.square()
        else:
            losses = weight * (torch.expm1(bounded(-k)) + k)
        rewarded = config.reward_coef * weight * batch.advantages * logprobs
        metrics = {
            **mismatch(logprobs, batch),
            "policy/ratio": mean(ratio, mask),
            "policy/clipfrac": mean(truncated, mask),
            "distill/k1": mean(k.detach(), mask),
        }
        if out.divergence is not None:
            metrics["distill/divergence"] = mean(out.divergence.detach(), mask)
        return self.reduce(config.teacher_coef * losses - rewarded, mask), metrics
