"""What a run says: lines at its beginning and at its end, and the card of its model."""

from __future__ import annotations

import inspect
import logging
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from jinja2 import Environment, StrictUndefined

from rlhf.assembly.models import say_ends
from rlhf.assembly.parts import part
from rlhf.assembly.training import check_formats
from rlhf.checks.check import problems
from rlhf.config.algorithms import Trains
from rlhf.config.models import paths_in
from rlhf.config.root import Config, threads
from rlhf.config.schema import plain
from rlhf.config.scorers import judges
from rlhf.core import formatting
from rlhf.core.errors import lines, override, setting
from rlhf.core.formatting import clock, short_path
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import cached_folder
from rlhf.core.state import SupervisedState, TrainState
from rlhf.loggers.logger import shown
from rlhf.memory import plan
from rlhf.models.folder import CARD, HUB_NAME, is_local
from rlhf.processes.ranks import Ranks
from rlhf.runs.folder import DISTRIBUTION, RunFolder, git_commit, versions
from rlhf.scorers.judge import answers_in, price_of
from rlhf.stages.inspection import rehearse
from rlhf.tasks.task import Task, summarize
from rlhf.terminal import console as progress
from rlhf.terminal.console import Stages, console, say, say_row, transcript
from rlhf.training.recorder import Recorder
from rlhf.words.compose import MODEL_FOLDERS, compose, model_label, options, settings
from rlhf.words.mistakes import CONFIG_ERRORS

# The lines at the beginning of a run: its sizes and memory, its data, and warnings about them.


log = logging.getLogger(__name__)


def print_opening(
    cfg: Config, folder: RunFolder, stages: Stages, task: Task, notes: Mapping[str, str], ranks: Ranks
) -> None:
    """Print the opening lines of a run, and try its reward functions on data that are not generated.

    Args:
        cfg: the config of the run, with the models that the run made first.
        folder: the run folder.
        stages: the stages of the run, which is in the last one.
        task: the data of the run.
        notes: further rows, by name.
        ranks: the ranks of the run.

    Raises:
        UserError: a split that the run reads cannot be loaded, or has no prompt that can be used, a reward
            function fails, or the chat template of a reward model does not format a dialogue.
    """
    say(f"{progress.prefix()}{cfg.algo.name} of {model_label(cfg)} on {cfg.task.name}", style="bold")
    rows = [("run folder", short_path(folder.path))] if progress.current is stages else []
    for name, value in [*rows, *describe(cfg, len(task)), *notes.items()]:
        say_row(name, value)
    say_ends(cfg, task.tokenizer)
    _log_all(doubts(cfg, len(task)))
    if cfg.task.embedded:
        return
    splits = ("train", "validation") if cfg.schedule.eval_every else ("train",)
    summary = summarize(task, cfg.generator.response_length, splits)
    for name, value in summary.rows:
        say_row(name, value)
    for line in summary.lines:
        say(f"    {line}")
    _log_all(summary.warnings)
    ranks.from_first(lambda: rehearse(cfg, task, folder.judgements))
    ranks.from_first(lambda: _log_all(check_formats(cfg, task)))


def _log_all(warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)


# Sizes derived from a config, for the summary at the start of a run.


_MANY_PASSES = 10


def describe(cfg: Config, examples: int) -> list[tuple[str, str]]:
    """Return (name, value) rows of the summary: derived sizes of a run, and the memory that the run needs.

    Args:
        cfg: the config of the run.
        examples: the size of the training data.
    """
    rows = counts(cfg, examples)
    if cfg.algo.trains is Trains.policy and cfg.generator.rollouts:
        rows.append(("reward", f"score of {cfg.scorer.described}, which training maximizes"))
    if cfg.algo.trains is not Trains.reward and cfg.gold.name != "none":
        rows.append(("judge", f"score of {cfg.gold.described}, used only by evaluations"))
    return [*rows, *plan.rows(plan.plan(cfg))]


