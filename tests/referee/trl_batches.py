"""Train tiny models with TRL on the CPU, and dump optimizer steps by `docs/hooks/trl.py`.

    .venv-bench/bin/python tests/referee/trl_batches.py <folder> [case ...]

writes `<folder>/<case>/step-<n>.safetensors`, and `expected.json` with the settings of each case and the
term and word of the verdict. Cases of MISTAKES make a historical mistake in the trainer.
"""

import json
import os
import random
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

HOOK = Path(__file__).parents[2] / "docs" / "hooks" / "trl.py"
STEPS = {1, 3}
COMMON = {
    "per_device_train_batch_size": 8,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "seed": 1,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
GROUPS = {"num_generations": 4, "max_completion_length": 16}
ACCUMULATED = {"gradient_accumulation_steps": 2}
TWICE = {"gradient_accumulation_steps": 2, "num_iterations": 2}
GRPO = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, **TWICE},
    "dapo": {"loss_type": "dapo", "beta": 0.0, "scale_rewards": "batch", "epsilon_high": 0.28, **TWICE},
    "dapo_kl": {"loss_type": "dapo", "beta": 0.05, "num_iterations": 2, "gradient_accumulation_steps": 4},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.1, "scale_rewards": "none", "temperature": 0.7}
    | {"num_iterations": 2, "gradient_accumulation_steps": 4},
    "bnpo": {"loss_type": "bnpo", "beta": 0.04, "use_bias_correction_kl": True}
    | TWICE
    | {"num_iterations": 3},
    "cispo": {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 5.0, "scale_rewards": "batch", **TWICE},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0, "epsilon": 0.03}
    | {"epsilon_high": 0.04, "gradient_accumulation_steps": 1, "steps_per_generation": 4},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0, **TWICE},
    "on_policy": {"loss_type": "dapo", "beta": 0.0, **ACCUMULATED},
    "dual_clip": {"loss_type": "grpo", "beta": 0.0, "delta": 1.5, **TWICE},
    "truncated": {"loss_type": "bnpo", "beta": 0.04, "mask_truncated_completions": True, **TWICE},
    "entropy": {"loss_type": "dapo", "beta": 0.0, "entropy_coef": 0.01, **TWICE},
    "generated_often": {"loss_type": "dapo", "beta": 0.0, "steps_per_generation": 1}
    | {"gradient_accumulation_steps": 4},
    "checkpointed": {"loss_type": "grpo", "beta": 0.04, "gradient_checkpointing": True, **TWICE},
    "bfloat16": {"loss_type": "dapo", "beta": 0.04, "bf16": True, **TWICE},
    "warmup": {"loss_type": "grpo", "beta": 0.0, "warmup_steps": 2, "max_grad_norm": 0.0, **TWICE},
}
RLOO = {
    "rloo_halves": {"beta": 0.05, "steps_per_generation": 4, **ACCUMULATED},
    "rloo": {"beta": 0.05, **TWICE},
    "rloo_normalized": {"beta": 0.05, "normalize_advantages": True, "reward_clip_range": (0.0, 3.0), **TWICE},
}
ONLINE_DPO = {
    f"online_{loss_type}_{parts}": {"loss_type": loss_type, "beta": 0.1, "gradient_accumulation_steps": parts}
    for loss_type in ("sigmoid", "ipo")
    for parts in (1, 2, 4)
}
MISTAKES = {  # case: where it is made, term and word of the verdict, whether the verdict needs the weights
    "divided_twice": ("dapo_kl", "reduction", "divided once more", False),
    "clip_inverted": ("dapo", "clipping", "inverted", False),
    "reference_shifted": ("grpo", "ref_logprobs", "shifted", False),
    "one_epsilon": ("dapo", "clipping", "clip_low", False),
    "temperature_missing": ("grpo", "weights", "temperature", True),
    "micro_batches_lost": ("grpo", "gradient", "only micro-batch", True),
}
WITH_MODEL = ("grpo", "dr_grpo", "rloo")


