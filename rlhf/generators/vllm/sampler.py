"""Sampling with vLLM, in a process of its own (`rlhf.generators.worker`), on vLLM's public interface.

The engine of vLLM lives in that very process (no further processes below it), so that a message to it is a
call. It must not be the trainer's process: vLLM changes classes of transformers for all of its process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import cached_file

from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError, UserError
from rlhf.core.seeding import derive
from rlhf.generators.transfer.weights import TransferError

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Sampling
    from rlhf.generators.transfer.weights import Manifest


TOKENS_ON_CPU = 8192  # of prompts that are encoded at once


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMFactory:
    """What the process of vLLM is started with. Plain values: it goes there through pickle."""

    model: str  # hub name or folder; its config alone is read, the weights come from the trainer
    trust_remote_code: bool
    dtype: str
    max_model_len: int  # tokens of a prompt and its response
    max_num_seqs: int  # sequences decoded at once
    memory: float  # share of the GPU's memory; on a CPU of RAM, for keys and values alone
    enforce_eager: bool  # do not compile
    tensor_parallel_size: int
    gpu: bool  # else on the CPU
    sleeps: bool  # give GPU memory back between requests
    in_flight: bool  # weights are loaded while requests run
    transfer: str  # how weights come: shared_memory, ipc, nccl
    stop_ids: tuple[int, ...]
    pad_id: int
    seed: int  # of the run

    def build(self) -> VLLMSampler:
        """Start vLLM in this process."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if self.enforce_eager and not self.gpu:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else helpers of the sampler are compiled, for 20 s
        return VLLMSampler(self)


