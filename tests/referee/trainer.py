"""A small trainer that shares no code with the package, and mistakes of it: batch files for the audit.

`step(setting, seed, mistake)` makes one optimizer step and returns what a hook would dump. The losses follow
the code of other frameworks: all terms are written out, with micro-batches and autograd.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PROMPTS, SAMPLES, TOKENS, WORDS, MICRO = 6, 4, 20, 30, 4
PAD, END = 0, 1
ROWS = PROMPTS * SAMPLES

BASE = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "std_eps": 1e-4,
    "over": "step",
    "surrogate": "clip",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "advantage": "gae",
        "gamma": 0.98,
        "lam": 0.9,
        "whiten": "tokens",
        "kl_coef": 0.05,
        "kl_in": "reward",
    }
    | {"kl": "k1", "reduction": "token", "vf_coef": 0.1, "clip_value": 0.2},
    "grpo": {"kl_coef": 0.05, "reduction": "sequence"},
    "dapo": {"clip_high": 0.28, "reduction": "token", "kl_coef": 0.02, "kl": "k2"},
    "opo": {"advantage": "opo", "scale": "none", "reduction": "token"},
    "truncate": {"reduction": "token", "kl_coef": 0.05, "correction": {"kind": "truncate", "cap": 1.1}},
    "reject": {
        "reduction": "token",
        "correction": {"reject": "token", "reject_low": 0.9, "reject_high": 1.15},
    },
    "sequence_is": {
        "reduction": "sequence",
        "correction": {"kind": "mask", "level": "geometric", "low": 0.9, "high": 1.2},
    },
    "distill": {
        "advantage": "none",
        "scale": "none",
        "policy_coef": 0.0,
        "teacher_coef": 1.0,
        "reduction": "token",
    },
    "forward": {
        "advantage": "mean",
        "surrogate": "reinforce",
        "policy_coef": 0.5,
        "teacher_coef": 0.3,
        "teacher": "k3",
    }
    | {"reduction": "token"},
    "teacher_reward": {
        "advantage": "none",
        "scale": "none",
        "teacher_in_advantage": 0.7,
        "reduction": "token",
    },
    "turns": {"reduction": "token", "clip_high": 0.28},
    "scalerl": {
        "surrogate": "cispo",
        "clip_low": 1.0,
        "clip_high": 0.4,
        "scale": "batch",
        "reduction": "prompt",
    },
    "gspo_token": {"ratio": "sequence_token", "clip_low": 0.03, "clip_high": 0.05, "reduction": "sequence"},
    "reinforce": {
        "advantage": "none",
        "scale": "none",
        "whiten": "batch",
        "surrogate": "reinforce",
        "ratio": "one",
    }
    | {"reduction": "sequence_sum", "kl_coef": 0.1, "kl_in": "reward", "kl": "k1"},
    "dpo": {"surrogate": "sigmoid", "beta": 0.1, "reduction": "sequence_sum"},
    "ipo": {"surrogate": "ipo", "beta": 0.2, "reduction": "sequence_sum"},
}

# mistake -> settings where it exists, terms that name it
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "gamma_and_lam_exchanged": (["ppo"], ["advantages"]),
    "values_one_late": (["ppo"], ["advantages"]),
    "reward_kl_sign": (["ppo", "reinforce"], ["advantages"]),
    "score_at_first_token": (["ppo"], ["advantages"]),
    "whitened_with_padding": (["ppo"], ["advantages"]),
    "not_whitened": (["ppo", "reinforce"], ["advantages"]),
    "value_loss_smaller": (["ppo"], ["values"]),
    "value_loss_with_padding": (["ppo"], ["values", "mask"]),
    "value_loss_doubled": (["ppo"], ["values"]),
    "value_loss_not_clipped": (["ppo"], ["values"]),
    "returns_are_whitened": (["ppo"], ["values", "returns", "advantages"]),
    "weights_missing": (["truncate", "sequence_is"], ["correction"]),
    "weights_of_current_policy": (["truncate"], ["correction"]),
    "weights_inverted": (["truncate"], ["correction"]),
    "weights_of_current_policy_attached": (["truncate"], ["correction"]),
    "kl_in_loss_too": (["reinforce", "ppo"], ["KL"]),
    "weights_not_capped": (["truncate"], ["correction"]),
    "weights_of_responses": (["truncate"], ["correction"]),
    "rejected_still_count": (["reject"], ["correction", "reduction"]),
    "teacher_sign": (["distill", "forward", "teacher_reward"], ["teacher", "advantages"]),
    "teacher_shifted": (
        ["distill", "forward", "teacher_reward"],
        ["teacher", "teacher_logprobs", "advantages"],
    ),
    "teacher_other_direction": (["distill", "forward"], ["teacher"]),
    "teacher_minus_current": (["teacher_reward"], ["advantages", "teacher"]),
    "messages_in_loss": (["turns"], ["mask"]),
    "messages_counted": (["turns"], ["reduction"]),
    "prompt_as_sequence": (["scalerl"], ["reduction"]),
    "cispo_as_clip": (["scalerl"], ["surrogate"]),
    "pair_beta_doubled": (["dpo", "ipo"], ["pairs"]),
    "pair_without_reference": (["dpo", "ipo"], ["pairs"]),
    "pair_averaged": (["dpo", "ipo"], ["pairs", "reduction"]),
    "ipo_target": (["ipo"], ["pairs"]),
    "pair_includes_padding": (["dpo"], ["mask"]),
    "baseline_not_weighted": (["opo"], ["advantages"]),
    "groups_within_micro_batches": (["grpo", "dapo"], ["advantages"]),
    "rewards_of_next_row": (["grpo", "opo"], ["advantages"]),
    "advantages_of_other_row": (["grpo", "dapo"], ["advantages"]),
    "deviation_of_batch": (["grpo"], ["advantages"]),
    "loss_mask_one_late": (["grpo", "dapo"], ["mask"]),
    "kl_doubled": (["grpo", "dapo"], ["KL"]),
    "kl_missing": (["grpo", "dapo"], ["KL"]),
    "kl_of_old_policy": (["grpo"], ["KL"]),
    "ratio_reversed": (["grpo", "truncate"], ["ratio"]),
    "clip_of_log_ratio": (["grpo", "dapo"], ["clipping"]),
    "variance": (["grpo"], ["advantages"]),
    "advantages_by_length": (["grpo", "dapo"], ["advantages"]),
    "rewards_squared": (["opo"], ["advantages"]),
    "rewards_in_bfloat16": (["opo", "grpo"], ["advantages"]),
    "reward_kl_mean": (["reinforce", "ppo"], ["advantages"]),
    "kl_with_padding": (["grpo", "dapo"], ["KL"]),
    "kl_weighted": (["truncate"], ["KL"]),
    "cispo_attached": (["scalerl"], ["surrogate"]),
    "mean_of_active": (["dapo"], ["reduction"]),
    "old_of_sampler": (["dapo"], ["old_logprobs"]),
    "reference_of_trainer": (["grpo"], ["ref_logprobs"]),
    "rejected_without_gradient": (["dpo", "ipo"], ["pairs"]),
    "reference_in_halves": (["dpo", "ipo"], ["pairs"]),
    "chosen_in_first_half": (["dpo", "ipo"], ["pairs"]),
    "reference_with_padding": (["dpo", "ipo"], ["pairs"]),
    "whitened_again": (["dapo", "turns"], ["advantages"]),
    "reference_of_other_rows": (["grpo"], ["ref_logprobs"]),
    "sampler_divides_log_probs": (["truncate"], ["behaviour_logprobs"]),
    "teacher_advantage_attached": (["distill"], ["teacher"]),
    "teacher_log_ratio_as_loss": (["distill"], ["teacher"]),
    "padding_without_end": (["turns"], ["mask"]),
    "baseline_of_others_by_all": (["grpo"], ["advantages"]),
    "whitened_in_micro_batches": (["ppo"], ["advantages"]),
    "ratio_divided": (["gspo_token"], ["ratio"]),
    "ratio_mean_attached": (["gspo_token"], ["ratio"]),
    "sampler_of_fewer_tokens": (["truncate"], ["behaviour_logprobs"]),
    "sampler_of_best_tokens": (["truncate", "dapo"], ["behaviour_logprobs"]),
    "micro_batches_by_number": (["dapo", "grpo"], ["reduction"]),
    "value_of_next_position": (["ppo"], ["advantages"]),
    "kl_not_divided": (["grpo"], ["KL"]),
    "dual_clip_everywhere": (["dapo"], ["clipping"]),
    "mean_of_padded_micro_batches": (["dapo"], ["reduction"]),
    "mean_with_padding": (["dapo", "opo"], ["reduction"]),
    "mean_of_ranks": (["dapo", "opo"], ["reduction"]),
    "sequence_as_token_mean": (["grpo", "gspo_token"], ["reduction"]),
    "token_ratio": (["gspo_token"], ["ratio"]),
    "old_at_other_temperature": (["grpo", "dapo"], ["old_logprobs"]),
    "reference_of_other_row": (["grpo"], ["ref_logprobs", "KL"]),
    "first_token_masked": (["grpo", "opo"], ["mask"]),
}


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Return a tensor whose columns are moved to the right (by > 0), with 0 at the edge."""
    moved = torch.zeros_like(x)
    if by > 0:
        moved[:, by:] = x[:, :-by]
    else:
        moved[:, :by] = x[:, -by:]
    return moved


