"""Measure TRL in its own environment (requirements/bench.txt). See also theirs_ppo.py and theirs_async.py.

python -m benchmarks.against_trl.theirs <case as JSON> <folder of materials> <output file> [--released]

These settings make TRL faster than its defaults: no gradient checkpointing (on by default), no logging, no
saving; on a CPU float32 (default: bfloat16). The optimizer is the default, fused AdamW. `tune` removes
two disadvantages of TRL on a CPU; `--released` measures TRL without `tune`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from benchmarks.against_trl.meter import Meter
from benchmarks.against_trl.work import EPISODES, WORKS, Case


def tune() -> None:
    """Speed up RLOO and GRPO on a CPU, where TRL's fused output head has no Triton kernel.

    Without a kernel the head also computes logits of the prompt, which are discarded, and its tile size is
    one for GPUs. Here the head skips the prompt and uses the tile size of this project.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert utils._use_triton is chunked_logprob._use_triton and chunked_logprob.TOKEN_CHUNK_SIZE
    utils._use_triton = lambda device: True  # skips the prompt; the kernels check the device themselves
    chunked_logprob.TOKEN_CHUNK_SIZE = 2**26 // (4 * utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def settings(case: Case, folder: str) -> dict[str, Any]:
    """Return the settings of all trainers."""
    return {
        "output_dir": folder,
        "max_steps": case.updates,
        "gradient_accumulation_steps": EPISODES // WORKS[case.work].micro_batch,
        "learning_rate": case.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": case.temperature,
        "disable_dropout": True,
        "gradient_checkpointing": False,
        "bf16": case.gpu,
        "use_cpu": not case.gpu,
        "tf32": True if case.gpu else None,  # products outside of autocast
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **({"use_vllm": True, "vllm_mode": "colocate"} if case.sampler == "vllm" else {}),
    }


def share_process() -> None:
    """Let vLLM and the policy run in one process.

    For GPT-NeoX, vLLM 0.32 runs the class of transformers and replaces the `__call__` of this class, which
    reads an attribute that only models of vLLM have. The attribute of the class is that of other models.
    """
    transformers.GPTNeoXModel.do_not_compile = True


def new_policy(case: Case, materials: Path) -> tuple[Any, Any]:
    """Return the policy and its tokenizer."""
    policy = case.policy(materials)
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), tokenizer


def new_reward(case: Case, materials: Path, trained: bool = False) -> Any:
    """Return the reward model; on a GPU in bfloat16, unless it is trained."""
    dtype = torch.bfloat16 if case.gpu and not trained else torch.float32
    return AutoModelForSequenceClassification.from_pretrained(case.reward(materials), dtype=dtype)


def texts(case: Case, materials: Path) -> list[str]:
    """Return the prompts of an update."""
    return [json.loads(line)["query"] for line in (case.data(materials) / "train.jsonl").open()]


def build(case: Case, materials: Path, folder: str) -> Any:
    """Return the trainer of a case."""
    work = WORKS[case.work]
    model, tokenizer = new_policy(case, materials)
    parts: dict[str, Any] = {
        "model": model,
        "reward_funcs": new_reward(case, materials),
        "train_dataset": Dataset.from_dict({"prompt": texts(case, materials) * case.updates}),
        "processing_class": tokenizer,
        "reward_processing_classes": AutoTokenizer.from_pretrained(case.reward(materials)),
    }
    common = settings(case, folder)
    if case.algo == "dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        config = OnlineDPOConfig(
            **common,
            per_device_train_batch_size=work.micro_batch // case.samples,  # in prompts
            train_sampling_strategy="sequential",
            max_new_tokens=work.response,
            max_length=work.longest_prompt + work.response,
            beta=0.1,
        )
        return OnlineDPOTrainer(**parts, args=config)
    common |= {
        "per_device_train_batch_size": work.micro_batch,
        "num_generations": case.samples,
        "max_completion_length": work.response,
        "shuffle_dataset": False,
    }
    if case.algo == "rloo":
        return trl.RLOOTrainer(**parts, args=trl.RLOOConfig(**common, beta=0.05))
    config = trl.GRPOConfig(**common, beta=0.04, loss_type="grpo", scale_rewards="group")
    return trl.GRPOTrainer(**parts, args=config)


