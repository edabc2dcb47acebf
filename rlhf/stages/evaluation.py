"""The evaluation of a run as a command: `python -m rlhf.evaluate run=<folder> [word ...]`.

Every checkpoint of the run and its final model answer held-out prompts, and are measured as in training, with
the settings of the run's config.yaml; words change them (`generator=vllm`, `scorer@gold=...`,
`eval.prompts=1000`). A row for each goes to evaluations.jsonl of the run folder, its completions to
evaluations/; what was evaluated with the same settings is not evaluated again. Exit codes are those of
`rlhf.train`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from rlhf.checks.check import problems
from rlhf.config.algo import Trains
from rlhf.config.backend import RANKS_FILE, TorchConfig, ZeroConfig
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
from rlhf.core.console import console, say
from rlhf.core.errors import UserError
from rlhf.core.files import append, as_line, read_lines, write_atomically
from rlhf.core.launched import is_first_rank, rank_count
from rlhf.core.state import TrainState
from rlhf.loggers.display import JUDGED, samples_table
from rlhf.processes.signals import interruptible
from rlhf.runs.disk import explained
from rlhf.runs.folder import RunFolder, complete_checkpoints
from rlhf.runs.transcript import setup_logging

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks


SPLITS = ("validation", "test")


SECTIONS = ("eval", "generator", "gold", "backend", "model", "task")  # what an evaluation reads


KEYS = ("seed", "progress", "cache_dir")  # besides these


CHOICES = {"generator": "generator", "scorer@gold": "gold"}  # what is typed to choose a section anew


SHARES = ("eval/win_rate", "eval/accuracy")  # parts of the examples, which get an interval


PART = 256  # prompts that are answered between two steps of the progress bar


def check_split(split: str) -> None:
    """Raise UserError where `split` is none that is held out."""
    if split not in SPLITS:
        raise UserError(f"split= must be one of {', '.join(SPLITS)}, got {split}; set split=test")


def run_folder(path: str) -> RunFolder:
    """The run in `path`.

    Raises:
        UserError: there is none.
    """
    folder = RunFolder(Path(path).expanduser())
    if not folder.config.is_file():
        state = "no config.yaml in it" if folder.path.is_dir() else "no such folder"
        raise UserError(
            f"run= must be the folder of a run, with its config.yaml ({state}), got {path}; "
            "set run=<output_dir>/<run name>"
        )
    return folder


def changed(folder: RunFolder, words: Sequence[str] = ()) -> Config:
    """The config of the run in `folder`, with what `words` change of it, checked.

    Raises:
        UserError: a word is wrong, or names what an evaluation does not read.
    """
    try:
        node = load_node(folder.config)
        OmegaConf.set_struct(node, True)
        for choice in (True, False):  # sections are chosen before their keys are set
            change(node, words, choice)
        cfg = OmegaConf.to_object(node)
    except CONFIG_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(explain(error, words)) from error
    assert isinstance(cfg, Config)
    if found := problems(measuring(cfg), training=False):
        raise UserError(*found)
    return cfg


def change(node: DictConfig, words: Sequence[str], choices: bool) -> None:
    """Set what `words` say in the config `node`: the sections that they choose, or all other keys."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for word, override in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
        typed = word.partition("=")[0]
        if word.startswith(("+", "~")) or override.is_sweep_override():
            raise UserError(
                f"{typed} must be set to one value (an evaluation has one), got {word}; leave it out"
            )
        first = typed.partition(".")[0]
        if typed not in CHOICES and (first not in (*SECTIONS, *KEYS) or typed in SECTIONS):
            remedy = f"set scorer@{word}" if typed == "gold" else "leave it out"
            raise UserError(
                f"{typed} must be something that an evaluation reads ({', '.join((*SECTIONS, *KEYS))}; the "
                f"run is trained already), got {word}; {remedy}"
            )
        if (typed in CHOICES) is not choices:
            continue
        if not choices:
            OmegaConf.update(node, typed, override.value())
            continue
        section = CHOICES[typed]
        chosen = composed([word])[section]
        if section == "generator":
            if chosen.name == "dataset":
                samplers = [name for name in options("generator") if name != "dataset"]
                raise UserError(one_of(typed, chosen.name, samplers))
            for key in ("temperature", "response_length"):
                chosen[key] = node.generator[key]
        OmegaConf.update(node, section, chosen, merge=False)


