"""What is wrong with a run, all at once and before anything is loaded: key as typed, rule, value, remedy.

Each section knows its own rules (`Section.problems`); those that cross sections are here. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf.config import Config, NanoConfig
from rlhf.folder import rank_count
from rlhf.generators.config import WorkerConfig, threads
from rlhf.local_models import context_length, context_problem, folder_problem, is_local
from rlhf.memory import plan as memory
from rlhf.schema import sections
from rlhf.scorers.config import RewardModelScorerConfig, choice, scorers
from rlhf.state import TrainState
from rlhf.tasks.config import EmbeddedTaskConfig


def problems(cfg: Config, rules: tuple[Rule, ...] | None = None) -> list[str]:
    """Everything that is wrong with the run `cfg`, each thing once.

    `rules` are those that cross sections; None: all.
    """
    found: list[str] = []
    for _, section in sections(cfg):
        found += section.problems(cfg)
    for rule in RULES if rules is None else rules:
        found += rule(cfg)
    return list(dict.fromkeys(found))


def warnings(cfg: Config) -> list[str]:
    """Settings without effect, or allowed but doubtful, each once."""
    found: list[str] = []
    for _, section in sections(cfg):
        found += section.warnings(cfg)
    for doubt in DOUBTS:
        found += doubt(cfg)
    return list(dict.fromkeys(found))


# -- rules of single numbers -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """A number's lower bound; `above`: it must be more. None passes: the type says where it is allowed."""

    key: str
    least: float
    meaning: str
    remedy: float
    above: bool = False


BOUNDS = (
    Bound("schedule.total_episodes", 1, "responses of the whole run", 12800),
    Bound("schedule.total_epochs", 0, "passes over the data", 1, above=True),
    Bound("schedule.prompts_per_update", 1, "prompts of one update", 64),
    Bound("schedule.minibatches", 1, "optimizer steps in a pass over a batch", 1),
    Bound("schedule.epochs", 1, "passes over a batch", 1),
    Bound("schedule.max_lag", 0, "later batches in flight", 0),
    Bound("schedule.eval_every", 0, "updates, or a fraction of the run; 0 is never", 0.2),
    Bound("schedule.save_every", 0, "updates, or a fraction of the run; 0 is never", 0.25),
    Bound("schedule.log_every", 0, "updates, or a fraction of the run; 0 is never", 1),
    Bound("optim.lr", 0, "the optimizer's step size", 3e-6, above=True),
    Bound("optim.eps", 0, "Adam divides by it", 1e-8, above=True),
    Bound("optim.max_grad_norm", 0, "gradients are scaled down to it; null: they are not", 1.0, above=True),
    Bound("optim.weight_decay", 0, "the pull of weights towards zero", 0),
    Bound("optim.warmup", 0, "optimizer steps, or a fraction of the run", 0),
    Bound("eval.prompts", 1, "held-out examples", 256),
    Bound("eval.batch_size", 1, "sequences decoded at once", 256),
    Bound("eval.samples", 0, "rows of a table", 3),
    Bound("eval.temperature", 0, "logits are divided by it", 0.01, above=True),
    Bound("save_total_limit", 1, "checkpoints kept; the newest is what a run goes on from", 2),
    Bound("seed", 0, "it seeds generators that take no negative number", 1),
)
COUNTS_OR_FRACTIONS = ("schedule.eval_every", "schedule.save_every", "schedule.log_every", "optim.warmup")


def read(cfg: Config, key: str) -> float | None:
    """The number that a dotted key names."""
    value = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]


