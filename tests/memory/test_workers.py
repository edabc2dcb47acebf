"""The GPU memory of generator processes and annotators in the memory plan."""

from dataclasses import dataclass, replace

import pytest

from rlhf.config.generators import Reserved, WorkerConfig
from rlhf.core.machine import Machine
from rlhf.memory import plan
from rlhf.memory import plan as memory
from rlhf.memory.uses import CONTEXT, GIB
from rlhf.words.compose import compose
from tests.memory.test_plan import PYTHIA_2_8B, local_model

LAG = "schedule.max_lag=1"
ANNOTATE = "generator.annotate=true"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def needs(words, gpus):
    """Return the bytes of each part on each device, by device and name."""
    machine = Machine(ram=256 * GIB, gpus=(80 * GIB,) * gpus)
    plan = memory.plan(compose(["backend.device=cuda", LAG, *words.split()]), machine)
    return {use.device: {part.name: part.bytes for part in use.parts} for use in plan.uses}


def test_a_generator_process_is_counted_on_its_own_gpu():
    one, two = needs("", 1), needs("", 2)
    assert list(one) == ["GPU 0", "RAM"] and list(two) == ["GPU 0", "GPU 1", "RAM"]
    assert "generator: weights" in one["GPU 0"] and "generator: weights" not in two["GPU 0"]
    assert two["GPU 1"]["generator: weights"] == one["GPU 0"]["generator: weights"]


def test_a_generator_process_of_ranks_on_all_gpus_is_counted_on_the_gpu_of_its_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    one, each = needs("", 2), needs("generator.per_rank=true", 2)
    assert list(one) == list(each) == ["GPU 0 1", "RAM"]
    assert one["GPU 0 1"]["generator: weights"] == each["GPU 0 1"]["generator: weights"]


@pytest.mark.parametrize(
    ("words", "gpus", "device"),
    [("", 1, "GPU 0"), ("", 2, "GPU 1"), ("", 3, "GPU 1"), ("generator=vllm", 2, "GPU 0")],
)
def test_the_models_of_an_annotator_are_counted_on_its_gpu(words, gpus, device):
    without, found = needs(words, gpus), needs(f"{words} {ANNOTATE}", gpus)
    parts = found[device].keys() - without.get(device, {}).keys()
    assert parts >= {"annotator: reference", "annotator: reward model", "annotator: log-probs and scores"}
    assert found["RAM"]["annotator's process"] > 0
    others = [name for name in found if name not in (device, "RAM")]
    assert not any(part.startswith("annotator") for name in others for part in found[name])


def test_each_process_on_a_gpu_has_a_cuda_context():
    found = needs(ANNOTATE, 2)["GPU 1"]
    assert found["CUDA"] == CONTEXT  # the last of two parts with this name: generator and annotator
    machine = Machine(ram=256 * GIB, gpus=(80 * GIB,) * 2)
    use = memory.plan(compose(["backend.device=cuda", LAG, ANNOTATE]), machine).uses[1]
    assert [part.bytes for part in use.parts if part.name == "CUDA"] == [CONTEXT] * 2


def test_a_gpu_with_too_little_memory_for_the_annotator_is_refused_with_a_remedy(monkeypatch, tmp_path):
    machine = Machine(ram=256 * GIB, gpus=(160 * GIB, 36 * GIB))
    monkeypatch.setattr(memory, "this_machine", lambda: machine)
    folder = local_model(tmp_path / "pythia", PYTHIA_2_8B)
    words = ["backend.device=cuda", LAG, f"model.policy={folder}", f"model.reward={folder}"]
    assert plan.problems(compose(words)) == []
    (problem,) = plan.problems(compose([*words, ANNOTATE]))
    assert "GPU 1" in problem and "generator.annotate=false" in problem


@dataclass(kw_only=True, slots=True)
class OtherEngine(WorkerConfig):
    """A generator that no module of the package knows."""

    def reserves(self, on_gpu):
        return Reserved(engine="engine", share=0.5)

    def reserved_gpus(self, ranks):
        return range(ranks, ranks + 1)


def test_a_new_generator_is_planned_from_the_answers_of_its_section():
    cfg = replace(compose(["backend.device=cuda"]), generator=OtherEngine(name="other"))
    gpus = memory.plan(cfg, Machine(ram=256 * GIB, gpus=(80 * GIB,) * 2)).uses
    assert [use.device for use in gpus] == ["engine's share of GPU 1", "GPU 0", "RAM"]
    assert gpus[0].total == 40 * GIB
    (ram,) = memory.plan(replace(cfg, backend=compose([]).backend), Machine(ram=16 * GIB)).uses
    assert {part.name: part.bytes for part in ram.parts}["engine: keys and values"] == 8 * GIB
