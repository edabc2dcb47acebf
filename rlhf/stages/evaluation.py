"""Evaluation of a run: its checkpoints and final model on held-out examples, measured as during training.

The settings are those of the run's config.yaml; overrides may change sections that an evaluation reads. Each
model gets a row in evaluations.jsonl of the run folder, and its completions in evaluations/. Models that were
evaluated with the same settings are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.table import Table

from rlhf.checks.check import problems
from rlhf.config.algo import Trains
from rlhf.config.backend import TorchConfig
from rlhf.config.catalogue import options
from rlhf.config.compose import composed
from rlhf.config.cores import threads
from rlhf.config.generator import WorkerConfig
from rlhf.config.identity import digest
from rlhf.config.mistakes import CONFIG_ERRORS, explain, one_of
from rlhf.config.root import Config
from rlhf.config.run import Progress
from rlhf.config.saved import load_node
from rlhf.config.schedule import Update
from rlhf.core.confidence import wilson
from rlhf.core.console import console, progress, say
from rlhf.core.errors import UserError
from rlhf.core.files import append, as_line, read_lines, write_atomically
from rlhf.core.launched import is_first_rank
from rlhf.core.state import TrainState
from rlhf.loggers.display import EVALUATION_METRICS, samples_table
from rlhf.processes.signals import interruptible
from rlhf.runs.disk import explain_full_disk
from rlhf.runs.folder import RunFolder
from rlhf.runs.transcript import setup_logging
from rlhf.stages.candidates import Candidate, candidates, refuse_other_ranks

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks

SPLITS = ("validation", "test")
SECTIONS = ("eval", "generator", "gold", "backend", "model", "task")  # sections that an evaluation reads
KEYS = ("seed", "progress", "cache_dir")  # other keys that an evaluation reads
CHOICES = {"generator": "generator", "scorer@gold": "gold"}  # key that selects an option -> its section
RATES = ("eval/win_rate", "eval/accuracy")  # fractions of the examples, shown with a confidence interval
CHUNK = 256  # prompts between two steps of the progress bar


def check_split(split: str) -> None:
    """Raise UserError if `split` is not a held-out split."""
    if split not in SPLITS:
        raise UserError(f"split= must be one of {', '.join(SPLITS)}, got {split}; set split=test")


def run_folder(path: str) -> RunFolder:
    """Return the run folder at `path`.

    Raises:
        UserError: `path` is not a run folder.
    """
    folder = RunFolder(Path(path).expanduser())
    if not folder.config.is_file():
        state = "no config.yaml in it" if folder.path.is_dir() else "no such folder"
        raise UserError(
            f"run= must be the folder of a run, with its config.yaml ({state}), got {path}; "
            "set run=<output_dir>/<run name>"
        )
    return folder


def changed(folder: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the run in `folder`, changed by `overrides` and checked.

    Raises:
        UserError: an override is invalid, or changes a setting that an evaluation does not read.
    """
    try:
        node = load_node(folder.config)
        OmegaConf.set_struct(node, True)
        for select_options in (True, False):  # an option is selected before its keys are set
            change(node, overrides, select_options)
        cfg = OmegaConf.to_object(node)
    except CONFIG_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(explain(error, overrides)) from error
    assert isinstance(cfg, Config)
    if found := problems(measuring(cfg), training=False):
        raise UserError(*found)
    return cfg


