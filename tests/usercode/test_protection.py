"""Code of the user leaves global settings and random states as they were."""

import io
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings

import numpy
import pytest
import torch

from rlhf.usercode.protection import protected

CUDNN, TERM = torch.backends.cudnn, signal.SIGTERM
ENTERED = []  # contexts that are never left


def enter_inference_mode():
    mode = torch.inference_mode()
    mode.__enter__()
    return mode


CHANGES = {  # what the user's code does -> how the setting is read
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "cudnn": (lambda: setattr(CUDNN, "benchmark", True), lambda: CUDNN.benchmark),
    "torch seed": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().tolist()),
    "torch draws": (lambda: torch.rand(3), lambda: torch.get_rng_state().tolist()),
    "numpy seed": (lambda: numpy.random.seed(7), lambda: numpy.random.get_state()[1].tolist()),
    "numpy errors": (lambda: numpy.seterr(all="raise"), numpy.geterr),
    "random": (lambda: random.seed(7), random.getstate),
    "folder": (lambda: os.chdir("/"), os.getcwd),
    "environment": (os.environ.clear, lambda: dict(os.environ)),
    "variable": (lambda: os.environ.update(OMP_NUM_THREADS="7"), lambda: dict(os.environ)),
    "output": (lambda: setattr(sys, "stdout", io.StringIO()), lambda: sys.stdout),
    "errors": (lambda: setattr(sys, "stderr", None), lambda: sys.stderr),
    "recursion": (lambda: sys.setrecursionlimit(400), sys.getrecursionlimit),
    "logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "inference mode": (lambda: ENTERED.append(enter_inference_mode()), torch.is_inference_mode_enabled),
    "inference mode, left": (lambda: torch.inference_mode().__enter__(), torch.is_grad_enabled),
    "signals": (lambda: signal.signal(TERM, signal.SIG_IGN), lambda: signal.getsignal(TERM)),
}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_code_of_the_user_changes_is_restored_also_after_an_error(name, seed):
    change, read = CHANGES[name]
    before = read()
    with pytest.raises(KeyError), protected(seed):
        change()
        raise KeyError
    assert read() == before


def test_a_folder_that_was_deleted_is_left():
    before = os.getcwd()
    with protected(), tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    assert os.getcwd() == before


def test_a_seed_gives_the_same_random_numbers_each_time():
    drawn = []
    for seed in (5, 5, 6):
        with protected(seed):
            drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])


@pytest.mark.process
def test_torch_has_its_defaults_after_a_file_that_imports_it_first(tmp_path):
    source = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)\n"
    (tmp_path / "own.py").write_text(f"{source}def f(response): ...\n")
    program = (
        "import sys\nfrom rlhf.usercode.address import load_function\n"
        f"load_function('scorer.path', '{tmp_path}/own.py:f', ())\n"
        "import torch\nassert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
