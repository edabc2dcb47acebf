"""Looks at a run: its data as tokens and trials of the user's code before it, samples of its model after."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Timer
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import build_device, build_stop_ids, build_tokenizer, names_of, quieten_libraries
from rlhf.assembly.parts import make
from rlhf.assembly.training import (
    TEXT,
    build_sampler,
    build_scorer,
    build_task,
    check_formats,
    part_of,
    reward_functions,
)
from rlhf.config.algorithms import Data, Trains
from rlhf.config.models import LoRAConfig
from rlhf.config.root import Config
from rlhf.config.scorers import FunctionScorerConfig, judges, scorers
from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError, UserError
from rlhf.core.formatting import printable, shortened
from rlhf.environments.environment import EnvironmentFactory
from rlhf.environments.episodes import Episodes
from rlhf.environments.library import gives_rewards
from rlhf.models.folder import on_this_machine
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.runs.folder import RunFolder
from rlhf.scorers.function import FunctionScorer
from rlhf.scorers.judge import JudgeScorer
from rlhf.scorers.scorer import ScorerContext, distinct_texts, response_texts
from rlhf.stages import prerequisites
from rlhf.stages.probes import judged, probed
from rlhf.tasks.task import Task, altered, summarize
from rlhf.terminal.console import say, say_row
from rlhf.text.chat import control_tokens, quoted, render, set_format, unquoted
from rlhf.text.encoding import encode_completions, encode_prompts

# The training data of a run as token ids: counts, and the first examples with masks. Nothing is trained.
#
#     prompt     [BOS <s>]|What| is| 2|+|2|?        not in the loss
#     response    4|[EOS </s>]                      in the loss
#
# The tokenizer and the data are built as the run builds them, so the examples are those of its first update.


log = logging.getLogger(__name__)

_SHOWN = 3  # examples
_FIRST, _LAST = 60, 30  # tokens of a text that are shown
_TRIED = 32  # examples with probes, and pairs for a judge
_SPECIAL = ("bos", "eos", "pad", "unk")


class Inspection:
    """The lines that describe the tokenizer and the training data of a run.

    Args:
        cfg: the config of the run, checked.
        width: the number of columns.
        line: prints a line, in a style if a second argument names one.
    """

    def __init__(self, cfg: Config, width: int, line: Callable[..., None]) -> None:
        self.cfg, self.width, self._say = cfg, width, line
        self.refused: list[str] = []  # judges that contradict themselves

    def report(self) -> None:
        """Print all lines.

        Raises:
            UserError: the tokenizer or the data cannot be used.
            RunError: a judge contradicts itself.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        quieten_libraries()
        datasets.disable_caching()  # otherwise `map` writes files beside a saved data set
        with tempfile.TemporaryDirectory() as scratch:
            if self.cfg.stand_ins:
                self.cfg = prerequisites.complete_stand_ins(self.cfg.with_({"cache_dir": scratch}))
            cfg = self.cfg
            self.tokenizer = tokenizer = build_tokenizer(cfg)
            self._show_tokenizer()
            data = cfg.data
            if data is Data.preferences and cfg.task.embedded and cfg.task.preferences_path is None:
                self._say("The run first samples its preference pairs; these are their prompts.")
                data = Data.prompts
            task = build_task(cfg, tokenizer, data, cfg.schedule.prompts_per_update)
            self._show_data(task)
            if cfg.environment.answers:
                described, warnings = tried_environment(cfg, task)
                self._title("Environment")
                self._say(f"  {described}")
                self._warn(warnings)
            self._show_rewards(task)
            batch, rollouts = next(task.prompts()), None
            if batch.completions is not None:
                limit = cfg.generator.response_length
                rollouts = encode_completions(batch, batch.completions, tokenizer, limit)
            for i in range(min(_SHOWN, len(batch))):
                self._title(f"Example {i + 1} of the first update ({batch.place(i)})")
                self._show_example(batch, rollouts, i)
            self._show_probes(task, scratch)
        if self.refused:
            raise RunError("; ".join(self.refused))

    def _title(self, text: str) -> None:
        self._say("")
        self._say(text, "bold")

    def _warn(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            for text in textwrap.wrap(f"  warning: {warning}", self.width, subsequent_indent=" " * 4):
                self._say(text, "yellow")

    def _show_tokenizer(self) -> None:
        """Print the vocabulary, the special tokens and the chat template."""
        cfg, tokenizer = self.cfg, self.tokenizer
        rows = [("name", cfg.model.tokenizer or cfg.start or f"made from task={cfg.task.name}")]
        rows.append(("tokens", f"{len(tokenizer):,}"))
        for name, meaning in (("bos", "begin (BOS)"), ("eos", "end (EOS)"), ("pad", "padding (PAD)")):
            token, number = getattr(tokenizer, f"{name}_token"), getattr(tokenizer, f"{name}_token_id")
            rows.append((meaning, "none" if token is None else f"{token}  (id {number})"))
        ends = build_stop_ids(cfg, tokenizer)[1:]
        for other, token in zip(ends, tokenizer.convert_ids_to_tokens(ends), strict=True):
            rows.append(("also an end", f"{token}  (id {other})"))
        rows.append(("chat template", "yes" if tokenizer.chat_template else "none"))
        self._say("Tokenizer", "bold")
        for name, value in rows:
            self._say(f"  {name:18}{value}")

    def _show_data(self, task: Task) -> None:
        """Print rows, columns and lengths, and the warnings about them."""
        splits = ("train", "validation") if self.cfg.schedule.eval_every else ("train",)
        logged: list[str] = []  # warnings of rlhf.tasks, which are shown here instead of being logged
        tasks, handler = logging.getLogger("rlhf.tasks"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        tasks.addHandler(handler)
        propagate, tasks.propagate = tasks.propagate, False
        try:
            summary = summarize(task, self.cfg.generator.response_length, splits)
        finally:
            tasks.removeHandler(handler)
            tasks.propagate = propagate
        self._title("Data")
        for name, value in summary.rows:
            for text in textwrap.wrap(f"  {name:18}{value}", self.width, subsequent_indent=" " * 20):
                self._say(text)
        self._warn([*logged, *summary.warnings])

    def _show_rewards(self, task: Task) -> None:
        """Print the scores of reward functions for some stored responses, and warnings.

        Among the warnings is what reward models with a chat template of their own do not read.
        """
        trials = tried(self.cfg, task)
        if trials:
            self._title("Rewards")
        for each in trials:
            self._say(f"  {each.path}")
            for text in each.lines():
                self._say(f"    {text}")
            self._warn([each.warning] if each.warning is not None else [])
        for at, question, answer in tried_judges(self.cfg, task):
            self._title(f"Question to the judge ({at})")
            for text in [*question.splitlines(), f"answer: {answer}"]:
                self._say(f"  {text}")
        self._warn(check_formats(self.cfg, task))

    def _show_probes(self, task: Task, scratch: str) -> None:
        """Print what judges answer about pairs, and what the training scorer gives for planted responses."""
        cfg, rows = self.cfg.with_({"cache_dir": scratch}), len(task.examples("train"))
        batch = task.batch(np.linspace(0, rows - 1, min(rows, _TRIED)).astype(int).tolist())
        known = [i for i, each in enumerate(batch.references) if each.strip()]
        batch = batch.select(torch.tensor(known, dtype=torch.int64))
        answers = [*map(unquoted, batch.references)]
        for at, section in judges(cfg).items() if known else ():
            better, worse = "the reference against the answer to another prompt", answers[1:] + answers[:1]
            if batch.completions is not None:
                better, worse = "the chosen response", [unquoted(str(each[1])) for each in batch.completions]
            pairs = [*zip(answers, worse, strict=True)]
            self._title(f"Trial of the judge at {at}: {len(pairs)} pairs of responses")
            judge = JudgeScorer(section, _context(cfg, task, at))
            for text, alarm in judged(judge, batch, pairs, better):
                self.refused.append(text) if alarm else self._say(f"  {text}")
        sections = (each for at, each in scorers(cfg) if at.startswith("scorer") and each.sequences)
        named = [each.reward_models("scorer", cfg.model.reward) for each in sections]
        # Other models are made later.
        here = all(each and all(on_this_machine(name) for _, name in each) for each in named)
        if not (here and known and cfg.scores_completions) or cfg.environment.answers:
            return
        batch = batch.select(torch.arange(0, len(batch), 4 if cfg.scorer.asks_service else 1))
        answers, control = [*map(unquoted, batch.references)], control_tokens(self.tokenizer)
        scorer = build_scorer(cfg, "scorer", self.tokenizer, Ranks(build_device(cfg)))
        assert scorer is not None, "validated: training needs a scorer"
        limit = cfg.generator.response_length if named else None  # the context of a model is limited

        def score(rows: Sequence[int], texts: Sequence[str]) -> np.ndarray:
            prompts = batch.select(torch.tensor(rows))
            both = zip((quoted(text, control) for text in texts), prompts.references, strict=True)
            made = [each[: 1 + cfg.scorer.compares] for each in both]
            planted = encode_completions(prompts, made, self.tokenizer, limit)
            return scorer.score_once(planted)[:, 0].cpu().numpy()

        self._title(f"Probes of the reward: planted responses to {len(batch)} examples, median scores")
        for text, alarm in probed(score, batch.texts, answers, scorer.tie_tolerance):
            self._warn([text]) if alarm else self._say(f"  {text}")

    def _show_example(self, batch: Prompts, rollouts: Rollouts | None, i: int) -> None:
        """Print an example as tokens, with the use of each part; `rollouts`: its stored responses, if any."""
        cfg, tokenizer, limit = self.cfg, self.tokenizer, self.cfg.generator.response_length
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]].tolist()
        self._show_tokens("prompt", prompt, "not in the loss", "dim")
        padding = f"  padding    {int((~batch.prompt_mask[i]).sum())} PAD on the left of the prompt"
        if rollouts is None:
            until = f"until {names_of(build_stop_ids(cfg, tokenizer), tokenizer)}, at most {limit} tokens"
            self._say(f"  {'response':10} sampled {until}; in the loss")
            if (environment := make(cfg.environment, tokenizer)) is not None:
                ids, end = environment.turns.tokens("<message of the environment>"), [tokenizer.eos_token_id]
                self._show_tokens("message", ids, "then a reply again; not in the loss", "dim", end)
            self._say(padding)
            return
        loss = "scored at its last token" if cfg.algo.trains is Trains.reward else "in the loss"
        names = ("response",) if rollouts.response_ids.shape[1] == 1 else ("chosen", "rejected")
        for j, name in enumerate(names):
            real = rollouts.real[i, j]
            kept = rollouts.response_ids[i, j][real].tolist()
            sampled = rollouts.response_mask[i, j][real].tolist()
            cut = "" if bool(rollouts.ended[i, j]) else f"; cut at {limit} tokens, without EOS"
            read = prompt
            for own, places in groupby(range(len(kept)), sampled.__getitem__):
                ids = [kept[place] for place in places]
                if own:
                    self._show_tokens(name, ids, loss + cut, "green", read[-4:])
                else:
                    self._show_tokens("message", ids, "not in the loss", "dim", read[-4:])
                read = read + ids
        right = (~rollouts.real[i]).sum(-1).tolist()
        self._say(f"{padding}, {' and '.join(map(str, right))} on the right; masked")

    def _show_tokens(
        self, name: str, ids: list[int], note: str, style: str, before: Sequence[int] = ()
    ) -> None:
        """Print a title and the tokens of a text, separated by `|`; long texts are shortened in the middle.

        Args:
            name: name of the text.
            ids: its tokens.
            note: use of the text in training.
            style: style of the tokens.
            before: tokens before the text.
        """
        self._say(f"  {name:10} {len(ids):,} tokens, {note}")
        if len(ids) <= _FIRST + _LAST:
            shown = self._texts(ids, before)
        else:
            left_out = f" ... {len(ids) - _FIRST - _LAST:,} tokens ... "
            end = self._texts(ids[-_LAST:], ids[:-_LAST][-1:])
            shown = [*self._texts(ids[:_FIRST], before), left_out, *end]
        for text in _wrapped(shown, self.width - 4):
            self._say(f"    {text}", style)

    def _texts(self, ids: list[int], before: Sequence[int]) -> list[str]:
        """Return the text of each token behind the tokens `before`; special ones are marked: `[EOS </s>]`."""
        roles = {getattr(self.tokenizer, f"{name}_token_id"): name.upper() for name in reversed(_SPECIAL)}
        texts, read = [], ""
        for end in range(len(ids) + 1):
            whole = str(self.tokenizer.decode([*before, *ids[:end]], clean_up_tokenization_spaces=False))
            texts.append(printable(whole[len(read) :]))
            read = whole
        return [
            f"[{roles[number]} {text.strip()}]" if number in roles else text
            for number, text in zip(ids, texts[1:], strict=True)
        ]


