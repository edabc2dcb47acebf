"""Evaluation of models on held-out examples, measured as during training.

The models are the checkpoints and the final model of a run, and models (folders or hub names) that `models=`
names. With a run, the settings are those of its config.yaml; overrides may change sections that an evaluation
reads. Each model gets a row in evaluations.jsonl of the run folder, and its completions in evaluations/.
Models that were evaluated with the same settings are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checks.check import warn
from rlhf.config.algo import Trains
from rlhf.config.backend import TorchConfig
from rlhf.config.cores import threads
from rlhf.config.identity import digest
from rlhf.config.model import LoRAConfig
from rlhf.config.run import Progress
from rlhf.config.saved import load_config
from rlhf.core.console import say, say_loading
from rlhf.core.errors import UserError, explained
from rlhf.core.files import append, as_line, component, read_lines, write_atomically
from rlhf.core.launched import is_first_rank
from rlhf.core.pasting import setting
from rlhf.core.progress import progress
from rlhf.core.state import TrainState
from rlhf.loggers.logger import no_reply_ended
from rlhf.processes.signals import interruptible
from rlhf.runs.disk import full_disk
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import EVALUATION_LOCK, claimed
from rlhf.runs.transcript import setup_logging
from rlhf.stages.candidates import Candidate, candidates, named_models
from rlhf.stages.evaluation_config import measuring
from rlhf.stages.evaluation_table import show
from rlhf.training.comparison import against_initial

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.metrics import Evaluation
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks

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
    only: tuple[str, ...] = (),
    ranks: Ranks | None = None,
    models: Sequence[str] = (),
    of_run: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate the models that have no row with the same settings in evaluations.jsonl.

    Args:
        cfg: the config of the evaluation.
        folder: the run folder, or, without a run, the folder of the results.
        split: the held-out split.
        only: names of the run's models to evaluate; empty for all.
        ranks: the ranks of the evaluation; None: the ranks that the launcher started.
        models: further models to evaluate: folders or hub names.
        of_run: whether to evaluate the models of the run in `folder`.

    Returns:
        The rows of `models`, then the rows of the run's models, oldest first, including rows of earlier
        evaluations. Damaged checkpoints have no row.

    Raises:
        UserError: the run has no model, an item that the config names cannot be used, or another process
            evaluates in the folder.
        Interrupted: a signal stopped the evaluation.
    """
    wanted = [*named_models(models), *(candidates(folder, cfg, only) if of_run else ())]
    rows = known(cfg, folder, split)
    due = _not_evaluated(wanted, rows)
    for candidate in wanted:
        if candidate not in due and is_first_rank():
            name = candidate.name if candidate.named else folder.path / candidate.name
            say(f"evaluated already with these settings: {name}")
    if due:
        from rlhf.stages.shortage import full_gpu  # imports torch

        claim = claimed(folder.path, name=EVALUATION_LOCK) if is_first_rank() else nullcontext()
        explanations = partial(full_gpu, cfg, None), partial(full_disk, folder)
        with interruptible(), claim, explained(*explanations):
            rows = known(cfg, folder, split)  # another process may have ended since
            due = _not_evaluated(wanted, rows)
            for row in measure(due, cfg, folder, split, ranks) if due else ():
                rows[row["model"]] = row
    initial = initial_scores(cfg, folder, split)
    found = [rows[candidate.name] for candidate in wanted if candidate.name in rows]
    # The initial policy may have been evaluated after other models.
    tolerance = cfg.tie_tolerance(cfg.scorer)
    return [{**row, **comparison(row, _saved_scores(folder, row), initial, tolerance)} for row in found]


def _not_evaluated(wanted: list[Candidate], rows: dict[str, dict[str, Any]]) -> list[Candidate]:
    """Return the models without a row; a named model whose files have changed has no row."""
    return [each for each in wanted if rows.get(each.name, {"files": ""}).get("files") != each.files]