def counts(cfg: Config, examples: int) -> list[tuple[str, str]]:
    """Return (name, value) rows of the counts of a run, from episodes per update to checkpoints.

    Args:
        cfg: the config of the run.
        examples: the size of the training data.
    """
    schedule, per_update = cfg.schedule, cfg.episodes_per_update
    prompts, group = schedule.prompts_per_update, cfg.algo.samples_per_prompt
    rows = [("episodes per update", f"{per_update:,} = {prompts:,} prompts x {group} samples")]
    updates = cfg.num_updates(examples)
    unit = "examples" if cfg.algo.supervised else "prompts"
    if cfg.epochs is not None:
        epochs = f"{plain(cfg.epochs)} epochs of {examples:,} {unit}"
        rows.append(("updates", f"{updates:,} = {epochs} / {prompts:,}"))
    else:
        rows.append(("updates", f"{updates:,} = {schedule.total_episodes:,} episodes / {per_update:,}"))
        rows.append(("passes over the data", f"{_passes(cfg, examples):.3g} of {examples:,} {unit}"))
    steps = updates * schedule.minibatches * schedule.epochs
    parts = f"{updates:,} updates x {schedule.minibatches} minibatches x {schedule.epochs} epochs"
    rows += [("optimizer steps", f"{steps:,} = {parts}"), ("sequences per forward", _forward_size(cfg))]
    if cfg.generator.packages:
        rows.append(("generator", cfg.generator.name))
    trainer, generator = threads(cfg)
    if generator is not None and schedule.max_lag > 0:
        n = cfg.generator.replicas
        which = "generator process" if n == 1 else f"each of {n} generator processes"
        rows.append(("CPU threads", f"trainer {trainer}, {which} {generator}"))
    evaluated = _due_updates(schedule.eval_every, updates, at_end=True)
    saved = [update for update in _due_updates(schedule.save_every, updates) if update < updates]
    rows.append(("evaluations", _at_updates([0, *evaluated] if evaluated else [])))
    return [*rows, ("checkpoints", _at_updates(saved))]


def _forward_size(cfg: Config) -> str:
    """Return the number of sequences of a forward pass with gradients as text."""
    backend, group, ranks = cfg.backend, cfg.algo.samples_per_prompt, world_size()
    in_minibatch = cfg.schedule.prompts_per_update // cfg.schedule.minibatches
    share = math.ceil(in_minibatch / ranks) * group
    most = min(backend.micro_batch, share)
    filled = plan.fills_memory(cfg)
    if filled or backend.tokens is not None:
        limit = "what fits into the memory" if filled else f"{backend.tokens:,} tokens"
        return f"at most {most}, and at most {limit}"
    text = f"{most}, {math.ceil(share / backend.micro_batch)} per optimizer step"
    return f"{text} on each of {ranks} ranks" if ranks > 1 else text


def _passes(cfg: Config, examples: int) -> float:
    """Return how often a run draws each of the `examples` prompts of the training data."""
    return cfg.num_updates(examples) * cfg.schedule.prompts_per_update / examples


def doubts(cfg: Config, examples: int) -> Iterator[str]:
    """Yield a warning if the run passes over its data many times, or too few for what scores decide.

    Args:
        cfg: the config of the run.
        examples: the size of the training data.
    """
    if (often := _passes(cfg, examples)) > _MANY_PASSES:
        fewer = max(1, round(3 * examples / cfg.schedule.prompts_per_update)) * cfg.episodes_per_update
        remedy = f"schedule.total_episodes={fewer}" if cfg.epochs is None else "schedule.total_epochs=3"
        yield (
            f"the run passes {often:.3g} times over its {examples:,} training rows (after about "
            f"{_MANY_PASSES} passes a model mostly memorises its data); for 3 passes set {remedy}"
        )
    for key in ("solved_at", "pass_rate"):
        if (value := getattr(cfg.schedule, key)) is not None and often <= 1:
            yield (
                f"schedule.{key}={plain(value)} has no effect in {often:.3g} passes over the data (scores "
                "decide about later passes)"
            )


