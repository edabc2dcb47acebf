"""The training data of a run as token ids: counts, and the first examples with masks. Nothing is trained.

    prompt     [BOS <s>]|What| is| 2|+|2|?        not in the loss
    response    4|[EOS </s>]                      in the loss

The tokenizer and the data are built as the run builds them, so the examples are those of its first update.
"""

from __future__ import annotations

import logging
import os
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import datasets

from rlhf.assembly.models import build_stop_ids, build_tokenizer, names_of
from rlhf.assembly.parts import make
from rlhf.assembly.training import build_task, check_formats
from rlhf.config.algo import Data, Trains
from rlhf.core.encoding import encode_completions
from rlhf.core.formatting import printable
from rlhf.stages import tiny_stand_ins
from rlhf.stages.quiet import quieten_libraries
from rlhf.stages.rehearsal import tried, tried_environment
from rlhf.tasks.summary import summarize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.tasks.task import Task

SHOWN = 3  # examples
FIRST, LAST = 60, 30  # tokens of a text that are shown
SPECIAL = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report."""

    text: str
    style: str | None = None


def inspection(cfg: Config, width: int) -> Iterator[Line]:
    """Yield the lines that describe the tokenizer and the training data of the run `cfg`.

    Args:
        cfg: the config of the run, checked.
        width: the number of columns.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quieten_libraries()
    datasets.disable_caching()  # otherwise `map` writes files beside a saved data set
    with tempfile.TemporaryDirectory() as scratch:
        if cfg.stand_ins:
            cfg = tiny_stand_ins.complete(cfg.with_({"cache_dir": scratch}))
        yield from tokenized(cfg, width)


def tokenized(cfg: Config, width: int) -> Iterator[Line]:
    """Yield the lines of `inspection`, for a config whose data exist."""
    tokenizer = build_tokenizer(cfg)
    yield from _tokenizer_lines(cfg, tokenizer)
    data = cfg.data
    if data is Data.preferences and cfg.task.embedded and cfg.task.preferences_path is None:
        yield Line("The run first samples its preference pairs; these are their prompts.")
        data = Data.prompts
    task = build_task(cfg, tokenizer, data, cfg.schedule.prompts_per_update)
    yield from _data_lines(cfg, task, width)
    if cfg.environment.answers:
        described, warnings = tried_environment(cfg, task, tokenizer)
        yield from (Line(""), Line("Environment", "bold"), Line(f"  {described}"))
        yield from _warning_lines(warnings, width)
    yield from _reward_lines(cfg, task, tokenizer, width)
    yield from examples(cfg, task, tokenizer, width)


