"""Dump optimizer steps that verl's own functions compute, by `docs/hooks/verl.py`.

    .venv-audit/bin/python tests/referee/verl_batches.py <folder> [case ...]

writes `<folder>/<case>/step-<n>.safetensors`, and `expected.json` with the settings of each case and the
term and word of the verdict. Log-probs are those of a table of logits in place of a model. Advantages,
losses, KL, `ppo_loss`, ActorConfig and `BaseEngine.train_batch` are verl's.
"""

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.utils import losses

HOOK = Path(__file__).parents[2] / "docs" / "hooks" / "verl.py"
PROMPTS, SAMPLES, TOKENS, WORDS, MICRO_BATCHES, EOS = 8, 4, 24, 13, 4, 1
SETTINGS = ("estimator", "loss_mode", "loss_agg_mode", "kl_loss_coef", "kl_loss_type", "more")
CASES = {
    "grpo": ("grpo", "vanilla", "token-mean", 0.0, "low_var_kl", {}),
    "grpo_kl": ("grpo", "vanilla", "token-mean", 0.05, "low_var_kl", {"clip_ratio_high": 0.28}),
    "grpo_sequence": ("grpo", "vanilla", "seq-mean-token-mean", 0.01, "mse", {}),
    "grpo_sum": ("grpo", "vanilla", "seq-mean-token-sum", 0.0, "low_var_kl", {"clip_ratio_c": 1.5}),
    "dr_grpo": ("dr_grpo", "vanilla", "seq-mean-token-sum-norm", 0.01, "kl", {"loss_scale_factor": TOKENS}),
    "k3_straight": ("grpo", "vanilla", "token-mean", 0.05, "k3+", {}),
    "rloo": ("rloo", "vanilla", "token-mean", 0.0, "low_var_kl", {}),
    "gspo": ("grpo", "gspo", "seq-mean-token-mean", 0.0, "low_var_kl", {}),
    "gspo_token": ("grpo", "gspo", "token-mean", 0.0, "low_var_kl", {}),
    "cispo": ("grpo", "cispo", "token-mean", 0.0, "low_var_kl", {"clip_ratio_high": 0.3}),
}
CLIPS = {"vanilla": (0.2, 0.2), "gspo": (0.03, 0.04), "cispo": (1.0, 4.0)}


# before verl counted the tokens of the step, each micro-batch had its own mean (PR#5641)
MISTAKES = {"means_of_means": ("grpo", "reduction", "of each micro-batch")}


class Engine(BaseEngine):
    """An engine whose model is a table of logits [B, T, V]."""

    def __init__(self, table, local):
        self.table, self.local = table, local

    def optimizer_zero_grad(self):
        self.table.grad = None

    def optimizer_step(self):
        with torch.no_grad():
            self.table -= 30.0 * self.table.grad
        return float(self.table.grad.norm())

    def is_mp_src_rank_with_outputs(self):
        return False

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        tokens = None if self.local else int(data["response_mask"].values().sum())
        size, names = len(data) // MICRO_BATCHES, list(data.keys())
        for i in range(MICRO_BATCHES):
            rows = range(i * size, (i + 1) * size)
            part = TensorDict({name: cut(data[name], rows) for name in names}, [size])
            for name, value in (
                ("dp_size", 1),
                ("batch_num_tokens", tokens),
                ("global_batch_size", len(data)),
            ):
                tensordict_utils.assign_non_tensor(part, **{name: value})
            found = logprobs(self.table[rows.start : rows.stop], data["padded"][rows.start : rows.stop])
            whole = [torch.cat([x[:n], x.new_zeros(1)]) for x, n in zip(found, lengths(part), strict=True)]
            whole = [torch.cat([x.new_zeros(1), x]) for x in whole]  # two prompt tokens: shifted by one
            loss, _ = loss_function(model_output={"log_probs": nested(whole)}, data=part)
            (loss * (size / len(data)) if self.local else loss).backward()