def measuring(cfg: Config) -> Config:
    """`cfg` where nothing is trained meanwhile: a generator that is waited for, and no annotator."""
    generator = cfg.generator
    if isinstance(generator, WorkerConfig):
        generator = replace(generator, annotate=None)
    return replace(cfg, generator=generator, schedule=replace(cfg.schedule, max_lag=0, update=Update.between))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint, or the final model, of a run."""

    name: str
    weights: Path  # what an engine loads
    position: Path  # the file that says where the run stood
    checkpoint: Path | None = None
    divided: int = 0  # among so many ranks, by DeepSpeed; 0: whole

    def counters(self) -> dict[str, int]:
        """Update and episode that it is of."""
        state = json.loads(self.position.read_text())
        state = state.get("state", state)
        return {name: state[name] for name in ("update", "episode")}


def candidates(folder: RunFolder, cfg: Config, only: tuple[str, ...] = ()) -> list[Candidate]:
    """What there is to evaluate in a run folder, oldest first; the names `only` of it, where there are any.

    Raises:
        UserError: there is nothing, or not all of `only`.
    """
    found = []
    for path in complete_checkpoints(folder.path):
        ranks = path / RANKS_FILE
        divided = json.loads(ranks.read_text())["ranks"] if ranks.exists() else 0
        weights = path if divided else path / "model"
        found.append(Candidate(path.name, weights, path / "counters.json", path, divided))
    if folder.finished():
        weights = folder.adapter if cfg.model.lora.rank else folder.model
        found.append(Candidate(folder.model.name, weights, folder.state))
    if not found:
        raise UserError(
            f"run= must have a checkpoint or a final model to evaluate, got {folder.path} with none; "
            "let the run come to its first checkpoint (schedule.save_every)"
        )
    names = [candidate.name for candidate in found]
    if missing := [name for name in only if name and name not in names]:
        raise UserError(
            f"only= must name what the run has ({', '.join(names)}), got {','.join(missing)}; "
            "set only=model, or leave it out"
        )
    return [candidate for candidate in found if not any(only) or candidate.name in only]


def refuse_other_ranks(due: list[Candidate], cfg: Config) -> None:
    """Raise UserError where a checkpoint is divided among another number of ranks than there are."""
    stage = cfg.backend.stage if isinstance(cfg.backend, ZeroConfig) else 0
    for candidate in due:
        if stage and candidate.divided not in (0, rank_count()):
            count = candidate.divided
            raise UserError(
                f"ranks must be {count} to evaluate {candidate.name} (backend={cfg.backend.name} has divided "
                f"it among as many), got {rank_count()}; start torchrun --nproc-per-node {count} -m "
                "rlhf.evaluate, or add only=model"
            )


def fingerprint(cfg: Config, split: str) -> str:
    """Eight hex digits of all settings that an evaluation's figures depend on."""
    return hashlib.sha256(f"{digest(cfg)}/{split}".encode()).hexdigest()[:8]


def settings(cfg: Config, split: str) -> dict[str, Any]:
    """The settings that a row tells of; `digest` is of all."""
    told = {"split": split, "prompts": cfg.eval.prompts}
    if cfg.algo.trains is not Trains.reward:
        told |= {
            "generator": cfg.generator.name if cfg.generator.samples else "hf",
            "temperature": cfg.eval.temperature,
            "kl_temperature": cfg.generator.temperature,
            "response_length": cfg.generator.response_length,
            "gold": cfg.gold.described,
        }
    return {**told, "dtype": cfg.model.dtype.value, "digest": fingerprint(cfg, split)}


