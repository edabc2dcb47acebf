"""Dump optimizer steps of TRL's GRPOTrainer, RLOOTrainer and OnlineDPOTrainer for `rlhf audit`.

    cp docs/hooks/trl.py trl_hook.py            # any name but trl.py, which would hide TRL

    from trl_hook import dump
    dump(trainer, "audit", steps={1, 3})        # before trainer.train(); steps count from 0

    rlhf audit audit/step-1.safetensors

The file needs torch, safetensors and TRL, not rlhf. Format of the dump: docs/reference/batch_file.md.

Run with TRL 1.16.0 on the CPU, float32 and bfloat16: the settings of tests/referee/trl_batches.py; with two
processes, each of which writes the file of its rows: GRPO, RLOO, online DPO.
Read, not run: GPUs, vLLM, tools, adapters, float16, DeepSpeed.
"""

import json
import warnings
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

# loss_type of GRPOConfig -> how the losses of tokens become one number
REDUCTION = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
REDUCTION["luspo"] = "sequence_sum"
BY_GENERATED_TOKENS = ("dapo", "cispo")  # divided by the tokens of the generation batch, scaled to one step

TRAINERS = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer")
METHODS = {  # what the hook wraps: methods of the trainers, private ones too
    "policy_gradient": (
        "_calculate_rewards",
        "_generate_and_score_completions",
        "_get_per_token_logps_and_entropies",
        "_compute_loss",
    ),
    "pairs": ("_calculate_rewards_from_functions", "_forward", "training_step"),
}
NAMES = {  # in TRL's dictionary of a micro-batch -> in the file
    "prompt_ids": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "completion_ids": "response_ids",
    "completion_mask": "response_mask",
    "advantages": "advantages",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "sampling_per_token_logps": "behaviour_logprobs",
    "importance_sampling_ratio": "weights",
    "tool_mask": "tool_mask",
    "audit_generation": "generation",
    "audit_row": "row",
}


