"""Preference pairs in the order of a judge: `python -m rlhf.relabel output=<folder> [word ...]`.

Both responses of every pair are scored by the gold scorer of the config (`scorer@gold=...`); where it
prefers the rejected one, the two change places. So a reward model that is trained on the pairs learns the
judge's preferences, and is measured by the same judge: the controlled set-up of *Asynchronous RLHF*, arXiv
2410.18252.
The data set has the columns prompt, chosen, rejected, chosen_score, rejected_score, swapped, and is read as
`task.preferences_path=<folder>`; relabel.json in it says how often the judge agreed.

Scores are kept as they are made, in `.tmp-<folder>`: what was interrupted goes on. Exit codes are those of
`rlhf.train`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.progress import Progress as Bar
from rich.table import Table

from rlhf.checks.check import typed, warn, warnings
from rlhf.config.algo import Data
from rlhf.config.compose import composed
from rlhf.config.identity import what_counts
from rlhf.config.run import Progress
from rlhf.config.scorer import RewardModelScorerConfig, choice
from rlhf.config.task import SPLITS, EmbeddedTaskConfig
from rlhf.core.confidence import wilson
from rlhf.core.console import console, say
from rlhf.core.errors import UserError
from rlhf.core.files import append, as_line, read_lines, write_atomically, write_json
from rlhf.core.launched import is_first_rank
from rlhf.core.console import PLAIN_EVERY_S
from rlhf.processes.signals import interruptible

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.core.batch import Prompts
    from rlhf.processes.ranks import Ranks
    from rlhf.scorers.scorer import Scorer
    from rlhf.tasks.task import Task


REPORT = "relabel.json"  # in the data set's folder: it is there last, and says that the data set is whole


BATCH = 256  # pairs that are scored between two steps of the progress bar


def pairs_of(words: list[str]) -> Config:
    """The config of a reward model's training on the pairs that `words` name: task, judge, number format.

    Raises:
        UserError: a word is wrong, or there are no pairs, or no judge.
    """
    for word in words:
        if word.partition("=")[0] in ("algo", "+algo"):
            raise UserError(f"algo must not be chosen (nothing is trained here), got {word}; leave it out")
    words = ["algo=reward", *words]
    node = composed(words)
    if node.model.policy is None and node.gold.get("path") is not None and node.gold.name == "reward_model":
        words.append(f"model.policy={json.dumps(node.gold.path)}")  # whose tokenizer is the judge's
    cfg = typed(composed(words), words)
    refuse_no_judge(cfg)
    if cfg.task.embedded and cfg.task.preferences_path is None:
        raise UserError(
            f"task.preferences_path must name the pairs for task={cfg.task.name} (those that it makes are "
            "labelled by the judge already), got null; set task.preferences_path=<folder>"
        )
    warn(warnings(cfg))
    return cfg


def refuse_no_judge(cfg: Config) -> None:
    """Raise UserError where the gold scorer does not judge texts."""
    if cfg.gold.name in ("none", "labels"):
        raise UserError(
            f"{choice('gold')} must be a scorer that judges (the pairs are labelled by it), got "
            f"{cfg.gold.name}; set {choice('gold')}=reward_model gold.path=<hub name or folder>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a judge sees the pairs of a split. Ties keep their order, and are left out of the agreement."""

    pairs: int  # that were scored
    agreed: int  # the chosen response has the higher score
    swapped: int  # the rejected one has
    ties: int
    left_out: int  # not scored: the prompt is longer than task.max_prompt_tokens

    def told(self) -> dict[str, Any]:
        """As relabel.json has it: with the share of those not tied that agrees, and its 95 % interval."""
        decided = self.agreed + self.swapped
        share = self.agreed / decided if decided else None
        low, high = wilson(share or 0.0, decided)
        return {**asdict(self), "agreement": share, "agreement_low": low, "agreement_high": high}


def agreement(scores: dict[int, list[float]], rows: int) -> Agreement:
    """Count how the scores [chosen, rejected] of rows agree with their labels; the split has `rows`."""
    margins = [chosen - rejected for chosen, rejected in scores.values()]
    return Agreement(
        pairs=len(margins),
        agreed=sum(margin > 0 for margin in margins),
        swapped=sum(margin < 0 for margin in margins),
        ties=sum(margin == 0 for margin in margins),
        left_out=rows - len(margins),
    )