def materials(seed=0):
    """Return a random model, its tokenizer and prompts."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(13))]
    words_to_ids = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words_to_ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_to_ids, padding_side="left", **special)
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = GPTNeoXConfig(vocab_size=16, max_position_embeddings=128, initializer_range=0.12, **shape, **ids)
    draw = random.Random(seed)
    prompts = [" ".join(f"w{draw.randrange(13)}" for _ in range(draw.randrange(2, 7))) for _ in range(64)]
    return GPTNeoXForCausalLM(config), tokenizer, Dataset.from_list([{"prompt": text} for text in prompts])


def reward(completions, **columns):
    """Return rewards that depend on the words and the length."""
    texts = [text.split() for text in completions]
    return [sum(int(w[1:]) % 7 for w in text if w[1:].isdigit()) / 10 + 0.05 * len(text) for text in texts]


def make(case, folder):
    """Return the trainer of a case."""
    model, tokenizer, data = materials()
    start = folder / f"start-{os.environ.get('RANK', 0)}"
    model.save_pretrained(start), tokenizer.save_pretrained(start)
    given = {
        "model": str(start),
        "reward_funcs": reward,
        "train_dataset": data,
        "processing_class": tokenizer,
    }
    settings = COMMON | {"output_dir": str(folder / "trl")}
    if case in ONLINE_DPO:
        settings |= {"max_new_tokens": 16, "max_length": 64, "temperature": 1.0, "missing_eos_penalty": 0.1}
        return OnlineDPOTrainer(args=OnlineDPOConfig(**settings, **ONLINE_DPO[case]), **given)
    if case in RLOO:
        return RLOOTrainer(args=RLOOConfig(**settings, **GROUPS, **RLOO[case]), **given)
    own = GRPO[MISTAKES[case][0] if case in MISTAKES else case]
    return GRPOTrainer(args=GRPOConfig(**{**settings, **GROUPS, **own}), **given)


def mistake(case, trainer):
    """Make a historical mistake in a trainer."""
    loss, step = trainer._compute_loss, trainer.training_step
    forward = trainer._get_per_token_logps_and_entropies

    def divided(model, inputs):
        return loss(model, inputs) / trainer.current_gradient_accumulation_steps

    def inverted(model, inputs):
        smaller = torch.min
        torch.min = lambda a, b=None, **named: smaller(a, **named) if b is None else torch.max(a, b)
        try:
            return loss(model, inputs)
        finally:
            torch.min = smaller

    def shifted(model, *rest, **named):
        logprobs, *others = forward(model, *rest, **named)
        return logprobs.roll(-1, 1) if model is trainer.ref_model else logprobs, *others

    def forgetful(model, *rest):
        model.zero_grad()  # gradients of earlier micro-batches do not reach the optimizer
        return step(model, *rest)

    if case == "divided_twice":
        trainer._compute_loss = divided
    elif case == "clip_inverted":
        trainer._compute_loss = inverted
    elif case == "reference_shifted":
        trainer._get_per_token_logps_and_entropies = shifted
    elif case == "micro_batches_lost":
        trainer.training_step = forgetful
    elif case == "one_epsilon":
        trainer.epsilon_high = trainer.epsilon_low
    elif case == "temperature_missing":  # in the trainer's log-probs, not in the sampler
        trainer.args.temperature = trainer.generation_config.temperature = 0.7


def main():
    """Dump the cases of the command line, or all."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder, *cases = sys.argv[1:]
    hook = SimpleNamespace(**runpy.run_path(str(HOOK)))
    expected = {}
    for case in cases or [*GRPO, *RLOO, *ONLINE_DPO, *MISTAKES]:
        trainer = make(case, Path(folder) / case)
        if case in MISTAKES:
            mistake(case, trainer)
        term, word, weights = MISTAKES[case][1:] if case in MISTAKES else (None, None, case in WITH_MODEL)
        if case in ONLINE_DPO and not case.endswith("_1"):
            term, word = "reduction", f"factor {case[-1]}"
        hook.dump(trainer, Path(folder) / case, steps=STEPS, model=weights)
        trainer.train()
        own = {**GRPO, **RLOO, **ONLINE_DPO}[MISTAKES[case][0] if case in MISTAKES else case]
        expected[case] = {"settings": own, "term": term, "word": word, "model": weights}
    (Path(folder) / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