class VLLMSampler:
    """Answers prompts with vLLM (a `rlhf.generators.sampler.Sampler`).

    A sample's random numbers depend on the run's seed, on purpose and request, and on its example and place
    among the K: not on the order of the batch, nor on what is decoded beside it (to float rounding of the
    logits).

    Attributes:
        llm: vLLM. It starts with random weights; nothing is sampled before the first `load`.
        tensors: what every version must hold.
    """

    def __init__(self, settings: VLLMFactory) -> None:
        self.settings = settings
        folder = config_folder(settings.model)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
        self.tensors = tensors(config, settings.trust_remote_code)  # before vLLM changes the model's class
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rlhf.generators.vllm.worker_extension import NAME

        if not settings.gpu:
            check_head_size(config)
        special: dict[str, Any] = {} if settings.gpu else on_cpu(settings)
        self.asleep: set[str] = set()  # parts of the GPU's memory that are given back
        self.llm = LLM(
            model=folder,
            runner="generate",
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            gpu_memory_utilization=settings.memory,
            enforce_eager=settings.enforce_eager,
            tensor_parallel_size=settings.tensor_parallel_size,
            distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else "mp",
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=settings.sleeps,
            generation_config="vllm",  # not the model's own
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            enable_prefix_caching=True,  # the K samples of a prompt share it
            weight_transfer_config=WeightTransferConfig(backend=NAME.format(settings.transfer)),
            worker_extension_cls="rlhf.generators.vllm.worker_extension.WorkerExtension",
            async_scheduling=False if settings.in_flight else None,  # no step under way when weights change
            **special,
        )
        if settings.transfer != "nccl":  # whose group the first manifest names
            self.llm.init_weight_transfer_engine({"init_info": {}})
        self.sleep()

    @property
    def version(self) -> int | None:
        """The version of the weights, as vLLM reports it; None before the first load."""
        reported = self.llm.get_weight_version()
        return int(reported) if reported.isdigit() else None

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Take the weights over through vLLM's weight transfer, and forget all prefixes; where requests are
        running, when these have ended.

        The weights alone are awake then, which the next request needs, and not yet the cache.

        Returns checksums by name.

        Raises:
            TransferError: they are not what the trainer sent; nothing was changed then.
            RunError: vLLM reports another version than that, or keeps prefixes.
        """
        compare(manifest, *self.tensors)
        self.wake("weights")
        if manifest.group is not None:
            self.llm.init_weight_transfer_engine({"init_info": manifest.group})
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": update_info(manifest)})
        self.llm.finish_weight_update(weight_version=str(manifest.version))
        if not self.llm.llm_engine.has_unfinished_requests():
            self.forget()
        if self.version != manifest.version:
            raise RunError(f"vLLM must report version {manifest.version}, just loaded, got {self.version}")
        taken: list[dict[str, int]] = self.llm.collective_rpc("taken_checksums")
        if any(other != taken[0] for other in taken):
            raise RunError(f"the workers of vLLM must hold the same tensors of version {manifest.version}")
        return taken[0]

    def forget(self) -> None:
        """Clear the cache of prefixes."""
        if not self.llm.reset_prefix_cache():
            raise RunError(
                f"vLLM must forget the prefixes of the weights before version {self.version}, and did not"
            )

    def sample(
        self, prompts: Prompts, sampling: Sampling, update: Callable[[], int] | None = None
    ) -> Rollouts:
        """K responses to each prompt, [N, K, T] on the CPU, T = `sampling.response_length`.

        At temperature 0 the most likely tokens, K = 1, their log-probs at temperature 1; vLLM raises
        temperatures below 0.01 to it.

        Raises:
            RunError: a token was sampled by other weights than those of `version`, without `update`.
        """
        from vllm import TokensPrompt

        assert self.version is not None, "nothing was loaded yet"
        start = time.perf_counter()
        self.wake("weights", "kv_cache")
        unpadded = [
            ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        ]
        self.llm.enqueue(
            [TokensPrompt(prompt_token_ids=ids) for ids in unpadded],
            [self.parameters(sampling, example) for example in prompts.index.tolist()],
            use_tqdm=False,
        )
        before, engine, outputs = self.version, self.llm.llm_engine, []
        while engine.has_unfinished_requests():
            if update is not None:
                update()
            outputs += engine.step()
        if self.version != before:
            self.forget()
        outputs.sort(key=lambda output: int(output.request_id))
        completions = [completion for output in outputs for completion in output.outputs]
        for completion in completions:
            for span in completion.weight_versions or []:
                if update is None and span.version != str(self.version):
                    raise RunError(
                        f"tokens must be sampled by version {self.version}, which was loaded last, "
                        f"got some by {span.version}"
                    )
        shape = (len(prompts), sampling.samples, sampling.response_length)
        ids, mask, logprobs = (
            x.view(shape) for x in pad(completions, sampling.response_length, self.settings.pad_id)
        )
        self.sleep()
        stops = torch.tensor(self.settings.stop_ids)
        return prompts.extend(
            Rollouts,
            response_ids=ids,
            response_mask=mask,
            behaviour_logprobs=logprobs,
            ended=(mask & torch.isin(ids, stops)).any(-1),
            token_versions=None if update is None else versions(completions, mask),
            version=self.version,
            generate_s=time.perf_counter() - start,
        )

    def parameters(self, sampling: Sampling, example: int) -> Any:
        """Settings of a request for the K samples of one prompt, as vLLM's; sample k has `seed` + k."""
        from vllm import SamplingParams

        return SamplingParams(
            n=sampling.samples,
            temperature=sampling.temperature,
            max_tokens=sampling.response_length,
            stop_token_ids=list(self.settings.stop_ids),
            ignore_eos=True,  # that of the model's config, which the trainer does not stop at
            seed=derive(self.settings.seed, "sample", sampling.purpose, sampling.request, example),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )

    def sleep(self) -> None:
        """Give the GPU's memory back until `wake`: weights to RAM, prefixes forgotten."""
        if self.settings.sleeps:
            self.llm.sleep(level=1)
            self.asleep = {"weights", "kv_cache"}

    def wake(self, *parts: str) -> None:
        """Take the GPU's memory for these parts again."""
        if wanted := [part for part in parts if part in self.asleep]:
            self.llm.wake_up(wanted)
            self.asleep -= set(wanted)

    def close(self) -> None:
        """Stop vLLM; its memory goes with the process."""
        del self.llm


