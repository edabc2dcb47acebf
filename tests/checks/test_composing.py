"""`generator=auto`, the default: vLLM where it is installed, a GPU is available and the config is valid."""

import pytest

from rlhf.checks import check
from rlhf.config import root
from rlhf.core.errors import UserError
from rlhf.core.machine import Machine
from rlhf.memory import plan, sizes
from rlhf.memory.sizes import config_size
from rlhf.stages.words import describe
from rlhf.words.compose import compose, run_name
from tests.memory.plans import PYTHIA_2_8B

MODEL = ["model=pythia_410m", "task=tldr"]


def on_gpus(count, monkeypatch, memory=2**36):
    """Let this machine have `count` GPUs with `memory` bytes."""
    monkeypatch.delenv(root.SELECTED, raising=False)
    for module in (root, check, plan):
        monkeypatch.setattr(module, "this_machine", lambda: Machine(2**38, (memory,) * count))


def config(overrides):
    """Return the config of a run."""
    return check.composed(overrides)


@pytest.mark.parametrize(("gpus", "expected"), [(0, "hf"), (1, "vllm_colocated"), (2, "vllm")])
def test_the_default_is_the_run_of_the_option_that_it_selects_and_the_summary_shows_it(
    gpus, expected, monkeypatch
):
    on_gpus(gpus, monkeypatch)
    named = compose([*MODEL, f"generator={expected}"])
    for overrides in (MODEL, [*MODEL, "generator=auto"]):
        chosen = config(overrides)
        assert chosen == named and run_name(chosen) == run_name(named)
    assert (("generator", expected) in describe(named, 8192)) == expected.startswith("vllm")


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (1, ["schedule.max_lag=1"], "hf"),  # vLLM on the GPU of the trainer cannot sample ahead
        (2, ["schedule.max_lag=1"], "vllm"),
        (1, ["generator.batch_size=64"], "hf"),  # a key of hf
        (1, ["generator.worker=true"], "hf"),
        (1, ["generator.memory=0.3"], "vllm_colocated"),  # a key of vLLM
        (1, ["eval.temperature=0.001"], "hf"),  # vLLM would raise it
        (1, ["experiment=tldr_410m_ppo"], "hf"),  # sets generator.batch_size
        (1, ["backend.device=cpu"], "hf"),
        (1, ["generator=hf"], "hf"),
        (2, ["algo=sft"], "dataset"),
        (1, ["debug=tiny"], "hf"),  # tiny stand-ins
    ],
)
def test_auto_selects_a_generator_with_which_the_config_is_valid(gpus, overrides, expected, monkeypatch):
    on_gpus(gpus, monkeypatch)
    assert config([*MODEL, *overrides]).generator.name == expected


def test_auto_selects_hf_if_vllm_does_not_fit_on_the_gpu_of_the_trainer(monkeypatch):
    monkeypatch.setattr(sizes, "named_size", lambda name: config_size(PYTHIA_2_8B))
    chosen = []
    for memory in (80, 141):
        on_gpus(1, monkeypatch, memory * 2**30)
        chosen.append(config([*MODEL, "model.dtype=bfloat16"]).generator.name)
    assert chosen == ["hf", "vllm_colocated"]


def test_auto_selects_hf_if_the_memory_of_torch_cannot_be_sent_to_vllm(monkeypatch):
    on_gpus(1, monkeypatch)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert config(MODEL).generator.name == "hf"
    assert config([*MODEL, "generator.transfer=shared_memory"]).generator.name == "vllm_colocated"


def test_auto_selects_hf_for_the_small_models_of_embedded_tasks(monkeypatch):
    on_gpus(2, monkeypatch)
    assert config([]).generator.name == "hf"


def test_an_invalid_config_is_explained_as_without_a_gpu(monkeypatch):
    errors = []
    for gpus in (0, 2):
        on_gpus(gpus, monkeypatch)
        with pytest.raises(UserError) as caught:
            config(["generator.bach_size=64"])
        errors.append(caught.value.problems)
    assert errors[0] == errors[1] and "generator.batch_size" in errors[0][0]