def release():
    """Return the version of TRL."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return "unknown"


def is_a(x, *names):
    """Return whether a class of these names is among the classes of `x`."""
    return any(each.__name__ in names for each in type(x).__mro__)


def claims(config):
    """Return what GRPOConfig, RLOOConfig or OnlineDPOConfig say, in the words of `rlhf audit`.

    Raises:
        ValueError: `rlhf audit` has no words for a setting.
    """
    if is_a(config, "OnlineDPOConfig"):
        beta = config.beta[0] if isinstance(config.beta, list) else config.beta
        said = {"surrogate": config.loss_type, "beta": beta, "temperature": 1.0}
        return said | {"reduction": "sequence_sum", "over": "micro_batch"}
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    said = {"temperature": config.temperature, "clip_low": config.epsilon, "clip_high": high, "std_eps": 1e-4}
    said |= {"kl_coef": config.beta, "surrogate": "clip", "std": "unbiased"}
    if is_a(config, "RLOOConfig"):
        said |= {"advantage": "leave_one_out", "scale": "none", "kl": "k1", "kl_in": "reward"}
        said |= {"whiten": "batch" if config.normalize_advantages else "none"}
        return said | {"ratio": "sequence_sum", "reduction": "sequence", "over": "micro_batch"}
    generated = config.loss_type in BY_GENERATED_TOKENS
    parts, generates = config.gradient_accumulation_steps, config.steps_per_generation
    unknown = [f"loss_type={config.loss_type}"] if config.loss_type not in REDUCTION else []
    if config.top_entropy_quantile < 1:
        unknown.append(f"top_entropy_quantile={config.top_entropy_quantile}")
    if config.off_policy_mask_threshold is not None:
        unknown.append(f"off_policy_mask_threshold={config.off_policy_mask_threshold}")
    if generated and 1 < generates < parts:
        unknown.append(f"steps_per_generation={generates} with gradient_accumulation_steps={parts}")
    if unknown:
        raise ValueError(f"rlhf audit has no words for {', '.join(unknown)}")
    sums = config.multi_objective_aggregation == "sum_then_normalize"
    if config.loss_type == "cispo":  # epsilon_high is the cap itself, and there is no lower bound
        said |= {"surrogate": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    return said | {
        "advantage": "mean" if sums else "given",
        "scale": config.scale_rewards,
        "ratio": {"token": "token", "sequence": "sequence_mean"}[config.importance_sampling_level],
        "dual_clip": config.delta,
        "kl": "k3",
        "kl_in": "loss",
        "kl_times_ratio": config.use_bias_correction_kl,
        "reduction": REDUCTION[config.loss_type],
        "max_tokens": config.max_completion_length,
        "over": "generation" if generated and generates > 1 else "micro_batch",
    }


def dump(trainer, folder, steps, model=False):
    """Write `<folder>/step-<n>.safetensors` at each optimizer step n of `steps`, counted from 0.

    With `model`, the weights before the step are written to `<folder>/model-<n>`, for `rlhf audit --model`.

    Raises:
        TypeError: the hook does not know the trainer.
        AttributeError: the trainer lacks a method that the hook wraps.
        ValueError: `rlhf audit` has no words for a setting of the trainer.
    """
    kind = "pairs" if is_a(trainer, "OnlineDPOTrainer") else "policy_gradient"
    if not is_a(trainer, *TRAINERS):
        raise TypeError(f"the hook knows {', '.join(TRAINERS)}, not {type(trainer).__name__}")
    missing = [name for name in METHODS[kind] if not hasattr(trainer, name)]
    if missing:
        found = f"trl {release()}: {type(trainer).__name__} has no {', '.join(missing)}"
        raise AttributeError(f"{found}; the hook was run with 1.16.0, and its METHODS need the new names")
    steps_of = Steps(trainer, Path(folder), set(steps), model, {"kind": kind, "claims": claims(trainer.args)})
    (wrap_pairs if kind == "pairs" else wrap_policy_gradient)(trainer, steps_of)
    trainer.add_callback(steps_of)


class Steps(TrainerCallback):
    """The tensors of the micro-batches of an optimizer step; written before the optimizer's step."""

    def __init__(self, trainer, folder, steps, model, header):
        self.trainer, self.folder, self.steps, self.model, self.header = trainer, folder, steps, model, header
        self.parts, self.norm = [], None
        self.generations = {}  # number -> what holds for all responses of a generation batch
        self.updates = 0  # optimizer steps that changed the weights
        clip = trainer.accelerator.clip_grad_norm_

        def clipped(*args, **kwargs):
            self.norm = clip(*args, **kwargs)
            return self.norm

        trainer.accelerator.clip_grad_norm_ = clipped

    def recording(self):
        """Return whether the tensors of this micro-batch are written."""
        return self.trainer.model.training and self.trainer.state.global_step in self.steps

    def note_logprobs(self, logprobs):
        """Note log-probs [B, T] of the micro-batch, and later their gradient."""
        part, scaler = self.parts[-1], getattr(self.trainer.accelerator, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        part["logprobs"] = logprobs.detach()
        logprobs.register_hook(lambda grad: part.update(logprob_grads=grad / scale))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Write the step, if it was asked for."""
        n, norm = state.global_step, None if self.norm is None else float(self.norm)
        if n in self.steps:
            lacking = [x for x in ("logprobs", "logprob_grads") if not all(x in part for part in self.parts)]
            if not self.parts or lacking:
                names = ", ".join(METHODS[self.header["kind"]])
                raise RuntimeError(f"step {n}: trl {release()} did not call {names} as 1.16.0 does")
            rank = f"-rank-{args.process_index}" if args.world_size > 1 else ""
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write(self.folder / f"step-{n}{rank}.safetensors", n, None if rank else norm)
            if self.model and args.process_index == 0:
                model = self.trainer.accelerator.unwrap_model(self.trainer.model)
                model.save_pretrained(self.folder / f"model-{n}")
            self.steps.discard(n)
        self.parts, self.generations = [], dict(list(self.generations.items())[-1:])
        self.updates += norm != 0 and any(group["lr"] > 0 for group in self.trainer.optimizer.param_groups)

    def on_train_end(self, args, state, control, **kwargs):
        """Name the steps that training did not reach."""
        if self.steps:
            warnings.warn(f"no file was written for the steps {sorted(self.steps)}", stacklevel=2)

    def write(self, path, step, norm):
        """Join the micro-batches of the step and write the file."""
        args, processor = self.trainer.args, self.trainer.processing_class
        tokenizer = getattr(processor, "tokenizer", processor)
        ends = getattr(self.trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
        dtype = str(self.parts[0]["logprobs"].dtype).removeprefix("torch.")
        dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else dtype
        header = {"schema": 1, "framework": "trl", "version": release(), "step": step, "dtype": dtype}
        header |= {"pad_id": tokenizer.pad_token_id, "eos_ids": list(ends), **self.header}
        header |= {} if norm is None else {"grad_norm": norm}
        tensors = joined(self.parts, tokenizer.pad_token_id)
        if header["kind"] == "pairs":
            header["claims"] = {**header["claims"], "beta": self.trainer.beta}
        else:
            header |= self.compared(tensors)
        save_file(tensors, path, {"rlhf": json.dumps(header)})

    def compared(self, tensors):
        """Add the rewards that were compared to `tensors`; return what the header says about them."""
        args, said = self.trainer.args, {}
        numbers, row = tensors.pop("generation"), tensors.pop("row")
        known = [self.generations[int(n)] for n in numbers.unique()]
        size, groups = len(known[0]["rewards"]), int(known[0]["group"].max()) + 1
        index = row + size * numbers.unique(return_inverse=True)[1]
        rewards, penalty = (
            torch.cat([each[name] for each in known]).cpu() for name in ("rewards", "penalty")
        )
        group = torch.cat([each["group"] + i * groups for i, each in enumerate(known)])
        tensors |= {"rewards": rewards[index], "group": group[index]}
        outside = torch.ones_like(rewards).index_fill(0, index, 0)  # the file has no log-probs of these rows
        tensors |= {"all_rewards": rewards - penalty * outside, "all_group": group, "all_index": index}
        if (tools := tensors.pop("tool_mask", None)) is not None:
            tensors["environment_mask"] = tensors["response_mask"] * (1 - tools)
            tensors["response_mask"] = tensors["response_mask"] * tools
        if getattr(args, "entropy_coef", 0) or getattr(args, "use_adaptive_entropy", False):
            del tensors["losses"]  # they contain the entropy bonus
        if "old_logprobs" in tensors:
            said["updates_since_old"] = self.updates - max(each["updates"] for each in known)
        if len(known) == 1:
            said["tokens"] = known[0]["tokens"] * len(self.parts) / args.steps_per_generation
        if rewards.isnan().any():  # no reward function scored the response
            said["claims"] = {**self.header["claims"], "advantage": "given"}
        return said


def joined(parts, pad_id):
    """Return the tensors of all micro-batches, padded to the same width: responses right, prompts left."""
    tensors = {}
    for name in parts[0]:
        found = [part[name] for part in parts]
        width = max(x.shape[-1] for x in found)
        if found[0].dim() == 2:
            gaps = [width - x.shape[1] for x in found]
            sides = [(gap, 0) if "prompt" in name else (0, gap) for gap in gaps]
            pad = partial(torch.nn.functional.pad, value=pad_id if name.endswith("_ids") else 0)
            found = [pad(x, side) for x, side in zip(found, sides, strict=True)]
        tensors[name] = torch.cat(found).contiguous().cpu()
    places = [torch.full((len(part["logprobs"]),), i) for i, part in enumerate(parts)]
    return tensors | {"micro_batch": torch.cat(places)}


def wrap_policy_gradient(trainer, steps):
    """Note rewards, log-probs, losses and the batches of GRPOTrainer and RLOOTrainer."""
    rewards_of, sample = trainer._calculate_rewards, trainer._generate_and_score_completions
    forward, loss_of = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    args, rewards = trainer.args, []
    quiet = []  # log-probs without a gradient, in the order of the calls

    def noted_rewards(*given, **named):
        rewards[:] = [rewards_of(*given, **named)]  # [responses of all processes, reward functions]
        return rewards[0]

    def noted_sample(inputs):
        rewards.clear(), quiet.clear()
        out = sample(inputs)
        if not trainer.model.training:
            return out
        total = (rewards[0] * trainer.reward_weights.to(rewards[0].device)).nansum(1)
        total[rewards[0].isnan().all(1)] = torch.nan
        if bounds := getattr(args, "reward_clip_range", None):
            total = total.clamp(*bounds)
        mask = out["completion_mask"] * out.get("tool_mask", 1)
        penalty = torch.zeros(len(inputs), device=mask.device)
        if "old_logps" in out:  # RLOO, which keeps sums over tokens only
            names = ["old_per_token_logps", "ref_per_token_logps"][: 1 + (args.beta != 0)]
            out |= dict(zip(names, quiet, strict=True))
            if args.beta:
                penalty = args.beta * ((quiet[0] - quiet[1]) * mask).sum(1)
        number = max(steps.generations, default=-1) + 1
        steps.generations[number] = {
            "rewards": total,
            "penalty": trainer.accelerator.gather(penalty),
            "group": torch.arange(len(total)) // trainer.num_generations,
            "tokens": float(trainer.accelerator.gather(mask.sum()).sum()) / args.world_size,
            "updates": steps.updates,
        }
        local, device = len(out["completion_ids"]), out["completion_ids"].device
        rows = torch.arange(local, device=device) + args.process_index * local
        out |= {"audit_generation": torch.full_like(rows, number), "audit_row": rows}
        return out  # TRL shuffles and divides all tensors of the dictionary together

    def noted_forward(*given, **named):
        result = forward(*given, **named)
        if not torch.is_grad_enabled():
            quiet.append(result[0])
        elif steps.recording():
            steps.note_logprobs(result[0])
        return result

    def noted_loss(model, inputs):
        if not steps.recording():
            return loss_of(model, inputs)
        part = {new: inputs[old] for old, new in NAMES.items() if inputs.get(old) is not None}
        if "weights" in part:  # [B, 1] if they are those of sequences
            part["weights"] = part["weights"].expand(part["response_mask"].shape)
        steps.parts.append(part)
        value = loss_of(model, inputs)
        steps.parts[-1]["losses"] = value.detach().reshape(1)
        return value

    trainer._calculate_rewards, trainer._generate_and_score_completions = noted_rewards, noted_sample
    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = noted_forward, noted_loss


def wrap_pairs(trainer, steps):
    """Note rewards, log-probs and losses of OnlineDPOTrainer; rows of the file alternate chosen, rejected."""
    forward, step_of = trainer._forward, trainer.training_step
    rewards_of = trainer._calculate_rewards_from_functions

    def noted_forward(model, prompt_ids, prompt_mask, ids, mask, *rest, **named):
        logprobs = forward(model, prompt_ids, prompt_mask, ids, mask, *rest, **named)
        if steps.recording() and torch.is_grad_enabled():
            steps.note_logprobs(logprobs)
            part = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": ids}
            steps.parts[-1] |= part | {"response_mask": mask.to(torch.uint8)}
        elif steps.recording():
            steps.parts[-1]["ref_logprobs"] = logprobs
        return logprobs

    def noted_rewards(*given, **named):
        rewards = rewards_of(*given, **named)
        if steps.recording():
            steps.parts[-1]["rewards"] = rewards  # the penalty of a missing end token is subtracted in place
        return rewards

    def noted_step(model, inputs, *rest, **named):
        model.train()
        if not steps.recording():
            return step_of(model, inputs, *rest, **named)
        steps.parts.append({})
        value = step_of(model, inputs, *rest, **named)
        part, n = steps.parts.pop(), len(inputs["prompt"])
        better = part["rewards"][:n] >= part["rewards"][n:]
        first = torch.arange(n, device=better.device)
        pairs = torch.stack([first + n * ~better, first + n * better], 1).flatten()
        steps.parts.append({k: x[pairs] for k, x in part.items()} | {"losses": value.reshape(1)})
        return value

    trainer._forward, trainer.training_step = noted_forward, noted_step
    trainer._calculate_rewards_from_functions = noted_rewards