def sampled(setting: str, seed: int) -> SimpleNamespace:
    """Return tokens, masks, log-probs of five policies, rewards and values."""
    g = torch.Generator().manual_seed(1000 * seed + len(setting))

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    logits = 1.4 * rand(ROWS, TOKENS, WORDS)
    logits[..., PAD] = -40
    logits[..., END] += 0.8
    ids = torch.multinomial(logits.softmax(-1).view(-1, WORDS), 1, generator=g).view(ROWS, TOKENS)
    ended = (ids == END).long().cumsum(1) - (ids == END).long() > 0
    ids[ended] = PAD
    spread = {"behaviour": 0.0, "old": 0.1, "now": 0.25, "ref": 0.3, "teacher": 0.5}
    noisy = {name: logits + size * rand(*logits.shape) for name, size in spread.items()}
    s = SimpleNamespace(ids=ids, mask=~ended, real=~ended, logits=noisy, messages=torch.zeros_like(ended))
    if setting == "turns":
        start = torch.randint(2, 5, (ROWS, 1), generator=g)
        places = torch.arange(TOKENS)
        s.messages = (places >= start) & (places < start + 3) & (s.ids != END) & ~ended
        s.mask = s.mask & ~s.messages
    s.logp = {name: picked(z, ids) for name, z in noisy.items()}
    s.rewards = (ids.double().mean(1) / 8 + 0.4 * rand(ROWS)).float()
    s.old_values = (0.5 * rand(ROWS, TOKENS)).float()
    s.values = (s.old_values + 0.25 * rand(ROWS, TOKENS)).float()
    return s