def measure(
    due: list[Candidate], cfg: Config, folder: RunFolder, split: str, ranks: Ranks | None
) -> Iterator[dict[str, Any]]:
    """Evaluate each model of `due`; write and yield its row. Damaged checkpoints are skipped."""
    say_loading()
    from rlhf.assembly.models import build_device
    from rlhf.processes.ranks import Ranks
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.quiet import quieten
    from rlhf.stages.run import at_start, run
    from rlhf.training.checkpoint import damage

    ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
    quieten(ranks)
    asked, shown_settings = cfg, settings(cfg, split)
    # Sharded weights need the run's own engine, whose value model may start as the reward model.
    reward = cfg.scores_completions or any(candidate.shards for candidate in due)
    cfg = ranks.from_first(lambda: complete(measuring(cfg), run, reward=reward))
    cfg = at_start(cfg, ranks.from_first(folder.started))
    if ranks.first:
        setup_logging(folder)
        kept = "".join(map(as_line, read_lines(folder.evaluations)))  # drops a line that a crash cut off
        write_atomically(folder.evaluations, kept)
    refuse_other_tokenizers(due, cfg)
    damaged = ranks.from_first(lambda: {c.name: damage(c.checkpoint) for c in due if c.checkpoint})
    for candidate in due:
        if why := damaged.get(candidate.name):
            say(f"warning: {candidate.checkpoint} is damaged and is not evaluated: {why}", style="yellow")
    good = [candidate for candidate in due if not damaged.get(candidate.name)]
    of_run = [candidate for candidate in good if not candidate.named]
    groups = [
        *([candidate] for candidate in good if candidate.named),
        [candidate for candidate in of_run if not candidate.shards],
        [candidate for candidate in of_run if candidate.shards],
    ]
    with _progress_by_model(cfg, len(good)) as begin:
        for group in filter(None, groups):
            for candidate, evaluation in evaluations(group, cfg, folder, split, ranks, begin):
                row: dict[str, Any] = {
                    "model": candidate.name,
                    **candidate.counters(),
                    **evaluation.figures,
                    "examples": evaluation.examples,
                    "settings": shown_settings,
                }
                if candidate.named:
                    start = cfg.start and Path(cfg.start).expanduser().resolve()
                    row |= {"files": candidate.files, "initial": start == candidate.weights.resolve()}
                initial = ranks.from_first(lambda: initial_scores(asked, folder, split))
                row |= comparison(row, evaluation.scores, initial, cfg.tie_tolerance(cfg.scorer))
                if ranks.first:
                    write(folder, row, evaluation)
                show(row, evaluation, cfg, last=candidate is good[-1])
                warn([text for text in [no_reply_ended(row, cfg)] if text is not None])
                yield row


def initial_scores(cfg: Config, folder: RunFolder, split: str) -> list[float] | None:
    """Return the scores of the initial policy's completions with the settings `cfg`; None if unknown.

    They are known if the settings are those of the run, which was evaluated before its first update, or if
    the initial policy was evaluated as one of `models=`.
    """
    rows = known(cfg, folder, split).values()
    scores = next((_saved_scores(folder, row) for row in rows if row.get("initial")), None)
    if scores is not None or split != "validation" or not folder.config.is_file():
        return scores
    if fingerprint(load_config(folder.config), split) != fingerprint(cfg, split):
        return None
    return _scores_of(row for row in read_lines(folder.completions, ["update"]) if row["update"] == 0)


def _saved_scores(folder: RunFolder, row: dict[str, Any]) -> list[float] | None:
    """Return the scores of the completions of a row of evaluations.jsonl; None without scores."""
    return _scores_of(read_lines(completions_file(folder, row)))


def _scores_of(samples: Iterable[dict[str, Any]]) -> list[float] | None:
    """Return the scores of completions; None if they have no scores."""
    scores = [sample.get("score") for sample in samples]
    known_scores = [score for score in scores if score is not None]
    return known_scores if scores and len(known_scores) == len(scores) else None


def comparison(
    row: dict[str, Any], scores: list[float] | None, initial: list[float] | None, tie_tolerance: float
) -> dict[str, float]:
    """Return the win rate of a model against the initial policy, with the bounds of its interval.

    Args:
        row: row of the model.
        scores: scores of the model's completions.
        initial: scores of the initial policy's completions of the same prompts.
        tie_tolerance: largest relative difference of two scores that tie.

    Returns:
        Empty if scores are unknown, or if the model is the initial policy.
    """
    if scores is None or initial is None or len(scores) != len(initial) or row.get("initial"):
        return {}
    return against_initial(scores, initial, tie_tolerance)


