"""Both generators at every lag: a few updates each. test_algorithms.py runs every algorithm with one of them.

Algorithms and generators are independent: a generator gets no objective, an objective gets a finished batch.
"""

from dataclasses import dataclass, replace

import pytest

from rlhf.assembly.parts import make
from rlhf.config.generator import VLLMConfig
from rlhf.generators.annotating import AnnotatedGenerator
from rlhf.generators.generator import Generator
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests import needs
from tests.end_to_end.conftest import rows

pytestmark = pytest.mark.forks

SCORED = ("scorer=facts", "scorer.missing_eos_score=null")


@dataclass
class Lent:
    """A generator that outlives the run that uses it."""

    generator: Generator

    def __getattr__(self, name):
        return getattr(self.generator, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def one_vllm(tmp_path_factory):
    """All runs of this module share one vLLM process and one annotator; the first run starts them."""
    kept: list[AnnotatedGenerator] = []

    def lend(section, context):
        if not isinstance(section, VLLMConfig):
            return make(section, context)
        if not kept:
            log = tmp_path_factory.mktemp("log")
            kept.append(make(replace(section, annotate=True), replace(context, folder=log)))
        return Lent(kept[0] if context.max_lag else kept[0].generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.assembly.generator.make", lend)
        yield
    for generator in kept:
        generator.close()


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("generator", ["hf", "vllm"])
def test_every_generator_runs_at_every_lag(tiny, tmp_path, one_vllm, generator, max_lag):
    if generator == "vllm":
        pytest.importorskip("vllm", reason=needs.VLLM)
    updates = 2 + (max_lag == 2)
    words = [f"generator={generator}", f"schedule.max_lag={max_lag}"]
    sizes = ["algo.samples_per_prompt=2", f"schedule.total_episodes={updates * 16}", "schedule.eval_every=0"]
    folder = RunFolder(tmp_path / "run")
    run(tiny(*words, *sizes, "schedule.save_every=0", *SCORED), folder)
    found = [row for row in rows(folder) if "lr" in row]
    assert [row["lag"] for row in found] == [min(update, max_lag) for update in range(updates)]
    assert [row["episode"] for row in found] == [16 * (update + 1) for update in range(updates)]
    assert all(("annotator/restarts" in row) == (max_lag > 0) for row in found)
    first = found[0]
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-3)
    assert first["mismatch/kl"] < 1e-4
    assert first["policy/grad_norm"] > 0
