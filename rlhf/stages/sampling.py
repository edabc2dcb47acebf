"""Samples of the final model of a run, for prompts that are not in the data of its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.assembly.device import build_device
from rlhf.assembly.generator import build_sampler
from rlhf.assembly.tokenizer import build_tokenizer
from rlhf.config.algo import Trains
from rlhf.config.model import LoRAConfig
from rlhf.core.batch import Sampling
from rlhf.core.encoding import encode_prompts
from rlhf.core.errors import UserError
from rlhf.scorers.scorer import response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config

Prompt = str | Sequence[Mapping[str, str]]


def sample(
    cfg: Config,
    model: Path,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    temperature: float,
    response_length: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Return one row per response; see `rlhf.experiment.Experiment.sample`.

    Raises:
        UserError: the model is a reward model, or an argument is invalid.
    """
    if cfg.algo.trains is Trains.reward:
        raise UserError(f"the run must train a language model (a reward model writes no text), got {model}")
    for name, value, least in (("samples", samples, 1), ("response_length", response_length, 1)):
        if value < least:
            raise UserError(f"{name} must be >= {least}, got {value}; set {name}={least}")
    if not temperature > 0:
        raise UserError(f"temperature must be > 0, got {temperature}; set temperature=0.01 (almost greedy)")
    if not prompts or isinstance(prompts, str):
        raise UserError(f"prompts must be a list of at least one prompt, got {prompts!r}; write [prompt]")
    cfg = replace(
        cfg, model=replace(cfg.model, base=str(model), policy=str(model), tokenizer=None, lora=LoRAConfig())
    )
    tokenizer = build_tokenizer(cfg)
    generator = build_sampler(cfg, tokenizer, build_device(cfg), seed)
    rows: list[dict[str, Any]] = []
    for formatted in (False, True):
        places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) is not formatted]
        if not places:
            continue
        texts = [text_of(prompts[i], tokenizer) for i in places]
        batch = encode_prompts(torch.tensor(places), texts, [""] * len(texts), tokenizer, formatted)
        asked = Sampling(
            samples=samples,
            temperature=temperature,
            response_length=response_length,
            purpose="sample",
            request=0,
        )
        rollouts = generator.submit(batch, asked).result()
        for place, text, responses, ended in zip(
            places, texts, response_texts(rollouts, tokenizer), rollouts.ended.tolist(), strict=True
        ):
            rows += [
                {"prompt": place, "text": text, "response": response, "ended": end}
                for response, end in zip(responses, ended, strict=True)
            ]
    yield from sorted(rows, key=lambda row: row["prompt"])


def text_of(prompt: Prompt, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a prompt as text; the chat template formats a conversation.

    Raises:
        UserError: the prompt is a conversation, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise UserError(
            "prompts must be texts (the tokenizer of this model has no chat template), got a conversation; "
            "pass texts in the format of the training prompts"
        )
    messages = [dict(message) for message in prompt]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
