"""Measure asynchronous GRPO of TRL in its own environment, with a vLLM server on a second GPU.

Never run with vLLM or on a GPU. Trainer and rollout process of TRL 1.16.0 ran on a CPU, with a stand-in for
the server, another attention and no weight transfer.

python -m benchmarks.against_trl.theirs_async <case as JSON> <folder of materials> <output file>

`trl.experimental.async_grpo` of TRL 1.16 has no reference model, takes chats only and computes rewards in a
process without a GPU. Its attention kernel (FlashAttention 3) comes from the Hugging Face Hub. Weights are
sent by NCCL after every update. Samples come in the order of their completion, so the number of prompt tokens
may differ a little from ours. Ours computes the log-probs of a reference, which is more work. 20 updates are
measured after 10 updates, so that samples made in advance do not count. The phase `generate` is the time in
which the trainer waits for samples; the memory is that of the trainer's GPU. The environment is made by hand,
because its vLLM and CUDA depend on the machine:

    python -m venv .venv-bench-async
    .venv-bench-async/bin/pip install "trl[vllm]==1.16.0" kernels psutil
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

from benchmarks.against_trl.meter import Meter
from benchmarks.against_trl.reward import rewards
from benchmarks.against_trl.theirs import main, new_policy, settings, texts
from benchmarks.against_trl.work import EPISODES, MAX_LAG, WORKS, Case

START_LIMIT_S = 600  # vLLM compiles and captures CUDA graphs


def build(case: Case, materials: Path, folder: str, server: str, **replaced: Any) -> AsyncGRPOTrainer:
    """Return the trainer.

    Args:
        case: the case.
        materials: folder of the models and prompts.
        folder: folder for the trainer's files.
        server: address of the vLLM server.
        replaced: parts of the trainer to replace, for tests.
    """
    work = WORKS[case.work]
    _, tokenizer = new_policy(case, materials)
    # A message is its text, so the token ids are those of the other cases. TRL refuses chat templates that it
    # does not know, unless the tokenizer has a template of responses.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "fields": {"content": {"close_pattern": "$", "content": "text"}},
    }
    common = settings(case, folder)
    del common["disable_dropout"]  # the models have none
    config = AsyncGRPOConfig(
        **common,
        per_device_train_batch_size=work.micro_batch,
        token_budget=0,  # micro-batches of a fixed number of samples
        num_generations=case.samples,
        max_completion_length=work.response,
        max_staleness=MAX_LAG,
        queue_maxsize=EPISODES,
        vllm_server_base_url=server,
    )
    prompts = [[{"role": "user", "content": text}] for text in texts(case, materials)]
    trainer = AsyncGRPOTrainer(
        model=str(case.policy(materials)),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),  # repeated without end, in this order
        processing_class=tokenizer,
        **replaced,
    )
    # TRL's count of FLOP reads this number, which the configuration of a GPT-NeoX does not have
    trainer.model.config.num_key_value_heads = trainer.model.config.num_attention_heads
    return trainer


def watch(trainer: AsyncGRPOTrainer, meter: Meter) -> None:
    """Let `meter` measure the phases and count samples and micro-batches.

    The phase `generate` is the time in which the trainer waits for samples.
    """
    collator = async_grpo_trainer.DataCollatorForRollout
    collate = collator.torch_call

    def counted(self: Any, examples: list[Any]) -> dict[str, Any]:
        for sample in (sample for row in examples[0] for sample in row.samples):
            response = int(sample["completion_mask"].sum())
            prompt = len(sample["input_ids"]) - response
            meter.counts.update({"episodes": 1, "prompt_tokens": prompt, "response_tokens": response})
        return collate(self, examples)

    collator.torch_call = counted
    meter.wrap(trainer, "get_batch_samples", "generate")
    meter.wrap(trainer, "training_step", seen=lambda _: {"micro_batches": 1})


@contextmanager
def vllm_server(case: Case, materials: Path, gpu: str) -> Iterator[str]:
    """Run a vLLM server of the policy on a GPU and yield its address.

    Raises:
        RuntimeError: the server ended, or was not ready within START_LIMIT_S.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work = WORKS[case.work]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(case.policy(materials))]
    command += ["--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(work.longest_prompt + work.response)]
    command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "nccl"}']
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "VLLM_SERVER_DEV_MODE": "1"}
    server = subprocess.Popen(command, env=variables)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(server, address)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> None:
    """Wait until the server answers.

    Raises:
        RuntimeError: the server ended, or was not ready within START_LIMIT_S.
    """
    limit = time.monotonic() + START_LIMIT_S
    while server.poll() is None and time.monotonic() < limit:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"the vLLM server must answer within {START_LIMIT_S} s; its output is above")


if __name__ == "__main__":
    own, other, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = own  # before the first use of CUDA in this process
    with vllm_server(Case.load(sys.argv[1]), Path(sys.argv[2]), other) as address:
        main(partial(build, server=address), watch, vllm=version("vllm"))
