"""Every algorithm with every generator at every lag: a few updates each, one process a generator."""

from dataclasses import dataclass, replace

import pytest

from rlhf.generators.annotating import AnnotatedGenerator
from rlhf.generators.generator import Generator
from rlhf.generators.hf import generator as hf
from rlhf.generators.vllm import generator as vllm
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import rows

ONLINE = ("dpo", "bok", "ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
SCORED = ("scorer=facts", "scorer.missing_eos_score=null")


@dataclass
class Lent:
    """A generator that outlives the run it is lent to."""

    generator: Generator

    def __getattr__(self, name):
        return getattr(self.generator, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Processes by generator, started by the first run that needs them; all runs have the same models. Only
    with a lag those that annotate are lent, too.
    """
    kept: dict[str, AnnotatedGenerator] = {}
    patch = pytest.MonkeyPatch()

    def lend(module):
        build = module.build

        def lent(config, context):
            if not config.has_worker(context.max_lag):
                return build(config, context)
            if config.name not in kept:
                logs = replace(context, folder=tmp_path_factory.mktemp("log"))
                kept[config.name] = build(replace(config, annotate=True), logs)
            both = kept[config.name]
            return Lent(both if context.max_lag else both.generator)

        patch.setattr(module, "build", lent)

    lend(hf)
    lend(vllm)
    yield kept
    patch.undo()
    for generator in kept.values():
        generator.close()


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("algo", ONLINE)
@pytest.mark.parametrize("generator", ["hf", "vllm"])
def test_every_algorithm_runs_with_every_generator_at_every_lag(
    tiny, tmp_path, processes, generator, algo, max_lag
):
    if generator == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
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
