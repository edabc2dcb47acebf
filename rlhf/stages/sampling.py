"""Samples of the final model of a run, for prompts that are not in the data of its task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.assembly.models import build_device, build_tokenizer
from rlhf.assembly.training import build_sampler
from rlhf.config.algo import Trains
from rlhf.config.model import LoRAConfig
from rlhf.core.batch import Sampling
from rlhf.core.chat_format import render, set_format
from rlhf.core.control import control_tokens, quoted
from rlhf.core.encoding import encode_prompts
from rlhf.core.errors import UserError
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import response_texts
from rlhf.stages.quiet import quieten_libraries
from rlhf.tasks.summary import altered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config

log = logging.getLogger(__name__)
Prompt = str | Sequence[Mapping[str, str]]


class Sampler:
    """A model that answers prompts; its weights are loaded once.

    Args:
        cfg: the config of the run that trained the model.
        model: folder or hub name of the model.
        seed: seed of the samples.
        chat: whether prompts are conversations although the task of `cfg` has texts: a response then ends as
            a turn of the chat template ends. None: they are if the tokenizer has a chat template.

    Attributes:
        tokenizer: tokenizer of the model.
        chat: whether prompts are conversations.

    Raises:
        UserError: the model is a reward model, or its tokenizer cannot be used.
    """

    def __init__(self, cfg: Config, model: str, seed: int, chat: bool | None = False) -> None:
        if cfg.algo.trains is Trains.reward:
            raise UserError(
                f"the run must train a language model (a reward model writes no text), got {model}"
            )
        quieten_libraries()
        clock = cfg.model.clock or RunFolder(Path(model).expanduser().parent).started()
        named = {"model.base": model, "model.policy": model, "model.tokenizer": None}
        cfg = cfg.with_({**named, "model.lora": LoRAConfig(), "model.clock": clock})
        self.tokenizer = build_tokenizer(cfg)
        self.chat = self.tokenizer.chat_template is not None if chat is None else chat
        if self.chat:
            set_format(self.tokenizer, cfg.model.chat_template, True)
        self.generator = build_sampler(cfg, self.tokenizer, build_device(cfg), seed)
        self.requests = 0

    def __call__(
        self, prompts: Sequence[Prompt], *, samples: int, temperature: float, response_length: int
    ) -> list[dict[str, Any]]:
        """Return one row per response; see `rlhf.experiment.Experiment.sample`.

        Raises:
            UserError: a prompt is a conversation, and the tokenizer has no chat template.
        """
        rows: list[dict[str, Any]] = []
        for formatted in (False, True):
            places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) is not formatted]
            if not places:
                continue
            texts = [text_of(prompts[i], self.tokenizer) for i in places]
            batch = encode_prompts(torch.tensor(places), texts, [""] * len(texts), self.tokenizer, formatted)
            texts = batch.texts
            shown: dict[str, list[Any]] = {"text": texts, "ids": batch.unpadded()}
            if changed := altered(self.tokenizer, shown, formatted, [], []):
                log.warning("%s", changed)
            asked = Sampling(
                samples=samples,
                temperature=temperature,
                response_length=response_length,
                purpose="sample",
                request=self.requests,
            )
            rollouts = self.generator.submit(batch, asked).result()
            for place, text, responses, ended in zip(
                places, texts, response_texts(rollouts, self.tokenizer), rollouts.ended.tolist(), strict=True
            ):
                rows += [
                    {"prompt": place, "text": text, "response": response, "ended": end}
                    for response, end in zip(responses, ended, strict=True)
                ]
        self.requests += 1
        return sorted(rows, key=lambda row: row["prompt"])


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
    messages = quoted([dict(message) for message in prompt], control_tokens(tokenizer))
    return render(tokenizer, messages, "the conversation")
