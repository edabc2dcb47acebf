"""Command `python -m rlhf.relabel output=<folder>`: relabel preference pairs with a judge.

    python -m rlhf.relabel output=<folder> [push_to=<owner>/<name>] [group=option ...] [key=value ...]

The judge, the gold scorer of the config (`scorer@gold=...`), scores both responses of every preference pair
of the task. If the rejected response has the higher score, the two responses are swapped. A reward model
trained on such pairs (`task.preferences_path=<folder>`) learns the preferences of the judge, and is evaluated
by the same judge. This is the controlled setup of *Asynchronous RLHF*, arXiv 2410.18252.

The data set has the columns prompt, chosen, rejected, chosen_score, rejected_score and swapped. Its file
relabel.json has the agreement of the judge with the original labels. During scoring, the scores are stored in
`.tmp-<folder>`, so that the same command resumes an interrupted command.

The exit codes are the exit codes of `rlhf.train`. `rlhf.pipeline` calls the same functions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from rlhf.checks.check import check_push, check_services, checked, composed, warn, warnings
from rlhf.config.algorithms import Data
from rlhf.config.root import Config
from rlhf.config.tasks import SPLITS
from rlhf.core import errors, files
from rlhf.core.errors import UserError, setting
from rlhf.core.files import append, delete_command, read_json, read_lines, write_atomically, write_json
from rlhf.core.formatting import in_float32, wilson
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.memory import plan as memory
from rlhf.processes.signals import interruptible
from rlhf.runs.lock import written_by_one
from rlhf.stages.prerequisites import MEANS, complete_stand_ins, push_data
from rlhf.terminal.console import console, progress, say, say_loading, say_row
from rlhf.words.compose import what_counts

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerFast

COMMAND = Command(
    name="rlhf.relabel",
    usage="output=<folder> [task=...] [scorer@gold=...] [group=option ...] [key=value ...]",
    does=(
        "Scores both responses of every preference pair of the task by the judge\n"
        "(scorer@gold), swaps them if the judge prefers the rejected one, and saves the\n"
        "pairs with their scores. Use the result with task.preferences_path=<folder>."
    ),
    own={"output": "folder of the new data set", "push_to": MEANS},
)

REPORT = "relabel.json"  # written last, so its presence marks the data set as complete
_OF_MODEL = ("dtype", "tokenizer", "pad_token", "chat_template")  # keys that the scores depend on
_COLUMNS = ("prompt", "chosen", "rejected", "chosen_score", "rejected_score", "swapped")  # of the data set


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], overrides: list[str]) -> None:
    """Relabel the pairs of a task, and print how often the judge agreed with the labels.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides of the config.

    Raises:
        UserError: an argument is invalid.
    """
    output = Path(COMMAND.required(own, "output", overrides)).expanduser()
    check_push(own.get("push_to"))
    cfg = pairs_of(overrides)
    relabel(cfg, output)
    if is_first_rank():
        console.print(table(output))
        say(f"pairs: {output} (use with {setting('task.preferences_path', output)})")
        if repository := own.get("push_to"):
            push_data(output, repository)


def pairs_of(overrides: list[str]) -> Config:
    """Return the checked config for relabelling: `algo=reward`, with the task, the judge and the dtype.

    Raises:
        UserError: an override is invalid, or there are no pairs or no judge.
    """
    for override in overrides:
        if override.partition("=")[0] in ("algo", "+algo"):
            raise UserError(
                f"algo must not be chosen (nothing is trained here), got {override}; leave it out"
            )
    overrides = ["algo=reward", *overrides]
    cfg = composed(overrides)
    judge = cfg.gold.reward_models("gold", None)
    if cfg.model.policy is None and judge:
        overrides.append(errors.override("model.policy", judge[0][1]))  # for the judge's tokenizer
    cfg = checked(composed(overrides))
    if cfg.gold.name in ("none", "labels"):
        raise UserError(
            "scorer@gold must be a scorer that judges (the pairs are labelled by it), got "
            f"{cfg.gold.name}; set scorer@gold=reward_model gold.path=<hub name or folder>"
        )
    if cfg.task.embedded and cfg.task.preferences_path is None:
        raise UserError(
            f"task.preferences_path must name the pairs for task={cfg.task.name} (its own pairs are already "
            "labelled by the judge), got null; set task.preferences_path=<folder>"
        )
    warn(warnings(cfg))
    return cfg


def agreement(scores: dict[int, list[float]], rows: int) -> dict[str, Any]:
    """Return the agreement of a judge with the labels of a split, as in relabel.json.

    Args:
        scores: row -> scores of the chosen and the rejected response.
        rows: number of rows of the split.

    Returns:
        The number of scored pairs; the pairs whose chosen response has the higher score (`agreed`), the lower
        score (`swapped`), or an equal score (`ties`, whose order does not change); the pairs that were not
        scored because the prompt is longer than `task.max_prompt_tokens` (`left_out`); and the agreement
        without ties, with its 95 % interval.
    """
    margins = [chosen - rejected for chosen, rejected in scores.values()]
    agreed, swapped = sum(margin > 0 for margin in margins), sum(margin < 0 for margin in margins)
    decided = agreed + swapped
    share = agreed / decided if decided else None
    low, high = wilson(share or 0.0, decided)
    return {
        "pairs": len(margins),
        "agreed": agreed,
        "swapped": swapped,
        "ties": len(margins) - decided,
        "left_out": rows - len(margins),
        "agreement": share,
        "agreement_low": low,
        "agreement_high": high,
    }


def table(output: Path) -> Table:
    """Return a table of the agreement in each split of a relabelled data set."""
    report = json.loads((output / REPORT).read_text())
    made = Table(title=f"pairs labelled by {report['gold']}", title_justify="left", box=box.SIMPLE)
    for name in ("split", "pairs", "agreed", "swapped", "ties", "skipped", "agreement [95 %]"):
        made.add_column(name, justify="left" if name == "split" else "right", no_wrap=True)
    for split, entry in report["splits"].items():
        counts = [f"{entry[name]:,}" for name in ("pairs", "agreed", "swapped", "ties", "left_out")]
        made.add_row(split, *counts, _interval_text(entry))
    return made


def agreement_text(output: Path) -> str:
    """Return the agreement on the training pairs of a relabelled data set as text."""
    entry = json.loads((output / REPORT).read_text())["splits"]["train"]
    return f"{_interval_text(entry)} of {entry['pairs']:,} pairs"


def _interval_text(entry: dict[str, Any]) -> str:
    """Return the agreement of a split with its interval as text; `entry` is an entry of relabel.json."""
    if entry["agreement"] is None:
        return "all are ties"
    return f"{entry['agreement']:.3f} [{entry['agreement_low']:.3f}, {entry['agreement_high']:.3f}]"


def settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that the scores depend on, without the rows of the data set."""
    node = what_counts(cfg)
    model = {key: node["model"][key] for key in _OF_MODEL if key in node["model"]}
    ties = {key: node["algo"][key] for key in ("tie_tolerance",) if key in node["algo"]}
    return {"task": node["task"], "gold": node["gold"], "model": model, **ties}