def table(output: Path) -> Table:
    """The report of a relabelled data set."""
    report = json.loads((output / REPORT).read_text())
    made = Table(title=f"pairs in the order of {report['gold']}", title_justify="left", box=box.SIMPLE)
    for name in ("split", "pairs", "agreed", "swapped", "ties", "left out", "agreement [95 %]"):
        made.add_column(name, justify="left" if name == "split" else "right", no_wrap=True)
    for split, told in report["splits"].items():
        counts = [f"{told[name]:,}" for name in ("pairs", "agreed", "swapped", "ties", "left_out")]
        made.add_row(split, *counts, in_words(told))
    return made


def in_words(told: dict[str, Any]) -> str:
    """The agreement of a split, with its interval."""
    if told["agreement"] is None:
        return "all are ties"
    return f"{told['agreement']:.3f} [{told['agreement_low']:.3f}, {told['agreement_high']:.3f}]"


def told_of(output: Path) -> str:
    """The agreement on the training pairs of a relabelled data set."""
    told = json.loads((output / REPORT).read_text())["splits"]["train"]
    return f"{in_words(told)} of {told['pairs']:,} pairs"


def settings(cfg: Config) -> dict[str, Any]:
    """What scores depend on, apart from the rows: two calls with the same give the same data set."""
    node = what_counts(cfg)
    model = {key: node["model"][key] for key in ("dtype", "tokenizer", "pad_token")}
    return {"task": node["task"], "gold": node["gold"], "model": model}


def fingerprint(cfg: Config) -> str:
    """Eight hex digits of the settings."""
    return hashlib.sha256(json.dumps(settings(cfg), sort_keys=True).encode()).hexdigest()[:8]


def tokenizer_of(cfg: Config) -> PreTrainedTokenizerFast:
    """What texts go through to the judge: its own tokenizer where it is a model, so that nothing is lost."""
    from rlhf.assembly.parts import make
    from rlhf.models.loading import load_tokenizer

    judge = cfg.gold.path if isinstance(cfg.gold, RewardModelScorerConfig) else None
    named = {
        "model.tokenizer": cfg.model.tokenizer,
        "gold.path": judge,
        "model.policy": cfg.model.policy,
    }
    for key, path in named.items():
        if path is not None:
            return load_tokenizer(path, cfg.model.pad_token, cfg.model.trust_remote_code, key)
    assert isinstance(cfg.task, EmbeddedTaskConfig), "validated: other tasks have a policy"
    tokenizer: PreTrainedTokenizerFast = make(cfg.task).tokenizer()
    return tokenizer


def finished(cfg: Config, output: Path) -> bool:
    """Whether the data set is in `output` already.

    Raises:
        UserError: something else is there.
    """
    report = output / REPORT
    if not report.is_file():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(
                f"output= must be a new folder (the data set is written there), got {output}, which holds "
                "something else; set output=<another folder>"
            )
        return False
    if json.loads(report.read_text())["settings"] != settings(cfg):
        raise UserError(
            f"output= must be a new folder (the pairs in it were labelled with other settings, which its "
            f"{REPORT} tells), got {output}; set output=<another folder>"
        )
    return True


def relabel(cfg: Config, output: Path, ranks: Ranks | None = None) -> None:
    """Make the data set in `output`, unless it is there; go on where an earlier call was interrupted.

    `ranks` are those that the environment names where none are given.

    Raises:
        UserError: something else is in `output`, or the data cannot be read.
        Interrupted: by a signal; the same call goes on.
    """
    if finished(cfg, output):
        if is_first_rank():
            say(f"relabelled already: {output}")
        return
    with interruptible():
        carry_out(cfg, output, ranks)


def carry_out(cfg: Config, output: Path, ranks: Ranks | None) -> None:
    """Score what is not scored yet, and write the data set."""
    from datasets import DatasetDict

    from rlhf.assembly.data import build_task
    from rlhf.assembly.device import build_device
    from rlhf.assembly.scorer import build_scorer
    from rlhf.processes.ranks import Ranks
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.run import quieten, run

    ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
    quieten(ranks)
    told = settings(cfg)
    if cfg.stand_ins:
        cfg = ranks.from_first(partial(complete, cfg, run))
    work = output.with_name(f".tmp-{output.name}")
    tokenizer = tokenizer_of(cfg)
    gold = build_scorer(cfg, "gold", tokenizer, ranks)
    assert gold is not None, "validated: the judge judges"
    task = build_task(cfg, tokenizer, Data.preferences, 1)
    splits, found = {}, {}
    for split in SPLITS:
        stored = task.source.preferences(split)
        about = {**told, "split": split, "rows": rows_digest(stored)}
        kept = ranks.from_first(partial(begin, work, split, about))
        scores = score(kept, work / f"{split}.jsonl", task, split, gold, tokenizer, cfg, ranks)
        found[split] = agreement(scores, len(stored))
        if ranks.first:
            splits[split] = in_order(stored, scores)
    if ranks.first:
        report = {
            "gold": cfg.gold.described,
            "splits": {split: one.told() for split, one in found.items()},
            "settings": told,
        }
        write_data(DatasetDict(splits), report, work, output)
    ranks.any(False)  # the others wait for it