def known(cfg: Config, folder: RunFolder, split: str) -> dict[str, dict[str, Any]]:
    """The rows of earlier evaluations with these settings, by the name of what was evaluated."""
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
    """Evaluate the run in `folder` with the settings of `cfg`, where that was not done before.

    Returns the rows of what was asked for, oldest first; checkpoints that are damaged have none. `ranks` are
    those that the environment names where none are given.

    Raises:
        UserError: there is nothing to evaluate, or something that the config names is not as it must be.
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
        with interruptible(), explained(folder):
            for row in measure(due, cfg, folder, split, ranks):
                rows[row["model"]] = row
    return [rows[candidate.name] for candidate in wanted if candidate.name in rows]


def measure(
    due: list[Candidate], cfg: Config, folder: RunFolder, split: str, ranks: Ranks | None
) -> Iterator[dict[str, Any]]:
    """Evaluate each of `due`, and write and yield its row."""
    from rlhf.assembly.device import build_device
    from rlhf.processes.ranks import Ranks
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.run import quieten, run
    from rlhf.training.checkpoint import damage

    ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
    quieten(ranks)
    told = settings(cfg, split)
    # A value model, which the run's own engine has, may start as the reward model.
    own_engine = any(candidate.divided for candidate in due)
    cfg = ranks.from_first(lambda: complete(measuring(cfg), run, reward=own_engine))
    if ranks.first:
        setup_logging(folder)
        kept = "".join(map(as_line, read_lines(folder.evaluations)))  # without what a crash has cut off
        write_atomically(folder.evaluations, kept)
    harm = ranks.from_first(lambda: {c.name: damage(c.checkpoint) for c in due if c.checkpoint})
    for candidate in due:
        if why := harm.get(candidate.name):
            say(f"warning: {candidate.checkpoint} is damaged and is not evaluated: {why}", style="yellow")
    good = [candidate for candidate in due if not harm.get(candidate.name)]
    by_engine = ([c for c in good if not c.divided], [c for c in good if c.divided])
    with progress(cfg, sum(map(len, by_engine))) as begin:
        for group in filter(None, by_engine):
            for candidate, evaluation in evaluations(group, cfg, folder, split, ranks, begin):
                row = {
                    "model": candidate.name,
                    **candidate.counters(),
                    **evaluation.figures,
                    **intervals(evaluation),
                    "settings": told,
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
    """Yield each candidate of a group that one engine reads, with its evaluation."""
    import torch

    from rlhf.assembly.data import build_task
    from rlhf.assembly.evaluator import build_evaluator
    from rlhf.assembly.generator import build_generator
    from rlhf.assembly.models import build_tokenizer
    from rlhf.core.seeding import derive
    from rlhf.generators.chunked import InParts
    from rlhf.stages.run import THREADS
    from rlhf.training.evaluators import PolicyEvaluator

    torch.set_num_threads(threads(cfg)[0] or THREADS)
    torch.manual_seed(derive(cfg.seed, "torch"))
    tokenizer = build_tokenizer(cfg)
    task = build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    state = TrainState(num_updates=1)
    cfg, engine = build_engine_for(group[0], cfg, tokenizer, ranks)
    with ExitStack() as ends:
        if cfg.model.policy is None:  # of a model from nothing, which vLLM is started with
            cfg = replace(cfg, model=replace(cfg.model, policy=str(group[0].weights)))
        generator = build_generator(cfg, engine, tokenizer, folder, ranks)
        ends.callback(generator.close)
        evaluator = build_evaluator(cfg, task, engine, generator, None, tokenizer, ranks, split)
        if isinstance(evaluator, PolicyEvaluator):
            evaluator.generator = parts = InParts(evaluator.generator, PART)
        for version, candidate in enumerate(group):
            engine.load(candidate.weights)
            if cfg.algo.trains is Trains.reward:
                engine.module.model.config.reward_offset = offset(candidate.weights)
            generator.load(engine.weights(), version)
            if isinstance(evaluator, PolicyEvaluator):
                requests = 2 if engine.reference is not None else 1  # near-greedy; at random for the KL
                parts.advance = begin(candidate, requests * len(evaluator.prompts))
            else:
                begin(candidate, 0)
            yield candidate, evaluator(state)


def build_engine_for(
    candidate: Candidate, cfg: Config, tokenizer: Any, ranks: Ranks
) -> tuple[Config, Engine]:
    """An engine that loads `candidate`, and `cfg` with the backend that places the other models for it.

    What is whole is measured without an optimizer; what DeepSpeed divided is read by the run's own engine.
    """
    from rlhf.assembly.engine import build_engine, build_frozen
    from rlhf.assembly.parts import part

    if candidate.divided:
        part(cfg.backend).prepare(cfg.backend, cfg.model.dtype, ranks, candidate.checkpoint)
        return cfg, build_engine(cfg, tokenizer, ranks, TrainState(num_updates=1))
    own = cfg.backend
    plain = TorchConfig(
        micro_batch=own.micro_batch, device=own.device, threads=own.threads, timeout_s=own.timeout_s
    )
    cfg = replace(cfg, backend=plain)
    return cfg, build_frozen(cfg, tokenizer, ranks)


def offset(folder: Path) -> float:
    """What a reward model in `folder` is centred by; a checkpoint's is not yet."""
    file = folder / "config.json"
    return json.loads(file.read_text()).get("reward_offset", 0.0) if file.exists() else 0.0