def update_info(manifest: Manifest) -> dict[str, Any]:
    """What the engine of vLLM is told that receives the weights."""
    if manifest.update is None:
        return {"manifest": manifest}
    return {
        "names": [entry.name for entry in manifest.entries],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in manifest.entries],
        "shapes": [list(entry.shape) for entry in manifest.entries],
        **manifest.update,
    }


def on_cpu(settings: VLLMFactory) -> dict[str, Any]:
    """What vLLM is told on a CPU in addition.

    A prompt is never encoded in parts: between parts vLLM winds the request's random numbers back, which a
    generator on a CPU cannot do. Blocks of the prefix cache are of 32 tokens: of vLLM's 128, prompts that are
    shorter share nothing. Keys and values have a size, not what a share of RAM leaves beside the weights.
    """
    return {
        "kv_cache_memory_bytes": int(settings.memory * psutil.virtual_memory().total),
        "block_size": 32,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(TOKENS_ON_CPU, settings.max_model_len, settings.max_num_seqs),
    }


def config_folder(model: str) -> str:
    """The folder with the config of `model`: itself, or where the trainer's download of it is cached."""
    file = cached_file(os.path.expanduser(model), "config.json", local_files_only=True)
    assert file is not None, "cached_file raises where there is none"
    return os.path.dirname(file)


def check_head_size(config: PreTrainedConfig) -> None:
    """Raise UserError where the attention kernels of vLLM for CPUs have no such heads."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise UserError(
            f"model.policy must have attention heads of a size that vLLM has on a CPU "
            f"({', '.join(map(str, sizes))}), got {size}; set generator=hf"
        )


def tensors(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes by name of the tensors of the Hugging Face model, and which of them there must be.

    The others are these under a second name, as the output embeddings are where they are tied. Made on the
    meta device, so that it costs no memory.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unique = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return shapes, unique & shapes.keys()


def pad(completions: list[Any], length: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, masks and log-probs of vLLM's completions, each [len(completions), length] padded right."""
    ids = torch.full((len(completions), length), pad_id)
    logprobs = torch.zeros(len(completions), length)
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    mask = torch.arange(length) < lengths[:, None]
    ids[mask] = torch.tensor([token for completion in completions for token in completion.token_ids])
    logprobs[mask] = torch.tensor([x for completion in completions for x in completion.logprobs.logprobs])
    return ids, mask, logprobs


def versions(completions: list[Any], mask: Tensor) -> Tensor:
    """Of the weights that sampled each token of vLLM's completions, as it says: [N, K, T] like `mask`."""
    found = torch.zeros(mask.shape, dtype=torch.int64)
    for row, completion in zip(found.flatten(0, 1), completions, strict=True):
        for span in completion.weight_versions:
            row[span.start : span.end] = int(span.version)
    return found


def compare(manifest: Manifest, shapes: dict[str, tuple[int, ...]], required: set[str]) -> None:
    """Raise TransferError where a manifest does not hold exactly these tensors (`tensors`)."""
    sent = {entry.name: entry.shape for entry in manifest.entries}
    wrong = [
        *(f"{name}: missing" for name in sorted(required - sent.keys())),
        *(f"{name}: unknown" for name in sent if name not in shapes),
        *(
            f"{name}: shape {list(shape)} instead of {list(shapes[name])}"
            for name, shape in sent.items()
            if name in shapes and tuple(shape) != tuple(shapes[name])
        ),
    ]
    if wrong:
        raise TransferError(
            f"version {manifest.version} must hold the tensors of the model that vLLM serves, got "
            + "; ".join(wrong[:3])
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        )
