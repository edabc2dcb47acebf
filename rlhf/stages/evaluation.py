"""Evaluation of models on held-out examples: candidates, config, results in the terminal."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Group
from rich.table import Table

from rlhf.checks.check import check_services, checked, composed, composed_node, warn
from rlhf.config.algorithms import Trains
from rlhf.config.models import RANKS_FILE, LoRAConfig, TorchConfig
from rlhf.config.root import Config, threads
from rlhf.config.run import Progress, Update
from rlhf.config.scorers import NoScorerConfig
from rlhf.core import files, formatting
from rlhf.core.errors import UserError, explained, setting
from rlhf.core.files import append, as_line, component, read_lines, write_atomically
from rlhf.core.launched import derive, is_first_rank
from rlhf.core.state import TrainState
from rlhf.loggers.logger import EVALUATION_METRICS, metric_texts, no_reply_ended, print_samples, shown
from rlhf.models.folder import CARD, folder_problem
from rlhf.processes.signals import interruptible
from rlhf.runs.folder import RunFolder, complete_checkpoints, setup_logging
from rlhf.runs.lock import EVALUATION_LOCK, claimed, full_disk
from rlhf.stages.prerequisites import complete
from rlhf.terminal.console import progress, say, say_items, say_loading
from rlhf.words.catalogue import options
from rlhf.words.compose import digest, key_of, load_config, overridden
from rlhf.words.mistakes import one_of

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation
    from rlhf.processes.ranks import Ranks


# Evaluation of models on held-out examples, measured as during training.
#
# The models are the checkpoints and the final model of a run, and models (folders or hub names) that
# `models=` names. With a run, the settings are those of its config.yaml; overrides may change sections that
# an evaluation reads. Each model gets a row in evaluations.jsonl of the run folder, and its completions in
# evaluations/. Models that were evaluated with the same settings are skipped.


CHUNK = 256  # prompts between two steps of the progress bar


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
    if cfg.scores_completions:
        shown["scorer"] = cfg.scorer.described
    return {**shown, "dtype": cfg.model.dtype.value, "digest": fingerprint(cfg, split)}


def known(cfg: Config, folder: RunFolder, split: str) -> dict[str, dict[str, Any]]:
    """Return the rows of earlier evaluations with the same settings and split, by the name of the model."""
    digits = fingerprint(cfg, split)
    rows = read_lines(folder.evaluations, ["model", "settings"])
    return {row["model"]: row for row in rows if row["settings"]["digest"] == digits}


def evaluate(
    cfg: Config,
    folder: RunFolder,
    split: str = "validation",
    only: Sequence[str] = (),
    models: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Evaluate the models that have no row with the same settings in evaluations.jsonl.

    Args:
        cfg: the config of the evaluation.
        folder: the run folder, or, without a run, the folder of the results.
        split: the held-out split.
        only: names of the run's models to evaluate; empty for all.
        models: further models to evaluate: folders or hub names.

    Returns:
        The rows of `models`, then the rows of the run's models, oldest first, including rows of earlier
        evaluations. Damaged checkpoints have no row.

    Raises:
        UserError: there is no such split, the run has no model, an item that the config names cannot be used,
            or another process evaluates in the folder.
        Interrupted: a signal stopped the evaluation.
    """
    check_split(split)
    wanted = [*named_models(models), *(candidates(folder, cfg, only) if folder.config.is_file() else ())]
    rows = known(cfg, folder, split)
    due = _not_evaluated(wanted, rows)
    for candidate in wanted:
        if candidate not in due and is_first_rank():
            name = candidate.name if candidate.named else folder.path / candidate.name
            say(f"evaluated already with these settings: {name}")
    if due:
        from rlhf.assembly.models import full_gpu  # imports torch

        claim = claimed(folder.path, name=EVALUATION_LOCK) if is_first_rank() else nullcontext()
        explanations = partial(full_gpu, cfg, None), partial(full_disk, folder)
        with interruptible(), claim, explained(*explanations):
            rows = known(cfg, folder, split)  # another process may have ended since
            due = _not_evaluated(wanted, rows)
            for row in measure(due, cfg, folder, split) if due else ():
                rows[row["model"]] = row
    found = [rows[candidate.name] for candidate in wanted if candidate.name in rows]
    # The initial policy may have been evaluated after other models.
    initial = _initial_scores(cfg, folder, split)
    saved = ((row, _scores_of(read_lines(completions_file(folder, row)))) for row in found)
    return [{**row, **_comparison(cfg, row, scores, initial)} for row, scores in saved]