def tokenizer_of(cfg: Config) -> PreTrainedTokenizerFast:
    """Return the tokenizer that encodes the texts of the pairs.

    The tokenizer is `model.tokenizer`, else that of the judge, of `model.policy` or of the task, in this
    order. With its own tokenizer, the judge reads the texts unchanged.
    """
    from rlhf.assembly.parts import make
    from rlhf.models.loading import fill_pad_token, read_tokenizer
    from rlhf.text.chat import set_format

    model, judge = cfg.model, [*cfg.gold.reward_models("gold", None), ("gold.path", None)][0]
    named = (
        ("model.tokenizer", model.tokenizer, model.pad_token),
        (*judge, cfg.gold.pad_token),
        ("model.policy", model.policy, model.pad_token),
    )
    for key, path, pad in named:
        if path is not None:
            tokenizer = read_tokenizer(path, model.trust_remote_code, key)
            reads = model.clock, model.thinking
            set_format(tokenizer, model.chat_template, make(cfg.task).conversational, *reads)
            fill_pad_token(tokenizer, pad, f"{key.partition('.')[0]}.pad_token")
            return tokenizer
    assert cfg.task.embedded, "validated: other tasks have a policy"
    return make(cfg.task).tokenizer()


def finished(cfg: Config, output: Path) -> bool:
    """Return whether `output` contains the complete data set of `cfg`.

    Raises:
        UserError: `output` contains something else, or pairs labelled with other settings.
    """
    report = output / REPORT
    if not report.is_file():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(
                f"output= must be a new folder (the data set is written there), got {output}, which contains "
                "something else; set output=<another folder>"
            )
        return False
    written = read_json(report, f"to relabel the pairs again: {delete_command(output)}")
    if written.get("settings") != settings(cfg):
        raise UserError(
            f"output= must be a new folder (the pairs in it were labelled with other settings, see its "
            f"{REPORT}), got {output}; set output=<another folder>"
        )
    return True


def relabel(cfg: Config, output: Path) -> None:
    """Make the relabelled data set, unless it is complete; resume an interrupted call.

    Args:
        cfg: the config from `pairs_of`.
        output: folder of the data set.

    Raises:
        UserError: `output` contains something else, the pairs cannot be read, a device certainly has too
            little memory for the judge, or another process writes `output`.
        Interrupted: a signal stopped the call; the same call resumes.
    """
    if not finished(cfg, output):
        if found := memory.problems(cfg, trains=False):
            raise UserError(*found)
        if is_first_rank():
            for name, value in memory.rows(memory.plan(cfg, trains=False)):
                say_row(name, value)
        warn(memory.warnings(cfg, trains=False))
        with interruptible(), written_by_one(output) if is_first_rank() else nullcontext():
            if not finished(cfg, output):
                carry_out(cfg, output)
                return
    if is_first_rank():
        say(f"relabelled already: {output}")