def plain(value: float) -> str:
    """A number as it is typed."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def numbers(cfg: Config) -> Iterator[str]:
    """Numbers out of bounds, and counts that are not whole."""
    for bound in BOUNDS:
        value = read(cfg, bound.key)
        if value is None:
            continue
        low = not (value > bound.least if bound.above else value >= bound.least)
        if low or not math.isfinite(value):
            sign = ">" if bound.above else ">="
            yield (
                f"{bound.key} must be {sign} {plain(bound.least)} ({bound.meaning}), got {plain(value)}; "
                f"set {bound.key}={plain(bound.remedy)}"
            )
    for key in COUNTS_OR_FRACTIONS:
        value = read(cfg, key)
        if value is not None and value > 1 and math.isfinite(value) and value != int(value):
            unit = "optimizer steps" if key == "optim.warmup" else "updates"
            yield (
                f"{key} must be whole from 1 on (it counts {unit}; below 1 it is a fraction of the run), "
                f"got {plain(value)}; set {key}={round(value)}"
            )
    betas = cfg.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield (
            "optim.betas must be two numbers from 0 to below 1 (decay rates of the gradient and its square), "
            f"got [{','.join(map(plain, betas))}]; set optim.betas=[0.9,0.999]"
        )


# -- rules that cross sections ---------------------------------------------------------------------


def length(cfg: Config) -> Iterator[str]:
    """How long the run is: said once, in a unit that its algorithm has."""
    episodes, epochs = cfg.schedule.total_episodes, cfg.schedule.total_epochs
    stored = not cfg.generator.rollouts
    if episodes is None and epochs is None:
        units = "schedule.total_episodes" + (" or schedule.total_epochs" if stored else "")
        why = "it says how long the run is"
        yield f"{units} must be set ({why}), got null; set schedule.total_episodes=12800"
    elif episodes is not None and epochs is not None:
        yield (
            "schedule.total_episodes and schedule.total_epochs must not both be set (each says how long the "
            f"run is), got {episodes} and {plain(epochs)}; set schedule.total_epochs=null or "
            "schedule.total_episodes=null"
        )
    elif epochs is not None and not stored:
        yield (
            f"schedule.total_epochs must be null for algo={cfg.algo.name} generator={cfg.generator.name} "
            f"(fresh samples are counted in episodes), got {plain(epochs)}; set schedule.total_epochs=null "
            "schedule.total_episodes=12800"
        )
    per_update = cfg.episodes_per_update
    if episodes is not None and episodes >= 1 and per_update >= 1 and episodes % per_update:
        yield (
            "schedule.total_episodes must be divisible by the episodes of an update "
            f"(schedule.prompts_per_update x algo.samples_per_prompt = {cfg.schedule.prompts_per_update} x "
            f"{cfg.algo.samples_per_prompt} = {per_update}), got {episodes}; "
            f"set schedule.total_episodes={nearest_multiple(episodes, per_update)}"
        )


def division(cfg: Config) -> Iterator[str]:
    """Batches that do not divide into equal parts without splitting a group."""
    prompts, parts = cfg.schedule.prompts_per_update, cfg.schedule.minibatches
    if prompts >= 1 and parts >= 1 and prompts % parts:
        yield (
            "schedule.prompts_per_update must be divisible by schedule.minibatches (minibatches are equal "
            f"parts of the prompts), got {prompts} and {parts}; "
            f"set schedule.prompts_per_update={nearest_multiple(prompts, parts)}"
        )
    ranks = rank_count()
    for key, count, meaning in (
        ("schedule.prompts_per_update", prompts // max(parts, 1), "each minibatch is divided among them"),
        ("eval.prompts", cfg.eval.prompts, "the held-out prompts are divided among them"),
    ):
        if 1 <= count < ranks:
            yield (
                f"{key} must give each of the {ranks} ranks a prompt ({meaning}), got {count}; start fewer "
                f"ranks, or set {key}={ranks * (parts if key.startswith('schedule') else 1)}"
            )
    sequences, group = cfg.backend.micro_batch, cfg.algo.samples_per_prompt
    if sequences >= 1 and group >= 1 and sequences % group:
        yield (
            "backend.micro_batch must be divisible by algo.samples_per_prompt (the samples of one prompt are "
            f"never split), got {sequences} and {group}; "
            f"set backend.micro_batch={nearest_multiple(sequences, group)}"
        )


def stored_completions(cfg: Config) -> Iterator[str]:
    """A generator, scorer or lag that does not go with the algorithm."""
    algo, generator = cfg.algo, cfg.generator
    if generator.samples:
        if algo.supervised:
            yield (
                f"generator must be dataset for algo={algo.name} (it trains on stored responses), "
                f"got {generator.name}; set generator=dataset"
            )
        elif cfg.scorer.name == "labels":
            yield (
                f"scorer must not be labels with generator={generator.name} (fresh samples have no labels), "
                "got labels; set scorer=reward_model"
            )
        return
    if algo.supervised and cfg.scorer.name != "labels":
        yield (
            f"scorer must be labels for algo={algo.name} (it maximises no score), got {cfg.scorer.name}; "
            "set scorer=labels"
        )
    if generator.rollouts:
        return
    wanted = 2 if cfg.data.name == "preferences" else 1
    if algo.samples_per_prompt != wanted:
        what = "a chosen and a rejected response" if wanted == 2 else "one reference response"
        yield (
            f"algo.samples_per_prompt must be {wanted} for algo={algo.name} generator=dataset (an example "
            f"holds {what}), got {algo.samples_per_prompt}; set algo.samples_per_prompt={wanted}"
        )
    if cfg.schedule.max_lag > 0:
        yield (
            "schedule.max_lag must be 0 with generator=dataset (nothing is sampled, so nothing can be late), "
            f"got {cfg.schedule.max_lag}; set schedule.max_lag=0"
        )


def judges(cfg: Config) -> Iterator[str]:
    """Scorers that cannot score this task."""
    for at, scorer in scorers(cfg):
        key = choice(at)
        if scorer.name == "facts" and cfg.task.name != "tldr_mini":
            yield (
                f"{key} must not be facts for task={cfg.task.name} (that program knows the facts of "
                f"task=tldr_mini alone), got facts; set {key}=reward_model"
            )
        if scorer.name == "answer" and cfg.task.name in WITHOUT_ANSWERS:
            yield (
                f"{key} must not be answer for task={cfg.task.name} (its references hold no answer to "
                f"compare with), got answer; set {key}=reward_model"
            )
    if cfg.gold.name == "labels":
        yield (
            "scorer@gold must not be labels (evaluation samples responses, which have no labels), got "
            "labels; set scorer@gold=reward_model gold.path=<hub name or folder>"
        )


WITHOUT_ANSWERS = ("tldr_mini", "tldr", "chat", "preferences")


def models(cfg: Config) -> Iterator[str]:
    """Local model folders that are not there or not whole, and responses that no context holds."""
    contexts = []
    for key, path in named_models(cfg):
        if problem := folder_problem(key, path):
            yield problem
        elif is_local(path):
            contexts.append(context_length(path))
    tokenizer = cfg.model.tokenizer
    if tokenizer is not None and is_local(tokenizer) and not Path(tokenizer).expanduser().is_dir():
        yield (
            "model.tokenizer must name a tokenizer on the hub or a folder that holds one (no folder "
            f"{tokenizer!r} here), got {tokenizer!r}; set model.tokenizer=<hub name or folder>"
        )
    made = cfg.model.policy is None and cfg.model.base is None
    if isinstance(cfg.model, NanoConfig) and made and not contexts:
        contexts.append(cfg.model.context)
    context = min((c for c in contexts if c is not None), default=None)
    if problem := context_problem(context, cfg.task.max_prompt_tokens, cfg.generator.response_length):
        yield problem


def named_models(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the models that the config names, by key."""
    found = {f"model.{name}": getattr(cfg.model, name) for name in ("base", "policy", "reference", "reward")}
    for at, scorer in scorers(cfg):
        if isinstance(scorer, RewardModelScorerConfig):
            found[f"{at}.path"] = scorer.path
    for key, path in found.items():
        if path is not None:
            yield key, path