def refuse_other_tokenizers(due: list[Candidate], cfg: Config) -> None:
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
    named = {"model.policy": model, "model.reference": reference}
    return cfg.with_({**named, "model.lora": LoRAConfig()})


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
        group: one named model, or models of the run, either all sharded or all not sharded.
        cfg: the config of the evaluation.
        folder: the run folder.
        split: the held-out split.
        ranks: the ranks of the evaluation.
        begin: starts the progress display of a model; see `_progress_by_model`.
    """
    import torch

    from rlhf.assembly.models import build_tokenizer
    from rlhf.assembly.training import (
        build_evaluator,
        build_generator,
        build_scorer,
        build_task,
        check_formats,
    )
    from rlhf.core.seeding import derive
    from rlhf.generators.generator import ChunkedGenerator
    from rlhf.stages.run import THREADS
    from rlhf.training.evaluators import PolicyEvaluator

    torch.set_num_threads(threads(cfg)[0] or THREADS)
    torch.manual_seed(derive(cfg.seed, "torch"))
    named = group[0].named
    if named:
        cfg = _starting_from(group[0].name, cfg)
    tokenizer = build_tokenizer(cfg)
    task = build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    warn(ranks.from_first(lambda: list(check_formats(cfg, task, tokenizer, split))))
    state = TrainState(num_updates=1)
    cfg, engine = _build_engine_for(group[0], cfg, tokenizer, ranks)
    with ExitStack() as ends:
        if cfg.model.policy is None:  # a policy from random weights; vLLM needs the files of a model
            cfg = cfg.with_({"model.policy": str(group[0].weights)})
        generator = build_generator(cfg, engine, tokenizer, folder, ranks)
        ends.callback(generator.close)
        scorer = build_scorer(cfg, "scorer", tokenizer, ranks) if cfg.scores_completions else None
        evaluator = build_evaluator(cfg, task, engine, generator, scorer, tokenizer, ranks, split)
        if isinstance(evaluator, PolicyEvaluator):
            evaluator.generator = chunks = ChunkedGenerator(evaluator.generator, CHUNK)
        for version, candidate in enumerate(group):
            if not named:  # the engine starts with the weights of a named model
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


def _build_engine_for(
    candidate: Candidate, cfg: Config, tokenizer: Any, ranks: Ranks
) -> tuple[Config, Engine]:
    """Build an engine that can load `candidate`.

    Sharded weights need the run's own engine. Other weights are loaded by an engine without an optimizer. The
    engine of a named model starts with its weights.

    Returns:
        `cfg` with the backend of the engine, which also places the other models, and the engine.
    """
    from rlhf.assembly.parts import part
    from rlhf.assembly.training import build_engine, build_frozen

    if candidate.shards:
        part(cfg.backend).prepare(cfg.backend, cfg.model.dtype, ranks)
        return cfg, build_engine(cfg, tokenizer, ranks, TrainState(num_updates=1))
    own = cfg.backend
    plain = TorchConfig(
        micro_batch=own.micro_batch,
        tokens=own.tokens,
        device=own.device,
        threads=own.threads,
        timeout_s=own.timeout_s,
    )
    cfg = cfg.with_({"backend": plain})
    return cfg, build_frozen(cfg, tokenizer, ranks, named=candidate.named)


def offset(folder: Path) -> float:
    """Return the offset that centres the scores of a reward model; a checkpoint has no offset: 0."""
    file = folder / "config.json"
    return json.loads(file.read_text()).get("reward_offset", 0.0) if file.exists() else 0.0


def write(folder: RunFolder, row: dict[str, Any], evaluation: Evaluation) -> None:
    """Write the completions, then the row; the row marks the evaluation as finished."""
    if evaluation.samples:
        file = completions_file(folder, row)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(map(as_line, evaluation.samples)))
    append(folder.evaluations, [row])


def completions_file(folder: RunFolder, row: dict[str, Any]) -> Path:
    """Return the file with the completions of a row of evaluations.jsonl."""
    name = f"{component(row['model'])}-{component(row['settings']['digest'])}.jsonl"
    return folder.path / "evaluations" / name


@contextmanager
def _progress_by_model(
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
            return display.enter_context(progress(title, total, cfg.progress.value))

        yield begin