def _not_evaluated(wanted: list[_Candidate], rows: dict[str, dict[str, Any]]) -> list[_Candidate]:
    """Return the models without a row; a named model whose files have changed has no row."""
    return [each for each in wanted if rows.get(each.name, {"files": ""}).get("files") != each.files]


def measure(due: list[_Candidate], cfg: Config, folder: RunFolder, split: str) -> Iterator[dict[str, Any]]:
    """Evaluate each model of `due`; write and yield its row. Damaged checkpoints are skipped."""
    check_services(cfg)
    say_loading()
    from rlhf.assembly.models import joined
    from rlhf.stages.run import at_start, run
    from rlhf.training.checkpoint import damage

    ranks = joined(cfg)
    asked, about = cfg, settings(cfg, split)
    # Sharded weights need the run's own engine, whose value model may start as the reward model.
    reward = cfg.scores_completions or any(candidate.shards for candidate in due)
    cfg = ranks.from_first(lambda: complete(_measuring(cfg), run, reward=reward))
    cfg = at_start(cfg, ranks.from_first(folder.started))
    if ranks.first:
        setup_logging(folder)
        kept = "".join(map(as_line, read_lines(folder.evaluations)))  # drops a line that a crash cut off
        write_atomically(folder.evaluations, kept)
    _refuse_other_tokenizers(due, cfg)
    damaged = ranks.from_first(lambda: {c.name: damage(c.checkpoint) for c in due if c.checkpoint})
    for candidate in due:
        if why := damaged.get(candidate.name):
            say(f"warning: {candidate.checkpoint} is damaged and is not evaluated: {why}", style="yellow")
    good = [candidate for candidate in due if not damaged.get(candidate.name)]
    groups = [[candidate] for candidate in good if candidate.named]
    for sharded in (False, True):
        groups.append([each for each in good if not each.named and bool(each.shards) is sharded])
    numbered = enumerate(chain.from_iterable(groups), 1)
    titles = {each.name: f"evaluating {each.name} ({number} of {len(good)})" for number, each in numbered}
    for candidate, evaluation in chain.from_iterable(
        evaluations(group, cfg, folder, split, ranks, titles) for group in groups if group
    ):
        row: dict[str, Any] = {
            "model": candidate.name,
            **candidate.counters(),
            **evaluation.figures,
            "examples": evaluation.examples,
            "settings": about,
        }
        if candidate.named:
            start = cfg.start and Path(cfg.start).expanduser().resolve()
            row |= {"files": candidate.files, "initial": start == candidate.weights.resolve()}
        initial = ranks.from_first(lambda: _initial_scores(asked, folder, split))
        row |= _comparison(cfg, row, evaluation.scores, initial)
        if ranks.first:
            if evaluation.samples:
                file = completions_file(folder, row)
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, "".join(map(as_line, evaluation.samples)))
            append(folder.evaluations, [row])  # after the completions: it marks them as complete
        if cfg.progress is not Progress.off:
            update = f" (update {row['update']})" if "update" in row else ""
            say_items(f"{row['model']}{update}:", metric_texts(row))
            if cfg.eval.samples:  # of the last model all that are asked for
                print_samples(evaluation.samples[: cfg.eval.samples if candidate is good[-1] else 1])
        warn([text for text in [no_reply_ended(row, cfg)] if text is not None])
        yield row


def _initial_scores(cfg: Config, folder: RunFolder, split: str) -> list[float] | None:
    """Return the scores of the initial policy's completions with the settings `cfg`; None if unknown.

    They are known if the settings are those of the run, which was evaluated before its first update, or if
    the initial policy was evaluated as one of `models=`.
    """
    for row in known(cfg, folder, split).values():
        if row.get("initial") and (scores := _scores_of(read_lines(completions_file(folder, row)))):
            return scores
    if split != "validation" or not folder.config.is_file():
        return None
    if fingerprint(load_config(folder.config), split) != fingerprint(cfg, split):
        return None
    return _scores_of(row for row in read_lines(folder.completions, ["update"]) if row["update"] == 0)


def _scores_of(samples: Iterable[dict[str, Any]]) -> list[float] | None:
    """Return the scores of completions; None if they have no scores."""
    scores: list[Any] = [sample.get("score") for sample in samples]
    return scores if scores and None not in scores else None


