"""Dump optimizer steps of ms-swift's GRPOTrainer for `rlhf audit`.

    cp docs/hooks/ms_swift.py swift_hook.py

    from swift_hook import dump
    dump(trainer, "audit", steps={1, 3})        # before trainer.train(); steps count from 0

    rlhf audit audit/step-1.safetensors

The file needs torch, safetensors and ms-swift, not rlhf. Format of the dump: docs/reference/batch_file.md.

Read, not run: everything. The hook follows swift/rlhf_trainers/grpo_trainer.py of ms-swift 4.6.0, which does
what TRL does with other methods (`_compute_loss_and_metrics` in place of `_compute_loss`) and a dataclass,
`GRPOBatch`, in place of a dictionary. Not for padding-free batches, sequence parallelism, teachers, Megatron.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

REDUCTION = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
BY_GENERATED_TOKENS = ("dapo", "cispo")
METHODS = ("_postprocess_batch", "_compute_loss_and_metrics", "_get_per_token_logps_and_entropies")
NAMES = {  # attribute of GRPOBatch -> tensor of the file
    "advantages": "advantages",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "rollout_per_token_logps": "behaviour_logprobs",
    "audit_row": "all_index",
}


def release():
    """Return the version of ms-swift."""
    try:
        return version("ms-swift")
    except PackageNotFoundError:
        return "unknown"


def claims(config):
    """Return what GRPOConfig of ms-swift says, in the words of `rlhf audit`.

    Raises:
        ValueError: `rlhf audit` has no words for a setting.
    """
    unknown = [f"loss_type={config.loss_type}"] if config.loss_type not in REDUCTION else []
    unknown += ["top_entropy_quantile"] if config.top_entropy_quantile < 1 else []
    unknown += ["rollout_importance_sampling_mode"] if config.rollout_importance_sampling_mode else []
    unknown += ["off_policy_sequence_mask_delta"] if config.off_policy_sequence_mask_delta is not None else []
    if unknown:
        raise ValueError(f"rlhf audit has no words for {', '.join(unknown)}")
    known = {"grpo": "mean", "rloo": "leave_one_out"}.get(config.advantage_estimator, "given")
    given = config.scale_rewards == "gdpo" or (config.kl_in_reward and config.beta)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    cispo = config.loss_type == "cispo"  # epsilon_high is the cap itself, and there is no lower bound
    levels = {"token": "token", "sequence": "sequence_mean", "sequence_token": "sequence_token"}
    return {
        "advantage": "given" if given else known,
        "scale": "none" if given else config.scale_rewards,
        "std": "unbiased",
        "std_eps": 1e-8,
        "ratio": levels[config.importance_sampling_level],
        "surrogate": "cispo" if cispo else "clip",
        "clip_low": 1.0 if cispo else config.epsilon,
        "clip_high": high - 1 if cispo else high,
        "dual_clip": config.delta,
        "kl_coef": 0.0 if config.kl_in_reward else config.beta,
        "kl_in": "loss",
        "kl": "k3",
        "reduction": REDUCTION[config.loss_type],
        "max_tokens": config.max_completion_length,
        "over": "generation" if config.loss_type in BY_GENERATED_TOKENS else "micro_batch",
        "temperature": config.temperature,
    }


class Steps(TrainerCallback):
    """The tensors of the micro-batches of an optimizer step; written before the optimizer's step."""

    def __init__(self, trainer, folder, steps):
        self.trainer, self.folder, self.steps = trainer, Path(folder), set(steps)
        self.parts, self.said, self.rewards, self.tokens = [], claims(trainer.args), None, 0.0

    def recording(self):
        """Return whether the tensors of this micro-batch are written."""
        return self.trainer.model.training and self.trainer.state.global_step in self.steps

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Write the step, if it was asked for."""
        if state.global_step in self.steps:
            if not self.parts or not all("logprob_grads" in part for part in self.parts):
                names = ", ".join(METHODS)
                raise RuntimeError(f"ms-swift {release()} did not call {names} as 4.6.0 does")
            self.write(args, state.global_step)
            self.steps.discard(state.global_step)
        self.parts = []

    def write(self, args, step):
        """Join the micro-batches of the step and write the file."""
        width = max(part["logprobs"].shape[1] for part in self.parts)
        tensors = {}
        for name in self.parts[0]:
            found = [part[name] for part in self.parts]  # T tokens, on the right
            found = [
                torch.nn.functional.pad(x, (width - x.shape[1], 0)) if x.dim() == 2 else x for x in found
            ]
            tensors[name] = torch.cat(found).detach().contiguous().cpu()
        places = [torch.full((len(part["logprobs"]),), i) for i, part in enumerate(self.parts)]
        tensors["micro_batch"] = torch.cat(places)
        tensors["all_rewards"] = self.rewards.cpu()
        tensors["all_group"] = torch.arange(len(self.rewards)) // self.trainer.num_generations
        for name in ("rewards", "group"):
            tensors[name] = tensors[f"all_{name}"][tensors["all_index"]]
        header = {
            "schema": 1,
            "kind": "policy_gradient",
            "framework": "ms-swift",
            "version": release(),
        }
        header |= {"step": step, "claims": self.said, "tokens": self.tokens}
        header |= {"dtype": "bfloat16"} if args.bf16 else {"dtype": "float16"} if args.fp16 else {}
        rank = f"-rank-{args.process_index}" if args.world_size > 1 else ""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, self.folder / f"step-{step}{rank}.safetensors", {"rlhf": json.dumps(header)})


def dump(trainer, folder, steps):
    """Write `<folder>/step-<n>.safetensors` at each optimizer step n of `steps`, counted from 0.

    Raises:
        AttributeError: the trainer lacks a method that the hook wraps.
        ValueError: `rlhf audit` has no words for a setting of the trainer.
    """
    missing = [name for name in METHODS if not hasattr(trainer, name)]
    if missing:
        found = f"ms-swift {release()}: {type(trainer).__name__} has no {', '.join(missing)}"
        raise AttributeError(f"{found}; the hook was written for 4.6.0, and its METHODS need the new names")
    note = Steps(trainer, folder, steps)
    finish, loss_of = trainer._postprocess_batch, trainer._compute_loss_and_metrics
    forward = trainer._get_per_token_logps_and_entropies

    def noted_batches(samples, batches):
        finish(samples, batches)
        if not trainer.model.training:
            return
        weights = trainer.reward_weights.to(trainer._rewards_per_func.device)
        note.rewards = (trainer._rewards_per_func * weights).nansum(1)  # of all processes
        first = trainer.args.process_index * len(samples)
        for batch in (each["grpo_batch"] for each in batches):  # in the order of the samples
            batch.audit_row = torch.arange(first, first + len(batch.advantages))
            first += len(batch.advantages)
            note.tokens = float(batch.num_items_in_batch) / trainer.args.world_size

    def noted_loss(model, model_inputs, batch):
        if not note.recording():
            return loss_of(model, model_inputs, batch)
        mask = batch.completion_mask
        if trainer.overlong_filter:
            mask = mask & ~batch.truncated_mask[:, None]
        found = {new: getattr(batch, old, None) for old, new in NAMES.items()}
        part = {name: x for name, x in found.items() if x is not None}
        note.parts.append(part | {"response_mask": mask.to(torch.uint8)})
        loss, metrics = loss_of(model, model_inputs, batch)
        note.parts[-1]["losses"] = loss.detach().reshape(1)
        return loss, metrics

    def noted_forward(*args, **kwargs):
        logprobs, entropies = forward(*args, **kwargs)
        if torch.is_grad_enabled() and note.recording():
            part = note.parts[-1]
            part["logprobs"] = logprobs.detach()
            logprobs.register_hook(lambda grad: part.update(logprob_grads=grad))
        return logprobs, entropies

    trainer._postprocess_batch, trainer._compute_loss_and_metrics = noted_batches, noted_loss
    trainer._get_per_token_logps_and_entropies = noted_forward
    trainer.add_callback(note)
