"""Every algorithm with every generator at every lag: a few updates each.

The runs share one process for each generator, because all of them train the same model.
"""

from dataclasses import dataclass, replace

import pytest

from rlhf.assembly.parts import make
from rlhf.generators.annotating import AnnotatedGenerator
from rlhf.generators.generator import Generator
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests import needs
from tests.end_to_end.conftest import rows

pytestmark = pytest.mark.forks

ONLINE = ("dpo", "bok", "ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
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
def processes(tmp_path_factory):
    """Lend every run the process of its generator; the first run that needs a process starts it.

    A run with a lag also gets the annotator, which scores the samples in a second process.
    """
    started: dict[str, AnnotatedGenerator] = {}

    def lend(section, context):
        if not section.has_worker(context.max_lag):
            return make(section, context)
        if section.name not in started:
            log = tmp_path_factory.mktemp("log")
            started[section.name] = make(replace(section, annotate=True), replace(context, folder=log))
        generator = started[section.name]
        return Lent(generator if context.max_lag else generator.generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.assembly.generator.make", lend)
        yield
    for generator in started.values():
        generator.close()


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("algo", ONLINE)
@pytest.mark.parametrize("generator", ["hf", "vllm"])
def test_every_algorithm_runs_with_every_generator_at_every_lag(
    tiny, tmp_path, processes, generator, algo, max_lag
):
    if generator == "vllm":
        pytest.importorskip("vllm", reason=needs.VLLM)
    updates = 2 + (max_lag == 2)
    words = [f"algo={algo}", f"generator={generator}", f"schedule.max_lag={max_lag}"]
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