def _comparison(
    cfg: Config, row: dict[str, Any], scores: list[float] | None, initial: list[float] | None
) -> dict[str, float]:
    """Return the win rate of a model against the initial policy, with the bounds of its interval.

    Args:
        cfg: the config of the evaluation.
        row: row of the model.
        scores: scores of the model's completions.
        initial: scores of the initial policy's completions of the same prompts.

    Returns:
        Empty if scores are unknown, or if the model is the initial policy.
    """
    if scores is None or initial is None or len(scores) != len(initial) or row.get("initial"):
        return {}
    from rlhf.training.recorder import against_initial

    return against_initial(scores, initial, cfg.tie_tolerance(cfg.scorer))


def _refuse_other_tokenizers(due: list[_Candidate], cfg: Config) -> None:
    """Raise UserError if a named model has another vocabulary than the reference model.

    KL and perplexity compare the two models token by token.
    """
    from rlhf.assembly.models import build_tokenizer

    named = [candidate for candidate in due if candidate.named]
    if not named or cfg.algo.trains is not Trains.policy:
        return
    vocabulary = build_tokenizer(cfg).get_vocab()
    for candidate in named:
        if build_tokenizer(_starting_from(candidate.name, cfg)).get_vocab() != vocabulary:
            raise UserError(
                f"models= must name models with the tokenizer of {cfg.start} (KL and perplexity compare the "
                f"models token by token), got {candidate.name}; evaluate it alone: python -m rlhf.evaluate "
                f"{setting('models', candidate.name)} <settings>"
            )


def _starting_from(model: str, cfg: Config) -> Config:
    """Return the config of a run that starts from `model`, with the reference model of `cfg`."""
    if cfg.algo.trains is Trains.base:
        return cfg.with_({"model.base": model, "model.lora": LoRAConfig()})
    reference = cfg.model.reference or cfg.model.policy
    return cfg.with_({"model.policy": model, "model.reference": reference, "model.lora": LoRAConfig()})


def evaluations(
    group: list[_Candidate], cfg: Config, folder: RunFolder, split: str, ranks: Ranks, titles: dict[str, str]
) -> Iterator[tuple[_Candidate, Evaluation]]:
    """Yield each model of a group with its evaluation. One engine loads the models one after the other.

    Args:
        group: one named model, or models of the run, either all sharded or all not sharded.
        cfg: the config of the evaluation.
        folder: the run folder.
        split: the held-out split.
        ranks: the ranks of the evaluation.
        titles: name of a model -> title of its progress display.
    """
    import torch

    from rlhf.assembly import training as assembly
    from rlhf.assembly.models import build_tokenizer
    from rlhf.assembly.parts import part
    from rlhf.generators.generator import ChunkedGenerator
    from rlhf.stages.run import THREADS
    from rlhf.training.evaluators import PolicyEvaluator

    torch.set_num_threads(threads(cfg)[0] or THREADS)
    torch.manual_seed(derive(cfg.seed, "torch"))
    named = group[0].named
    if named:
        cfg = _starting_from(group[0].name, cfg)
    tokenizer = build_tokenizer(cfg)
    task = assembly.build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    warn(ranks.from_first(lambda: list(assembly.check_formats(cfg, task, split))))
    state = TrainState(num_updates=1)
    # Sharded weights need the run's own engine, other weights an engine without an optimizer. The engine of a
    # named model starts with its weights.
    if group[0].shards:
        part(cfg.backend).prepare(cfg.backend, cfg.model.dtype, ranks)
        engine = assembly.build_engine(cfg, tokenizer, ranks, state)
    else:
        kept = ("micro_batch", "tokens", "device", "threads", "timeout_s")
        plain = TorchConfig(**{name: getattr(cfg.backend, name) for name in kept})
        cfg = cfg.with_({"backend": plain})  # which also places the other models
        engine = assembly.build_frozen(cfg, tokenizer, ranks, named=named)
    with ExitStack() as ends:
        if cfg.model.policy is None:  # a policy from random weights; vLLM needs the files of a model
            cfg = cfg.with_({"model.policy": str(group[0].weights)})
        generator = assembly.build_generator(cfg, engine, folder, ranks)
        ends.callback(generator.close)
        scorer = None
        if cfg.scores_completions:
            scorer = assembly.build_scorer(cfg, "scorer", tokenizer, ranks, judgements=folder.judgements)
        evaluator = assembly.build_evaluator(cfg, task, engine, generator, scorer, split, folder)
        if isinstance(evaluator, PolicyEvaluator):
            evaluator.initial = list  # a row of an evaluation compares scores
            evaluator.generator = chunks = ChunkedGenerator(evaluator.generator, CHUNK)
        for version, candidate in enumerate(group):
            if not named:
                engine.load(candidate.weights)
                if cfg.algo.trains is Trains.reward:
                    file = candidate.weights / "config.json"  # a checkpoint has no offset of its scores
                    saved = json.loads(file.read_text()) if file.exists() else {}
                    engine.module.model.config.reward_offset = saved.get("reward_offset", 0.0)
            generator.load(engine.weights(), version)
            title = titles[candidate.name]
            if isinstance(evaluator, PolicyEvaluator):
                # Near-greedy samples; samples for the KL; attempts.
                requests = 1 + (engine.reference is not None) + bool(cfg.eval.attempts)
                total = requests * len(evaluator.prompts)
                with progress(title, total, cfg.progress.value) as chunks.advance:
                    evaluation = evaluator(state)
            else:  # the evaluation of a reward model does not count prompts
                if cfg.progress is not Progress.off:
                    say(title)
                evaluation = evaluator(state)
            yield candidate, evaluation


