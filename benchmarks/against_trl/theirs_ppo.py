"""Measure PPO of TRL in its own environment (requirements/bench-ppo.txt). TRL 1.12 is the last with PPO.

python -m benchmarks.against_trl.theirs_ppo <case as JSON> <folder of materials> <output file>

The PPO trainer has its own loop and uses functions of its module instead of methods.
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
    """Return the trainer. Its value model starts as the reward model, as in this project."""
    work = WORKS[case.work]
    model, tokenizer = new_policy(case, materials)
    rows = Dataset.from_dict({"input_ids": tokenizer(texts(case, materials))["input_ids"]})
    common = settings(case, folder)
    del common["disable_dropout"]  # PPO has no such setting: dropout is always off
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
    # The default loader shuffles, and at its end accelerate makes an optimizer step per micro-batch.
    trainer.dataloader = DataLoader(rows, batch_size=EPISODES, collate_fn=trainer.data_collator)
    return trainer


def watch(trainer: PPOTrainer, meter: Meter) -> None:
    """Let `meter` measure the phases and count samples and micro-batches.

    Old values belong to the phase `reference`, as in this project.
    """
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
