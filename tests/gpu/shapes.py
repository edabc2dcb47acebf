"""Models that are created from configs: tiny models of four kinds, and the shape of Pythia 410M."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks.against_trl.materials import make, new_policy
from benchmarks.against_trl.work import SHAPES, Case, Shape, cases
from rlhf.core.batch import Batch, Prompts, Rollouts
from tests.tiny_models import VOCABULARY, tiny_lm, tiny_tokenizer

KINDS = ("llama", "gpt_neox", "qwen2", "qwen3")
HEADS = {
    "hidden_size": 128,
    "num_attention_heads": 2,
}  # heads of size 64, which every attention kernel supports
PAD = 0


def tiny(kind: str, **settings: object) -> PreTrainedModel:
    """Return a tiny causal LM with random weights, the same in every process."""
    if kind != "qwen3":
        return tiny_lm(kind, **settings)
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
    shape |= {"initializer_range": 0.2, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 1, **settings}
    shape["head_dim"] = int(shape["hidden_size"]) // int(shape["num_attention_heads"])
    return AutoModelForCausalLM.from_config(Qwen3Config(**shape)).eval()


def shape_of(gpu: bool) -> Shape:
    """Return the shape of Pythia 410M on a GPU, and the shape of `model=pythia` on a CPU."""
    return SHAPES["410m" if gpu else "nano"]


def large(gpu: bool, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal LM of `shape_of(gpu)` with random weights, which never samples the end token."""
    with torch.device(device):
        model = new_policy(shape_of(gpu))
    return model.to(dtype).eval()


def case_of(gpu: bool, materials: Path) -> Case:
    """Return the case of the benchmark with `shape_of(gpu)`, whose models are created in `materials`."""
    (case,) = cases(["tldr-410m" if gpu else "short-nano"], ["dpo"], [8 if gpu else 1], gpu)
    make(case, materials)
    return case


def write_folder(model: PreTrainedModel, folder: Path) -> str:
    """Write config and tokenizer of a model to a folder, without weights; return the folder."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def prompts(count: int, length: int, vocabulary: int = VOCABULARY, full: bool = False) -> Prompts:
    """Return random prompts of different lengths, or of full length."""
    draw = torch.Generator().manual_seed(3)
    starts = torch.randint(0, length - 1, (count, 1), generator=draw)
    mask = torch.arange(length) >= (torch.zeros_like(starts) if full else starts)
    ids = torch.randint(3, vocabulary, (count, length), generator=draw)
    return Prompts(
        index=torch.arange(count),
        texts=[""] * count,
        references=[""] * count,
        prompt_ids=ids.masked_fill(~mask, PAD),
        prompt_mask=mask,
    )


def batch(count: int, samples: int, prompt: int, response: int, vocabulary: int) -> Batch:
    """Return a scored batch of `count` prompts and `samples` responses each, all of full length."""
    given = prompts(count, prompt, vocabulary, full=True)
    draw = torch.Generator().manual_seed(4)
    shape = (count, samples, response)
    rollouts = given.extend(
        Rollouts,
        response_ids=torch.randint(3, vocabulary, shape, generator=draw),
        response_mask=torch.ones(shape, dtype=torch.bool),
        behaviour_logprobs=torch.full(shape, -1.0),
        ended=torch.ones(count, samples, dtype=torch.bool),
    )
    return rollouts.extend(Batch, scores=torch.rand(count, samples, generator=draw))