def completions_file(folder: RunFolder, row: dict[str, Any]) -> Path:
    """Return the file with the completions of a row of evaluations.jsonl."""
    name = f"{component(row['model'])}-{component(row['settings']['digest'])}.jsonl"
    return folder.path / "evaluations" / name


# The config of an evaluation: the config of a run changed by overrides, or the config of overrides alone.


_SPLITS = ("validation", "test")
# Sections and other keys that an evaluation reads.
_SECTIONS = ("eval", "generator", "scorer", "gold", "backend", "model", "task")
_KEYS = ("seed", "progress", "cache_dir")
# Key that selects an option -> its section.
_CHOICES = {"generator": "generator", "scorer": "scorer", "scorer@gold": "gold"}


def check_split(split: str) -> None:
    """Raise UserError if `split` is not a held-out split."""
    if split not in _SPLITS:
        raise UserError(f"split= must be one of {', '.join(_SPLITS)}, got {split}; set split=test")


def check_sampling(samples: int, temperature: float, response_length: int) -> None:
    """Raise UserError if a setting of a request for samples is out of range."""
    for name, value in (("samples", samples), ("response_length", response_length)):
        if value < 1:
            raise UserError(f"{name} must be >= 1, got {value}; set {name}=1")
    if not temperature > 0:
        raise UserError(f"temperature must be > 0, got {temperature:g}; set temperature=0.01 (almost greedy)")


def run_folder(path: str) -> RunFolder:
    """Return the run folder at `path`.

    Raises:
        UserError: `path` is not a run folder, or a folder is in place of one of its files.
    """
    folder = RunFolder(Path(path).expanduser())
    if not folder.config.is_file():
        state = "no config.yaml in it" if folder.path.is_dir() else "no such folder"
        remedy = "run=<output_dir>/<run name>"
        if (folder.path.parent / "config.yaml").is_file():
            remedy = setting("run", folder.path.parent)
        elif (folder.path / "config.json").is_file():
            remedy = setting("models", path)
        raise UserError(
            f"run= must be the folder of a run, with its config.yaml ({state}), got {path}; set {remedy}"
        )
    folder.check_files()
    return folder


