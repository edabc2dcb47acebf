"""The rule about compiled blocks."""

import pytest

from rlhf.checks.check import problems
from rlhf.words.compose import compose
from rlhf.words.identity import run_name, what_counts


@pytest.mark.parametrize("backend", ["zero0", "zero3", "zero2_offload"])
def test_compiled_blocks_are_refused_with_deepspeed_and_the_remedies_are_valid(backend):
    words = [f"backend={backend}", "algo=dpo"]
    (message,) = problems(compose([*words, "backend.compile=true"]))
    assert message.startswith("backend.compile must be null or false with backend=")
    first, second = message.rpartition("set ")[2].split(", or ")
    assert problems(compose([*words, first])) == []
    assert problems(compose(["algo=dpo", second, "backend.compile=true"])) == []


@pytest.mark.parametrize("value", ["null", "false"])
def test_deepspeed_runs_without_compiled_blocks(value):
    assert problems(compose(["backend=zero2", "algo=dpo", f"backend.compile={value}"])) == []


def test_compilation_is_part_of_the_run_name_only_if_it_is_set():
    assert "compile" not in what_counts(compose([]))["backend"]
    assert run_name(compose(["backend.compile=true"])) != run_name(compose([]))
