"""Samples of models: for prompts of a user, and as preference pairs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict

from rlhf.assembly.models import build_device, build_tokenizer, quieten_libraries
from rlhf.assembly.training import build_sampler, build_scorer, build_task
from rlhf.config.algorithms import Data, Trains
from rlhf.config.models import LoRAConfig
from rlhf.core.batch import Sampling
from rlhf.core.errors import UserError
from rlhf.processes.ranks import Ranks
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import response_texts
from rlhf.tasks.task import altered
from rlhf.terminal.console import progress
from rlhf.text.chat import control_tokens, quoted, render, set_format
from rlhf.text.encoding import encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.core.batch import Rollouts


# Samples of the final model of a run, for prompts that are not in the data of its task.


log = logging.getLogger(__name__)
_Prompt = str | Sequence[Mapping[str, str]]


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
        self, prompts: Sequence[_Prompt], *, samples: int, temperature: float, response_length: int
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


def text_of(prompt: _Prompt, tokenizer: PreTrainedTokenizerFast) -> str:
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


# Sampling of preference pairs: two responses of a policy per prompt, ordered by gold score.


CHUNK = 256  # prompts per request


def sample_pairs(cfg: Config) -> DatasetDict:
    """Sample pairs for training and held-out prompts, and return them as splits train and validation.

    The columns are prompt, chosen and rejected. Pairs whose gold scores tie are skipped.
    """
    device = build_device(cfg)
    tokenizer = build_tokenizer(cfg)
    generator = build_sampler(cfg, tokenizer, device, seed=cfg.stages.seed)
    gold = build_scorer(cfg, "gold", tokenizer, Ranks(device))
    assert gold is not None, "an embedded task has a judge"
    task = build_task(cfg, tokenizer, Data.prompts, min(CHUNK, cfg.stages.pairs), judge=True)

    batches, updates = task.prompts(), -(-cfg.stages.pairs // task.prompts_per_update)
    requests = [("train", next(batches)) for _ in range(updates)]
    held_out = task.held_out(2 * cfg.eval.prompts)  # twice the needed number, because tied pairs are skipped
    requests += [("validation", held_out.select(rows)) for rows in torch.arange(len(held_out)).split(CHUNK)]
    columns: dict[str, dict[str, list[str]]] = {}
    with progress("sampling pairs", len(requests), cfg.progress.value) as advance:
        for request, (split, prompts) in enumerate(requests):
            sampling = Sampling(
                samples=2,
                temperature=cfg.stages.pairs_temperature,
                response_length=cfg.generator.response_length,
                purpose="pairs",
                request=request,
            )
            rollouts = generator.submit(prompts, sampling).result()
            add_pairs(
                columns.setdefault(split, {"prompt": [], "chosen": [], "rejected": []}),
                rollouts,
                gold.compare(*gold.scored(rollouts)),
                response_texts(rollouts, tokenizer),
            )
            advance(1)
    return DatasetDict({split: Dataset.from_dict(rows) for split, rows in columns.items()})


def add_pairs(
    columns: dict[str, list[str]], rollouts: Rollouts, scores: torch.Tensor, texts: list[list[str]]
) -> None:
    """Append the pairs of `rollouts` (K = 2) with different scores [N, 2] to `columns`."""
    for prompt, (first, second), (a, b) in zip(rollouts.texts, texts, scores.tolist(), strict=True):
        if a != b:
            columns["prompt"].append(prompt)
            columns["chosen"].append(first if a > b else second)
            columns["rejected"].append(second if a > b else first)