def changed(folder: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the run in `folder`, changed by `overrides` and checked.

    Raises:
        UserError: an override is invalid, or changes a setting that an evaluation does not read.
    """
    cfg = overridden(folder.config, overrides, " (an evaluation has one), got {}; leave it out", _change)
    checked(_measuring(cfg), training=False)
    return cfg


def _change(node: DictConfig, overrides: Sequence[Override]) -> None:
    """Apply overrides to the config `node`; an option is selected before its keys are set.

    Raises:
        UserError: an override changes a setting that an evaluation does not read, an option cannot be
            composed, or samples nothing.
    """
    for override in sorted(overrides, key=lambda each: key_of(each) not in _CHOICES):
        key, text = key_of(override), override.input_line
        first = key.partition(".")[0]
        if key not in _CHOICES and (first not in (*_SECTIONS, *_KEYS) or key in _SECTIONS):
            remedy = f"set {shlex.quote(f'scorer@{text}')}" if key == "gold" else "leave it out"
            raise UserError(
                f"{key} must be something that an evaluation reads ({', '.join((*_SECTIONS, *_KEYS))}; the "
                f"run is already trained), got {text}; {remedy}"
            )
        section = _CHOICES.get(key)
        if section is None:
            OmegaConf.update(node, key, override.value())
            continue
        chosen = composed_node([str(text)])[section]
        if section == "generator":
            if chosen.name == "dataset":
                samplers = [name for name in options("generator") if name != "dataset"]
                raise UserError(one_of(key, chosen.name, samplers))
            for kept in ("temperature", "response_length"):  # those of the run's generator
                chosen[kept] = node.generator[kept]
        OmegaConf.update(node, section, chosen, merge=False)


def alone(models: Sequence[str], overrides: Sequence[str]) -> Config:
    """Return the config of `overrides`, checked, for an evaluation of models that no run names.

    The first of the models becomes the model that training starts from, unless an override names another, so
    KL and win rate compare the models with it. A reward model that no override names is not used.

    Raises:
        UserError: an override is invalid, or a model folder is not complete.
    """
    named_models(models)
    cfg = composed(list(overrides))
    if cfg.start is None:
        cfg = cfg.with_({f"model.{'base' if cfg.algo.trains is Trains.base else 'policy'}": models[0]})
    if cfg.scorer.reads_reward and cfg.model.reward is None:
        cfg = cfg.with_({"scorer": NoScorerConfig()})
    checked(_measuring(cfg), training=False)
    return cfg


def _measuring(cfg: Config) -> Config:
    """Return `cfg` without settings that only training uses: lag, in-flight updates, annotator."""
    changes = {f"generator.{key}": None for key in cfg.generator.only_training}
    return cfg.with_({**changes, "schedule.max_lag": 0, "schedule.update": Update.between})


# Models that can be evaluated: checkpoints and final model of a run, model folders and hub names.


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint or the final model of a run, or a model that the user names.

    Attributes:
        name: name of the folder of the checkpoint or final model; a named model: folder or hub name.
        weights: path that an engine loads.
        position: file with the update and the episode of the model; None for a named model.
        checkpoint: folder of the checkpoint; None for other models.
        shards: number of ranks that DeepSpeed sharded the weights over; 0 if the weights are not sharded.
        files: hash of sizes and times of the files of a named folder; None for other models.
    """

    name: str
    weights: Path
    position: Path | None
    checkpoint: Path | None = None
    shards: int = 0
    files: str | None = None

    @property
    def named(self) -> bool:
        """Whether the user named the model, instead of the run that trained it."""
        return self.position is None

    def counters(self) -> dict[str, int]:
        """Return the update and the episode of the model; empty for a named model."""
        if self.position is None:
            return {}
        state = json.loads(self.position.read_text())
        state = state.get("state", state)
        return {name: state[name] for name in ("update", "episode") if name in state}


def candidates(folder: RunFolder, cfg: Config, only: Sequence[str] = ()) -> list[_Candidate]:
    """Return the models of a run, oldest first.

    Args:
        folder: the run folder.
        cfg: the config of the run.
        only: names of the models to return; empty for all.

    Raises:
        UserError: the run has no model, lacks a model named in `only`, or its final model is not complete.
    """
    found = []
    for path in complete_checkpoints(folder.path):
        shards = 0
        # If the file with the number is damaged, `damage` tells later that the checkpoint is skipped.
        with suppress(OSError, ValueError, TypeError, KeyError):
            shards = int(json.loads((path / RANKS_FILE).read_bytes())["ranks"])
        weights = path if shards else path / "model"
        found.append(_Candidate(path.name, weights, path / "counters.json", path, shards))
    if folder.finished():
        weights = folder.adapter if cfg.model.lora.rank else folder.model
        found.append(_Candidate(folder.model.name, weights, folder.state))
    if not found:
        raise UserError(
            f"run= must have a checkpoint or a final model to evaluate, got {folder.path} with neither; "
            "continue the run to its first checkpoint (schedule.save_every)"
        )
    names = [candidate.name for candidate in found]
    if missing := [name for name in only if name and name not in names]:
        raise UserError(
            f"only= must name what the run has ({', '.join(names)}), got {','.join(missing)}; "
            "set only=model, or leave it out"
        )
    chosen = [candidate for candidate in found if not any(only) or candidate.name in only]
    if chosen[-1].checkpoint is None and (problem := folder.model_problem(bool(cfg.model.lora.rank))):
        others = ",".join(name for name in names if name != folder.model.name)
        raise UserError(
            f"run= must have a complete final model ({problem}), got {folder.path}; "
            + (f"set only={others}, or " if others else "")
            + folder.again()
        )
    return chosen


def named_models(models: Sequence[str]) -> list[_Candidate]:
    """Return the models that the user names.

    Args:
        models: model folders or hub names.

    Raises:
        UserError: a folder does not contain a complete model.
    """
    if problems := [problem for model in models if (problem := folder_problem("models", model))]:
        raise UserError(*problems)
    found = []
    for model in models:
        folder, digits = Path(model).expanduser(), None
        if folder.is_dir():  # its card does not change what the model computes
            kept = [path for path in folder.iterdir() if path.is_file() and path.name != CARD]
            stats = {path.name: path.stat() for path in kept}
            digits = files.digest({name: [each.st_size, each.st_mtime_ns] for name, each in stats.items()})
        found.append(_Candidate(model, folder, None, files=digits))
    return found


# Results of evaluations in the terminal: the metrics of each model, and a table of all models.


_COUNTS = ("update", "episode", "examples")
_SIDE_BY_SIDE = 3  # largest number of models in columns beside each other; more models are rows
_WIDTH = 24  # largest width of a column
_PADDING = 3  # blanks between two cells


def table(rows: list[dict[str, Any]], width: int = 80) -> Group:
    """Return a table of rows of evaluations.jsonl, with every metric that any row has.

    The table has a column for each model, or, if there are many models, a row. Columns that do not fit in
    `width` columns of the terminal are in another table below.
    """
    rows = [shown(row) for row in rows]
    about = rows[0]["settings"] if rows else {}
    title = [f"{name} {about[name]}" for name in ("split", "generator", "scorer", "gold") if name in about]
    every = {**dict(zip(_COUNTS, _COUNTS, strict=True)), **EVALUATION_METRICS}
    names = {name: short for name, short in every.items() if any(name in row for row in rows)}
    models = short_names([row["model"] for row in rows])
    full = zip(models, (row["model"] for row in rows), strict=True)
    paths = [f"{name}: {path}" for name, path in full if name != path]
    by_model = [[formatting.text(row, name) for name in names] for row in rows]
    headings = list(names.values())
    if len(rows) <= _SIDE_BY_SIDE:
        first, others = ("", headings), list(zip(models, by_model, strict=True))
    else:
        by_metric = [[cells[place] for cells in by_model] for place in range(len(headings))]
        first, others = ("model", models), list(zip(headings, by_metric, strict=True))
    tables = []
    for group in _fitting_groups(first, others, width):
        tables.append(part := Table(box=box.SIMPLE))
        part.add_column(first[0], no_wrap=True)
        for heading, _ in group:
            part.add_column(heading, justify="right", no_wrap=True)
        for cells in zip(first[1], *(cells for _, cells in group), strict=True):
            part.add_row(*cells)
    return Group(*formatting.lines_of(title, width), *tables, *paths)


def short_names(models: Sequence[str]) -> list[str]:
    """Return a name of at most `_WIDTH` columns for each model: the last part of its path that others lack.

    The start of a longer name is left out. Names that are not unique get a number.
    """
    names, paths = [], [model.rstrip("/").split("/") for model in models]
    for path in paths:
        equal = [sum(each[-end:] == path[-end:] for each in paths) for end in range(1, len(path) + 1)]
        name = path[-1 - equal.index(1)] if 1 in equal else path[-1]
        names.append(name if len(name) <= _WIDTH else f"…{name[1 - _WIDTH :]}")
    doubled = {name for name in names if names.count(name) > 1}
    return [f"{i} {name[4 - _WIDTH :]}" if name in doubled else name for i, name in enumerate(names, 1)]


_Column = tuple[str, list[str]]  # heading and cells


def _fitting_groups(first: _Column, others: list[_Column], width: int) -> Iterator[list[_Column]]:
    """Yield the columns `others` in groups, each of which fits in `width` beside the column `first`."""
    group: list[_Column] = []
    breadths = [max(map(len, [heading, *cells])) + _PADDING for heading, cells in [first, *others]]
    left = room = width - 1 - breadths[0]
    for column, needed in zip(others, breadths[1:], strict=True):
        if group and needed > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= needed
    yield group