def intervals(evaluation: Evaluation) -> dict[str, float]:
    """The ends of the 95 % intervals (Wilson) of the figures that are parts of the examples."""
    found: dict[str, float] = {}
    for name in SHARES:
        if name in evaluation.figures:
            low, high = wilson(evaluation.figures[name], evaluation.examples)
            found |= {f"{name}_low": low, f"{name}_high": high}
    return {**found, "examples": evaluation.examples}


def write(folder: RunFolder, row: dict[str, Any], evaluation: Evaluation) -> None:
    """Write the completions, then the row, which says that the evaluation is done."""
    if evaluation.samples:
        file = folder.path / "evaluations" / f"{row['model']}-{row['settings']['digest']}.jsonl"
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(map(as_line, evaluation.samples)))
    append(folder.evaluations, [row])


@contextmanager
def progress(cfg: Config, models: int) -> Iterator[Callable[[Candidate, int], Callable[[int], None]]]:
    """Show how far the evaluation is: gives what is called with each candidate and its number of prompts to
    answer, and returns what is called with the number of those that are answered.
    """
    live = console.is_terminal if cfg.progress is Progress.auto else cfg.progress is Progress.live
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    begun = 0
    with Bar(*columns, console=console, disable=not live, transient=True) as bar:

        def begin(candidate: Candidate, total: int) -> Callable[[int], None]:
            nonlocal begun
            begun += 1
            title = f"evaluating {candidate.name} ({begun} of {models})"
            if not live and cfg.progress is not Progress.off:
                say(title)
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(title, total=total)
            return lambda count: bar.advance(task, count)

        yield begin


def show(row: dict[str, Any], evaluation: Evaluation, cfg: Config, last: bool) -> None:
    """Show the figures of one evaluation, and completions: of the last more."""
    if cfg.progress is Progress.off:
        return
    figures = [f"{short} {row[name]:.3g}" for name, short in JUDGED.items() if name in row]
    say(f"{row['model']} (update {row['update']}):  {'  '.join(figures)}")
    if evaluation.samples and cfg.eval.samples:
        state = TrainState(num_updates=row["update"], update=row["update"])
        console.print(samples_table(evaluation, cfg.eval.samples if last else 1, state))


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows below one another, with the figures that they have."""
    about = rows[0]["settings"] if rows else {}
    title = ", ".join(f"{name} {about[name]}" for name in ("split", "generator", "gold") if name in about)
    made = Table(title=title, title_justify="left", box=box.SIMPLE)
    made.add_column("model", no_wrap=True)
    names = {name: short for name, short in JUDGED.items() if any(name in row for row in rows)}
    for title in ("update", "episode", "examples", *names.values()):
        made.add_column(
            title + " [95 %]" * (title in ("win-rate", "accuracy")), justify="right", no_wrap=True
        )
    for row in rows:
        counts = [f"{row[name]:,}" for name in ("update", "episode", "examples")]
        made.add_row(row["model"], *counts, *(figure(row, name) for name in names))
    return made


def figure(row: dict[str, Any], name: str) -> str:
    """A figure of a row, with its interval where it has one."""
    if name not in row:
        return ""
    if f"{name}_low" not in row:
        return f"{row[name]:.3g}"
    return f"{row[name]:.3f} [{row[name + '_low']:.3f}, {row[name + '_high']:.3f}]"