def _due_updates(every: float, updates: int, at_end: bool = False) -> list[int]:
    """Return the updates after which an event with interval `every` is due.

    Args:
        every: number of updates between two events; below 1: a fraction of the run; 0: never.
        updates: number of updates of the run.
        at_end: whether the event is also due after the last update.
    """
    states = (TrainState(num_updates=updates, update=update) for update in range(1, updates + 1))
    return [state.update for state in states if state.due(every, at_end)]


def _at_updates(updates: list[int]) -> str:
    """Format a list of updates as text; of more than 8 updates, the first 4 and the last are listed."""
    if not updates:
        return "none"
    shown = [f"{update:,}" for update in updates]
    if len(shown) > 8:
        shown = [*shown[:4], "...", shown[-1]]
    return f"{len(updates)}, after updates {' '.join(shown)}"


# The lines at the end of a run: what changed, how long it took, where the files are, what to do next.


_VALUE_WIDTH = 21  # columns of a value with its interval


def print_closing(
    cfg: Config,
    typed: Config,
    folder: RunFolder,
    recorder: Recorder,
    state: TrainState,
    session_s: float,
    resumed: bool,
) -> None:
    """Print the closing lines of a finished run, and write them to train.log.

    A run that is a stage before other stages of the same command prints no commands.

    Args:
        cfg: the config of the run, with the models that the run made first.
        typed: the config before the run made these models.
        folder: the run folder.
        recorder: the recorder, which has the first and the last evaluation.
        state: the counters of the run.
        session_s: seconds since the start of this session.
        resumed: whether updates of earlier sessions belong to the run.
    """
    stage = progress.current
    lines = [f"finished: {_trained(state)}, in {clock(session_s)}"]
    if resumed:
        lines.append(f"  in this session; the updates of all sessions took {clock(state.wall_s)}")
    for at, judge in judges(cfg).items():
        files = (folder.judgements.with_name(f"{at}{process}.jsonl") for process in ("", "-annotator"))
        rows = [row for file in files for row in answers_in(file)]
        price = f", price {price_of(rows, judge.prices):.4g}" if judge.prices else ""
        lines.append(f"  {at} {judge.described}: {len(rows):,} answers{price}")
    lines += [*_changes(cfg, recorder), "files:"]
    for path in (folder.model, folder.adapter, folder.completions, folder.metrics):
        if path.is_dir() or (path.is_file() and path.stat().st_size):
            lines.append(f"  {short_path(path)}")
    if stage is None or stage.number == len(stage.names):
        lines += _next_steps(cfg, typed, folder)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # commands and paths can be copied
        transcript.info(line)


def _trained(state: TrainState) -> str:
    """Return the number of updates, and of episodes or examples, that a run trained on."""
    if isinstance(state, SupervisedState):
        return f"{state.update:,} updates, {state.examples:,} examples ({state.epoch:.2f} epochs)"
    return f"{state.update:,} updates, {state.episode:,} episodes"


def _changes(cfg: Config, recorder: Recorder) -> Iterator[str]:
    """Yield the lines of a table: metrics of the first and of the last evaluation, with 95 % intervals."""
    first, last = recorder.first, shown(recorder.evaluated)
    if not last:
        yield "  not evaluated (schedule.eval_every=0; 1000000: before and after training)"
        return
    named = {name: text for name, text in _titles(cfg).items() if name in last}
    rows = [(_held_out(cfg, recorder), "before", "after")]
    for name, text in named.items():
        rows.append((text, formatting.text(first, name), formatting.text(last, name)))
    wide = max(len(text) for text, _, _ in rows)
    for text, before, after in rows:
        yield f"  {text:{wide}}  {before:{_VALUE_WIDTH}} {after}".rstrip()
    if any(formatting.bounds(last, name) for name in named):
        yield "  ([low, high]: 95 % interval over these examples)"