def logprobs(logits, ids):
    return torch.gather(logits.log_softmax(-1), 2, ids[..., None])[..., 0]


def lengths(data):
    return data["responses"].offsets().diff().tolist()


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def cut(x, rows):
    return nested([x[i] for i in rows]) if x.is_nested else x[rows.start : rows.stop]


def make(case, seed=0):
    """Return engine, data and configuration of a case."""
    estimator, mode, agg, coef, kl, more = CASES[case]
    torch.manual_seed(seed)
    count = PROMPTS * SAMPLES
    table = torch.randn(count, TOKENS, WORDS)
    table[..., EOS] -= 0.5
    ids = torch.distributions.Categorical(logits=table).sample()
    ends = (ids == EOS).long()
    mask = (ends.cumsum(1) - ends) == 0
    old = logprobs(table, ids)
    ref = logprobs(table + 0.3 * torch.randn_like(table), ids)
    now = (table + 0.3 * torch.randn_like(table)).requires_grad_()
    rewards = torch.randn(count)
    group = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    scores = torch.zeros(count, TOKENS).index_fill_(1, torch.tensor([0]), 1.0) * rewards[:, None]
    named = {"token_level_rewards": scores, "response_mask": mask.float(), "index": group.numpy()}
    if estimator == "rloo":
        advantages, _ = core_algos.compute_rloo_outcome_advantage(**named)
    else:
        scaled = {"norm_adv_by_std_in_grpo": estimator == "grpo"}
        advantages, _ = core_algos.compute_grpo_outcome_advantage(**named, **scaled)
    count_of = mask.sum(1).tolist()
    rows = {"responses": ids, "response_mask": mask.long(), "old_log_probs": old, "ref_log_prob": ref}
    data = {
        name: nested([row[:n] for row, n in zip(x, count_of, strict=True)])
        for name, x in {**rows, "advantages": advantages}.items()
    }
    data["prompts"] = nested([torch.zeros(2, dtype=torch.long)] * count)
    data |= {"rewards": rewards, "group": group, "padded": ids}
    low, high = CLIPS[mode]
    settings = {
        "strategy": "fsdp",
        "rollout_n": SAMPLES,
        "ppo_micro_batch_size_per_gpu": count // MICRO_BATCHES,
    }
    settings |= {"clip_ratio_low": low, "clip_ratio_high": high, "loss_agg_mode": agg, "kl_loss_type": kl}
    settings |= {
        "policy_loss": PolicyLossConfig(loss_mode=mode),
        "use_kl_loss": coef > 0,
        "kl_loss_coef": coef,
    }
    config = ActorConfig(**{**settings, **more})
    algorithm = SimpleNamespace(adv_estimator="rloo" if estimator == "rloo" else "grpo")
    algorithm.norm_adv_by_std_in_grpo = estimator == "grpo"
    return now, TensorDict(data, [count]), config, algorithm


def main():
    """Dump the cases of the command line, or all."""
    folder, *cases = sys.argv[1:]
    hook, expected = SimpleNamespace(**runpy.run_path(str(HOOK))), {}
    originals = dict(core_algos.POLICY_LOSS_REGISTRY), losses.kl_penalty, losses.no_padding_2_padding
    train = BaseEngine.train_batch
    for case in cases or [*CASES, *MISTAKES]:
        own, term, word = MISTAKES.get(case, (case, None, None))
        table, data, config, algorithm = make(own)
        core_algos.POLICY_LOSS_REGISTRY.update(originals[0])
        losses.kl_penalty, losses.no_padding_2_padding = originals[1:]
        BaseEngine.train_batch = train
        hook.install(Path(folder) / case, {0, 1}, algorithm, eos_ids=[EOS])
        engine = Engine(table, local=case in MISTAKES)
        for _ in range(2):
            engine.train_batch(data, partial(losses.ppo_loss, config=config))
        settings = dict(zip(SETTINGS, CASES[own], strict=True))
        expected[case] = {"settings": settings, "term": term, "word": word, "model": False}
    (Path(folder) / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
