"""The vLLM sampler, which runs in a generator process and uses vLLM's public interface.

vLLM's engine runs in the generator process itself, without child processes on a single GPU, so that a message
to the engine is a function call. vLLM cannot run in the trainer's process, because it changes classes of
transformers in its process.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import cached_file

from rlhf.config.generators import forward_tokens, working_memory
from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import derive
from rlhf.environments.environment import EnvironmentFactory
from rlhf.environments.episodes import Episodes
from rlhf.generators.generator import Update
from rlhf.generators.weights import Manifest, TransferError
from rlhf.text.encoding import padded

if TYPE_CHECKING:
    from vllm import LLM


log = logging.getLogger(__name__)

FILES, NCCL = "rlhf_files", "rlhf_nccl"  # vLLM's names of the ways in which weights come to a server


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMFactory:
    """The settings of a vLLM sampler. They are plain values, because they are pickled for the process."""

    model: str  # hub name or folder; only its config is read, the weights come from the trainer
    trust_remote_code: bool
    dtype: str
    float32_head: bool  # logits are computed in float32, also with a 16-bit dtype
    max_model_len: int  # maximum number of tokens of a prompt and its response
    max_num_seqs: int  # sequences decoded in parallel
    memory: float  # share of the GPU's memory; on a CPU, share of RAM for keys and values
    enforce_eager: bool  # do not compile
    tensor_parallel_size: int
    gpu: bool  # False: vLLM runs on the CPU
    sleeps: bool  # free the GPU memory between requests
    in_flight: bool  # weights are loaded while requests run
    transfer: str  # transfer of weights: shared_memory, ipc or nccl
    stop_ids: tuple[int, ...]  # tokens that end a response; vLLM reads no end token from the model's files
    pad_id: int
    seed: int  # seed of the run
    absent_ids: tuple[int, ...] = ()  # ids of the model that no token has; they are not sampled
    environment: EnvironmentFactory | None = None  # answers replies; None: a response is one reply

    @property
    def way(self) -> str:
        """How the weights come to a server, as vLLM names it."""
        return NCCL if self.transfer == "nccl" else FILES

    def config(self) -> PreTrainedConfig:
        """Return the config of the model."""
        return AutoConfig.from_pretrained(config_folder(self.model), trust_remote_code=self.trust_remote_code)

    def build(self) -> VLLMSampler:
        """Start vLLM in this process and return its sampler."""
        # run the engine in this process
        os.environ.update(self.variables(), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        return VLLMSampler(self)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process or a server of vLLM."""
        level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
        own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": level}
        if self.enforce_eager and not self.gpu:
            own["TORCHDYNAMO_DISABLE"] = "1"  # otherwise parts of vLLM's sampler compile for 20 s
        return own