def _titles(cfg: Config) -> dict[str, str]:
    """Return the names and the titles of the metrics of an evaluation that a run reports at its end."""
    return {
        "eval/win_rate": f"win rate vs. references ({cfg.gold.name})",
        "eval/accuracy": "accuracy of answers" if cfg.checks_answers else "accuracy on held-out pairs",
        "eval/gold_score": f"judge ({cfg.gold.name})",
        "eval/score": f"reward ({cfg.scorer.name})",
        "eval/win_rate_vs_initial": "win rate vs. initial policy",
        "eval/loss": "held-out loss",
        "eval/kl": "KL to the reference",
    }


def _held_out(cfg: Config, recorder: Recorder) -> str:
    """Return the number of held-out examples of the last evaluation, as text."""
    return f"{recorder.evaluated_on:,} held-out {'pairs' if cfg.algo.trains is Trains.reward else 'prompts'}"


def _next_steps(cfg: Config, typed: Config, folder: RunFolder) -> Iterator[str]:
    """Yield commands for a finished run, which can be pasted into a shell.

    Args:
        cfg: the config of the run, with the models that the run made first.
        typed: the config before the run made these models.
        folder: the run folder.
    """
    rewards = cfg.algo.trains is Trains.reward
    run = short_path(folder.path)
    evaluate = ["python -m rlhf.evaluate", setting("run", run)]
    if cfg.start is not None and not rewards:
        evaluate += ["only=model", setting("models", short_path(Path(cfg.start)))]
    yield "next:"
    if (stage := next_stage(typed, folder, cfg.start)) is not None:
        ranks = local_world_size()
        launcher = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
        yield from lines(f"{launcher} -m rlhf.train", *(setting(key, value) for key, value in stage.items()))
    yield from lines("python -m rlhf.report", shlex.quote(run))
    yield from lines(*evaluate)
    if folder.completions.is_file() and folder.completions.stat().st_size:
        yield from lines("python -m rlhf.sample", setting("run", run), "show=4")
    if not rewards:
        yield from lines("python -m rlhf.sample", setting("run", run))


# The training that usually follows a supervised run, with its model: a reward model, DPO or RL.


# Settings that all stages share: data, models, judge, device, and the length of responses.
_SHARED = re.compile(r"\+?(schema/\w+@)?(task|model|scorer@gold|gold|backend|generator\.response_length)\b")
_OF_A_STAGE = ("model.base", "model.policy", "model.reward", "model.reference")
_REWARD_FUNCTION = "<file>.py:<function>"


def next_stage(cfg: Config, folder: RunFolder, start: str | None) -> dict[str, Any] | None:
    """Return the overrides of the training that follows the run `cfg`, by key; None: none is known.

    | after | data | next stage |
    |---|---|---|
    | SFT | answers that a program checks | GRPO |
    | SFT | generated posts | online DPO, which makes pairs and a reward model first |
    | SFT | preference pairs | reward model |
    | SFT | other prompts | RLOO with a reward function that the user names |
    | reward model | preference pairs | online DPO with the reward model |

    Args:
        cfg: the config of the run, before the run made models that the config does not name.
        folder: the run folder, with the final model.
        start: the model that the run started from.
    """
    if not cfg.algo.supervised or (found := settings(cfg)) is None:
        return None
    defaults = dict(options(compose([override(key, found[key]) for key in ("algo", "task")])))
    shared = {
        key: value
        for key, value in found.items()
        if _SHARED.match(key) and key not in _OF_A_STAGE and (key == "task" or value != defaults.get(key))
    }
    read_by_rl = [key for key, *_ in cfg.task.needs(pairs=False, evaluates=True)]
    model = short_path(folder.model)
    if cfg.algo.trains is Trains.reward:
        stages = [{"algo": "dpo", "model.policy": start, "model.reward": model}]
    else:  # the best first
        likely = {"grpo": cfg.gold.verifies, "dpo": cfg.task.embedded, "reward": True}
        stages = [{"algo": algo, "model.policy": model} for algo, is_likely in likely.items() if is_likely]
        own = {"scorer": "function", "scorer.path": _REWARD_FUNCTION}
        stages.append({"algo": "rloo", "model.policy": model, **own})
    for stage in stages:
        if stage["algo"] != "reward" and "task.preferences_path" not in read_by_rl:
            shared.pop("task.preferences_path", None)
        overrides = {"algo": stage.pop("algo"), **shared, **stage}
        if _REWARD_FUNCTION in stage.values():
            return overrides
        with suppress(*CONFIG_ERRORS):
            if not problems(compose([override(key, value) for key, value in overrides.items()])):
                return overrides
    return None


