"""The memory plan of relabelling: only the judge is loaded."""

import pytest

from rlhf.core.machine import Machine
from rlhf.memory import plan
from rlhf.memory.uses import CONTEXT, GIB, GROUP, PROCESS
from rlhf.words.compose import compose
from tests.memory.test_plan import COUNT_2_8B, LAPTOP, PYTHIA_2_8B, TWO_GPUS, local_model, parts, phases

HEAD = 2560 * 50304  # the output head, which a judge replaces by a head with one output


@pytest.fixture
def judged(tmp_path) -> list[str]:
    """Return the overrides of relabelling with a judge of 2.8 billion parameters."""
    folder = local_model(tmp_path / "judge", PYTHIA_2_8B)
    return ["algo=reward", f"model.policy={folder}", "scorer@gold=reward_model", f"gold.path={folder}"]


def test_relabelling_needs_the_weights_of_the_judge_and_its_activations(judged):
    (use,) = plan.relabelling_plan(compose(judged), LAPTOP).uses
    count = COUNT_2_8B - HEAD + 2560
    assert use.device == "RAM"
    assert parts(use) == {"process": PROCESS, "judge: weights": 4 * count}
    assert list(phases(use)) == ["log-probs and scores"] and use.largest.bytes > 0


def test_relabelling_on_gpus_needs_cuda_and_with_several_ranks_nccl(judged, monkeypatch):
    use = plan.relabelling_plan(compose([*judged, "model.dtype=bfloat16"]), TWO_GPUS).uses[0]
    assert use.device == "GPU 0" and use.total == 80 * GIB
    assert parts(use) == {"CUDA": CONTEXT, "judge: weights": 2 * (COUNT_2_8B - HEAD + 2560)}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parts(plan.relabelling_plan(compose(judged), TWO_GPUS).uses[0])["NCCL"] == GROUP


def test_larger_batches_of_the_judge_need_more_memory(judged):
    small, large = (
        plan.relabelling_plan(compose([*judged, f"gold.batch_size={size}"]), LAPTOP).uses[0]
        for size in (8, 64)
    )
    assert small.bytes < large.bytes


def test_a_judge_that_is_a_program_needs_no_plan():
    assert plan.relabelling_plan(compose(["algo=reward"]), LAPTOP).uses == ()


def test_a_judge_that_is_not_on_this_machine_is_named(judged):
    found = plan.relabelling_plan(compose([*judged[:-1], "gold.path=someone/judge"]), LAPTOP)
    assert found.uses == () and found.unknown == {"gold.path": "someone/judge"}


def test_a_judge_that_does_not_fit_is_refused_with_a_remedy_that_works(judged, monkeypatch):
    (use,) = plan.relabelling_plan(compose([*judged, "gold.batch_size=2"]), LAPTOP).uses
    monkeypatch.setattr("rlhf.memory.plan.this_machine", lambda: Machine(ram=int(use.bytes)))
    (problem,) = plan.relabelling_problems(compose([*judged, "gold.batch_size=512"]))
    assert problem.startswith("gold.batch_size must be small enough for the ")
    assert "got 512; set gold.batch_size=" in problem
    size = problem.rpartition("=")[2]
    assert plan.relabelling_problems(compose([*judged, f"gold.batch_size={size}"])) == []
    monkeypatch.setattr("rlhf.memory.plan.this_machine", lambda: Machine(ram=GIB))
    (problem,) = plan.relabelling_problems(compose(judged))
    assert problem.startswith("gold.path must be") and problem.endswith("or set model.dtype=bfloat16")


def test_a_judge_that_barely_fits_gives_a_warning(judged, monkeypatch):
    (use,) = plan.relabelling_plan(compose(judged), LAPTOP).uses
    monkeypatch.setattr("rlhf.memory.plan.this_machine", lambda: Machine(ram=int(use.bytes)))
    (warning,) = plan.relabelling_warnings(compose(judged))
    assert warning.startswith("relabelling may need about ") and "judge" in warning
