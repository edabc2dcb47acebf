"""Reward functions of a first day. The materials contain a copy of this file as `day_rewards.py`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time

state = {"calls": 0}


def length(text):
    return len(text) / 100


def sleeps(seconds):
    time.sleep(seconds)


def pool(prompt, response, reference):
    with multiprocessing.Pool(2) as workers:
        return sum(workers.map(length, [response, reference]))


def pool_lists(prompts, responses, references):
    with multiprocessing.Pool(2) as workers:
        return workers.map(length, responses)


def terminated(prompt, response, reference):
    process = multiprocessing.Process(target=sleeps, args=(60,))
    process.start()
    process.join(0.05)
    if process.is_alive():
        process.terminate()
        process.join()
    return len(response) / 100 + process.exitcode / 1000


def executor(prompts, responses, references):
    with concurrent.futures.ProcessPoolExecutor(2) as workers:
        return list(workers.map(length, responses))


def program_time_limit(prompt, response, reference):
    try:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2, check=False)
    except subprocess.TimeoutExpired:
        return len(response) / 100
    return 0.0


def forked_by_hand(prompt, response, reference):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    return len(response) / 100


class TooLong(Exception):
    """The time limit of a function."""


def alarm(prompt, response, reference):
    def stop(number, frame):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with contextlib.suppress(TooLong):
        time.sleep(5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    return len(response) / 100


def sees_messages(messages, response):
    if messages[-1]["role"] != "user":
        raise ValueError(messages)
    return len(response) / 100


def trl_dialogue(prompts, completions, **kwargs):
    if not isinstance(prompts[0], list) or not isinstance(completions[0], list):
        raise TypeError(f"{prompts[0]!r}, {completions[0]!r}")
    return [len(completion[0]["content"]) / 100 for completion in completions]


def trl_lists(prompts, completions, **kwargs):
    return [len(completion) / 100 for completion in completions]


def trl_answer(completions, answer, **kwargs):
    return [float(text in completion) for completion, text in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def fails_later(prompt, response, reference):
    state["calls"] += 1
    if state["calls"] > 20:
        raise ValueError("no more")
    return len(response) / 100


def none(prompt, response, reference):
    return None


def none_by_branch(prompt, response, reference):
    if response == reference:
        return 1.0


def infinite(prompt, response, reference):
    return -math.inf


def mapping(prompt, response, reference):
    return {"score": 0.5}


def text(prompt, response, reference):
    return "8/10"


def one_more(prompts, responses, references):
    return [0.5] * (len(responses) + 1)


def series(prompts, responses, references):
    import pandas

    return pandas.Series([len(response) / 100 for response in responses], index=range(5, 5 + len(responses)))


def decimal(prompt, response, reference):
    from decimal import Decimal

    return Decimal(len(response)) / 100


def default_dtype(prompt, response, reference):
    import torch

    torch.set_default_dtype(torch.float64)
    return len(response) / 100


def inference_mode(prompt, response, reference):
    import torch

    state["mode"] = torch.inference_mode()
    state["mode"].__enter__()
    return len(response) / 100


def output_to_nowhere(prompt, response, reference):
    sys.stdout = sys.stderr = io.StringIO()
    return len(response) / 100


def environment(prompt, response, reference):
    os.environ.clear()
    return len(response) / 100


def recursion(prompt, response, reference):
    sys.setrecursionlimit(60)
    return len(response) / 100