# The model card (README.md) of a final model: data, algorithm, results, and the command of the run.
#
# The card contains no path of this machine: local folders and files appear by name, addresses not at all.


UNKNOWN = "unknown"  # the hub's identifier of a license that is not known
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_URL = re.compile(r"\w+://\S+")
_LICENSE = ("license", "license_name", "license_link")  # keys of a model card


def model_card(
    cfg: Config, typed: Config, folder: Path, examples: int, recorder: Recorder, state: TrainState
) -> str:
    """Return the model card of a run: metadata as YAML, then Markdown.

    Args:
        cfg: the config of the run, with the models that the run made first.
        typed: the config before the run made these models; the command in the card gives this config.
        folder: the run folder, whose name is the title.
        examples: the size of the training data.
        recorder: the recorder, which has the first and the last evaluation.
        state: the counters of the run.
    """
    found = settings(typed)
    shared = None if found is None else {key: public_value(value) for key, value in found.items()}
    rewards, last, titles = cfg.algo.trains is Trains.reward, shown(recorder.evaluated), _titles(cfg)
    local, datasets = data(cfg)
    source = ", ".join([*datasets, *local]) or "generated by the task"
    reward = judge = None
    if cfg.algo.trains is Trains.policy and cfg.generator.rollouts:
        models = paths_in(cfg.model.reward) if cfg.scorer.reads_reward else [cfg.scorer.described]
        reward = ", ".join(map(public, models or [cfg.scorer.name]))
    if not rewards and cfg.gold.name != "none":
        judge = public(cfg.gold.described)
    task = "text-classification" if rewards else "text-generation"
    results = [
        EvalResult(
            task_type=task,
            dataset_type=datasets[0] if len(datasets) == 1 else cfg.task.name,
            dataset_name=cfg.task.name,
            metric_type=metric.removeprefix("eval/"),
            metric_name=title,
            metric_value=last[metric],
        )
        for metric, title in titles.items()
        if math.isfinite(last.get(metric, math.nan))
    ]
    metadata = ModelCardData(  # names that are not on the hub are left out
        **origin(cfg.start),
        datasets=datasets or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["rlhf", cfg.algo.name, *(["reward-model"] if rewards else [])],
        model_name=folder.absolute().name,
        eval_results=results or None,
    )
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = files("rlhf.stages").joinpath("model_card.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        cfg=cfg,
        distribution=DISTRIBUTION,
        start=cfg.start and public(cfg.start),
        metadata=metadata,
        rewards=rewards,
        algorithm=algorithm(cfg),
        data=f"{source}: {examples:,} {'pairs' if cfg.reads_pairs else 'prompts'}",
        reward=reward,
        length=_trained(state),
        held_out=_held_out(cfg, recorder),
        judge=judge,
        first=recorder.first,
        last=last,
        titles=titles,
        settings=None if shared is None else [setting(key, value) for key, value in shared.items()],
        hidden=shared != found,
        packages=list(_packages(cfg)),
        row=row,
        value=formatting.text,
    )


def row(*cells: object) -> str:
    """Return a row of a table in Markdown."""
    texts = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(texts)} |"