class VLLMSampler:
    """A sampler that answers prompts with vLLM; see `rlhf.generators.generator.Sampler`.

    The random numbers of a sample depend on the run's seed, the purpose and number of the request, the
    example and the sample's index. They do not depend on the order of the batch or on other requests (up to
    float rounding of the logits).

    Args:
        settings: the settings of vLLM.

    Attributes:
        llm: vLLM. It starts with random weights; nothing is sampled before the first `load`.
        tensors: shapes of the model's tensors by name, and the names that a version of the weights must
            contain.

    Raises:
        UserError: vLLM does not support the head size of the model on a CPU.
    """

    def __init__(self, settings: VLLMFactory) -> None:
        self.settings = settings
        config = settings.config()
        self.tensors = tensors(config, settings.trust_remote_code)  # before vLLM, which changes classes
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rlhf.generators.vllm.worker_extension import NAME

        arguments = engine_arguments(settings, config)
        if settings.sleeps:
            shapes, required = self.tensors
            arguments |= on_shared_gpu(settings, config, sum(math.prod(shapes[name]) for name in required))
        if settings.absent_ids:
            arguments["additional_config"] = {"absent_ids": list(settings.absent_ids)}
        self.asleep: set[str] = set()  # parts of the GPU memory that are freed until `wake`
        self.llm = LLM(
            model=config_folder(settings.model),
            distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else "mp",
            enable_sleep_mode=settings.sleeps,
            weight_transfer_config=WeightTransferConfig(backend=NAME.format(settings.transfer)),
            async_scheduling=False if settings.in_flight else None,  # no step may run while weights change
            **arguments,
        )
        if settings.transfer != "nccl":  # for nccl, the first manifest contains the group to join
            self.llm.init_weight_transfer_engine({"init_info": {}})
        self.level: int | None = None  # level of vLLM's sleep mode, known after the first load
        if settings.sleeps:
            self.release_cache()

    @property
    def version(self) -> int | None:
        """Return the version of the weights that vLLM reports; None before the first load."""
        reported = self.llm.get_weight_version()
        return int(reported) if reported.isdigit() else None

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Load weights through vLLM's weight transfer, and return their checksums by tensor name.

        The prefix cache is cleared after the load, or, if requests are running, after the requests have
        ended. With sleep mode, only the weights are in GPU memory afterwards. The next request allocates the
        key-value cache, and frees it and the weights at its end.

        Raises:
            TransferError: the tensors differ from the tensors that the trainer sent.
            RunError: vLLM reports another version, does not clear the prefix cache, or its workers have
                different tensors.
        """
        compare(manifest, *self.tensors)
        self.wake("weights")
        if manifest.group is not None:
            self.llm.init_weight_transfer_engine({"init_info": manifest.group})
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": manifest.update_info()})
        self.llm.finish_weight_update(weight_version=str(manifest.version))
        if not self.llm.llm_engine.has_unfinished_requests():
            self.forget()
        if self.version != manifest.version:
            raise RunError(
                f"vLLM must report version {manifest.version} (the version just loaded), got {self.version}"
            )
        taken: list[dict[str, int]] = self.llm.collective_rpc("taken_checksums")
        if any(other != taken[0] for other in taken):
            raise RunError(f"the workers of vLLM must hold the same tensors of version {manifest.version}")
        if self.settings.sleeps and self.level is None:
            self.level = self.sleep_level()
        return taken[0]

    def forget(self) -> None:
        """Clear the prefix cache.

        Raises:
            RunError: vLLM does not clear the cache.
        """
        if not self.llm.reset_prefix_cache():
            raise RunError(
                f"vLLM must clear the prefix cache after loading version {self.version} (the cache was "
                "computed with older weights), but vLLM did not"
            )

    def sample(self, prompts: Prompts, sampling: Sampling, update: Update | None = None) -> Rollouts:
        """Return K responses to each prompt, [N, K, T] on the CPU, T = `sampling.response_length`.

        Temperature 0 requires K = 1 and gives the most likely tokens, with log-probs at temperature 1. vLLM
        raises other temperatures below 0.01 to 0.01. With an environment, responses are episodes. `serve`
        describes in-flight updates.

        Args:
            prompts: the prompts.
            sampling: number of samples, temperature and response length of the request.
            update: with in-flight updates, a function that may load newer weights; called before every step.

        Raises:
            RunError: without `update`, a token was sampled by a version other than the version loaded last;
                or vLLM does not clear the prefix cache; or the environment fails.
        """
        assert self.version is not None, "load weights before the first request"
        assert self.level != 2 or "weights" not in self.asleep, "load weights before each request"
        start = time.perf_counter()
        self.wake("weights", "kv_cache")
        before = self.version
        respond = self._respond if self.settings.environment is None else self._converse
        rollouts = respond(prompts, sampling, update)
        if self.version != before:
            self.forget()
        self.sleep()
        return replace(rollouts, version=self.version, generate_s=time.perf_counter() - start)

    def _respond(self, prompts: Prompts, sampling: Sampling, update: Update | None) -> Rollouts:
        """Sample one reply for each sample."""
        # With in-flight updates, each sample by itself, as vLLM derives them
        samples = [None] if update is None else range(sampling.samples)
        heads = list(zip(prompts.unpadded(), prompts.index.tolist(), strict=True))
        asked = [(ids, self.parameters(sampling, row, k)) for ids, row in heads for k in samples]
        outputs: list[Any] = [None] * len(asked)
        once = iter([[Request(i, *each) for i, each in enumerate(asked)]])
        serve(self.llm, lambda wait: next(once, []), outputs.__setitem__, update)
        completions = [completion for output in outputs for completion in output.outputs]
        replies = [(each.token_ids, each.logprobs.logprobs) for each in completions]
        by_token = [versions(each) for each in completions] if update is not None else None
        return rollouts_of(prompts, sampling, replies, by_token, self.settings)

    def _converse(self, prompts: Prompts, sampling: Sampling, update: Update | None) -> Rollouts:
        """Sample K episodes of each prompt. An episode does not wait for the replies of other episodes.

        The history of an episode is the prompt of its next reply; the prefix cache has the keys of most of
        its tokens. The first reply has the random numbers of a run without an environment.
        """
        settings, K, turn = self.settings, sampling.samples, Counter[int]()
        assert settings.environment is not None
        played = settings.environment, settings.stop_ids, settings.seed

        def asked(wait: bool) -> Iterator[Request]:
            for i in episodes.ready(wait):
                one = self.parameters(sampling, int(prompts.index[i // K]), i % K, turn[i])
                one.max_tokens = episodes.room(i)
                turn[i] += 1
                yield Request(i, episodes.history(i), one)

        def answered(i: int, output: Any) -> None:
            (reply,) = output.outputs
            episodes.reply(
                i, list(reply.token_ids), reply.logprobs.logprobs, None if update is None else versions(reply)
            )

        with Episodes(prompts, sampling, *played) as episodes:
            serve(self.llm, asked, answered, update)
            return episodes.rollouts(settings.pad_id, in_flight=update is not None)

    def parameters(self, sampling: Sampling, example: int, sample: int | None = None, turn: int = 0) -> Any:
        """Return vLLM's sampling parameters for a sample of a prompt; None: K samples, k with `seed` + k."""
        from vllm import SamplingParams

        given = sampling_parameters(sampling, example, self.settings, sample or 0, turn)
        return SamplingParams(n=sampling.samples if sample is None else 1, flat_logprobs=True, **given)

    def sleep_level(self) -> int:
        """Return the level of vLLM's sleep mode with which a load restores the complete model.

        Level 2 discards the weights. After waking up, vLLM restores buffers, and a load restores parameters
        (`worker_extension.check_reached`). If the model still has other tensors in the discarded memory after
        a load, for example the slopes of ALiBi, nothing would restore them. Then level 1 is used, which moves
        the weights to RAM.
        """
        others = [name for names in self.llm.collective_rpc("unrestored") for name in names]
        if others:
            lost = ", ".join(sorted(set(others)))
            log.warning("weights are moved to RAM between requests, because a load does not restore %s", lost)
        return 1 if others else 2

    def release_cache(self) -> None:
        """Free the GPU memory of keys and values until the next request; the weights stay allocated.

        This method is called at the end of the start, when the trainer may still load its models; vLLM
        refuses it after the first request. `sleep` is not used at the start: it fails if the trainer
        allocates more memory than vLLM frees meanwhile, and only a load shows which level restores the
        complete model (`sleep_level`).
        """
        self.llm.sleep(level=0)  # stops scheduling and frees nothing; required by the next line
        self.llm.release_kv_cache_memory()
        self.asleep = {"kv_cache"}

    def sleep(self) -> None:
        """Free the GPU memory until `wake`. With level 2, weights must be loaded before the next request."""
        if self.settings.sleeps:
            self.llm.sleep(level=self.level)
            self.asleep = {"weights", "kv_cache"}

    def wake(self, *parts: str) -> None:
        """Allocate the GPU memory for the given parts ("weights", "kv_cache") again."""
        if wanted := [part for part in parts if part in self.asleep]:
            self.llm.wake_up(wanted)
            self.asleep -= set(wanted)

    def close(self) -> None:
        """Stop vLLM; its memory is freed when the process ends."""
        del self.llm