def _tokenizer_lines(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Iterator[Line]:
    """Yield the lines about the vocabulary, the special tokens and the chat template."""
    yield Line("Tokenizer", "bold")
    yield Line(f"  {'name':18}{cfg.model.tokenizer or cfg.start or f'made from task={cfg.task.name}'}")
    yield Line(f"  {'tokens':18}{len(tokenizer):,}")
    for name, meaning in (("bos", "begin (BOS)"), ("eos", "end (EOS)"), ("pad", "padding (PAD)")):
        token, number = getattr(tokenizer, f"{name}_token"), getattr(tokenizer, f"{name}_token_id")
        yield Line(f"  {meaning:18}{'none' if token is None else f'{token}  (id {number})'}")
    ends = build_stop_ids(cfg, tokenizer)[1:]
    for other, token in zip(ends, tokenizer.convert_ids_to_tokens(ends), strict=True):
        yield Line(f"  {'also an end':18}{token}  (id {other})")
    yield Line(f"  {'chat template':18}{'yes' if tokenizer.chat_template else 'none'}")


def _data_lines(cfg: Config, task: Task, width: int) -> Iterator[Line]:
    """Yield the lines about rows, columns and lengths, and the warnings about them."""
    splits = ("train", "validation") if cfg.schedule.eval_every else ("train",)
    with _warnings_of("rlhf.tasks") as logged:
        summary = summarize(task, cfg.generator.response_length, splits)
    yield Line("")
    yield Line("Data", "bold")
    for name, value in summary.rows():
        for text in textwrap.wrap(f"  {name:18}{value}", width, subsequent_indent=" " * 20):
            yield Line(text)
    yield from _warning_lines([*logged, *summary.warnings()], width)


def _reward_lines(cfg: Config, task: Task, tokenizer: PreTrainedTokenizerFast, width: int) -> Iterator[Line]:
    """Yield the scores of reward functions for some stored responses, and warnings.

    Among the warnings is what reward models with a chat template of their own do not read.
    """
    for number, each in enumerate(tried(cfg, task, tokenizer)):
        if number == 0:
            yield Line("")
            yield Line("Rewards", "bold")
        yield Line(f"  {each.path}")
        for text in each.lines():
            yield Line(f"    {text}")
        if each.warning is not None:
            yield from _warning_lines([each.warning], width)
    yield from _warning_lines(check_formats(cfg, task, tokenizer), width)


def _warning_lines(warnings: Iterable[str], width: int) -> Iterator[Line]:
    for warning in warnings:
        for text in textwrap.wrap(f"  warning: {warning}", width, subsequent_indent=" " * 4):
            yield Line(text, "yellow")


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Return a context that yields a list, to which the warnings of a logger are added."""
    found: list[str] = []
    log, handler = logging.getLogger(name), logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    propagate, log.propagate = log.propagate, False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


def examples(cfg: Config, task: Task, tokenizer: PreTrainedTokenizerFast, width: int) -> Iterator[Line]:
    """Yield the lines of the first examples of the first update, with their masks."""
    batch = next(task.prompts())
    count = min(SHOWN, len(batch))
    limit = cfg.generator.response_length
    rollouts = None
    if batch.completions is not None:
        rollouts = encode_completions(batch, batch.completions, tokenizer, limit)
    loss = "scored at its last token" if cfg.algo.trains is Trains.reward else "in the loss"
    for i in range(count):
        yield Line("")
        yield Line(f"Example {i + 1} of the first update ({batch.place(i)})", "bold")
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]].tolist()
        yield from _text_lines("prompt", prompt, "not in the loss", tokenizer, width, "dim")
        if rollouts is None:
            until = f"until {names_of(build_stop_ids(cfg, tokenizer), tokenizer)}, at most {limit} tokens"
            yield Line(f"  {'response':10} sampled {until}; in the loss")
            if (environment := make(cfg.environment, tokenizer)) is not None:
                ids, end = environment.turns.tokens("<message of the environment>"), [tokenizer.eos_token_id]
                note = "then a reply again; not in the loss"
                yield from _text_lines("message", ids, note, tokenizer, width, "dim", end)
        else:
            for j, name in enumerate(names(rollouts.response_ids.shape[1])):
                real = rollouts.real[i, j]
                kept = rollouts.response_ids[i, j][real].tolist()
                sampled = rollouts.response_mask[i, j][real].tolist()
                cut = "" if bool(rollouts.ended[i, j]) else f"; cut at {limit} tokens, without EOS"
                read = prompt
                for own, places in groupby(range(len(kept)), sampled.__getitem__):
                    ids = [kept[place] for place in places]
                    use = (name, ids, loss + cut) if own else ("message", ids, "not in the loss")
                    yield from _text_lines(*use, tokenizer, width, "green" if own else "dim", read[-4:])
                    read = read + ids
        text = f"  padding    {int((~batch.prompt_mask[i]).sum())} PAD on the left of the prompt"
        if rollouts is not None:
            right = (~rollouts.real[i]).sum(-1).tolist()
            text += f", {' and '.join(map(str, right))} on the right; masked"
        yield Line(text)


def names(samples: int) -> tuple[str, ...]:
    """Return the names of the stored responses of a prompt."""
    return ("response",) if samples == 1 else ("chosen", "rejected")


def _text_lines(
    name: str,
    ids: list[int],
    note: str,
    tokenizer: PreTrainedTokenizerFast,
    width: int,
    style: str,
    before: Sequence[int] = (),
) -> Iterator[Line]:
    """Yield a title and the tokens of a text, separated by `|`; long texts are shortened in the middle.

    Args:
        name: name of the text.
        ids: its tokens.
        note: use of the text in training.
        tokenizer: the tokenizer.
        width: the number of columns.
        style: style of the tokens.
        before: tokens before the text.
    """
    yield Line(f"  {name:10} {len(ids):,} tokens, {note}")
    if len(ids) <= FIRST + LAST:
        shown = _token_texts(ids, tokenizer, before)
    else:
        left_out = f" ... {len(ids) - FIRST - LAST:,} tokens ... "
        end = _token_texts(ids[-LAST:], tokenizer, ids[:-LAST][-1:])
        shown = [*_token_texts(ids[:FIRST], tokenizer, before), left_out, *end]
    for line in wrapped(shown, width - 4):
        yield Line(f"    {line}", style)


def _token_texts(ids: list[int], tokenizer: PreTrainedTokenizerFast, before: Sequence[int]) -> list[str]:
    """Return the text of each token behind the tokens `before`; special tokens are marked: `[EOS </s>]`."""
    roles = {getattr(tokenizer, f"{name}_token_id"): name.upper() for name in reversed(SPECIAL)}
    found: list[str] = []
    read = str(tokenizer.decode([*before], clean_up_tokenization_spaces=False))
    for end, number in enumerate(ids, 1):
        whole = str(tokenizer.decode([*before, *ids[:end]], clean_up_tokenization_spaces=False))
        text = printable(whole[len(read) :])
        read = whole
        found.append(f"[{roles[number]} {text.strip()}]" if number in roles else text)
    return found


def wrapped(parts: list[str], width: int) -> Iterator[str]:
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
