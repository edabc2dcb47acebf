"""Create the models (random weights), tokenizer and prompts that both sides load."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

from benchmarks.against_trl.work import SHAPES, Case, Shape

SPECIAL = ("<pad>", "<eos>", "<unk>")


def make(case: Case, folder: Path) -> None:
    """Create the models and prompts of the case that are missing in `folder`."""
    transformers.utils.logging.disable_progress_bar()
    shape = SHAPES[case.model]
    if not (case.reward(folder) / "config.json").exists():
        torch.manual_seed(0)
        tokenizer = new_tokenizer(shape)
        policy, reward = new_policy(shape), new_reward(shape)
        for model, place in ((policy, case.policy(folder)), (reward, case.reward(folder))):
            tokenizer.save_pretrained(place)
            model.save_pretrained(place)
    if not (case.data(folder) / "validation.jsonl").exists():
        case.data(folder).mkdir(parents=True)
        rows = [{"query": text, "reference_response": ""} for text in texts(case, shape)]
        for split in ("train", "validation"):
            file = case.data(folder) / f"{split}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def new_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word (`w3` has id 3).

    Decoding and tokenizing again gives the same ids; TRL does this before scoring.
    """
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), shape.vocabulary))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def config(shape: Shape) -> GPTNeoXConfig:
    """Return the model configuration, without dropout."""
    return GPTNeoXConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden_size,
        max_position_embeddings=shape.context,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        classifier_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        num_labels=1,
    )


def new_policy(shape: Shape) -> GPTNeoXForCausalLM:
    """Return a causal LM that never samples a special token, so that all responses have full length.

    The weights guarantee this at no cost to either side: the last norm outputs 1 in the last dimension, and
    the output embeddings turn this 1 into a logit of -100 for special tokens and 0 for all others.
    """
    model = GPTNeoXForCausalLM(config(shape))
    with torch.no_grad():
        norm, head = model.base_model.final_layer_norm, model.get_output_embeddings().weight
        norm.weight[-1], norm.bias[-1] = 0.0, 1.0
        head[:, -1] = 0.0
        head[: len(SPECIAL), -1] = -100.0
    return model


def new_reward(shape: Shape) -> GPTNeoXForSequenceClassification:
    """Return a sequence classifier with one label. Its scores differ, so no pair is a tie."""
    model = GPTNeoXForSequenceClassification(config(shape))
    torch.nn.init.normal_(model.get_submodule("score").weight, std=(shape.hidden_size + 1) ** -0.5)
    return model


def texts(case: Case, shape: Shape) -> list[str]:
    """Return the prompts of an update in random order. Each ends with a space, before the response."""
    draw = Random(0)
    lengths = case.lengths
    draw.shuffle(lengths)
    words = range(len(SPECIAL), shape.vocabulary)
    return [" ".join(f"w{i}" for i in draw.choices(words, k=length)) + " " for length in lengths]