def watch(trainer: Any, meter: Meter) -> None:
    """Let `meter` measure the phases and count samples and micro-batches."""
    dpo = not isinstance(trainer, (trl.RLOOTrainer, trl.GRPOTrainer))
    vllm = getattr(trainer, "use_vllm", False)
    if vllm:
        count_vllm(trainer.llm if dpo else trainer.vllm_generation.llm, meter)
    else:
        count_samples(trainer.model, trainer.processing_class, meter)
    meter.wrap(trainer, "_generate_vllm" if vllm and dpo else "_generate", "generate")
    meter.wrap(trainer, "_calculate_rewards_from_functions" if dpo else "_calculate_rewards", "score")
    # without gradient: the reference, and the policy before the update if the trainer uses it
    forward = "_forward" if dpo else "_get_per_token_logps_and_entropies"
    meter.wrap(trainer, forward, "reference", when=lambda: not torch.is_grad_enabled())
    meter.wrap(trainer, "training_step", seen=lambda _: {"micro_batches": 1})


def count_samples(policy: Any, tokenizer: Any, meter: Meter) -> None:
    """Count the prompts and responses of `policy.generate`."""
    generate = policy.generate
    ends = torch.tensor([tokenizer.pad_token_id, tokenizer.eos_token_id])

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        ids = made if isinstance(made, torch.Tensor) else made.sequences
        responses = ids[:, kwargs["input_ids"].shape[1] :]
        meter.counts["episodes"] += len(responses)
        meter.counts["prompt_tokens"] += int(kwargs["attention_mask"].sum())
        meter.counts["response_tokens"] += int((~torch.isin(responses.cpu(), ends)).sum())
        return made

    policy.generate = counted


def count_vllm(llm: Any, meter: Meter) -> None:
    """Count the prompts and responses of vLLM's `generate`."""

    def seen(outputs: Any) -> dict[str, int]:
        made = [(len(each.prompt_token_ids), len(one.token_ids)) for each in outputs for one in each.outputs]
        prompts, responses = (sum(lengths) for lengths in zip(*made, strict=True))
        return {"episodes": len(made), "prompt_tokens": prompts, "response_tokens": responses}

    meter.wrap(llm, "generate", seen=seen)


class Moments(TrainerCallback):
    """Reports the start of training, optimizer steps and ends of updates to the meter."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Start measuring: models are loaded and the optimizer exists."""
        inner = getattr(optimizer, "optimizer", optimizer)  # the torch optimizer inside the one of accelerate
        inner.register_step_post_hook(lambda *_: self.meter.counts.update({"optimizer_steps": 1}))
        self.meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End an update."""
        self.meter.update_ended()


def carry_out(
    case: Case, materials: Path, build: Callable[..., Any], watch: Callable[..., None], meter: Meter
) -> None:
    """Build the trainer, attach the meter with `watch`, and train."""
    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(case, materials, folder)
        watch(trainer, meter)
        trainer.add_callback(Moments(meter))
        trainer.train()


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    return {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def main(build: Callable[..., Any], watch: Callable[..., None], **more: str) -> None:
    """Parse the command line, measure, and write the figures; `more`: versions of more libraries."""
    case, materials, out = Case.load(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    meter = Meter(case.warmup, case.gpu)
    carry_out(case, materials, build, watch, meter)
    out.write_text(json.dumps({**meter.figures(), "versions": {**versions(), **more}}))


if __name__ == "__main__":
    if Case.load(sys.argv[1]).sampler == "vllm":
        share_process()
    if not ("--released" in sys.argv or Case.load(sys.argv[1]).gpu):
        tune()
    main(build, watch)