def algorithm(cfg: Config) -> str:
    """Return what the documentation of the algorithm begins with: its name and its source.

    For a variant, which is a setting of another algorithm, this is its entry in a list there.
    """
    documented = inspect.getdoc(sys.modules[part(cfg.algo).__module__]) or cfg.algo.name
    title = re.escape((type(cfg.algo).__doc__ or "").partition(":")[0])
    variant = re.search(rf"^- ({title} \(.+?)(?=^- |\n\n)", documented, re.M | re.S)
    text = " ".join((variant[1] if variant else " ".join(documented.split("\n\n")[:2])).split())
    return _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _packages(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the name and the version of each library that the result depends on."""
    installed, code = dict(versions()), git_commit()
    if code is not None and DISTRIBUTION in installed:
        changes = ", with changes" if code["changed"] else ""
        installed[DISTRIBUTION] += f" (commit {code['commit'][:12]}{changes})"
    names = [DISTRIBUTION, "torch", "transformers", "tokenizers", "datasets"]
    names += [*cfg.generator.packages, *cfg.backend.packages, *(["peft"] if cfg.model.lora.rank else [])]
    yield from ((name, installed[name]) for name in names if name in installed)
    yield "python", platform.python_version()


def data(cfg: Config) -> tuple[list[str], list[str]]:
    """Return the names of local training data, and the hub names of training data."""
    local, hub = [], []
    for task in (cfg.task.parts or {"": cfg.task}).values():  # the parts of a mixture
        path = (task.preferences_path if cfg.reads_pairs else None) or task.path
        name = getattr(task, "preferences_name" if cfg.reads_pairs else "prompts_name", None)
        if path is not None:
            local.append(public(path))
        elif name is not None:
            hub.append(name)
    return local, hub


def origin(start: str | None) -> dict[str, Any]:
    """Return what a model card states about the model that training started from.

    Args:
        start: folder or hub name of the model; None: random weights.

    Returns:
        `base_model`: the hub name; for a folder, the base model that its card names, if that is on the hub.
        `license`: the license that the card of the model states, or `UNKNOWN`. `license_name` and
        `license_link`: name and web address of a license that the hub does not list.
    """
    if start is None:
        return {"base_model": None, "license": UNKNOWN}
    local = is_local(start)
    folder = Path(start).expanduser() if local else cached_folder(start)
    card: dict[str, Any] = {}
    if folder is not None:
        with suppress(OSError, ValueError, yaml.YAMLError):  # a card that cannot be read states nothing
            card = metadata_load(folder / CARD) or {}
    base = card.get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    if not local:
        base = start
    elif not isinstance(base, str) or is_local(base) or HUB_NAME.fullmatch(base) is None:
        base = None
    stated = {key: text for key in _LICENSE if isinstance(text := card.get(key), str)}
    if not stated.get("license_link", "").startswith("https://"):  # a file of the base model's repository
        stated.pop("license_link", None)
    return {"base_model": base, "license": UNKNOWN, **stated}


def public_value(value: Any) -> Any:
    """Return the value of a setting with the names of local folders and files instead of their paths."""
    if isinstance(value, list):
        return [public_value(each) for each in value]
    if not isinstance(value, str):
        return value
    key, equals, text = value.rpartition("=")  # a list may contain overrides, for example of a stage
    bare = text.strip("\"'")
    shown = public(bare)
    return value if shown == bare else f"{key}{equals}{shown}"


def public(text: str) -> str:
    """Return a text of the config with the name of a local folder or file instead of its path.

    An address of a service becomes `<url>`. Other texts, such as hub names, stay as they are.
    """
    if _URL.fullmatch(text):
        return "<url>"
    place, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    local = place.startswith(("/", "~", "./", "../")) or ("/" in place and os.path.exists(place))
    if not local or "\n" in place:
        return text
    path = Path(place)
    inner = path.name in MODEL_FOLDERS or path.name.startswith("checkpoint-")
    return f"{path.parent.name}/{path.name}{colon}{function}" if inner else f"{path.name}{colon}{function}"
