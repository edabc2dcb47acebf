"""`backend.portable`: the same bits on every x86 processor with AVX2."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rlhf.checks.check import problems
from rlhf.core.machine import Machine
from rlhf.stages.prerequisites import stage
from rlhf.words.compose import compose, digest
from tests.test_structure import MODULES

# Of processors with and without AVX-512, of two makers. Other versions of MKL may sum in another order.
DIGEST, TORCH, TRANSFORMERS = "d2d4fe1697173a0a", "2.13", "5.19"


@pytest.fixture(scope="module")
def found():
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("backend.portable needs an x86 processor with AVX2")
    command = [sys.executable, "-m", "tests.assembly.portable_process"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.process
def test_every_processor_trains_to_the_same_bits(found):
    if not (version("torch").startswith(TORCH) and version("transformers").startswith(TRANSFORMERS)):
        pytest.skip("the digest is that of the locked versions")
    assert found[0][0] == DIGEST


@pytest.mark.process
def test_roots_are_exact_though_those_of_mkl_are_not(found):
    _, wrong, of_mkl = found[0]
    assert wrong == 0 < of_mkl


@pytest.mark.process
def test_a_process_that_computed_otherwise_is_refused(found):
    late, left_on = (text for (text,) in found[1:])
    assert "torch has not computed before; start another process" in late
    assert "backend.portable must be true in this process" in left_on


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("backend=zero2", "backend must be torch with backend.portable=true"),
        ("model.dtype=bfloat16", "model.dtype must be float32 with"),
        ("backend.compile=true", "backend.compile must be null or false with"),
        ("generator=vllm", "generator must sample with transformers with"),
    ],
)
def test_what_has_kernels_for_each_processor_is_refused(override, rule):
    words = ["algo=dpo", "model=pythia", override]
    assert not any("portable" in text for text in problems(compose(words)))
    assert [text for text in problems(compose([*words, "backend.portable=true"])) if text.startswith(rule)]


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("rlhf.checks.inputs.this_machine", lambda: Machine(2**34, (2**34,)))
    words = ["algo=dpo", "model=pythia", "backend.portable=true"]
    assert [text for text in problems(compose(words)) if text.startswith("backend.device must be cpu")]
    assert not problems(compose([*words, "backend.device=cpu"]))


def test_stages_are_portable_too_and_the_name_of_a_run_says_it():
    plain, portable = (
        compose(["algo=dpo", "model=pythia", f"backend.portable={on}"]) for on in ("false", "true")
    )
    assert digest(plain) != digest(portable)
    assert stage(portable, "sft").backend.portable and not stage(plain, "sft").backend.portable


def test_no_function_is_used_that_mkl_begins_with_an_approximation_of_the_processor():
    """Such functions are sqrt, atan and log10; `rlhf.core.launched.root` is right on all processors."""
    used = re.compile(r"\.(sqrt|atan|log10)_?\(\)|torch\.(sqrt|atan|log10)\(")
    folders = ("objectives", "models", "engines", "training", "generators", "scorers")
    for name, path in MODULES.items():
        if name.startswith(tuple(f"rlhf.{folder}." for folder in folders)):
            assert not used.search(path.read_text()), name
