"""Reward functions, valid and invalid. The materials contain a copy of this file as `my_rewards.py`."""

from __future__ import annotations

import asyncio
import os
import sys
import time

calls = 0
NUMBER = 3


def brief(prompt: str, response: str, reference: str) -> float:
    return -abs(len(response.split()) - len(reference.split())) / 10


def boolean(prompt, response, reference):
    return "a" in response


def constant(prompt, response, reference):
    return 1.0


def nothing(prompt, response, reference):
    return None


def text(prompt, response, reference):
    return "0.5"


def one_in_a_list(prompt, response, reference):
    return [0.5]


def pair(prompt, response, reference):
    return 0.5, 1.0


def not_a_number(prompt, response, reference):
    return float("nan")


def infinite(prompt, response, reference):
    return float("inf")


def huge(prompt, response, reference):
    return 1e300


def complex_number(prompt, response, reference):
    return 1j


def numpy_number(prompt, response, reference):
    import numpy

    return numpy.float32(len(response) / 100)


def tensor(prompt, response, reference):
    import torch

    return torch.tensor(len(response) / 100)


def big_tensor(prompt, response, reference):
    import torch

    return torch.zeros(2)


def key_error(prompt, response, reference):
    return {"a": 1}[response[:5]]


def raises_later(prompt, response, reference):
    global calls
    calls += 1
    if calls > 40:
        raise RuntimeError("no more scores")
    return len(response) / 100


def without_message(prompt, response, reference):
    raise ValueError


def stop_iteration(prompt, response, reference):
    return next(iter(()))


def recursive(prompt, response, reference):
    return recursive(prompt, response, reference)


def exits(prompt, response, reference):
    sys.exit(3)


def exits_with_text(prompt, response, reference):
    sys.exit("my own message")


def os_exits(prompt, response, reference):
    os._exit(7)


def interrupts(prompt, response, reference):
    raise KeyboardInterrupt


def prints(prompt, response, reference):
    if response.startswith("a"):
        print("a response that starts with a")
    return len(response) / 100


def changes_folder(prompt, response, reference):
    os.chdir("/")
    return len(response) / 100


def slow(prompt, response, reference):
    time.sleep(0.5)
    return len(response) / 100


def yields(prompt, response, reference):
    yield 0.5


async def waits(prompt, response, reference):
    await asyncio.sleep(0)
    return 0.5


def two_arguments(prompt, response):
    return 0.5


def four_arguments(prompt, response, reference, answer):
    return 0.5


def keyword_only(prompt, response, *, reference):
    return 0.5


def any_arguments(*texts):
    return len(texts[1]) / 100


def with_default(prompt, response, reference=None, scale=2):
    return scale * len(response) / 100


anonymous = lambda prompt, response, reference: len(response) / 100  # noqa: E731


class Cls:
    """A class, which is no function of three texts."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, prompt, response, reference):
        """Return a score."""
        return self.scale * len(response) / 100


instance = Cls()


def batched(prompts, responses, references):
    return [len(response) / 100 for response in responses]


def batched_generator(prompts, responses, references):
    return (len(response) / 100 for response in responses)


def batched_one_number(prompts, responses, references):
    return 0.5


def batched_one_too_few(prompts, responses, references):
    return [0.5 for _ in responses[1:]]


def batched_dictionary(prompts, responses, references):
    return {"scores": [0.5 for _ in responses]}


def batched_raises(prompts, responses, references):
    return [1 / 0 for _ in responses]