def engine_arguments(settings: VLLMFactory, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments that a vLLM in this process and a server of vLLM have in common.

    Args:
        settings: the settings of vLLM.
        config: the config of the model.

    Raises:
        UserError: vLLM does not support the head size of the model on a CPU.
    """
    special: dict[str, Any] = {"gpu_memory_utilization": settings.memory}
    if not settings.gpu:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if (size := _head_size(config)) not in sizes:
            raise UserError(
                "model.policy must have attention heads of a size that vLLM supports on a CPU "
                f"({', '.join(map(str, sizes))}), got {size}; set generator=hf"
            )
        # Prompts are never encoded in chunks: between chunks vLLM resets the request's random generator,
        # which is not possible on a CPU. So a prompt and one token of each other sequence must fit into a
        # forward pass. Blocks of the prefix cache have 32 tokens, because with vLLM's default of 128 tokens
        # the keys and values of a shorter prompt would not be shared. The cache of keys and values has a
        # fixed size, which does not depend on the weights
        special |= {
            "kv_cache_memory_bytes": int(settings.memory * psutil.virtual_memory().total),
            "block_size": 32,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_TOKENS_ON_CPU, settings.max_model_len + settings.max_num_seqs),
        }
    if settings.absent_ids:
        special["logits_processors"] = ["rlhf.generators.vllm.worker_extension:AbsentIds"]
    return {
        "runner": "generate",
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "hf_overrides": {"head_dtype": "float32"} if settings.float32_head else {},
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # ignore the model's own generation config
        "logprobs_mode": "processed_logprobs",  # log-probs at the sampling temperature
        "enable_prefix_caching": True,  # the K samples of a prompt share its keys and values
        "worker_extension_cls": "rlhf.generators.vllm.worker_extension.WorkerExtension",
        **special,
    }


def config_folder(model: str) -> str:
    """Return the folder with the config of `model`: a local folder, or the cache of the hub download."""
    file = cached_file(os.path.expanduser(model), "config.json", local_files_only=True)
    assert file is not None, "cached_file raises an error if the file does not exist"
    return os.path.dirname(file)


def tensors(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shapes of a Hugging Face model's tensors by name, and the names that a version must contain.

    The names that are not required are second names of tensors, for example of tied output embeddings. The
    model is created on the meta device, which needs no memory.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unique = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return shapes, unique & shapes.keys()


def compare(manifest: Manifest, shapes: dict[str, tuple[int, ...]], required: set[str]) -> None:
    """Check that a manifest contains the tensors of the model, before vLLM receives them.

    Args:
        manifest: the weights to load.
        shapes: shapes of the model's tensors by name.
        required: names that the manifest must contain.

    Raises:
        TransferError: tensors are missing, unknown or of another shape.
    """
    sent = {entry.name: list(entry.shape) for entry in manifest.entries}
    names, known = sorted(required | sent.keys()), {name: list(shape) for name, shape in shapes.items()}
    wrong = [
        f"{name}: {sent.get(name, 'missing')} instead of {known.get(name, 'unknown')}"
        for name in names
        if sent.get(name) != known.get(name)
    ]
    if wrong:
        raise TransferError(
            f"version {manifest.version} must hold the tensors of the model that vLLM serves, got "
            + "; ".join(wrong[:3])
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        )


# Requests to vLLM: when their sequences start, their parameters, and their outputs as tensors.


class Request(NamedTuple):
    """A request to vLLM: a prompt, and how to sample after it."""

    owner: int  # number of the prompt, sample or episode that gets the output
    ids: list[int]
    parameters: Any  # vLLM's sampling parameters


def serve(
    llm: LLM,
    source: Callable[[bool], Iterable[Request]],
    sink: Callable[[int, Any], None],
    update: Update | None,
) -> None:
    """Let vLLM sample all requests of a source. After an error, vLLM has none of them.

    With in-flight updates, a sequence is sent to vLLM only when its prompt fits into the next step, so that
    it never reads prompt keys that older weights computed: the version is part of the keys of the prefix
    cache (`cache_salt`). Prompts that do not fit into a step beside `max_num_seqs` sequences are encoded in
    several steps, between which the weights may change.

    Args:
        llm: vLLM.
        source: returns new requests; called before every step. With True, nothing is left to sample: the
            source waits for new requests, and returns none at the end.
        sink: takes the owner of a request and its output, as soon as vLLM has sampled it.
        update: function that may load newer weights; called before every step. Requests must have one sample
            each then.

    Raises:
        RunError: source, sink or `update` fail; or, without `update`, a token was sampled by a version other
            than the version loaded last.
    """
    from vllm import TokensPrompt

    engine, waiting, owners = llm.llm_engine, deque[Request](), dict[str, int]()
    most = most_tokens = longest = math.inf  # sequences, tokens and tokens of a prompt in a step of vLLM
    pending: float = 0  # prompt tokens of started sequences that the next step does not encode
    if update is not None:
        limits = engine.vllm_config.scheduler_config
        most, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        longest = most_tokens - most
    try:
        while True:
            idle = not waiting and not owners
            waiting += source(idle)
            if idle and not waiting:
                return
            if update is not None:
                update()
            running = engine.get_num_unfinished_requests()
            tokens = most_tokens - running - pending
            started = next_sequences(waiting, most - running, tokens, longest)
            pending = max(0, sum(len(each.ids) for each in started) - tokens)
            if started:
                salt = llm.get_weight_version()
                sent = llm.enqueue(
                    [TokensPrompt(prompt_token_ids=each.ids, cache_salt=salt) for each in started],
                    [each.parameters for each in started],
                    use_tqdm=False,
                )
                # vLLM adds random letters to the ids that its outputs have
                owners |= {id.partition("-")[0]: each.owner for id, each in zip(sent, started, strict=True)}
            for output in engine.step():
                spans = [span for completion in output.outputs for span in completion.weight_versions or []]
                version = llm.get_weight_version()
                if update is None and (other := {span.version for span in spans} - {version}):
                    raise RunError(
                        f"tokens must be sampled by version {version} (the version loaded last), got tokens "
                        f"of version {', '.join(other)}"
                    )
                sink(owners.pop(output.request_id), output)
    except RunError:
        engine.abort_request(list(owners))
        raise


def next_sequences(waiting: deque[Request], count: float, tokens: float, longest: float) -> list[Request]:
    """Remove from `waiting` the sequences that vLLM starts in its next step, and return them.

    Args:
        waiting: the sequences in their order.
        count: the largest number of sequences.
        tokens: the largest number of prompt tokens of all sequences together.
        longest: the largest number of tokens of a prompt that is encoded in one step. A longer prompt does
            not wait until all its tokens fit into the step.
    """
    found: list[Request] = []
    while waiting and len(found) < count and tokens > 0:
        length = len(waiting[0].ids)
        if tokens < length <= longest:
            break
        found.append(waiting.popleft())
        tokens -= length
    return found


def sampling_parameters(
    sampling: Sampling, example: int, settings: VLLMFactory, sample: int = 0, turn: int = 0
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a reply; the seed of sample k is that of sample 0, plus k.

    Args:
        sampling: the settings of the request.
        example: the row of the prompt in the data.
        settings: the tokens that end a response, and the seed of the run.
        sample: the number of the sample, from 0; of several samples in one request, the first.
        turn: the number of the reply in its episode, from 0.
    """
    seed = derive(settings.seed, "sample", sampling.purpose, sampling.request, example)
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.response_length,
        "stop_token_ids": list(settings.stop_ids),
        "ignore_eos": True,  # stop only at stop_token_ids, not at the end token of the model's config
        "seed": derive(seed, sample, turn) if turn else seed + sample,
        "logprobs": 0,  # log-probs of the sampled token only
        "detokenize": False,
    }