def change(node: DictConfig, overrides: Sequence[str], select_options: bool) -> None:
    """Apply overrides to the config `node`.

    Args:
        node: the config, changed in place.
        overrides: overrides of the command line. All overrides are checked.
        select_options: True: apply only overrides that select an option; False: apply only all other
            overrides.

    Raises:
        UserError: an override is invalid, or changes a setting that an evaluation does not read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    for text, override in zip(overrides, parsed, strict=True):
        key = text.partition("=")[0]
        if text.startswith(("+", "~")) or override.is_sweep_override():
            raise UserError(
                f"{key} must be set to one value (an evaluation has one), got {text}; leave it out"
            )
        first = key.partition(".")[0]
        if key not in CHOICES and (first not in (*SECTIONS, *KEYS) or key in SECTIONS):
            remedy = f"set scorer@{text}" if key == "gold" else "leave it out"
            raise UserError(
                f"{key} must be something that an evaluation reads ({', '.join((*SECTIONS, *KEYS))}; the run "
                f"is already trained), got {text}; {remedy}"
            )
        if (key in CHOICES) is not select_options:
            continue
        if not select_options:
            OmegaConf.update(node, key, override.value())
            continue
        section = CHOICES[key]
        chosen = composed([text])[section]
        if section == "generator":
            if chosen.name == "dataset":
                samplers = [name for name in options("generator") if name != "dataset"]
                raise UserError(one_of(key, chosen.name, samplers))
            for kept in ("temperature", "response_length"):
                chosen[kept] = node.generator[kept]
        OmegaConf.update(node, section, chosen, merge=False)


def measuring(cfg: Config) -> Config:
    """Return `cfg` without settings that only training uses: lag, in-flight updates, annotator."""
    generator = cfg.generator
    if isinstance(generator, WorkerConfig):
        generator = replace(generator, annotate=None)
    return replace(cfg, generator=generator, schedule=replace(cfg.schedule, max_lag=0, update=Update.between))


def fingerprint(cfg: Config, split: str) -> str:
    """Return eight hex digits of all settings that the metrics of an evaluation depend on."""
    return hashlib.sha256(f"{digest(cfg)}/{split}".encode()).hexdigest()[:8]


def settings(cfg: Config, split: str) -> dict[str, Any]:
    """Return the settings for a row of evaluations.jsonl; `digest` is the fingerprint of all settings."""
    shown = {"split": split, "prompts": cfg.eval.prompts}
    if cfg.algo.trains is not Trains.reward:
        shown |= {
            "generator": cfg.generator.name if cfg.generator.samples else "hf",
            "temperature": cfg.eval.temperature,
            "kl_temperature": cfg.generator.temperature,
            "response_length": cfg.generator.response_length,
            "gold": cfg.gold.described,
        }
    return {**shown, "dtype": cfg.model.dtype.value, "digest": fingerprint(cfg, split)}


def known(cfg: Config, folder: RunFolder, split: str) -> dict[str, dict[str, Any]]:
    """Return the rows of earlier evaluations with the same settings and split, by the name of the model."""
    digits = fingerprint(cfg, split)
    rows = read_lines(folder.evaluations)
    return {row["model"]: row for row in rows if row["settings"]["digest"] == digits}


def evaluate(
    cfg: Config,
    folder: RunFolder,
    split: str = "validation",
    only: tuple[str, ...] = (),
    ranks: Ranks | None = None,
) -> list[dict[str, Any]]:
    """Evaluate the models of a run that have no row with the same settings in evaluations.jsonl.

    Args:
        cfg: the config of the evaluation.
        folder: the run folder.
        split: the held-out split.
        only: names of the models to evaluate; empty for all.
        ranks: the ranks of the evaluation; None: the ranks that the launcher started.

    Returns:
        The rows of the models, oldest first, including rows of earlier evaluations. Damaged checkpoints have
        no row.

    Raises:
        UserError: the run has no model, or an item that the config names cannot be used.
        Interrupted: a signal stopped the evaluation.
    """
    wanted = candidates(folder, cfg, only)
    rows = known(cfg, folder, split)
    due = []
    for candidate in wanted:
        if candidate.name not in rows:
            due.append(candidate)
        elif is_first_rank():
            say(f"evaluated already with these settings: {folder.path / candidate.name}")
    refuse_other_ranks(due, cfg)
    if due:
        with interruptible(), explain_full_disk(folder):
            for row in measure(due, cfg, folder, split, ranks):
                rows[row["model"]] = row
    return [rows[candidate.name] for candidate in wanted if candidate.name in rows]


def measure(
    due: list[Candidate], cfg: Config, folder: RunFolder, split: str, ranks: Ranks | None
) -> Iterator[dict[str, Any]]:
    """Evaluate each model of `due`; write and yield its row. Damaged checkpoints are skipped."""
    from rlhf.assembly.device import build_device
    from rlhf.processes.ranks import Ranks
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.run import quieten, run
    from rlhf.training.checkpoint import damage

    ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
    quieten(ranks)
    shown_settings = settings(cfg, split)
    # Sharded weights need the run's own engine, whose value model may start as the reward model.
    own_engine = any(candidate.shards for candidate in due)
    cfg = ranks.from_first(lambda: complete(measuring(cfg), run, reward=own_engine))
    if ranks.first:
        setup_logging(folder)
        kept = "".join(map(as_line, read_lines(folder.evaluations)))  # drops a line that a crash cut off
        write_atomically(folder.evaluations, kept)
    damaged = ranks.from_first(lambda: {c.name: damage(c.checkpoint) for c in due if c.checkpoint})
    for candidate in due:
        if why := damaged.get(candidate.name):
            say(f"warning: {candidate.checkpoint} is damaged and is not evaluated: {why}", style="yellow")
    good = [candidate for candidate in due if not damaged.get(candidate.name)]
    by_engine = ([c for c in good if not c.shards], [c for c in good if c.shards])
    with progress_by_model(cfg, len(good)) as begin:
        for group in filter(None, by_engine):
            for candidate, evaluation in evaluations(group, cfg, folder, split, ranks, begin):
                row = {
                    "model": candidate.name,
                    **candidate.counters(),
                    **evaluation.figures,
                    **intervals(evaluation),
                    "settings": shown_settings,
                }
                if ranks.first:
                    write(folder, row, evaluation)
                show(row, evaluation, cfg, last=candidate is good[-1])
                yield row


def evaluations(
    group: list[Candidate],
    cfg: Config,
    folder: RunFolder,
    split: str,
    ranks: Ranks,
    begin: Callable[[Candidate, int], Callable[[int], None]],
) -> Iterator[tuple[Candidate, Evaluation]]:
    """Yield each model of a group with its evaluation. One engine loads the models one after the other.

    Args:
        group: the models, either all sharded or all not sharded.
        cfg: the config of the evaluation.
        folder: the run folder.
        split: the held-out split.
        ranks: the ranks of the evaluation.
        begin: starts the progress display of a model; see `progress_by_model`.
    """
    import torch

    from rlhf.assembly.data import build_task
    from rlhf.assembly.evaluator import build_evaluator
    from rlhf.assembly.generator import build_generator
    from rlhf.assembly.models import build_tokenizer
    from rlhf.core.seeding import derive
    from rlhf.generators.chunked import ChunkedGenerator
    from rlhf.stages.run import THREADS
    from rlhf.training.evaluators import PolicyEvaluator

    torch.set_num_threads(threads(cfg)[0] or THREADS)
    torch.manual_seed(derive(cfg.seed, "torch"))
    tokenizer = build_tokenizer(cfg)
    task = build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    state = TrainState(num_updates=1)
    cfg, engine = build_engine_for(group[0], cfg, tokenizer, ranks)
    with ExitStack() as ends:
        if cfg.model.policy is None:  # a policy from random weights; vLLM needs the files of a model
            cfg = replace(cfg, model=replace(cfg.model, policy=str(group[0].weights)))
        generator = build_generator(cfg, engine, tokenizer, folder, ranks)
        ends.callback(generator.close)
        evaluator = build_evaluator(cfg, task, engine, generator, None, tokenizer, ranks, split)
        if isinstance(evaluator, PolicyEvaluator):
            evaluator.generator = chunks = ChunkedGenerator(evaluator.generator, CHUNK)
        for version, candidate in enumerate(group):
            engine.load(candidate.weights)
            if cfg.algo.trains is Trains.reward:
                engine.module.model.config.reward_offset = offset(candidate.weights)
            generator.load(engine.weights(), version)
            if isinstance(evaluator, PolicyEvaluator):
                requests = 2 if engine.reference is not None else 1  # near-greedy; then sampled, for the KL
                chunks.advance = begin(candidate, requests * len(evaluator.prompts))
            else:
                begin(candidate, 0)
            yield candidate, evaluator(state)


def build_engine_for(
    candidate: Candidate, cfg: Config, tokenizer: Any, ranks: Ranks
) -> tuple[Config, Engine]:
    """Build an engine that can load `candidate`.

    Sharded weights need the run's own engine. Other weights are loaded by an engine without an optimizer.

    Returns:
        `cfg` with the backend of the engine, which also places the other models, and the engine.
    """
    from rlhf.assembly.engine import build_engine, build_frozen
    from rlhf.assembly.parts import part

    if candidate.shards:
        part(cfg.backend).prepare(cfg.backend, cfg.model.dtype, ranks, candidate.checkpoint)
        return cfg, build_engine(cfg, tokenizer, ranks, TrainState(num_updates=1))
    own = cfg.backend
    plain = TorchConfig(
        micro_batch=own.micro_batch, device=own.device, threads=own.threads, timeout_s=own.timeout_s
    )
    cfg = replace(cfg, backend=plain)
    return cfg, build_frozen(cfg, tokenizer, ranks)


def offset(folder: Path) -> float:
    """Return the offset that centres the scores of a reward model; a checkpoint has no offset: 0."""
    file = folder / "config.json"
    return json.loads(file.read_text()).get("reward_offset", 0.0) if file.exists() else 0.0


def intervals(evaluation: Evaluation) -> dict[str, float]:
    """Return the bounds of the 95 % Wilson intervals of the `RATES`, and the number of examples."""
    found: dict[str, float] = {}
    for name in RATES:
        if name in evaluation.figures:
            low, high = wilson(evaluation.figures[name], evaluation.examples)
            found |= {f"{name}_low": low, f"{name}_high": high}
    return {**found, "examples": evaluation.examples}


def write(folder: RunFolder, row: dict[str, Any], evaluation: Evaluation) -> None:
    """Write the completions, then the row; the row marks the evaluation as finished."""
    if evaluation.samples:
        file = folder.path / "evaluations" / f"{row['model']}-{row['settings']['digest']}.jsonl"
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(map(as_line, evaluation.samples)))
    append(folder.evaluations, [row])


@contextmanager
def progress_by_model(
    cfg: Config, models: int
) -> Iterator[Callable[[Candidate, int], Callable[[int], None]]]:
    """Show the progress of an evaluation of several models.

    Yields:
        A function that starts the display of a model, given the model and the number of prompts to answer.
        The function returns another function, which must be called with each number of newly answered
        prompts.
    """
    started = 0
    with ExitStack() as display:

        def begin(candidate: Candidate, total: int) -> Callable[[int], None]:
            nonlocal started
            started += 1
            display.close()  # the display of the previous model
            title = f"evaluating {candidate.name} ({started} of {models})"
            if total == 0:  # the evaluation of a reward model does not count prompts
                if cfg.progress is not Progress.off:
                    say(title)
                return lambda count: None
            return display.enter_context(progress(title, total, cfg.progress.value, transient=True))

        yield begin


def show(row: dict[str, Any], evaluation: Evaluation, cfg: Config, last: bool) -> None:
    """Print the metrics of a model, and `eval.samples` completions if the model is the last one, else one."""
    if cfg.progress is Progress.off:
        return
    figures = [f"{short} {row[name]:.3g}" for name, short in EVALUATION_METRICS.items() if name in row]
    say(f"{row['model']} (update {row['update']}):  {'  '.join(figures)}")
    if evaluation.samples and cfg.eval.samples:
        state = TrainState(num_updates=row["update"], update=row["update"])
        console.print(samples_table(evaluation, cfg.eval.samples if last else 1, state))


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of rows of evaluations.jsonl, with a column for each metric that any row has."""
    about = rows[0]["settings"] if rows else {}
    title = ", ".join(f"{name} {about[name]}" for name in ("split", "generator", "gold") if name in about)
    made = Table(title=title, title_justify="left", box=box.SIMPLE)
    made.add_column("model", no_wrap=True)
    for heading in ("update", "episode", "examples"):
        made.add_column(heading, justify="right", no_wrap=True)
    names = {name: short for name, short in EVALUATION_METRICS.items() if any(name in row for row in rows)}
    for name, short in names.items():
        made.add_column(short + " [95 %]" * (name in RATES), justify="right", no_wrap=True)
    for row in rows:
        counts = [f"{row[name]:,}" for name in ("update", "episode", "examples")]
        made.add_row(row["model"], *counts, *(figure(row, name) for name in names))
    return made


def figure(row: dict[str, Any], name: str) -> str:
    """Return the metric `name` of a row as text, with its interval if any; empty if it is not in the row."""
    if name not in row:
        return ""
    if f"{name}_low" not in row:
        return f"{row[name]:.3g}"
    return f"{row[name]:.3f} [{row[name + '_low']:.3f}, {row[name + '_high']:.3f}]"
