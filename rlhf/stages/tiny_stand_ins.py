"""Tiny stand-ins for models and data of the hub (`debug=tiny`): every recipe runs offline in seconds.

The data have the columns and splits of the data sets that they replace, so a run uses the same code. The
policy is trained on the data for a second, until the policy ends its responses and is sometimes correct.
Reward models are random. Metrics of such a run have no meaning.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.assembly.parts import make as make_part
from rlhf.config.schema import values
from rlhf.config.scorer import RewardModelScorerConfig, scorers
from rlhf.core.console import say
from rlhf.core.files import component, digest
from rlhf.models.folder import is_local
from rlhf.stages.artefacts import made_once

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.config.task import TaskConfig

Row = dict[str, Any]
_Pair = tuple[str, str]  # prompt and reference
_SIZES = {"train": 64, "validation": 32}  # rows per split
_KNOWN_ROWS = 512  # rows of a user's data whose words get tokens
WORDS = r" ?\w+|\s| ?#+| ?[^\w\s]"  # regular expression of a token
_LLAMAS = ("rho_1b", "llama_8b")  # model options with the Llama architecture; others are GPT-NeoX
_POSITIONS = 8192  # maximum sequence length, longer than the sequences of any recipe
STEPS, LEARNING_RATE = 60, 1e-2  # for the training of the policy


def complete(cfg: Config) -> Config:
    """Return `cfg` with the paths of stand-ins for the models and data that `cfg` does not name as folders.

    Stand-ins that do not exist are made first.
    """
    folder = stand_ins(cfg)
    cfg = copy.deepcopy(cfg)
    if (folder / "data").is_dir():  # the config names no folder of data
        cfg.task.path = str(folder / "data")
        cfg.task.preferences_path = cfg.task.preferences_path or str(folder / "pairs")
    model = cfg.model
    model.base, model.policy = model.base or str(folder / "policy"), model.policy or str(folder / "policy")
    model.reward = model.reward or str(folder / "reward")
    for _, scorer in scorers(cfg):
        if isinstance(scorer, RewardModelScorerConfig) and scorer.path and not is_local(scorer.path):
            scorer.path = str(folder / "judge")
    return cfg


def stand_ins(cfg: Config) -> Path:
    """Return the folder of the stand-ins for the task and the model of `cfg`; make a missing folder first."""
    digits = digest([values(cfg.task), cfg.model.name in _LLAMAS])
    folder = Path(cfg.cache_dir) / component(f"stand-ins-{cfg.task.name}-{digits}")

    def write(scratch: Path) -> None:
        say(f"making tiny stand-ins for models and data of the hub (once; kept in {folder})", style="bold")
        make(cfg, scratch)

    return made_once(folder, write)


def make(cfg: Config, folder: Path) -> None:
    """Write `data`, `pairs`, and the models `policy`, `reward` and `judge`, which share a tokenizer."""
    task = copy.copy(cfg.task)
    made = task.path is None and task.name in ROWS
    if made:
        task.path = str(folder / "data")
        _write_splits(folder / "data", ROWS[task.name], task.validation_split)
    pairs = read(task)
    if made:
        _write_splits(folder / "pairs", lambda rng: preference(rng, pairs))
    tokenizer = _make_tokenizer([text for pair in pairs for text in pair])
    config = architecture(cfg.model.name in _LLAMAS, tokenizer)
    _make_policy(config, tokenizer, pairs, folder / "policy")
    for seed, name in enumerate(("reward", "judge")):
        _make_reward_model(config, tokenizer, seed, folder / name)


def _tldr_row(rng: random.Random) -> Row:
    """Return a post and its summary."""
    who, where, how = (
        rng.choice(("friend", "sister", "boss")),
        rng.choice(("paris", "rome")),
        rng.choice(_MOODS),
    )
    post = f"My {who} moved to {where} last week. I am {how} about it."
    return {
        "query": f"SUBREDDIT: r/advice\n\nTITLE: My {who}\n\nPOST: {post}\n\nTL;DR:",
        "reference_response": f" my {who} left for {where}, I am {how}.<|endoftext|>",
    }


def _gsm8k_row(rng: random.Random) -> Row:
    """Return a problem and its worked answer."""
    a, b = rng.randint(1, 4), rng.randint(1, 4)
    return {
        "question": f"Anna has {a} apples and buys {b} more. How many has she now?",
        "answer": f"{a} + {b} = {a + b}\n#### {a + b}",
    }


def _chat_row(rng: random.Random) -> Row:
    """Return a dialogue, with or without a system prompt."""
    what, how = rng.choice(("tea", "bread", "soup")), rng.choice(_MOODS)
    turns = [
        ("user", f"I am {how}. What do I need for {what}?"),
        ("assistant", f"Water, and some time for {what}."),
    ]
    if rng.random() < 0.5:
        turns.insert(0, ("system", "You are a cook."))
    return {
        "prompt": turns[-2][1],
        "prompt_id": f"{rng.getrandbits(64):016x}",
        "messages": [{"role": role, "content": content} for role, content in turns],
        "category": "Open QA",
    }


_MOODS = ("sad", "happy", "tired")
ROWS: dict[str, Callable[[random.Random], Row]] = {"tldr": _tldr_row, "gsm8k": _gsm8k_row, "chat": _chat_row}


def preference(rng: random.Random, pairs: list[_Pair]) -> Row:
    """Return a pair: the reference of a prompt is chosen, the reference of another prompt is rejected."""
    prompt, chosen = rng.choice(pairs)
    rejected = rng.choice([answer for _, answer in pairs if answer != chosen])
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _write_splits(folder: Path, row: Callable[[random.Random], Row], validation: str = "validation") -> None:
    """Write a file of rows for each split; the file of the validation split has the name `validation`."""
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("validation", validation)):
        rng = random.Random(split)
        lines = (json.dumps(row(rng)) for _ in range(_SIZES[split]))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(task: TaskConfig) -> list[_Pair]:
    """Return the first training examples of the task as pairs of prompt and reference."""
    rows = make_part(task).prompts("train")
    rows = rows.select(range(min(_KNOWN_ROWS, len(rows))))
    if "messages" in rows.column_names:
        from rlhf.core.dialogues import Dialogues

        dialogues = Dialogues(_make_tokenizer([]))  # the chat template needs no vocabulary
        written = [dialogues.write(row["messages"], [row["reference_response"]]) for row in rows]
        answers = [(prompt, answer) for prompt, (answer,) in written]
    else:
        answers = list(zip(rows["query"], rows["reference_response"], strict=True))
    # Without references, the policy learns to repeat words of the prompt, so that it samples some words.
    return [(prompt, answer or " ".join(["", *prompt.split()[:4]])) for prompt, answer in answers]


def _make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of `texts`, and with the plain chat template."""
    from rlhf.core.chat_format import PLAIN, set_template
    from rlhf.tasks.word_tokenizer import SPECIAL, word_tokenizer

    words = {word for text in texts for word in re.findall(WORDS, text)}
    tokenizer = word_tokenizer(sorted(words - set(SPECIAL)), WORDS)
    set_template(tokenizer, PLAIN)
    return tokenizer


def architecture(llama: bool, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Return the config of a model of about 100,000 parameters, with a head size that vLLM supports."""
    from transformers import GPTNeoXConfig, LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": _POSITIONS,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaConfig(**sizes, num_key_value_heads=1) if llama else GPTNeoXConfig(**sizes)


def _make_policy(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, pairs: list[_Pair], folder: Path
) -> None:
    """Train a causal LM on `pairs` for a few steps, and write it with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    texts = [prompt + answer.removesuffix(tokenizer.eos_token) for prompt, answer in pairs[: _SIZES["train"]]]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_reward_model(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path
) -> None:
    """Write a sequence classifier with random weights, and the tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