def carry_out(cfg: Config, output: Path) -> None:
    """Score the pairs that have no scores yet, and write the data set."""
    check_services(cfg)
    say_loading()
    from datasets import DatasetDict

    from rlhf.assembly.models import joined
    from rlhf.assembly.training import build_scorer, build_task, check_formats
    from rlhf.text.encoding import encode_completions

    ranks = joined(cfg)
    about = settings(cfg)  # before stand-ins replace paths
    if cfg.stand_ins:
        cfg = ranks.from_first(partial(complete_stand_ins, cfg))
    work = files.scratch_of(output)
    tokenizer = tokenizer_of(cfg)
    task = build_task(cfg, tokenizer, Data.preferences, 1, judge=True)
    warn(ranks.from_first(lambda: list(check_formats(cfg, task, judge=True))))
    gold = build_scorer(cfg, "gold", tokenizer, ranks, judgements=work / "judgements" / "*.jsonl")
    assert gold is not None, "validated: the judge scores texts"
    splits, agreements = {}, {}
    for split in SPLITS:
        stored = task.source.preferences(split)
        hasher = hashlib.sha256()
        for some in stored.iter(1000):
            hasher.update(json.dumps(some, sort_keys=True).encode())
        of_split = {**about, "split": split, "rows": hasher.hexdigest()[:16]}
        scores = ranks.from_first(partial(begin, work, split, of_split))  # by row: chosen, rejected
        left, batches = task.by_length(split, memory.PAIRS, scores)  # without prompts that are too long
        if scores:
            say(f"resumed scoring pairs of {split}: {len(scores):,} are done, {left:,} are left")
        with progress(f"scoring pairs of {split}", left, cfg.progress.value) as advance:
            for prompts in batches:
                assert prompts.completions is not None
                rollouts = encode_completions(prompts, prompts.completions, tokenizer, response_length=None)
                judged = gold.compare(*gold.scored(rollouts))
                rows = zip(prompts.index.tolist(), judged.tolist(), strict=True)
                new = [{"index": index, "scores": [*map(in_float32, pair)]} for index, pair in rows]
                if ranks.first:
                    append(work / f"{split}.jsonl", new)
                scores |= {row["index"]: row["scores"] for row in new}
                advance(len(prompts))
        agreements[split] = agreement(scores, len(stored))
        if ranks.first:
            splits[split] = _in_order(stored, scores)
    if ranks.first:
        report = {"gold": cfg.gold.described, "splits": agreements, "settings": about}
        write_data(DatasetDict(splits), report, work, output)
    ranks.any(False)  # the other ranks wait until the data set is written


def begin(work: Path, split: str, about: dict[str, Any]) -> dict[int, list[float]]:
    """Prepare the files of a split, and return the scores of an interrupted call, by row.

    Args:
        work: folder of the scores.
        split: the split to score.
        about: settings and digest of the rows; stored scores with other settings or rows are discarded.
    """
    work.mkdir(parents=True, exist_ok=True)
    about_file, file = work / f"{split}.json", work / f"{split}.jsonl"
    remedy = f"to score the pairs of this split again: {delete_command(about_file)}"
    same = about_file.is_file() and read_json(about_file, remedy) == about
    kept = read_lines(file, ["index", "scores"]) if same else []
    write_atomically(file, "".join(map(files.as_line, kept)))  # drops a line that a crash cut off
    write_json(about_file, about)
    return {row["index"]: row["scores"] for row in kept}


def _in_order(stored: Dataset, scores: dict[int, list[float]]) -> Dataset:
    """Return the scored rows, with the better response of each pair as the chosen response.

    Args:
        stored: the original pairs.
        scores: row -> scores of the chosen and the rejected response.
    """
    from rlhf.tasks.columns import TOOLS
    from rlhf.tasks.source import mapped

    kept = sorted(scores)
    rows = stored.select(kept)

    def order(row: dict[str, Any], place: int) -> dict[str, Any]:
        pair, values = (row["chosen"], row["rejected"]), scores[kept[place]]
        swapped = values[1] > values[0]
        if swapped:
            pair, values = pair[::-1], values[::-1]
        return dict(zip(_COLUMNS, (row["prompt"], *pair, *values, swapped), strict=True))

    dropped = [name for name in rows.column_names if name != TOOLS]
    return mapped(rows, order, with_indices=True, remove_columns=dropped)


def write_data(data: DatasetDict, report: dict[str, Any], work: Path, output: Path) -> None:
    """Write the data set and its report inside `work`, rename it to `output`, and remove `work`."""
    made = work / "data"
    shutil.rmtree(made, ignore_errors=True)
    data.save_to_disk(str(made))
    if (judgements := work / "judgements").is_dir():
        judgements.rename(made / judgements.name)
    write_json(made / REPORT, report)
    if output.is_dir():
        output.rmdir()  # empty, as `finished` has checked
    output.parent.mkdir(parents=True, exist_ok=True)
    made.rename(output)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
