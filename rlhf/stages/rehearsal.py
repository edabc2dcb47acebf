"""Trials of the user's code in a run: reward functions and the environment, before a model is loaded.

A reward function scores a few examples of the data. The response of an example is its stored reference
response, or else a short text. The short text and an empty response are tried, too, because a policy
samples other responses than the references. An environment plays the first turn of a few episodes with an
empty reply. Services and reward models are not called.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Timer
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhf.assembly.models import build_stop_ids, build_tokenizer
from rlhf.assembly.parts import make
from rlhf.assembly.training import TEXT, build_task, part_of, reward_functions
from rlhf.config.algo import Data
from rlhf.config.scorer import scorers
from rlhf.core.batch import Sampling
from rlhf.core.console import say, say_row
from rlhf.core.control import unquoted
from rlhf.core.encoding import encode_completions
from rlhf.core.errors import RunError, UserError
from rlhf.core.formatting import shortened
from rlhf.environments.episodes import Episodes
from rlhf.environments.library import gives_rewards
from rlhf.processes.ranks import ALONE
from rlhf.scorers.function import FunctionScorer
from rlhf.scorers.scorer import ScorerContext, distinct_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.config.scorer import FunctionScorerConfig
    from rlhf.core.batch import Prompts
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.tasks.task import Task

log = logging.getLogger(__name__)

_EXAMPLES = 3
BUDGET_S = 10.0  # no further example is tried after this time; the first one has no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a reward function returned for some examples.

    Attributes:
        path: address of the function.
        responses: the responses that it scored.
        scores: their scores.
        seconds: duration of all calls.
        warning: why the function fails for an empty response; None: it does not fail, or was not tried.
    """

    path: str
    responses: list[str]
    scores: list[float]
    seconds: float
    warning: str | None

    def lines(self) -> Iterator[str]:
        """Yield a line for each response, and one if the calls took so long that examples were left out."""
        for response, score in zip(self.responses, self.scores, strict=True):
            yield f"{_text(score):>8} for {shortened(repr(response), 48)}"
        if len(self.scores) < _EXAMPLES and self.seconds > BUDGET_S:
            yield f"{len(self.scores)} tried, because this took {self.seconds:.1f} s"


def rehearse(cfg: Config, task: Task | None = None) -> None:
    """Try the reward functions and the environment of a run, print what they did, and log warnings.

    Args:
        cfg: the config of the run.
        task: the data of the run; None: they are built.

    Raises:
        UserError: a function or the environment fails, or a function returns something that is not a score.
    """
    if not (any(reward_functions(cfg)) or cfg.environment.answers):
        return
    tokenizer = build_tokenizer(cfg)
    task = task or build_task(cfg, tokenizer, Data.prompts, cfg.schedule.prompts_per_update)
    trials = tried(cfg, task, tokenizer)
    for each in trials:
        scores = ", ".join(map(_text, each.scores))
        slow = f" ({each.seconds:.1f} s)" if each.seconds > 1 else ""
        say_row(
            "reward tried", f"{each.path.rpartition(':')[2]}: {scores} for {len(each.scores)} examples{slow}"
        )
    warnings = [each.warning for each in trials if each.warning is not None]
    if cfg.environment.answers:
        described, more = tried_environment(cfg, task, tokenizer)
        say_row("environment", described)
        warnings += more
    for warning in warnings:
        log.warning("%s", warning)