def _wrapped(parts: list[str], width: int) -> Iterator[str]:
    """Yield lines of at most `width` columns with all parts, separated by `|`."""
    line = ""
    for i, part in enumerate(parts):
        text = part + "|" * (i + 1 < len(parts))
        if line and len(line) + len(text) > width:
            yield line
            line = ""
        while len(text) > width:
            yield text[:width]
            text = text[width:]
        line += text
    if line:
        yield line


# Trials of the user's code in a run: reward functions and the environment, before a model is loaded.
#
# A reward function scores a few examples of the data. The response of an example is its stored reference
# response, or else a short text. The short text and an empty response are tried, too, because a policy
# samples other responses than the references. An environment plays the first turn of a few episodes with an
# empty reply. A judge gets one question. Other services and reward models are not called.


_EXAMPLES = 3
BUDGET_S = 10.0  # no further example is tried after this time; the first one has no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
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


def rehearse(cfg: Config, task: Task | None = None, judgements: Path | None = None) -> None:
    """Try reward functions, judges and the environment of a run, print what they did, and log warnings.

    Args:
        cfg: the config of the run.
        task: the data of the run; None: they are built.
        judgements: see `ScorerContext`.

    Raises:
        UserError: a function, a judge or the environment fails, or a function returns something that is not
            a score.
    """
    if not (any(reward_functions(cfg)) or cfg.environment.answers or judges(cfg)):
        return
    task = task or build_task(cfg, build_tokenizer(cfg), Data.prompts, cfg.schedule.prompts_per_update)
    trials = tried(cfg, task)
    warnings = [each.warning for each in trials if each.warning is not None]
    for each in trials:
        name, scores = each.path.rpartition(":")[2], ", ".join(map(_text, each.scores))
        slow = f" ({each.seconds:.1f} s)" if each.seconds > 1 else ""
        say_row("reward tried", f"{name}: {scores} for {len(each.scores)} examples{slow}")
    for at, _, answer in tried_judges(cfg, task, judgements):
        say_row("judge tried", f"{at}: {shortened(repr(answer), 60)}")
    if cfg.environment.answers:
        described, more = tried_environment(cfg, task)
        say_row("environment", described)
        warnings += more
    for warning in warnings:
        log.warning("%s", warning)


