"""Generators that sample with a Hugging Face model.

The model is the trained model in the trainer's process, or a copy of the model in a separate process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.core.batch import Prompts, Rollouts, Sampling, moved_to
from rlhf.core.errors import UserError
from rlhf.core.launched import derive, local_rank
from rlhf.environments.episodes import Episodes
from rlhf.generators.generator import Generator, GeneratorContext, finished
from rlhf.generators.hf.sampling import HFSettings, sample, uniforms
from rlhf.generators.process import start
from rlhf.generators.weights import Manifest, TransferError, checksum, read
from rlhf.models.forward import NoBlocks, compiled_blocks
from rlhf.models.modules import absent_ids, set_head
from rlhf.models.placement import autocast, place
from rlhf.processes.worker import environment
from rlhf.terminal.progress import Phases
from rlhf.text.encoding import pad_prompts

if TYPE_CHECKING:
    from rlhf.config.generators import HFConfig
    from rlhf.config.models import Dtype


def build(config: HFConfig, context: GeneratorContext) -> Generator:
    """Return a generator that samples with the trained model, or with a copy in a separate process.

    Raises:
        UserError: `generator.compile` is set, and the model has no blocks that can be compiled.
    """
    if config.compile:
        try:
            compiled_blocks(context.policy)
        except NoBlocks as fault:
            raise UserError(
                f"generator.compile must be false ({fault}), got true; set generator.compile=false"
            ) from None
    settings = HFSettings(
        stop_ids=list(context.stop_ids),
        pad_id=context.tokenizer.pad_token_id,
        batch_size=config.batch_size,
        seed=context.seed,
        cached=context.cached,
        noise=config.noise,
        environment=context.environment,
        compile=config.compile,
    )
    if not config.has_worker(context.max_lag):
        return HFGenerator(context.borrow, settings, context.phases)
    model = context.policy
    factory = HFSamplerFactory(
        config=model.config.to_json_string(use_diff=False),
        attention=context.model.loaded_attention,
        remote=model.config.name_or_path if context.model.trust_remote_code else None,
        device=model.device.type,
        dtype=context.model.dtype,
        float32_head=context.model.float32_head,
        absent_ids=absent_ids(model),
        settings=settings,
    )
    first = local_rank() if config.per_rank else 0
    variables = [environment(context.threads, model.device, first + i) for i in range(config.replicas)]
    return start(config, context, factory, variables)


class HFGenerator(Generator):
    """A generator that samples with the trained model in the trainer's process.

    `submit` samples a request before it returns, with the current weights. So requests and loads are
    processed first in, first out, and `load` copies nothing.

    Args:
        borrow: returns a context that yields the trained model (`engine.borrow_policy`).
        settings: the settings of sampling.
        phases: the phases of the run, for its progress display.
    """

    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[PreTrainedModel]],
        settings: HFSettings,
        phases: Phases | None = None,
    ) -> None:
        self.borrow = borrow
        self.settings = settings
        self.phases = phases or Phases()
        self.version = 0

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Sample K responses to each prompt, and return a finished future."""
        start = time.perf_counter()
        with self.borrow() as model:
            rollouts = respond(model, prompts, sampling, self.settings, phases=self.phases)
        seconds = time.perf_counter() - start
        return finished(replace(rollouts, version=self.version, generate_s=seconds))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Record the version of the borrowed weights."""
        self.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSamplerFactory:
    """A factory that creates a sampler with its own model, inside the sampler's process.

    The model has random weights until the first load.

    Args:
        config: the config of the model, as JSON.
        attention: the attention implementation (`model.attention`).
        remote: hub name or folder with the code of the model; None: transformers has the code.
        device: the type of the device, "cpu" or "cuda".
        dtype: the dtype of forward passes; bfloat16 is autocast over the float32 weights.
        float32_head: whether logits are computed in float32, also with a 16-bit dtype.
        settings: the settings of sampling.
        absent_ids: ids of the model that no token has; they are not sampled.
    """

    config: str
    attention: str
    remote: str | None
    device: str
    dtype: Dtype
    settings: HFSettings
    float32_head: bool = False
    absent_ids: list[int] = field(default_factory=list)

    def build(self) -> HFSampler:
        """Return the sampler, with a model of random weights."""
        if self.remote is not None:
            config = AutoConfig.from_pretrained(self.remote, trust_remote_code=True)
        else:
            values = json.loads(self.config)
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=self.attention,
            dtype=torch.float32,
            trust_remote_code=self.remote is not None,
        )
        if self.float32_head or self.absent_ids:
            rows = range(model.get_output_embeddings().out_features)
            set_head(model, self.float32_head, tokens=set(rows) - set(self.absent_ids))
        return HFSampler(place(model, torch.device(self.device)).eval(), self)


class HFSampler:
    """A sampler with its own copy of the model; equal weights sample the same tokens as in `HFGenerator`."""

    def __init__(self, model: PreTrainedModel, made_by: HFSamplerFactory) -> None:
        self.model = model
        self.made_by = made_by

    def sample(
        self, prompts: Prompts, sampling: Sampling, update: Callable[[], int] | None = None
    ) -> Rollouts:
        """Return K responses to each prompt; `update` may load weights before each forward pass."""
        # Autocast caches 16-bit copies of weights that require a gradient. Weights that change during a
        # request must not be cached.
        self.model.requires_grad_(update is None)
        with autocast(self.model.device, self.made_by.dtype):
            return respond(self.model, prompts, sampling, self.made_by.settings, update)

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Copy the weights of a manifest into the model; return the checksums of the model's tensors.

        Raises:
            TransferError: the weights changed during the transfer, or belong to another model.
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
        """Do nothing: the model is freed with the process."""


def respond(
    model: PreTrainedModel,
    prompts: Prompts,
    sampling: Sampling,
    settings: HFSettings,
    update: Callable[[], int] | None = None,
    phases: Phases | None = None,
) -> Rollouts:
    """Sample K responses to each prompt, in chunks of `batch_size` sequences, the longest prompts first.

    `update` is called before each forward pass; it may change the model's weights, and returns their version.
    The phase in `phases` counts the finished sequences. With an environment, responses are episodes.
    """
    length, numbers, most = sampling.response_length, sampling.numbers, sampling.most
    if numbers is None:
        purpose = derive(settings.seed, "sample", sampling.purpose)
        numbers = uniforms(purpose, sampling.request, prompts.index, sampling.samples, length)
    if settings.environment is not None:
        one_reply = replace(settings, environment=None)

        def reply(asked: Prompts, request: Sampling) -> Rollouts:
            return respond(model, asked, request, one_reply, update, phases)

        stop_ids, seed = settings.stop_ids, settings.seed
        with Episodes(prompts, sampling, settings.environment, stop_ids, seed) as episodes:
            return _converse(episodes, numbers, settings.pad_id, reply, in_flight=update is not None)
    chunk = max(1, settings.batch_size // sampling.samples)
    if most is not None:
        length = int(most.max())
        numbers = numbers[..., :length]
    begun = sampling.begun or []
    if any(each.ids for each in begun):
        heads = zip(prompts.prompt_ids, prompts.prompt_mask, begun, strict=True)
        ids, mask = pad_prompts([head[real].tolist() + own.ids for head, real, own in heads], settings.pad_id)
        prompts = replace(prompts, prompt_ids=ids, prompt_mask=mask)
    phases = phases or Phases()
    parts, versions = [], []
    order = prompts.prompt_mask.sum(1).argsort(descending=True, stable=True)
    with phases("sampling", len(prompts) * sampling.samples) as done:
        for rows in order.split(chunk):
            held: list[int] = []  # the version of the weights for each response token
            with phases("token", length) as next_token:
                part = sample(
                    model,
                    moved_to(model.device, prompts.prompt_ids[rows]),
                    moved_to(model.device, prompts.prompt_mask[rows]),
                    samples_per_prompt=sampling.samples,
                    response_length=length,
                    temperature=sampling.temperature,
                    uniforms=numbers[rows.cpu()],
                    stop_ids=settings.stop_ids,
                    pad_id=settings.pad_id,
                    before_forward=None if update is None else partial(note, update, held),
                    after_token=next_token,
                    cached=settings.cached,
                    most=None if most is None else most[rows.cpu()],
                    noise=settings.noise if sampling.purpose == "train" else 0.0,
                    compiled=settings.compile and update is None,
                )
            parts.append(part)
            done(len(rows) * sampling.samples)
            if update is not None:
                versions.append(_pad_to(torch.tensor(held) * part[1].cpu(), length, 0))
    home, fill, back = prompts.prompt_ids.device, (settings.pad_id, False, 0.0), order.argsort()
    ids, mask, logprobs = (
        torch.cat([_pad_to(part[i], length, fill[i]) for part in parts]).to(home)[back] for i in range(3)
    )
    return prompts.extend(
        Rollouts,
        response_ids=ids,
        response_mask=mask,
        behaviour_logprobs=logprobs,
        ended=torch.cat([part[3] for part in parts]).to(home)[back],
        token_versions=torch.cat(versions).to(home)[back] if versions else None,
    )


def _converse(
    episodes: Episodes,
    numbers: Tensor,
    pad_id: int,
    reply: Callable[[Prompts, Sampling], Rollouts],
    in_flight: bool,
) -> Rollouts:
    """Sample episodes turn by turn; `reply` samples the replies to histories.

    Token t of an episode has the random number t of its sample, whatever the turn. The first replies to a
    prompt share its encoding. Later, the history of each running episode is a prompt.
    """
    prompts, sampling = episodes.prompts, episodes.sampling
    K, numbers = sampling.samples, numbers.flatten(0, 1)
    while running := episodes.running():
        begun = [episodes.begun(i) for i in running]
        shared = not any(each.ids for each in begun)
        asked, samples = (prompts, K) if shared else (prompts.select(torch.tensor(running) // K), 1)
        room = [episodes.room(i) for i in running]
        uniform = torch.zeros(len(running), max(room), dtype=torch.float64)
        for row, i, most in zip(uniform, running, room, strict=True):
            row[:most] = numbers[i, episodes.added(i) :][:most]
        request = replace(
            sampling,
            samples=samples,
            response_length=max(room),
            numbers=uniform.view(len(asked), samples, -1),
            most=torch.tensor(room).view(len(asked), samples),
            begun=begun,
        )
        found = reply(asked, request)
        parts = (found.response_ids, found.behaviour_logprobs, found.token_versions)
        rows = zip(*(x.flatten(0, 1).tolist() for x in parts if x is not None), strict=True)
        lengths = found.response_mask.sum(-1).flatten().tolist()
        for i, length, values in zip(running, lengths, rows, strict=True):
            episodes.reply(i, *(each[:length] for each in values))
    return episodes.rollouts(pad_id, in_flight)


def note(update: Callable[[], int], held: list[int]) -> None:
    """Call `update` and append the version of the weights to `held`."""
    held.append(update())


def _pad_to(x: Tensor, length: int, value: float) -> Tensor:
    """Pad `x` [..., T] on the right with `value` to [..., length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=value)
