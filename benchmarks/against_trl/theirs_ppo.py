"""TRL's PPO, in an environment of its own (requirements/bench-ppo.txt): TRL 1.12 is the last that has it.

python -m benchmarks.against_trl.theirs_ppo <case as json> <folder of materials> <file>

It has a loop of its own, and functions of its module do what the other trainers have methods for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.against_trl.meter import Meter
from benchmarks.against_trl.theirs import count_samples, main, new_policy, new_reward, settings, texts
from benchmarks.against_trl.work import EPISODES, WORKS, Case


def build(case: Case, materials: Path, folder: str) -> PPOTrainer:
    """The trainer. Its value model starts as the reward model, as ours does."""
    work = WORKS[case.work]
    model, tokenizer = new_policy(case, materials)
    rows = Dataset.from_dict({"input_ids": tokenizer(texts(case, materials))["input_ids"]})
    common = settings(case, folder)
    del common["disable_dropout"]  # it always does
    config = PPOConfig(
        **common,
        total_episodes=EPISODES * case.updates,
        per_device_train_batch_size=work.micro_batch,
        local_rollout_forward_batch_size=EPISODES,
        num_mini_batches=1,
        num_ppo_epochs=1,
        num_sample_generations=0,
        response_length=work.response,
        stop_token="eos",
        kl_coef=0.05,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=model,
        ref_model=None,  # a copy of the policy
        reward_model=new_reward(case, materials),
        value_model=new_reward(case, materials, trained=True),
        train_dataset=rows,
    )
    # Not its own loader, which shuffles, and at whose end accelerate makes a step of every micro-batch.
    trainer.dataloader = DataLoader(rows, batch_size=EPISODES, collate_fn=trainer.data_collator)
    return trainer


def watch(trainer: PPOTrainer, meter: Meter) -> None:
    """Charge phases, count samples and micro-batches; old values are `reference`, as with ours."""
    count_samples(trainer.policy_model, trainer.processing_class, meter)
    meter.wrap(ppo_trainer, "batch_generation", "generate")
    get_reward = ppo_trainer.get_reward

    def scores_or_values(model: Any, *rest: Any) -> Any:
        with meter.charge("score" if model is trainer.reward_model else "reference"):
            return get_reward(model, *rest)

    ppo_trainer.get_reward = scores_or_values

    def without_gradient() -> bool:
        return not torch.is_grad_enabled()

    def micro_batch(_: Any) -> dict[str, int]:
        return {"micro_batches": int(torch.is_grad_enabled())}

    meter.wrap(ppo_trainer, "forward", "reference", when=without_gradient, seen=micro_batch)
    meter.wrap(ppo_trainer, "selective_log_softmax", "reference", when=without_gradient)


if __name__ == "__main__":
    main(build, watch)
