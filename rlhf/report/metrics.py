"""Metrics that the report shows: title, heading, decimals, direction, scale; and the kinds of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from rlhf.config.algo import Trains
from rlhf.report.runs import Run, trains


class Kind(StrEnum):
    """The kind of a run; the value is used in file names and in ids of the page."""

    rl = "rl"
    offline = "offline"
    reward = "reward"
    sft = "sft"

    @property
    def heading(self) -> str:
        """The kind in headings."""
        return _TITLES[self]


_TITLES = {
    Kind.rl: "RL",
    Kind.offline: "Offline training of the policy",
    Kind.reward: "Reward model",
    Kind.sft: "SFT",
}


def kind_of(run: Run) -> Kind:
    """Return the kind of a run, given by the model that its algorithm trains and by its generator."""
    offline = run.config.get("generator.name") == "dataset"
    policy = Kind.offline if offline else Kind.rl
    return {Trains.base: Kind.sft, Trains.reward: Kind.reward}.get(trains(run.config), policy)


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl as the report shows it.

    Attributes:
        name: name in metrics.jsonl.
        title: title of a figure, with unit.
        heading: heading of a column.
        decimals: number of decimals in tables and sentences.
        better: 1 if higher is better, -1 if lower is better, 0 if neither.
        scale: settings that determine the scale of the metric: "scorer", "gold", "algo" or "". Values of runs
            that differ in these settings are not comparable and never share an axis.
        expected: value of the metric if nothing happens, such as 1 for a ratio.
        noise: largest difference from `expected` that is rounding noise. A metric that is never further from
            `expected` is not drawn. 0: the metric is always drawn.
        logarithmic: whether to draw the metric on a logarithmic axis if values differ by a factor above 30.
        rate: whether the metric is between 0 and 1.
    """

    name: str
    title: str
    heading: str
    decimals: int = 3
    better: int = 0
    scale: str = ""
    expected: float = 0.0
    noise: float = 0.0
    logarithmic: bool = False
    rate: bool = False

    def text(self, value: float) -> str:
        """Return a value of the metric as text."""
        return number(value, self.decimals)

    @property
    def evaluated(self) -> bool:
        """Whether evaluations on held-out data measure the metric."""
        return self.name.startswith("eval/")


_NOISE = 1e-6  # rounding noise of a sum of log-probs in float32

_share = partial(Metric, decimals=3, better=1, rate=True)
_sample_size = partial(_share, expected=1.0, noise=_NOISE)

# Metrics of the learning curves, in the order of the panels.
LEARNING = (
    _share("eval/win_rate", "win rate vs. reference responses", "win rate", scale="gold"),
    _share("eval/win_rate_vs_initial", "win rate vs. initial policy", "win rate vs. initial", scale="scorer"),
    _share("eval/accuracy", "accuracy on held-out data", "accuracy"),
    Metric("eval/score", "reward on held-out prompts", "reward", 2, 1, "scorer"),
    Metric("eval/gold_score", "judge score", "judge score", 2, 1, "gold"),
    Metric("eval/loss", "held-out loss (nats)", "held-out loss", 3, -1, "algo"),
    Metric("eval/margin", "reward margin on held-out pairs", "margin", 3, 0, "algo", noise=_NOISE),
    Metric("objective/scores", "training reward", "training reward", 2, 1, "scorer"),
    Metric("eval/kl", "KL to the reference (nats per response)", "KL", 2, noise=_NOISE),
    Metric("eval/response_tokens", "response length (tokens)", "tokens", 1),
    Metric("environment/turns", "replies per episode", "turns", 1),
    Metric("environment/tool_errors", "failed calls per episode", "failed calls", 2, -1),
    Metric("objective/entropy", "entropy estimate (nats per response)", "entropy", 2),
)

# Metrics of the figure of the optimization, in the order of the panels.
OPTIMIZATION = (
    Metric("loss/policy", "loss", "training loss", 3, -1, "algo", noise=_NOISE),
    Metric("loss/value", "loss of the value model", "value loss", 3, -1, "algo"),
    _share("rewards/accuracies", "accuracy on training pairs", "training accuracy"),
    Metric("rewards/margins", "reward margin on training pairs", "margin", 3, 0, "algo", noise=_NOISE),
    Metric("policy/grad_norm", "gradient norm before clipping", "gradient norm", 3, logarithmic=True),
    Metric("lr", "learning rate", "learning rate", 9),
    Metric("memory/peak_gib", "peak memory (GiB)", "peak GiB", 1),
)

# Metrics of the figure of lag and mismatch, in the order of the panels.
OFF_POLICY = (
    Metric("lag", "lag (updates)", "lag", 1, noise=_NOISE),
    Metric("mismatch/token_lag", "lag of a token (updates)", "token lag", 1, noise=_NOISE),
    Metric("replay/age", "lag of a prompt (updates)", "age", 1, noise=_NOISE),
    Metric("prompts/solved", "share of solved prompts", "solved", 3, rate=True),
    Metric("mismatch/kl", "KL of sampler and trainer (nats per token)", "KL", 6, noise=_NOISE),
    # a log-prob in float32 has an error of up to 1e-5
    Metric(
        "mismatch/max_ratio", "largest ratio of trainer to sampler", "largest ratio", expected=1.0, noise=1e-5
    ),
    _sample_size("mismatch/ess", "effective sample size over responses", "ESS"),
    _sample_size("weighting/ess", "effective sample size over pairs", "pair ESS"),
    Metric("policy/clipfrac", "fraction of clipped ratios", "clipped", 3, noise=_NOISE, rate=True),
)

_PERPLEXITY = Metric("eval/ppl", "perplexity under the reference", "perplexity", 2)
METRICS = {each.name: each for each in (*LEARNING, *OPTIMIZATION, *OFF_POLICY, _PERPLEXITY)}

# Metrics that state the result of a run, by kind; the first that most runs have is the result. The metrics of
# training rows follow, for runs without evaluations.
_RESULTS = {
    Kind.rl: (
        "eval/win_rate",
        "eval/accuracy",
        "eval/win_rate_vs_initial",
        "eval/score",
        "eval/gold_score",
        "objective/scores",
    ),
    Kind.offline: (
        "eval/win_rate",
        "eval/accuracy",
        "eval/win_rate_vs_initial",
        "eval/score",
        "eval/gold_score",
        "eval/loss",
        "rewards/accuracies",
        "loss/policy",
    ),
    Kind.reward: ("eval/accuracy", "eval/loss", "rewards/accuracies", "loss/policy"),
    Kind.sft: ("eval/loss", "eval/win_rate", "loss/policy"),
}


def main_metric(kind: Kind, runs: Sequence[Run]) -> Metric | None:
    """Return the metric of `_RESULTS` that most runs have; None if no run has any of them.

    A metric of training is returned only if no run has a metric of evaluations.
    """
    counts = {name: sum(run.last(name) is not None for run in runs) for name in _RESULTS[kind]}
    name = max(counts, key=lambda name: (counts[name] > 0 and METRICS[name].evaluated, counts[name]))
    return METRICS[name] if counts[name] else None


def number(value: float, decimals: int) -> str:
    """Return a number as text with `decimals` decimals, and without the sign of a zero."""
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if not text.strip("-0.,") else text


def duration(seconds: float) -> str:
    """Return a duration as text, in the unit that fits."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
