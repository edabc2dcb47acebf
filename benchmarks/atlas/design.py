"""The design of the study: tasks, methods, lags, minibatches, seeds and learning rates, as plain data.

The learning rate of each method and task is chosen from `Design.rates`, at lag 0 and at lag 16, by the mean
final value of the tuning seeds, which no table uses. Lags 0 and 1 and N = 1 use the rate of lag 0, larger
lags and N the rate of lag 16. Online DPO and PPO on `tldr_mini` with lags 0 and 64 are repeated with K = 4,
and with a hidden size of 64 in place of 128, with the learning rates of K = 2 and size 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlhf.core.files import digest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ROOT / "docs"

# Name -> overrides of `python -m rlhf.train`. All other settings of the algorithms are their defaults.
UNCORRECTED: Mapping[str, tuple[str, ...]] = {
    "dpo": ("algo=dpo",),
    "ipo": ("algo=dpo", "algo.loss_type=ipo"),
    "rloo": ("algo=rloo",),
    "ppo": ("algo=ppo", "algo.value_lr=1e-3"),
    "grpo": ("algo=grpo",),
    "cispo": ("algo=cispo",),
    "bok": ("algo=bok",),
}
CORRECTED: Mapping[str, tuple[str, ...]] = {
    "dpo+is": ("algo=dpo", "algo.weighting=is"),
    "dpo+wpo": ("algo=dpo", "algo.weighting=wpo"),
    "oapl": ("algo=oapl",),
    "topr": ("algo=topr",),
    "m2po": ("algo=m2po",),
    # the band of the preset is for long responses: with about 30 tokens it would reject almost all
    "geometric": (
        *("algo=grpo", "correction=geometric"),
        *("algo.correction.reject_low=0.9", "algo.correction.reject_high=1.1"),
    ),
    "truncate": ("algo=grpo", "algo.correction.kind=truncate"),
}
METHODS = {**UNCORRECTED, **CORRECTED}


class Task(NamedTuple):
    """A task of the study, with the batch size of all its runs.

    Attributes:
        metric: metric of the final evaluation by which methods are compared.
        label: name of the metric in tables.
        samples: K, responses of one prompt.
        prompts: prompts per optimizer step.
        kl: KL to the reference, in nats per response, at which gold scores are compared.
        cpu_s: CPU seconds of a run, as an estimate before any run is measured.
        overrides: further overrides of every run of the task.
    """

    metric: str
    label: str
    samples: int
    prompts: int
    kl: float
    cpu_s: float
    overrides: tuple[str, ...] = ()


class Cell(NamedTuple):
    """Settings whose runs differ only in the seed and the learning rate.

    Attributes:
        task: name of the task.
        method: name of the method.
        lag: `schedule.max_lag`.
        minibatches: N, optimizer steps per rollout batch.
        samples: K, responses of one prompt.
        width: hidden size of all models.
    """

    task: str
    method: str
    lag: int = 0
    minibatches: int = 1
    samples: int = 2
    width: int = 128


class Run(NamedTuple):
    """A run of the study. `rate` is None while the learning rate of the cell is not chosen."""

    cell: Cell
    seed: int
    rate: float | None


@dataclass(frozen=True, kw_only=True)
class Design:
    """A study.

    Attributes:
        tasks: the tasks, by name.
        methods: overrides of each method, by name.
        lags: values of `schedule.max_lag`, with one optimizer step per rollout batch.
        minibatches: numbers of optimizer steps per rollout batch (N), with lag 0.
        seeds: seeds of the runs in the figures.
        tuning_seeds: seeds of the runs from which learning rates are chosen.
        tuning_lags: the lags at which learning rates are chosen. Cells with a smaller lag and N than the
            second value use the rate of the first value, other cells the rate of the second value.
        rates: the learning rates that are compared.
        collapse_rate: a learning rate that is too large, of the runs that are made to collapse; None: no such
            runs. They are not in the figures, but the study of the collapse warning uses them.
        collapse_lags: the lags of these runs.
        collapse_seeds: the seeds of these runs.
        steps: optimizer steps of every run.
        eval_every: fraction of the run between evaluations; runs for learning rates have only the first and
            the last evaluation.
        scale_methods: methods that are also run with other K and width.
        scale_task: the task of these runs.
        scale_lags: the lags of these runs.
        scale_samples: further values of K.
        scale_widths: further hidden sizes.
        overrides: further overrides of every run.
        results: the file of results, one row per run.
        chosen: the file of chosen learning rates.
        document: the page with the generated part.
        tables: the file of all tables.
        figure: the figure of the page.
        outputs: the folder of run folders and models.
    """

    tasks: Mapping[str, Task]
    methods: Mapping[str, tuple[str, ...]]
    lags: Sequence[int]
    minibatches: Sequence[int]
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    tuning_lags: tuple[int, int]
    rates: Sequence[float]
    steps: int
    eval_every: float
    collapse_rate: float | None = None
    collapse_lags: Sequence[int] = ()
    collapse_seeds: Sequence[int] = ()
    scale_methods: Sequence[str] = ()
    scale_task: str = "tldr_mini"
    scale_lags: Sequence[int] = ()
    scale_samples: Sequence[int] = ()
    scale_widths: Sequence[int] = ()
    overrides: tuple[str, ...] = ()
    results: Path
    chosen: Path
    document: Path
    tables: Path
    figure: Path
    outputs: Path

    @property
    def resolution(self) -> float:
        """The smallest difference of two win rates or accuracies: one prompt of an evaluation."""
        settings = dict(each.split("=", 1) for each in self.overrides)
        return 1 / int(settings["eval.prompts"])

    def cell(self, task: str, method: str, lag: int = 0, minibatches: int = 1) -> Cell:
        """Return a cell with the K of its task."""
        return Cell(task, method, lag, minibatches, self.tasks[task].samples)

    def settings(self, run: Run) -> list[str]:
        """Return the overrides on which the result of a run depends.

        All runs of a task have the same number of optimizer steps and of samples per optimizer step.
        """
        cell, task = run.cell, self.tasks[run.cell.task]
        prompts = task.samples * task.prompts * cell.minibatches // cell.samples
        return [
            f"task={cell.task}",
            "model=pythia",
            *self.methods[cell.method],
            *([] if cell.width == Cell._field_defaults["width"] else [f"model.hidden_size={cell.width}"]),
            f"algo.samples_per_prompt={cell.samples}",
            f"optim.lr={run.rate:g}",
            f"schedule.prompts_per_update={prompts}",
            f"schedule.total_episodes={self.steps * task.prompts * task.samples}",
            f"schedule.minibatches={cell.minibatches}",
            f"schedule.max_lag={cell.lag}",
            f"schedule.eval_every={self.steps if run.seed in self.tuning_seeds else self.eval_every}",
            f"seed={run.seed}",
            *task.overrides,
            *self.overrides,
        ]

    def key(self, run: Run) -> str:
        """Return eight hex digits that identify the settings of a run."""
        return digest(self.settings(run))

    def execution(self) -> list[str]:
        """Return the overrides that do not change results: one thread, no second process, no checkpoints.

        A generator in the trainer's process samples a batch at its request, so a lag is exact.
        """
        return [
            "generator.worker=false",
            "backend.threads=1",
            "schedule.save_every=0",
            "eval.samples=0",
            "progress=off",
            f"output_dir={self.outputs}",
            f"cache_dir={self.outputs / 'models'}",
        ]

    def overrides_of(self, run: Run) -> list[str]:
        """Return all overrides of a run."""
        return self.settings(run) + self.execution()


STUDY = Design(
    tasks={
        "tldr_mini": Task("eval/win_rate", "win rate", samples=2, prompts=8, kl=1.0, cpu_s=36),
        "arithmetic": Task("eval/gold_score", "accuracy", samples=4, prompts=4, kl=0.5, cpu_s=15),
    },
    methods=METHODS,
    lags=(0, 1, 4, 16, 64),
    minibatches=(1, 4, 16, 64),
    seeds=(1, 2, 3, 4, 5),
    tuning_seeds=(101, 102),
    tuning_lags=(0, 16),
    rates=(3e-5, 1e-4, 3e-4),
    steps=128,
    eval_every=0.25,
    collapse_rate=1e-3,
    collapse_lags=(0, 16),
    collapse_seeds=(201, 202),
    scale_methods=("dpo", "ppo"),
    scale_lags=(0, 64),
    scale_samples=(4,),
    scale_widths=(64,),
    overrides=("eval.prompts=256", "backend.micro_batch=128"),
    results=DOCUMENTS / "results/off_policy_runs.jsonl",
    chosen=DOCUMENTS / "results/off_policy_rates.json",
    document=DOCUMENTS / "results/off_policy.md",
    tables=Path(__file__).with_name("tables.md"),
    figure=DOCUMENTS / "figures/off_policy_atlas.png",
    outputs=Path("outputs/atlas"),
)

SMOKE = Design(
    tasks={"tldr_mini": Task("eval/win_rate", "win rate", samples=2, prompts=4, kl=0.01, cpu_s=3)},
    methods={name: METHODS[name] for name in ("dpo", "ppo")},
    lags=(0, 4),
    minibatches=(1, 4),
    seeds=(1, 2),
    tuning_seeds=(101,),
    tuning_lags=(0, 4),
    rates=(1e-4, 3e-4),
    steps=8,
    eval_every=0.5,
    overrides=(
        "eval.prompts=16",
        "generator.response_length=16",
        'stages.sft=["debug=tiny"]',
        'stages.reward=["debug=tiny"]',
        "stages.pairs=64",
    ),
    results=Path("outputs/atlas_smoke/off_policy_runs.jsonl"),
    chosen=Path("outputs/atlas_smoke/off_policy_rates.json"),
    document=Path("outputs/atlas_smoke/off_policy.md"),
    tables=Path("outputs/atlas_smoke/tables.md"),
    figure=Path("outputs/atlas_smoke/off_policy_atlas.png"),
    outputs=Path("outputs/atlas_smoke"),
)