def rows_digest(stored: Dataset) -> str:
    """16 hex digits of the rows of a data set."""
    digest = hashlib.sha256()
    for rows in stored.iter(1000):
        digest.update(json.dumps(rows, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def begin(work: Path, split: str, told: dict[str, Any]) -> dict[int, list[float]]:
    """The scores of a split that are there, by row; none where they were made with other settings."""
    work.mkdir(parents=True, exist_ok=True)
    about, file = work / f"{split}.json", work / f"{split}.jsonl"
    kept = read_lines(file) if about.is_file() and json.loads(about.read_text()) == told else []
    write_atomically(file, "".join(map(as_line, kept)))  # without a line that was cut off
    write_json(about, told)
    return {row["index"]: row["scores"] for row in kept}


def score(
    scores: dict[int, list[float]],
    file: Path,
    task: Task,
    split: str,
    gold: Scorer,
    tokenizer: PreTrainedTokenizerFast,
    cfg: Config,
    ranks: Ranks,
) -> dict[int, list[float]]:
    """The scores [chosen, rejected] of all rows of a split, those that are there already among them."""
    from rlhf.core.encoding import encode_completions

    left, batches = task.by_length(split, BATCH, scores)
    if scores:
        say(f"going on with {split}: {len(scores):,} pairs are scored, {left:,} are left")
    for prompts in shown(batches, left, f"scoring pairs of {split}", cfg.progress):
        assert prompts.completions is not None
        rollouts = encode_completions(prompts, prompts.completions, tokenizer, response_length=None)
        rows = zip(prompts.index.tolist(), gold.score(rollouts).tolist(), strict=True)
        new = [{"index": index, "scores": pair} for index, pair in rows]
        scores |= {row["index"]: row["scores"] for row in new}
        if ranks.first:
            append(file, new)
    return scores


def shown(batches: Iterator[Prompts], total: int, what: str, mode: Progress) -> Iterator[Prompts]:
    """The batches; how many of `total` pairs are done is shown as a bar, or in lines."""
    live = console.is_terminal if mode is Progress.auto else mode is Progress.live
    done, told = 0, time.monotonic()
    with Bar(*Bar.get_default_columns(), console=console, disable=not live) as bar:
        task = bar.add_task(what, total=total)
        for batch in batches:
            yield batch
            done += len(batch)
            bar.update(task, completed=done)
            late = time.monotonic() - told >= PLAIN_EVERY_S or done == total
            if not live and mode is not Progress.off and late:
                told = time.monotonic()
                say(f"{what}: {done:,} of {total:,}")


def in_order(stored: Dataset, scores: dict[int, list[float]]) -> Dataset:
    """The rows of `stored` that have scores [chosen, rejected], the better response of each as the chosen."""
    kept = sorted(scores)
    rows = stored.select(kept)

    def order(columns: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {name: [] for name in ("prompt", "chosen", "rejected", *ADDED)}
        for prompt, *pair, place in zip(
            columns["prompt"], columns["chosen"], columns["rejected"], places, strict=True
        ):
            values = scores[kept[place]]
            swapped = values[1] > values[0]
            if swapped:
                pair, values = pair[::-1], values[::-1]
            for name, value in zip(made, (prompt, *pair, *values, swapped), strict=True):
                made[name].append(value)
        return made

    return rows.map(
        order, batched=True, with_indices=True, remove_columns=rows.column_names, load_from_cache_file=False
    )


ADDED = ("chosen_score", "rejected_score", "swapped")


def write_data(data: DatasetDict, report: dict[str, Any], work: Path, output: Path) -> None:
    """Write data set and report under another name, then rename: `output` is whole or not there."""
    made = work / "data"
    shutil.rmtree(made, ignore_errors=True)
    data.save_to_disk(str(made))
    write_json(made / REPORT, report)
    if output.is_dir():
        output.rmdir()  # empty, as was looked at
    output.parent.mkdir(parents=True, exist_ok=True)
    made.rename(output)
    shutil.rmtree(work)
