"""Dump optimizer steps of verl's actor for `rlhf audit`.

    cp docs/hooks/verl.py verl_hook.py          # any name but verl.py, which would hide verl

In a process that trains the actor, before its first step:

    from verl_hook import install
    install("audit", steps={1, 3}, temperature=config.rollout.temperature)

    rlhf audit audit/step-1.safetensors

For the advantages, add two columns to the batch of the driver before `update_actor`, and pass `algorithm`:

    batch.batch["rewards"] = batch.batch["token_level_rewards"].sum(-1)
    batch.batch["group"] = torch.tensor(np.unique(batch.non_tensor_batch["uid"], return_inverse=True)[1])

The file needs torch, safetensors and verl, not rlhf. Format of the dump: docs/reference/batch_file.md.

Run with verl 0.9.1 on the CPU: `ppo_loss`, the losses and advantages of core_algos, ActorConfig, and
`BaseEngine.train_batch` with an engine of the test (tests/referee/verl_batches.py).
Read, not run: the engines of verl, Ray workers, several ranks (each writes the file of its rows).
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

REDUCTION = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
RATIO = {"vanilla": "token", "gspo": "sequence_token", "cispo": "token"}  # by policy_loss.loss_mode


def claims(actor, algorithm=None, temperature=1.0):
    """Return what ActorConfig and AlgoConfig say, in the words of `rlhf audit`.

    Without `algorithm`, the advantages are not checked.

    Raises:
        ValueError: `rlhf audit` has no words for a setting.
    """
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    kl = actor.kl_loss_type.removesuffix("+")
    unknown = [f"policy_loss.loss_mode={mode}"] if mode not in RATIO else []
    if actor.loss_agg_mode not in REDUCTION:
        unknown.append(f"loss_agg_mode={actor.loss_agg_mode}")
    if actor.use_kl_loss and kl not in KL:
        unknown.append(f"kl_loss_type={actor.kl_loss_type}")
    if unknown:
        raise ValueError(f"rlhf audit has no words for {', '.join(unknown)}")
    estimator = getattr(algorithm, "adv_estimator", None)
    scaled = estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo
    return {
        "advantage": {"grpo": "mean", "rloo": "leave_one_out"}.get(estimator, "given"),
        "scale": "group" if scaled else "none",
        "std": "unbiased",
        "std_eps": 1e-6,
        "ratio": RATIO[mode],
        "surrogate": "cispo" if mode == "cispo" else "clip",
        "clip_low": actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        "clip_high": actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        "dual_clip": actor.clip_ratio_c if mode == "vanilla" else None,
        "kl_coef": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        "kl_in": "loss",
        "kl": "k2" if actor.kl_loss_type.endswith("+") else KL.get(kl, "k3"),  # +: with the gradient of k2
        "reduction": REDUCTION[actor.loss_agg_mode],
        "max_tokens": actor.loss_scale_factor or 0,
        "over": "step",
        "temperature": temperature,
    }


def install(folder, steps, algorithm=None, temperature=1.0, eos_ids=None, pad_id=0):
    """Write `<folder>/step-<n>.safetensors` at each optimizer step n of `steps` of this process, from 0.

    Args:
        folder: where files are written.
        steps: numbers of optimizer steps; an update of verl has one for each of its mini-batches.
        algorithm: AlgoConfig, if the batch has the columns `rewards` and `group`.
        temperature: that of the sampler.
        eos_ids: ids of end tokens, with which the mask is checked.
        pad_id: the id of padding.

    Raises:
        AttributeError: verl lacks a function that the hook wraps.
    """
    from verl.trainer.ppo import core_algos
    from verl.workers.engine.base import BaseEngine
    from verl.workers.utils import losses

    wrapped = [(core_algos, "POLICY_LOSS_REGISTRY"), (BaseEngine, "train_batch")]
    wrapped += [(losses, name) for name in ("ppo_loss", "kl_penalty", "no_padding_2_padding")]
    missing = [f"{where.__name__}.{name}" for where, name in wrapped if not hasattr(where, name)]
    if missing:
        found = f"verl {version('verl')} has no {', '.join(missing)}"
        raise AttributeError(f"{found}; the hook was run with 0.9.1, and needs the new names")
    parts, seen, done = [], {}, []
    penalty, padded, train = losses.kl_penalty, losses.no_padding_2_padding, BaseEngine.train_batch

    def noted_policy(policy_loss):
        def noted(old_log_prob, log_prob, advantages, response_mask, *rest, **named):
            part = {"logprobs": log_prob.detach(), "old_logprobs": old_log_prob, "advantages": advantages}
            part |= {"response_mask": response_mask.to(torch.uint8)}
            if named.get("rollout_is_weights") is not None:
                part["weights"] = named["rollout_is_weights"]
            if log_prob.requires_grad:
                log_prob.register_hook(lambda grad: part.update(logprob_grads=grad))
            width, data = log_prob.shape[1], seen.get("data", {})
            for old, new in {"responses": "response_ids", "rewards": "rewards", "group": "group"}.items():
                if old in data:
                    x = data[old].to_padded_tensor(pad_id) if data[old].is_nested else data[old]
                    short = width - x.shape[-1] if old == "responses" else 0
                    part[new] = torch.nn.functional.pad(x, (0, short), value=pad_id) if short else x
            parts.append(part)
            seen["config"] = named.get("config", rest[1] if len(rest) > 1 else None)
            return policy_loss(old_log_prob, log_prob, advantages, response_mask, *rest, **named)

        return noted

    def noted_penalty(logprob, ref_logprob, *rest, **named):
        if parts:
            parts[-1]["ref_logprobs"] = ref_logprob
        return penalty(logprob, ref_logprob, *rest, **named)

    def noted_padding(tensor, data):
        seen["data"] = data  # the whole micro-batch, which ppo_loss does not pass on
        return padded(tensor, data)

    def noted_training(engine, data, loss_function):
        parts.clear()
        result = train(engine, data, loss_function)
        actor = getattr(loss_function, "func", loss_function) is losses.ppo_loss
        if actor and not all("logprob_grads" in part for part in parts or [{}]):
            raise RuntimeError(f"verl {version('verl')}: ppo_loss did not call a policy loss as 0.9.1 does")
        if actor and len(done) in steps:
            write(parts, seen["config"])
        done.extend([None] if actor else [])
        parts.clear()
        return result

    def write(parts, config):
        tensors = {name: torch.cat(fitted([part[name] for part in parts], pad_id)).cpu() for name in parts[0]}
        places = [torch.full((len(part["logprobs"]),), i) for i, part in enumerate(parts)]
        tensors["micro_batch"] = torch.cat(places)
        said, info = claims(config, algorithm, temperature), config.global_batch_info
        header = {"schema": 1, "kind": "policy_gradient", "framework": "verl", "version": version("verl")}
        header |= {"step": len(done), "pad_id": pad_id} | ({"eos_ids": eos_ids} if eos_ids else {})
        if info.get("dp_size", 1) > 1 and said["reduction"] == "token":  # the tokens of all ranks
            header["tokens"] = float(info["batch_num_tokens"]) / info["dp_size"]
            said["over"] = "generation"
        sizes = tensors["group"].unique(return_counts=True)[1] if "group" in tensors else torch.zeros(1)
        if (sizes != config.rollout_n).any():  # other ranks or mini-batches have responses of the prompt
            said["advantage"] = "given"
        rank = f"-rank-{torch.distributed.get_rank()}" if torch.distributed.is_initialized() else ""
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"step-{len(done)}{rank}.safetensors"
        whole = {name: x.detach().contiguous() for name, x in tensors.items()}
        save_file(whole, path, {"rlhf": json.dumps(header | {"claims": said})})

    for mode, policy_loss in list(core_algos.POLICY_LOSS_REGISTRY.items()):
        core_algos.POLICY_LOSS_REGISTRY[mode] = noted_policy(policy_loss)
    losses.kl_penalty, losses.no_padding_2_padding = noted_penalty, noted_padding
    BaseEngine.train_batch = noted_training


def fitted(found, pad_id):
    """Return the tensors of the micro-batches, padded on the right to the same width."""
    width = max(x.shape[-1] for x in found)
    value = 0 if found[0].is_floating_point() or found[0].dtype == torch.uint8 else pad_id
    pad = torch.nn.functional.pad
    return [pad(x, (0, width - x.shape[1]), value=value) if x.dim() == 2 else x for x in found]
