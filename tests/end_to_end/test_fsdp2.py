"""Tests that `backend=fsdp2` gives the steps of plain torch, for every algorithm and kind of model.

test_backends.py has the tests that all backends have in common.
"""

import pytest
import torch

from rlhf.core import launched
from rlhf.core.machine import Machine
from rlhf.memory.plan import plan
from rlhf.words.compose import compose
from tests.end_to_end.fsdp2_steps import ALGORITHMS, DEEP, MODELS, RESHARDED
from tests.end_to_end.test_backends import ranks, same_weights
from tests.tiny_models import tiny_lm


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def found(base):
    """Return the results of fsdp2_steps.py on a number of ranks; two ranks come first."""
    results = {}

    def get(size: int) -> dict:
        if size not in results:
            if size != 2:
                get(2)
            ranks(size, "tests.end_to_end.fsdp2_steps", base, base / f"{size}.pt")
            results[size] = torch.load(base / f"{size}.pt", weights_only=True)
        return results[size]

    return get


def same_row(found, expected, rel):
    names = [name for name in expected if name.startswith("loss/")] + ["policy/grad_norm"]
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=rel, abs=1e-6), name
    assert found["policy/grad_norm"] > 0


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_first_step_of_every_algorithm_is_that_of_plain_torch(algo, found):
    both = found(2)["algorithms"][algo]
    same_row(both["fsdp2"], both["torch"], rel=1e-5)
    assert both["fsdp2"]["policy/grad_norm"] == pytest.approx(both["torch"]["policy/grad_norm"], rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_are_those_of_plain_torch_and_a_rank_stores_half(name, found):
    """The third step is made directly after an inference, which leaves weights gathered."""
    model = found(2)["models"][name]
    rough = "bfloat16" in name
    same_row(model["rows"][0], model["torch"]["rows"][0], rel=1e-3 if rough else 1e-5)
    for row, expected in zip(model["rows"], model["torch"]["rows"], strict=True):
        same_row(row, expected, rel=0.1 if rough else 1e-5)
    if not rough:
        same_weights(model["weights"], model["torch"]["weights"], rtol=1e-5, atol=5e-6)
    whole, own = model["numbers"]
    assert own < 0.51 * whole


@pytest.mark.parametrize("name", MODELS)
def test_the_same_number_of_ranks_resumes_to_the_bit(name, found):
    model, resumed = found(2)["models"][name], found(2)["resumed"][name]
    assert resumed["step"] == 3 and resumed["row"] == model["rows"][2]
    same_weights(resumed["weights"], model["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("name", RESHARDED)
@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_ranks_resumes(size, name, found):
    model, resumed = found(2)["models"][name], found(size)["resumed"][name]
    same_row(resumed["row"], model["rows"][2], rel=1e-6)
    same_weights(resumed["weights"], model["weights"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_weights_saved_and_lent_model_and_adapter_are_complete(name, found):
    left = found(2)["models"][name]["left"]
    same_weights(left["saved"], left["weights"], rtol=0, atol=0)
    if "bfloat16" not in name:  # the lent model then computes in bfloat16
        assert torch.equal(left["logits"], left["plain"]["logits"])
    if "adapters" in name:
        same_weights(left["weights"], left["plain"]["weights"], rtol=0, atol=0)


def test_a_full_disk_of_one_rank_is_an_error_of_this_rank_and_the_others_do_not_wait(found):
    assert found(2)["full disk"] == ["", "RuntimeError"]


def test_a_teacher_on_a_server_is_no_module_to_divide(found):
    assert found(2)["served teacher"]["policy/grad_norm"] > 0


def test_inference_in_bfloat16_keeps_no_copies_of_gathered_weights(found):
    three, one = found(2)["copies"]
    assert three == 3 * one > 0


def test_torch_does_not_warn(found):
    assert [found(size)["warnings"] for size in (1, 2, 4)] == [[], [], []]


@pytest.mark.parametrize("shared", [True, False])
def test_the_memory_plan_is_within_a_tenth_of_what_a_rank_stores(shared, found, tmp_path, monkeypatch):
    tiny_lm(**DEEP).save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert launched.world_size() == 2
    words = ["algo=grpo", "algo.samples_per_prompt=2", "scorer=facts", "backend=fsdp2"]
    cfg = compose([*words, f"model.policy={tmp_path}", f"model.shared_prefix={str(shared).lower()}"])
    gpus = Machine(ram=2**40, gpus=(2**40, 2**40))
    (use,) = (use for use in plan(cfg, gpus).uses if use.device == "GPU 0 1")
    (training,) = (phase for phase in use.phases if phase.name == "training")
    parts = [each for each in (*use.parts, *training.parts) if each.name.startswith("policy: ")]
    planned = sum(each.bytes for each in parts if "activations" not in each.name)
    assert planned == pytest.approx(found(2)["memory"][shared], rel=0.1)