def tried_judges(cfg: Config, task: Task, judgements: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """Ask each judge one question about a training example; yield its key, the question and the answer.

    Raises:
        UserError: the server refuses the question, or the answer is no verdict.
    """
    for at, section in judges(cfg).items():
        context = replace(_context(cfg, task, at), judgements=judgements)
        try:
            yield at, *JudgeScorer(section, context).trial(task.batch([0]))
        except RunError as error:
            raise UserError(str(error)) from None


def _context(cfg: Config, task: Task, at: str) -> ScorerContext:
    """Return the context of a scorer that is tried, at its key."""
    return ScorerContext(
        at=at,
        tokenizer=task.tokenizer,
        ranks=ALONE,
        model=cfg.model,
        place=lambda make: make(),
        build=lambda section, key: None,
    )


def tried_environment(cfg: Config, task: Task) -> tuple[str, list[str]]:
    """Play the first turn of three training examples with an empty reply; return a description and warnings.

    Raises:
        UserError: the class fails as it would in the run, or the chat template has no fixed form of messages.
    """
    tokenizer = task.tokenizer
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


def tried(cfg: Config, task: Task) -> list[_Trial]:
    """Return the trials of all reward functions of a run.

    Args:
        cfg: the config of the run.
        task: the data of the run.

    Raises:
        UserError: a function fails, or returns something that is not a score.
    """
    found, problems, known, rows = [], [], dict(scorers(cfg)), task.examples("train")
    for at, section in reward_functions(cfg):
        scorer = FunctionScorer(section, _context(cfg, task, at))
        whole, paths = known.get(at.rpartition(".parts.")[0]), getattr(known[at], "path", None)
        # Whether no other function judges the examples, so that the function must judge them all.
        scorer.alone = len(paths) == 1 if isinstance(paths, list) else whole is None or whole.of_mixture
        places: Sequence[int] = range(len(rows))
        if (part := part_of(cfg, at)) is not None:  # the part of a mixture that the scorer scores
            of_part = np.asarray(rows["part"]) == list(cfg.task.shares).index(part)
            places = np.flatnonzero(of_part).tolist()
        try:
            found.append(_trial(section, scorer, task.batch(list(places[:_EXAMPLES]))))
        except RunError as error:
            problems.append(str(error))
    if problems:
        raise UserError(*problems)
    return found


def _trial(section: FunctionScorerConfig, scorer: FunctionScorer, prompts: Prompts) -> _Trial:
    """Return the trial of one function on the examples `prompts`.

    Raises:
        RunError: the function fails, or returns something that is not a score.
    """
    texts = [text or TEXT for text in prompts.references]
    rollouts = encode_completions(prompts, [[text] for text in texts], scorer.tokenizer, None)
    size = len(prompts) if section.batched else 1
    scores, warning = list[float](), None
    slow = f"{scorer.name} has been scoring {_EXAMPLES} examples for {BUDGET_S:g} s; Ctrl-C ends the run"
    timer = Timer(BUDGET_S, say, [slow])
    timer.daemon = True
    timer.start()
    started = time.monotonic()
    try:
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
    finally:
        timer.cancel()
    shown, path = [*map(unquoted, texts[: len(scores)])], str(section.path)
    return _Trial(path=path, responses=shown, scores=scores, seconds=seconds, warning=warning)


def _text(score: float) -> str:
    return "None" if math.isnan(score) else f"{score:.4g}"


# Samples of the final model of a run, for prompts that are not in the data of its task.


_Prompt = str | Sequence[Mapping[str, str]]


class Sampler:
    """A model that answers prompts; its weights are loaded once.

    Args:
        cfg: the config of the run that trained the model.
        model: folder or hub name of the model.
        seed: seed of the samples.
        chat: whether prompts are conversations although the task of `cfg` has texts: a response then ends as
            a turn of the chat template ends. None: they are if the tokenizer has a chat template.

    Attributes:
        tokenizer: tokenizer of the model.
        chat: whether prompts are conversations.

    Raises:
        UserError: the model is a reward model, or its tokenizer cannot be used.
    """

    def __init__(self, cfg: Config, model: str, seed: int, chat: bool | None = False) -> None:
        if cfg.algo.trains is Trains.reward:
            raise UserError(
                f"the run must train a language model (a reward model writes no text), got {model}"
            )
        quieten_libraries()
        clock = cfg.model.clock or RunFolder(Path(model).expanduser().parent).started()
        named = {"model.base": model, "model.policy": model, "model.tokenizer": None}
        cfg = cfg.with_({**named, "model.lora": LoRAConfig(), "model.clock": clock})
        self.tokenizer = build_tokenizer(cfg)
        self.chat = self.tokenizer.chat_template is not None if chat is None else chat
        if self.chat:
            set_format(self.tokenizer, cfg.model.chat_template, True, thinking=cfg.model.thinking)
        self.generator = build_sampler(cfg, self.tokenizer, seed)
        self.requests = 0

    def __call__(self, prompts: Sequence[_Prompt], **settings: Any) -> list[dict[str, Any]]:
        """Return one row per response; see `rlhf.experiment.Experiment.sample`.

        Args:
            prompts: texts or conversations.
            settings: `samples`, `temperature` and `response_length`.

        Raises:
            UserError: a prompt is a conversation, and the tokenizer has no chat template.
        """
        rows: list[dict[str, Any]] = []
        for formatted in (False, True):
            places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) is not formatted]
            if not places:
                continue
            texts = [text_of(prompts[i], self.tokenizer) for i in places]
            batch = encode_prompts(torch.tensor(places), texts, [""] * len(texts), self.tokenizer, formatted)
            shown: dict[str, list[Any]] = {"text": batch.texts, "ids": batch.unpadded()}
            if changed := altered(self.tokenizer, shown, formatted, [], []):
                log.warning("%s", changed)
            asked = Sampling(**settings, purpose="sample", request=self.requests)
            rollouts = self.generator.submit(batch, asked).result()
            responses, ended = response_texts(rollouts, self.tokenizer), rollouts.ended.tolist()
            for place, text, *answers in zip(places, batch.texts, responses, ended, strict=True):
                for response, end in zip(*answers, strict=True):
                    rows.append({"prompt": place, "text": text, "response": response, "ended": end})
        self.requests += 1
        return sorted(rows, key=lambda row: row["prompt"])


def text_of(prompt: _Prompt, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a prompt as text; the chat template formats a conversation.

    Raises:
        UserError: the prompt is a conversation, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise UserError(
            "prompts must be texts (the tokenizer of this model has no chat template), got a conversation; "
            "pass texts in the format of the training prompts"
        )
    messages = quoted([dict(message) for message in prompt], control_tokens(tokenizer))
    return render(tokenizer, messages, "the conversation")
