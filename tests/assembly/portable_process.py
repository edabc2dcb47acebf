"""A process of test_portable: forks that compute with `backend.portable`, each printed as a line of JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import rlhf.stages.run  # noqa: F401  as the process that forks the runs of a study
from rlhf.assembly.models import build_device
from rlhf.core.errors import UserError
from rlhf.core.launched import root
from rlhf.words.compose import compose

RUN = ["algo=dpo", "model=pythia", "backend.device=cpu"]


def portable() -> list[object]:
    """Return the digest of a model after three steps, and how many of 500 square roots are wrong."""
    build_device(compose([*RUN, "backend.portable=true"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=300, attention_dropout=0.0, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(3):
        tokens = torch.arange(8 * 40).reshape(8, 40) * (step + 3) % 300
        logprobs = torch.log_softmax(model(tokens).logits[:, :-1], -1)
        (-logprobs.gather(-1, tokens[:, 1:, None]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    made = hashlib.sha256()
    for weights in model.parameters():
        made.update(weights.detach().numpy().tobytes())
    values = torch.rand(500)
    exact = torch.tensor([math.sqrt(value) for value in values.tolist()], dtype=torch.float64).float()
    wrong = [
        int(sum(f(value) != known for value, known in zip(values, exact, strict=True)))
        for f in (root, torch.sqrt)
    ]
    return [made.hexdigest()[:16], *wrong]


def late() -> list[object]:
    """Compute before `backend.portable` is set; a refused run leaves no variables for the next."""
    _ = torch.eye(8) @ torch.eye(8)
    try:
        build_device(compose([*RUN, "backend.portable=true"]))
    finally:
        build_device(compose(RUN))
    return []


def left_on() -> list[object]:
    """Begin a run without `backend.portable` after one that had it."""
    for portable in ("true", "false"):
        build_device(compose([*RUN, f"backend.portable={portable}"]))
    return []


def forked(work: Callable[[], list[object]]) -> None:
    """Print what a forked process returns, or its error."""
    child = os.fork()
    if child == 0:
        try:
            found = work()
        except UserError as error:
            found = [str(error)]
        print(json.dumps(found), flush=True)
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    for each in (portable, late, left_on):
        forked(each)
