"""Measure this project: the same run as `python -m rlhf.train` with these settings.

python -m benchmarks.against_trl.ours <case as JSON> <folder of materials> <output file>
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.against_trl.meter import Meter
from benchmarks.against_trl.work import EPISODES, MAX_LAG, WORKS, Case


def overrides(case: Case, materials: Path) -> list[str]:
    """Return the command-line arguments of the run."""
    work = WORKS[case.work]
    return [
        *(asynchronous() if case.asynchronous else synchronous(case, materials)),
        f"algo.samples_per_prompt={case.samples}",
        "model=pythia",
        f"model.dtype={'bfloat16' if case.gpu else 'float32'}",
        f"model.policy={case.policy(materials)}",
        "task=tldr",
        f"task.path={case.data(materials)}",
        f"task.max_prompt_tokens={work.longest_prompt}",
        "scorer.missing_eos_score=null",
        "scorer@gold=none",
        f"generator.response_length={work.response}",
        f"generator.temperature={case.temperature}",
        "backend=torch",
        f"backend.device={'cuda' if case.gpu else 'cpu'}",
        f"backend.micro_batch={work.micro_batch}",
        f"backend.threads={case.threads}",
        f"optim.lr={case.lr}",
        "optim.schedule=constant",
        f"schedule.total_episodes={EPISODES * case.updates}",
        f"schedule.prompts_per_update={case.prompts}",
        "schedule.eval_every=0",
        "schedule.save_every=0",
        "progress=off",
    ]


def synchronous(case: Case, materials: Path) -> list[str]:
    """Return the arguments of a case that samples and trains in turn."""
    return [
        f"algo={case.algo}",
        f"model.reward={case.reward(materials)}",
        "scorer=reward_model",
        *(["generator=vllm_colocated"] if case.sampler == "vllm" else ["generator=hf"]),
    ]


def asynchronous() -> list[str]:
    """Return the arguments of a case that samples with vLLM on a second GPU, as TRL's asynchronous GRPO.

    TRL has no reference model in this case. Here the reference model is used for metrics only.
    """
    return [
        "algo=grpo",
        "algo.kl_coef=0",
        "scorer=function",
        f"scorer.path={Path(__file__).with_name('reward.py')}:variety",
        "generator=vllm",
        f"schedule.max_lag={MAX_LAG}",
    ]


def measure(case: Case, materials: Path) -> dict[str, Any]:
    """Run the case and return its figures."""
    meter = Meter(case.warmup, case.gpu)
    carry_out(overrides(case, materials), case.samples, meter)
    return meter.figures()


def carry_out(args: list[str], samples: int, meter: Meter) -> None:
    """Run the command line `args`, measured by `meter`. Call this once per process: it patches the run.

    Args:
        args: command-line arguments of the run.
        samples: samples per prompt (K).
        meter: measures the run.
    """
    from rlhf.assembly import training as assembly
    from rlhf.loggers.logger import Logger
    from rlhf.runs.folder import RunFolder
    from rlhf.scorers.scorer import RewardModelScorer
    from rlhf.stages import run as runs
    from rlhf.words.compose import compose

    class EndOfUpdate(Logger):
        """Ends an update of the meter: the row of metrics is written at the end of an update."""

        def log(self, *_: Any) -> None:
            meter.update_ended()

    def sampled(rollouts: Any) -> dict[str, int]:
        return {
            "episodes": rollouts.episodes,
            "prompt_tokens": samples * int(rollouts.prompt_mask.sum()),
            "response_tokens": int(rollouts.response_mask.sum()),
        }

    def watched(stream: Iterable[Any], updates: int) -> Iterator[Any]:
        rollouts = iter(stream)
        for _ in range(updates):
            with meter.charge("generate"):  # waiting for rollouts
                batch = next(rollouts)
            meter.counts.update(sampled(batch))
            yield batch

    build_engine, build_loggers, train = assembly.build_engine, runs.build_loggers, runs.train

    def engine(*args: Any) -> Any:
        made = build_engine(*args)
        meter.wrap(made, "annotate", "reference")
        meter.wrap(made, "forward", seen=lambda _: {"micro_batches": 1})
        meter.wrap(made, "update", seen=lambda _: {"optimizer_steps": 1})
        return made

    def loop(parts: Any, stream: Any, state: Any, *rest: Any) -> None:
        meter.begin()
        train(parts, watched(stream, state.num_updates), state, *rest)

    assembly.build_engine, runs.train = engine, loop
    runs.build_loggers = lambda *args: [*build_loggers(*args), EndOfUpdate()]
    meter.wrap(RewardModelScorer, "score", "score")
    with tempfile.TemporaryDirectory() as folder:
        runs.run(compose(args), RunFolder(Path(folder) / "run"))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    case, materials, out = Case.load(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    out.write_text(json.dumps({**measure(case, materials), "versions": versions()}))
