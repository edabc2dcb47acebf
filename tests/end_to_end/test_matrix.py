"""Every algorithm with every generator at every lag: a few updates each.

The runs share one process for each generator, because all of them train the same model.
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest

from rlhf.assembly.parts import make
from rlhf.config.generators import GeneratorConfig
from rlhf.generators.generator import Generator
from rlhf.generators.process import AnnotatedGenerator
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests import needs
from tests.end_to_end.conftest import UPDATES_ONLY, rows
from tests.end_to_end.test_algorithms import ONLINE, SCORED, assert_agreement

LAGS = ("hf", 2), ("vllm", 2)  # make test-all; the updates of a run at lag 2 have the lags 0, 1 and 2
WITH_VLLM = ("dpo", "ppo")  # pairs, values: in make test-all the others are tested with hf only


def cases():
    """Yield every algorithm with every generator at every lag."""
    for generator, algo, lag in product(("hf", "vllm"), ONLINE, (0, 1, 2)):
        smoke = (generator, lag) == ("hf", 0) and algo in ("ppo", "grpo")
        often = (generator, lag) in LAGS and (generator == "hf" or algo in WITH_VLLM)
        mark = [pytest.mark.smoke] if smoke else [] if often else [pytest.mark.nightly]
        yield pytest.param(generator, algo, lag, marks=mark)


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

    def lend(section, *context):
        if not isinstance(section, GeneratorConfig) or not section.has_worker(context[0].max_lag):
            return make(section, *context)
        if section.name not in started:
            log = tmp_path_factory.mktemp("log")
            started[section.name] = make(replace(section, annotate=True), replace(context[0], folder=log))
        generator = started[section.name]
        return Lent(generator if context[0].max_lag else generator.generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.assembly.training.make", lend)
        yield
    for generator in started.values():
        generator.close()


@pytest.mark.parametrize(("generator", "algo", "max_lag"), list(cases()))
def test_every_algorithm_runs_with_every_generator_at_every_lag(
    tiny, tmp_path, processes, generator, algo, max_lag
):
    if generator == "vllm":
        pytest.importorskip("vllm", reason=needs.VLLM)
    updates = 2 + (max_lag == 2)
    words = [f"algo={algo}", f"generator={generator}", f"schedule.max_lag={max_lag}"]
    sizes = ["algo.samples_per_prompt=2", f"schedule.total_episodes={updates * 16}"]
    folder = RunFolder(tmp_path / "run")
    run(tiny(*words, *sizes, *UPDATES_ONLY, *SCORED), folder)
    found = [row for row in rows(folder) if "lr" in row]
    assert [row["lag"] for row in found] == [min(update, max_lag) for update in range(updates)]
    assert [row["episode"] for row in found] == [16 * (update + 1) for update in range(updates)]
    assert all(("annotator/restarts" in row) == (max_lag > 0) for row in found)
    assert_agreement(found[0], folder)