def tried_environment(cfg: Config, task: Task, tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[str]]:
    """Play the first turn of three training examples with an empty reply; return a description and warnings.

    Raises:
        UserError: the class fails as it would in the run, or the chat template has no fixed form of messages.
    """
    factory: EnvironmentFactory = make(cfg.environment, tokenizer)
    warnings = [*factory.turns.warnings()]
    reads = any(each.reads_rewards for at, each in scorers(cfg) if not at.startswith("gold"))
    if cfg.environment.tools and not reads and gives_rewards(cfg.environment.tools):
        warnings.append(
            "no scorer reads the rewards of the tools; set scorer=environment, or add a part to "
            "scorer=weighted: +scorer@scorer.parts.tools=environment"
        )
    prompts = task.batch([*range(min(_EXAMPLES, len(task.examples("train"))))])
    length = cfg.generator.response_length
    sampling = Sampling(samples=1, temperature=1.0, response_length=length, purpose="trial")
    stop_ids, stopping = build_stop_ids(cfg, tokenizer), replace(factory, on_error="stop")
    try:
        with Episodes(prompts, sampling, stopping, stop_ids, cfg.seed) as played:
            for i in played.running():
                played.reply(i, [tokenizer.eos_token_id], [0.0])
            played.running()
    except RunError as error:
        if factory.on_error == "stop":
            raise UserError(str(error)) from None
        warnings.append(str(error).rpartition("; ")[0])
    else:
        if played.unread:
            warnings.append(
                f"{factory.address} returns {played.unread!r:.60} from reset, which the model does not read "
                f"with task={cfg.task.name}, whose rows are the prompts; set task=environment, or put the "
                "text into the prompts"
            )
    limits = f"at most {factory.max_turns} replies; role of messages: {factory.turns.role}"
    return f"{cfg.environment.name}, {limits}", warnings


def tried(cfg: Config, task: Task, tokenizer: PreTrainedTokenizerFast) -> list[Trial]:
    """Return the trials of all reward functions of a run.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        tokenizer: the policy's tokenizer.

    Raises:
        UserError: a function fails, or returns something that is not a score.
    """
    found, problems, known = [], [], dict(scorers(cfg))
    for at, section in reward_functions(cfg):
        whole, paths = known.get(at.rpartition(".parts.")[0]), getattr(known[at], "path", None)
        alone = len(paths) == 1 if isinstance(paths, list) else whole is None or whole.of_mixture
        context = ScorerContext(
            at=at,
            tokenizer=tokenizer,
            ranks=ALONE,
            model=cfg.model,
            place=lambda make: make(),
            build=lambda section, key: None,
        )
        try:
            found.append(trial(section, context, examples(cfg, task, at), alone))
        except RunError as error:
            problems.append(str(error))
    if problems:
        raise UserError(*problems)
    return found


def examples(cfg: Config, task: Task, at: str) -> Prompts:
    """Return the first training examples whose responses the scorer at the key `at` scores."""
    rows, part = task.examples("train"), part_of(cfg, at)
    places = range(len(rows))
    if part is not None:
        places = np.flatnonzero(np.asarray(rows["part"]) == list(cfg.task.shares).index(part)).tolist()
    return task.batch(list(places[:_EXAMPLES]))


def trial(
    section: FunctionScorerConfig, context: ScorerContext, prompts: Prompts, alone: bool = True
) -> Trial:
    """Return the trial of one function on the examples `prompts`; `alone`: no other function judges them.

    Raises:
        RunError: the function fails, or returns something that is not a score.
    """
    scorer = FunctionScorer(section, context)
    scorer.alone = alone
    texts = [text or TEXT for text in prompts.references]
    rollouts = encode_completions(prompts, [[text] for text in texts], scorer.tokenizer, None)
    size = len(prompts) if section.batched else 1
    scores: list[float] = []
    warning = None
    started = time.monotonic()
    with _patience(scorer.name):
        for rows in torch.arange(len(prompts)).split(size):
            scores += scorer.given(rollouts.select(rows))[:, 0].tolist()
            if (seconds := time.monotonic() - started) > BUDGET_S:
                break
        else:
            first = prompts.select(torch.tensor([0]))
            other = encode_completions(first, [[TEXT]], scorer.tokenizer, None)
            if TEXT not in texts and distinct_texts(other, scorer.tokenizer).responses[0]:
                scorer.given(other)
            try:
                scorer.given(encode_completions(first, [[""]], scorer.tokenizer, None))
            except RunError as error:
                warning = f"a policy may sample an empty response: {error}"
    return Trial(
        path=str(section.path),
        responses=list(map(unquoted, texts[: len(scores)])),
        scores=scores,
        seconds=seconds,
        warning=warning,
    )


def _text(score: float) -> str:
    return "None" if math.isnan(score) else f"{score:.4g}"


@contextmanager
def _patience(name: str) -> Iterator[None]:
    """Return a context that prints a line if it takes longer than `BUDGET_S`."""
    text = f"{name} has been scoring {_EXAMPLES} examples for {BUDGET_S:g} s; Ctrl-C ends the run"
    timer = Timer(BUDGET_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