def rollouts_of(
    prompts: Prompts,
    sampling: Sampling,
    replies: Sequence[Sequence[Any]],
    versions: Sequence[Sequence[int]] | None,
    settings: VLLMFactory,
) -> Rollouts:
    """Return replies as rollouts [N, K, T].

    Args:
        prompts: N prompts.
        sampling: K and T.
        replies: token ids and log-probs of each of the N K replies, and perhaps more.
        versions: of the weights that sampled each of their tokens; None: the tokens have no versions.
        settings: the tokens that end a reply, and the token of padding.
    """
    N, K, T = len(prompts), sampling.samples, sampling.response_length

    def table(rows: Sequence[Sequence[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        return padded(rows, T, fill, dtype).view(N, K, T)

    ids = table([reply[0] for reply in replies], settings.pad_id, torch.int64)
    mask = table([[True] * len(reply[0]) for reply in replies], False, torch.bool)
    return prompts.extend(
        Rollouts,
        response_ids=ids,
        response_mask=mask,
        behaviour_logprobs=table([reply[1] for reply in replies], 0.0, torch.float32),
        ended=(mask & torch.isin(ids, torch.tensor(settings.stop_ids))).any(-1),
        token_versions=None if versions is None else table(versions, 0, torch.int64),
    )


def versions(completion: Any) -> list[int]:
    """Return the version of the weights that sampled each token, as reported by vLLM."""
    return [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)]


# Arguments of vLLM that depend on the device: on a CPU, and on a GPU that vLLM shares with the trainer.


# `gpu_memory_utilization` on a shared GPU. With `kv_cache_memory_bytes`, vLLM uses this share only to refuse
# its start if a smaller share of the GPU is free, but the trainer loads its models onto the same GPU at this
# time. vLLM accepts every share above 0; this share is less than 1 kB.
LEAST_SHARE = 1e-9
_TOKENS_ON_CPU = 8192  # prompt tokens that a CPU encodes in one forward pass


def on_shared_gpu(settings: VLLMFactory, config: PreTrainedConfig, parameters: int) -> dict[str, Any]:
    """Return additional arguments of vLLM on the trainer's GPU: the size of the cache of keys and values.

    Args:
        settings: the settings of vLLM.
        config: the config of the model.
        parameters: number of weights on all GPUs of vLLM.

    Raises:
        UserError: the share is too small for the weights and one sequence.
    """
    from vllm.platforms import current_platform

    text, size = config.get_text_config(), getattr(torch, settings.dtype).itemsize
    gpus = range(settings.tensor_parallel_size)
    total = min(map(current_platform.get_device_total_memory, gpus))
    working = working_memory(
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        number_bytes=size,
        sequences=settings.max_num_seqs,
    )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    own_heads = -(-heads // len(gpus))
    sequence = 2 * text.num_hidden_layers * own_heads * _head_size(config) * size * settings.max_model_len
    used = size * parameters // len(gpus) + working
    room = int(settings.memory * total) - used
    if room < sequence:
        needed = math.ceil(100 * (used + sequence) / total) / 100
        raise UserError(
            "generator.memory must leave room for the weights and one sequence on the GPU that vLLM shares "
            f"with the trainer (vLLM needs {(used + sequence) / 2**30:.1f} of {total / 2**30:.1f} GiB), "
            f"got {settings.memory:g}; set "
            + (f"generator.memory={needed:g}" if needed < 1 else "model.policy to a smaller model")
        )
    return {
        "kv_cache_memory_bytes": room,
        "gpu_memory_utilization": LEAST_SHARE,
        "max_num_batched_tokens": forward_tokens(settings.max_num_seqs),
    }


def _head_size(config: PreTrainedConfig) -> int:
    """Return the width of an attention head."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
