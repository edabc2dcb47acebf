"""Sampling with a Hugging Face model: the trainer's own, at the moment of the request, or a copy of it in the
process of a `WorkerGenerator`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.core.batch import Rollouts
from rlhf.core.seeding import derive
from rlhf.generators.generator import Generator, finished
from rlhf.generators.hf.sampling import sample, uniforms
from rlhf.generators.transfer.shared_memory import read
from rlhf.generators.transfer.weights import TransferError, checksum
from rlhf.models.placement import place
from rlhf.models.precision import autocast

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.core.batch import Prompts, Sampling
    from rlhf.generators.transfer.weights import Manifest


class HFGenerator(Generator):
    """The policy itself as generator.

    A request is sampled when it is submitted, by the weights as they are then; that is the
    first-in-first-out order of requests and loads. `load` therefore has nothing to copy: the trainer's
    weights are the generator's.

    Args:
        borrow: gives the model for the time of a request (`engine.borrow_policy`).
        tokenizer: for the ids of stop and pad tokens.
        batch_size: sequences decoded at once.
        seed: of the run.
    """

    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[PreTrainedModel]],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        seed: int,
    ) -> None:
        self.borrow = borrow
        self.stop_ids = [tokenizer.eos_token_id]
        self.pad_id = tokenizer.pad_token_id
        self.batch_size = batch_size
        self.seed = seed
        self.version = 0

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Sample now."""
        start = time.perf_counter()
        with self.borrow() as model:
            rollouts = respond(
                model, prompts, sampling, self.stop_ids, self.pad_id, self.batch_size, self.seed
            )
        seconds = time.perf_counter() - start
        return finished(replace(rollouts, version=self.version, generate_s=seconds))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take note of the version that the borrowed weights now have."""
        self.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSamplerFactory:
    """Makes a sampler with a model of its own; that gets its weights with the first load.

    Args:
        config: of the model, as json.
        attention: implementation, as `model.attention`.
        remote: where the code of a model is that transformers does not have; None: it has it.
        device: where the model goes.
        dtype: what forwards compute in; bfloat16 is autocast over the weights as they are sent.
        stop_ids, pad_id, batch_size, seed: as of `HFGenerator`.
    """

    config: str
    attention: str
    remote: str | None
    device: str
    dtype: Dtype
    stop_ids: list[int]
    pad_id: int
    batch_size: int
    seed: int

    def build(self) -> HFSampler:
        """Make it."""
        if self.remote is not None:
            config = AutoConfig.from_pretrained(self.remote, trust_remote_code=True)
        else:
            settings = json.loads(self.config)
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=self.attention,
            dtype=torch.float32,
            trust_remote_code=self.remote is not None,
        )
        return HFSampler(place(model, torch.device(self.device)).eval(), self)


class HFSampler:
    """Samples as `HFGenerator` does, same tokens for the same weights, with a copy of the model."""

    def __init__(self, model: PreTrainedModel, made_by: HFSamplerFactory) -> None:
        self.model = model
        self.made_by = made_by

    def sample(
        self, prompts: Prompts, sampling: Sampling, update: Callable[[], int] | None = None
    ) -> Rollouts:
        """K responses to each prompt."""
        made_by = self.made_by
        # Autocast keeps 16-bit weights of those that require a gradient: not where they change in flight.
        self.model.requires_grad_(update is None)
        with autocast(self.model.device, made_by.dtype):
            return respond(
                self.model,
                prompts,
                sampling,
                made_by.stop_ids,
                made_by.pad_id,
                made_by.batch_size,
                made_by.seed,
                update,
            )

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Copy the weights into the model; returns the checksums of what it then holds.

        Raises:
            TransferError: they did not arrive as they were sent, or are those of another model.
        """
        own = self.model.state_dict()
        if unlike := own.keys() ^ manifest.checksums().keys():
            raise TransferError(
                f"version {manifest.version} must have the tensors of the generator's model, and only one of "
                f"the two has {min(unlike)}"
            )
        for name, tensor in read(manifest):
            own[name].copy_(tensor)
        return {name: checksum(tensor) for name, tensor in own.items()}

    def close(self) -> None:
        """The model goes with the process."""


def respond(
    model: PreTrainedModel,
    prompts: Prompts,
    sampling: Sampling,
    stop_ids: list[int],
    pad_id: int,
    batch_size: int,
    seed: int,
    update: Callable[[], int] | None = None,
) -> Rollouts:
    """Sample K responses to each prompt, in chunks of `batch_size` sequences, the longest prompts first.

    `update` may change the model's weights before a forward, and returns their version.
    """
    chunk = max(1, batch_size // sampling.samples)
    length = sampling.response_length
    purpose = derive(seed, "sample", sampling.purpose)
    numbers = uniforms(purpose, sampling.request, prompts.index, sampling.samples, length)
    parts, versions = [], []
    order = prompts.prompt_mask.sum(1).argsort(descending=True, stable=True)
    for rows in order.split(chunk):
        held: list[int] = []  # the version at each token
        part = sample(
            model,
            prompts.prompt_ids[rows].to(model.device),
            prompts.prompt_mask[rows].to(model.device),
            samples_per_prompt=sampling.samples,
            response_length=length,
            temperature=sampling.temperature,
            uniforms=numbers[rows.cpu()],
            stop_ids=stop_ids,
            pad_id=pad_id,
            before_forward=None if update is None else partial(note, update, held),
        )
        parts.append(part)
        if update is not None:
            versions.append(pad_to(torch.tensor(held) * part[1].cpu(), length, 0))
    home, fill, back = prompts.prompt_ids.device, (pad_id, False, 0.0), order.argsort()
    ids, mask, logprobs = (
        torch.cat([pad_to(part[i], length, fill[i]) for part in parts]).to(home)[back] for i in range(3)
    )
    return prompts.extend(
        Rollouts,
        response_ids=ids,
        response_mask=mask,
        behaviour_logprobs=logprobs,
        ended=torch.cat([part[3] for part in parts]).to(home)[back],
        token_versions=torch.cat(versions).to(home)[back] if versions else None,
    )


def note(update: Callable[[], int], held: list[int]) -> None:
    """Have weights updated, and take note of the version."""
    held.append(update())


def pad_to(x: Tensor, length: int, value: float) -> Tensor:
    """`x` [..., T] padded on the right with `value` to [..., length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=value)