def picked(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probs of tokens as float32."""
    return torch.gather((logits / temperature).log_softmax(-1), 2, ids[..., None])[..., 0].float()


def advantages_of(c: dict[str, Any], s: SimpleNamespace, bug: str | None) -> tuple[Tensor, Tensor | None]:
    """Return advantages, [B] or [B, T], and the returns of PPO."""
    logp, mask, rewards = {k: v.double() for k, v in s.logp.items()}, s.mask.double(), s.rewards.double()
    kl = (logp["old"] - logp["ref"]) * mask * c["kl_coef"] * (c.get("kl_in") == "reward")
    if bug == "reward_kl_sign":
        kl = -kl
    if bug == "reward_kl_mean":
        kl = kl / mask.sum(1, keepdim=True)
    if c["advantage"] == "gae":
        return _gae(c, s, kl, bug)
    if bug == "rewards_of_next_row":
        rewards = rewards.roll(-1)
    if bug == "rewards_in_bfloat16":
        rewards = rewards.bfloat16().double()
    if bug == "rewards_squared":
        rewards = rewards**2
    rewards = rewards - kl.sum(1)
    groups = rewards.view(PROMPTS, SAMPLES)
    if bug == "groups_within_micro_batches":  # the micro-batches cut the groups in halves
        groups = rewards.view(-1, 2)
    baseline = groups.mean(1, keepdim=True)
    if c["advantage"] == "opo" and bug != "baseline_not_weighted":
        lengths = s.mask.sum(1).double().view(PROMPTS, SAMPLES)
        baseline = (groups * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    if bug == "baseline_of_others_by_all":
        baseline = (groups.sum(1, keepdim=True) - groups) / SAMPLES
    a = groups - (0 if c["advantage"] == "none" else baseline)
    if c["scale"] == "group" and bug != "deviation_of_batch":
        a = a / (groups.std(1, keepdim=True) ** (2 if bug == "variance" else 1) + c["std_eps"])
    elif c["scale"] == "batch" or bug == "deviation_of_batch":
        a = a / (rewards.std() + c["std_eps"])
    a = a.reshape(-1)
    if c.get("whiten") == "batch" and bug != "not_whitened":
        a = (a - a.mean()) / (a.std() + c["std_eps"])
    if bug == "advantages_of_other_row":
        a = a.roll(1)
    if bug == "advantages_by_length":
        a = a[s.mask.sum(1).argsort(stable=True)]
    if weight := c.get("teacher_in_advantage"):
        teacher = shift(logp["teacher"], -1) if bug == "teacher_shifted" else logp["teacher"]
        gap = teacher - logp["now" if bug == "teacher_minus_current" else "behaviour"]
        a = a[:, None] + weight * (-gap if bug == "teacher_sign" else gap) * mask
    return a, None


def _gae(c: dict[str, Any], s: SimpleNamespace, kl: Tensor, bug: str | None) -> tuple[Tensor, Tensor]:
    mask, values = s.mask, s.old_values.double()
    gamma, lam = (c["lam"], c["gamma"]) if bug == "gamma_and_lam_exchanged" else (c["gamma"], c["lam"])
    used = shift(values) if bug == "values_one_late" else values
    a, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(ROWS):
        length = int(mask[row].sum())
        later, following = 0.0, 0.0
        if bug == "value_of_next_position" and length < TOKENS:
            following = used[row, length]
        for t in reversed(range(length)):
            reward = -kl[row, t] + s.rewards[row] * (
                t == (0 if bug == "score_at_first_token" else length - 1)
            )
            delta = reward + gamma * following - used[row, t]
            later = delta + gamma * lam * later
            a[row, t], following = later, used[row, t]
    returns = (a + used) * mask
    chosen = torch.ones_like(mask) if bug == "whitened_with_padding" else mask
    white = (a - a[chosen].mean()) / (a[chosen].var() + 1e-8).sqrt()
    if bug == "whitened_in_micro_batches":
        parts = zip(a.chunk(MICRO), chosen.chunk(MICRO), strict=True)
        white = torch.cat([(x - x[at].mean()) / (x[at].var() + 1e-8).sqrt() for x, at in parts])
    if bug == "returns_are_whitened":
        returns = (white + used) * mask
    return (a if bug == "not_whitened" else white) * mask, returns


def step(setting: str, seed: int, bug: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and header of a step of the trainer."""
    claims = BASE | {"advantage": "mean", "scale": "group", "ratio": "token", "kl": "k3"} | SETTINGS[setting]
    s = sampled(setting, seed)
    header = {
        "schema": 1,
        "kind": "policy_gradient",
        "framework": "trainer.py",
        "version": setting,
        "step": 1,
    }
    header |= {"pad_id": PAD, "eos_ids": [END], "claims": claims, "updates_since_old": 1}
    if bug == "old_at_other_temperature":
        s.logp["old"] = picked(s.logits["old"], s.ids, 0.6)
    if bug in ("old_of_sampler", "reference_of_trainer"):
        s.logp["old" if bug[0] == "o" else "ref"] = s.logp["behaviour" if bug[0] == "o" else "old"].clone()
        header |= {"updates_since_old": 0} if bug[0] == "o" else {"step": 3}
    if bug == "sampler_of_fewer_tokens":
        s.logp["behaviour"] = s.logp["old"] + 0.2
    if bug == "sampler_of_best_tokens":
        s.logp["behaviour"] = s.logits["behaviour"].log_softmax(-1).amax(-1).float()
    if bug == "sampler_divides_log_probs":
        s.logp["behaviour"] = s.logp["behaviour"] / 0.6
    if bug == "reference_of_other_rows":
        s.logp["ref"] = s.logp["ref"][torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))]
    if bug == "padding_without_end":
        cut = s.mask.sum(1) < TOKENS - 8
        s.ids[cut & s.real.any(1)] = torch.where(s.ids[cut] == END, 5, s.ids[cut])
        s.mask = s.mask | (cut[:, None] & ~s.messages)
    if bug == "reference_of_other_row":
        s.logp["ref"] = s.logp["ref"].roll(1, 0)
    if bug == "mean_of_active":
        s.rewards[:SAMPLES] = s.rewards[0]
    if bug == "first_token_masked":
        s.mask = s.mask.clone()
        s.mask[:, 0] = False
    micro = torch.arange(ROWS) // (ROWS // MICRO)
    tensors = {"response_ids": s.ids, "response_mask": s.mask.to(torch.uint8), "logprobs": s.logp["now"]}
    tensors |= {"rewards": s.rewards, "group": torch.arange(ROWS) // SAMPLES, "micro_batch": micro}
    if setting in ("dpo", "ipo"):
        header["kind"] = "pairs"
        tensors["ref_logprobs"] = s.logp["ref"]
        return tensors | _pairs(claims, s, micro, bug), header
    tensors |= {f"{name}_logprobs": s.logp[name] for name in ("old", "behaviour")}
    if claims["kl_coef"]:
        tensors["ref_logprobs"] = s.logp["ref"]
    if "teacher_coef" in claims or "teacher_in_advantage" in claims:
        tensors["teacher_logprobs"] = s.logp["teacher"]
    if setting == "turns":
        tensors["environment_mask"] = s.messages
    a, returns = advantages_of(claims, s, bug)
    tensors["advantages"] = a.float()
    tensors |= _loss(claims, s, a.float().double(), micro, bug)
    if returns is not None:
        tensors |= {"values": s.values, "old_values": s.old_values, "returns": returns.float()}
        tensors |= _values(claims, s, returns.float().double(), micro, bug)
    return tensors, header


def _loss(
    c: dict[str, Any], s: SimpleNamespace, a: Tensor, micro: Tensor, bug: str | None
) -> dict[str, Tensor]:
    logp = {k: v.double() for k, v in s.logp.items()}
    now = s.logp["now"].clone().requires_grad_()
    mask = s.mask.double()
    used = shift(mask) if bug == "loss_mask_one_late" else mask
    used = (mask + s.messages).clamp(max=1) if bug == "messages_in_loss" else used
    weights, kept = _weights(c.get("correction", {}), logp, now.detach().double(), mask, bug)
    used = used * kept
    counted = mask if bug == "rejected_still_count" else used
    counted = torch.ones_like(mask) if bug == "mean_with_padding" else counted
    counted = s.real.double() if bug == "messages_counted" else counted
    counted = mask * (a != 0)[:, None] if bug == "mean_of_active" else counted
    losses = []
    for part in range(MICRO):
        i, apart = micro == part, 0.0
        x, y, w = now[i].double(), logp["old"][i], used[i]
        adv = a[i] if a.dim() == 2 else a[i][:, None]
        if bug == "whitened_again":
            adv = adv.expand_as(x)
            adv = (adv - adv[mask[i] > 0].mean()) / (adv[mask[i] > 0].std() + 1e-8)
        gap = (y - x) if bug == "ratio_reversed" else (x - y)
        u = gap.exp()
        if c["ratio"] == "sequence_token" and bug != "token_ratio":
            mean = ((gap * mask[i]).sum(1) / mask[i].sum(1))[:, None]
            u = ((mean if bug == "ratio_mean_attached" else mean.detach()) + x - x.detach()).exp()
            if bug == "ratio_divided":
                u = (gap / mask[i].sum(1, keepdim=True)).exp()
        low, high = 1 - c["clip_low"], 1 + c["clip_high"]
        if c["surrogate"] == "reinforce":
            loss = -adv * x
        elif c["surrogate"] == "cispo" and bug != "cispo_as_clip":
            clipped = u.clamp(low, high)
            loss = -adv * (clipped if bug == "cispo_attached" else clipped.detach()) * x
        elif bug == "dual_clip_everywhere":
            loss = torch.min(torch.max(-adv * u, -adv * u.clamp(low, high)), -3 * adv)
        elif bug == "clip_of_log_ratio":
            loss = torch.max(-adv * u, -adv * gap.clamp(-c["clip_low"], c["clip_high"]).exp())
        else:
            loss = torch.max(-adv * u, -adv * u.clamp(low, high))
        if bug == "weights_of_current_policy_attached":
            weights = (now.double() - logp["behaviour"]).exp().clamp(max=c["correction"]["cap"])
        loss = c.get("policy_coef", 1.0) * loss * weights[i]
        if bug == "kl_in_loss_too":
            k = logp["ref"][i] - x
            loss = loss + 0.04 * (torch.exp(k) - 1 - k)
        if c["kl_coef"] and c.get("kl_in") != "reward":
            k = (y if bug == "kl_of_old_policy" else x) - logp["ref"][i]
            k = k.square() / 2 if c["kl"] == "k2" else torch.exp(-k) - 1 + k
            k = (
                c["kl_coef"]
                * {"kl_doubled": 2, "kl_missing": 0, "kl_not_divided": MICRO}.get(str(bug), 1)
                * k
            )
            if bug == "kl_with_padding":
                apart = k.sum() / mask.numel()
            else:
                loss = loss + (k * weights[i] if bug == "kl_weighted" else k)
        if coef := c.get("teacher_coef"):
            teacher = shift(logp["teacher"], -1) if bug == "teacher_shifted" else logp["teacher"]
            k = x - teacher[i]
            k = -k if bug == "teacher_sign" else k
            kind = c.get("teacher", "k1")
            if bug == "teacher_other_direction":
                kind = "k3" if kind == "k1" else "k1"
            if bug != "teacher_advantage_attached":
                k = k.detach() if kind == "k1" else k
            advantage = 1 if bug == "teacher_log_ratio_as_loss" else k
            loss = loss + coef * (advantage * x if kind == "k1" else torch.exp(-k) - 1 + k)
        share = part + 1 if bug == "micro_batches_by_number" else 1
        losses.append(share * _reduced(c["reduction"], loss, w, counted, i, bug) + apart)
    return _backward(losses, now, "logprob_grads", "losses")


def _reduced(kind: str, loss: Tensor, w: Tensor, counted: Tensor, i: Tensor, bug: str | None) -> Tensor:
    if bug == "prompt_as_sequence":
        kind = "sequence"
    if bug == "sequence_as_token_mean":
        kind = "token"
    if bug == "mean_of_padded_micro_batches":
        return (loss * w).sum() / (len(w) * w.sum(1).max()) / MICRO
    if bug == "mean_of_ranks":  # two ranks, each with half of the micro-batches
        half = counted[: ROWS // 2] if bool(i[0]) or bool(i[ROWS // MICRO]) else counted[ROWS // 2 :]
        return (loss * w).sum() / half.sum() / 2
    if kind == "token":
        return (loss * w).sum() / counted.sum()
    if kind == "prompt":
        tokens = counted.view(PROMPTS, -1).sum(1).repeat_interleave(SAMPLES)[i]
        return ((loss * w).sum(1) / tokens).sum() / PROMPTS
    if kind == "sequence_sum":
        return (loss * w).sum() / ROWS
    return ((loss * w).sum(1) / counted[i].sum(1).clamp(min=1)).sum() / ROWS


def _weights(
    c: dict[str, Any], logp: dict[str, Tensor], now: Tensor, mask: Tensor, bug: str | None
) -> tuple[Tensor, Tensor]:
    """Return weights and kept tokens of the off-policy correction."""
    ones = torch.ones_like(mask)
    gap = (now if bug == "weights_of_current_policy" else logp["old"]) - logp["behaviour"]
    gap = -gap if bug == "weights_inverted" else gap
    kept = ones
    if "reject" in c:
        kept = ((gap.exp() >= c["reject_low"]) & (gap.exp() <= c["reject_high"])).double()
    if bug == "weights_missing" or "kind" not in c:
        return ones, kept
    if c.get("level") == "geometric" or bug == "weights_of_responses":
        gap = (gap * mask).sum(1, keepdim=True) / (
            mask.sum(1, keepdim=True) if c.get("level") == "geometric" else 1
        )
    w = gap.exp().expand_as(mask)
    if c["kind"] == "truncate":
        return (w if bug == "weights_not_capped" else w.clamp(max=c["cap"])), kept
    return w * ((w >= c["low"]) & (w <= c["high"])), kept


def _values(
    c: dict[str, Any], s: SimpleNamespace, returns: Tensor, micro: Tensor, bug: str | None
) -> dict[str, Tensor]:
    now = s.values.clone().requires_grad_()
    used = torch.ones_like(s.mask).double() if bug == "value_loss_with_padding" else s.mask.double()
    losses = []
    for part in range(MICRO):
        i = micro == part
        v, old, r = now[i].double(), s.old_values[i].double(), returns[i]
        free, bound = (v - r) ** 2, (v.clamp(old - c["clip_value"], old + c["clip_value"]) - r) ** 2
        loss = torch.min(free, bound) if bug == "value_loss_smaller" else torch.max(free, bound)
        loss = free if bug == "value_loss_not_clipped" else loss
        loss = c["vf_coef"] * (2 if bug == "value_loss_doubled" else 1) * loss
        losses.append((loss * used[i]).sum() / used.sum())
    return _backward(losses, now, "value_grads", "value_losses")


def _pairs(c: dict[str, Any], s: SimpleNamespace, micro: Tensor, bug: str | None) -> dict[str, Tensor]:
    now = s.logp["now"].clone().requires_grad_()
    mask = torch.ones_like(s.mask).double() if bug == "pair_includes_padding" else s.mask.double()
    beta = c["beta"] * (2 if bug == "pair_beta_doubled" else 1)
    losses = []
    for part in range(MICRO):
        i = micro == part
        reference = 0 if bug == "pair_without_reference" else s.logp["ref"][i].double()
        sums = (reference * (1 if bug == "reference_with_padding" else mask[i])).sum(1)
        if bug == "reference_in_halves":
            sums = torch.stack(sums.chunk(2), 1).flatten()
        ratios = (now[i].double() * mask[i]).sum(1) - sums
        if bug == "pair_averaged":
            ratios = ratios / mask[i].sum(1)
        if bug == "chosen_in_first_half":
            ratios = torch.stack(ratios.chunk(2), 1).flatten()
        rejected = ratios[1::2]
        z = ratios[0::2] - (rejected.detach() if bug == "rejected_without_gradient" else rejected)
        if c["surrogate"] == "ipo":
            loss = (z - (1 if bug == "ipo_target" else 0.5) / beta) ** 2
        else:
            loss = -torch.nn.functional.logsigmoid(beta * z)
        losses.append(loss.sum() / (ROWS / 2))
    return _backward(losses, now, "logprob_grads", "losses")


def _backward(losses: list[Tensor], inputs: Tensor, grads: str, name: str) -> dict[str, Tensor]:
    for loss in losses:
        loss.backward()
    assert inputs.grad is not None
    return {grads: inputs.grad, name: torch.stack([loss.detach() for loss in losses]).float()}