def objective_metric(cfg: Config) -> Iterator[str]:
    """A sweeper's figure that no evaluation measures."""
    metric = cfg.objective_metric
    if metric is not None and metric.startswith("eval/") and cfg.schedule.eval_every == 0:
        yield (
            "schedule.eval_every must be > 0 with objective_metric (without evaluation nothing measures "
            f"{metric}), got 0; set schedule.eval_every=0.2"
        )


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` that is closest to `value`, at least one."""
    return max(1, round(value / of)) * of


Rule = Callable[[Config], Iterator[str]]
RULES: tuple[Rule, ...] = (numbers, length, division, stored_completions, judges, models, objective_metric)
MEASURED: tuple[Rule, ...] = (numbers, judges, models)  # of what is measured, and not trained


# -- doubts ----------------------------------------------------------------------------------------


def training_sees_its_judge(cfg: Config) -> Iterator[str]:
    """The proxy and the judge, or parts of them, are one."""
    if not cfg.generator.samples:
        return
    judging = {scorer.source(cfg): choice(at) for at, scorer in scorers(cfg) if at.startswith("gold")}
    for at, scorer in scorers(cfg):
        judge = judging.get(scorer.source(cfg))
        if at.startswith("scorer") and judge is not None:
            yield (
                f"{choice(at)} and {judge} are the same ({scorer.name}): training sees its judge, so "
                "eval/win_rate says nothing about over-optimisation"
            )


def no_effect(cfg: Config) -> Iterator[str]:
    """Settings that change nothing in this combination."""
    algo, schedule = cfg.algo, cfg.schedule
    if algo.supervised and schedule.epochs > 1:
        yield (
            f"schedule.epochs={schedule.epochs} repeats each batch before the next; passes over the data are "
            "schedule.total_epochs"
        )
    if algo.trains.name != "policy" and cfg.model.reference is not None:
        yield f"model.reference has no effect with algo={algo.name} (it has no reference model)"
    if schedule.total_episodes is not None and cfg.episodes_per_update >= 1:
        updates = cfg.num_updates()
        steps = updates * schedule.minibatches * schedule.epochs
        if schedule.max_lag >= updates > 0:
            yield f"schedule.max_lag={schedule.max_lag} is never reached in a run of {updates} updates"
        if cfg.optim.warmup >= max(1, steps):
            yield (
                f"optim.warmup={plain(cfg.optim.warmup)} lasts the whole run of {steps} optimizer steps, so "
                "the learning rate never falls"
            )


DOUBTS: tuple[Rule, ...] = (training_sees_its_judge, no_effect)


# -- derived sizes ---------------------------------------------------------------------------------


def describe(cfg: Config, examples: int | None = None) -> list[tuple[str, str]]:
    """Name and value of the sizes that follow from the config, and of the memory that they need.

    `examples` is the size of the training data, where that is known.
    """
    return [*counts(cfg, examples), *memory.rows(cfg)]


def counts(cfg: Config, examples: int | None = None) -> list[tuple[str, str]]:
    """Name and value of what is counted in a run."""
    schedule, per_update = cfg.schedule, cfg.episodes_per_update
    prompts, group = schedule.prompts_per_update, cfg.algo.samples_per_prompt
    rows = [("episodes per update", f"{per_update:,} = {prompts:,} prompts x {group} samples")]
    if examples is None and isinstance(cfg.task, EmbeddedTaskConfig) and cfg.data.name != "preferences":
        examples = cfg.task.train_size
    in_minibatch = prompts // schedule.minibatches * group
    ranks = rank_count()
    share = math.ceil(in_minibatch / group / ranks) * group
    forwards = math.ceil(share / cfg.backend.micro_batch)
    forward = f"{min(cfg.backend.micro_batch, share)}, {forwards} to an optimizer step"
    if ranks > 1:
        forward += f" on each of {ranks} ranks"
    if schedule.total_episodes is None and examples is None:
        rows.append(("updates", f"{plain(schedule.total_epochs or 0)} epochs; known when the data are read"))
        rows.append(("sequences per forward", forward))
        return rows
    updates = cfg.num_updates(examples)
    if schedule.total_episodes is not None:
        rows.append(("updates", f"{updates:,} = {schedule.total_episodes:,} episodes / {per_update:,}"))
    else:
        epochs = plain(schedule.total_epochs or 0)
        rows.append(("updates", f"{updates:,} = {epochs} epochs of {examples:,} examples / {prompts:,}"))
    steps = updates * schedule.minibatches * schedule.epochs
    parts = f"{updates:,} updates x {schedule.minibatches} minibatches x {schedule.epochs} epochs"
    evaluated = due_updates(schedule.eval_every, updates, at_end=True)
    return [
        *rows,
        ("optimizer steps", f"{steps:,} = {parts}"),
        ("sequences per forward", forward),
        *cores(cfg),
        ("evaluations", at_updates([0, *evaluated] if evaluated else [])),
        ("checkpoints", at_updates([u for u in due_updates(schedule.save_every, updates) if u < updates])),
    ]


def cores(cfg: Config) -> Iterator[tuple[str, str]]:
    """How trainer and generator share the cores, where both work at the same time."""
    trainer, generator = threads(cfg)
    if generator is not None and cfg.schedule.max_lag > 0:
        assert isinstance(cfg.generator, WorkerConfig), "others have no threads"
        n = cfg.generator.replicas
        whose = "the generator's process" if n == 1 else f"each of {n} generator processes"
        yield "CPU threads", f"{trainer} of the trainer, {generator} of {whose}"


def due_updates(every: float, updates: int, at_end: bool = False) -> list[int]:
    """Updates after which something that happens `every` so often happens."""
    states = (TrainState(num_updates=updates, update=update) for update in range(1, updates + 1))
    return [state.update for state in states if state.due(every, at_end)]


def at_updates(updates: list[int]) -> str:
    """A list of updates in words, its middle left out where it is long."""
    if not updates:
        return "none"
    words = [f"{update:,}" for update in updates]
    if len(words) > 8:
        words = [*words[:4], "...", words[-1]]
    return f"{len(updates)}, after updates {' '.join(words)}"
