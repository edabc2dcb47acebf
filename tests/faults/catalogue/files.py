"""Files of run folders and of `cache_dir` that are removed, damaged or replaced."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf.core.files import discard
from tests.faults.catalogue.signals import ANY
from tests.faults.entry import LOAD, Act, Entry, Moment, Outcome, codes
from tests.faults.trial import Trial

Damage = Callable[[Trial, Path], None]


def remove(trial: Trial, path: Path) -> None:
    """Remove a file or a folder, also if the run writes files into the folder meanwhile."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
    while path.is_dir():
        shutil.rmtree(path, ignore_errors=True)


def truncate(trial: Trial, path: Path) -> None:
    """Cut a file at a random position."""
    os.truncate(path, trial.draw.randrange(path.stat().st_size))


def empty(trial: Trial, path: Path) -> None:
    """Cut a file to 0 bytes."""
    os.truncate(path, 0)


def zero(trial: Trial, path: Path) -> None:
    """Fill a file with zeros, as after a power failure."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(trial: Trial, path: Path) -> None:
    """Flip a random bit of a file."""
    data = bytearray(path.read_bytes())
    data[trial.draw.randrange(len(data))] ^= 1 << trial.draw.randrange(8)
    path.write_bytes(data)


def rename(trial: Trial, path: Path) -> None:
    """Rename a file or a folder."""
    path.rename(path.with_name(f"{path.name}.bak"))


def folder_instead(trial: Trial, path: Path) -> None:
    """Replace a file by a folder."""
    remove(trial, path)
    path.mkdir()


def garbage(trial: Trial, path: Path) -> None:
    """Replace the content of a file by random bytes."""
    path.write_bytes(trial.draw.randbytes(300))


def write_protect(trial: Trial, path: Path) -> None:
    """Make a file read-only, also for root if the file system can."""
    path.chmod(0o444)


def cut_line(trial: Trial, path: Path) -> None:
    """Cut the end of a line in the middle of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    number = trial.draw.randrange(len(lines) - 1)
    lines[number] = lines[number][: len(lines[number]) // 2] + b"\n"
    path.write_bytes(b"".join(lines))


def missing_line(trial: Trial, path: Path) -> None:
    """Remove a line in the middle of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[trial.draw.randrange(len(lines) - 1)]
    path.write_bytes(b"".join(lines))


def repeated_line(trial: Trial, path: Path) -> None:
    """Repeat a line of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    number = trial.draw.randrange(len(lines))
    path.write_bytes(b"".join([*lines[: number + 1], lines[number], *lines[number + 1 :]]))


def content(text: str) -> Damage:
    """Return a damage that replaces the content of a file by a text."""

    def damage(trial: Trial, path: Path) -> None:
        path.write_text(text)

    return damage


def on(pattern: str, damage: Damage, top: str = "run") -> Act:
    """Return an act that damages a random file.

    Args:
        pattern: glob pattern of the file; `checkpoint` at its begin is the newest checkpoint.
        damage: the damage.
        top: "run": relative to the run folder; "trial": relative to the trial's folder.
    """

    def act(trial: Trial) -> None:
        base = trial.run_folder() if top == "run" else trial.folder
        wanted = pattern
        if pattern.startswith("checkpoint/"):
            newest = max(base.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
            wanted = f"{newest.name}/{pattern.partition('/')[2]}".removesuffix("/")
        while not (found := sorted(base.glob(wanted))) and trial.sessions and trial.session.code is None:
            time.sleep(0.01)
        assert found, f"no {wanted} in {base}"
        path = trial.draw.choice(found)
        damage(trial, path)
        trial.note(f"{damage.__name__} {path.relative_to(trial.folder)}")

    return act


def state_with(text: str) -> Act:
    """Return an act that writes a text to trainer_state.json."""

    def act(trial: Trial) -> None:
        (trial.run_folder() / "trainer_state.json").write_text(text)

    return act


def all_checkpoints(trial: Trial) -> None:
    """Flip a bit in a file of every checkpoint."""
    for path in sorted(trial.run_folder().glob("checkpoint-*")):
        flip(trial, trial.draw.choice(sorted(file for file in path.rglob("*.pt"))))


def stray(name: str, make: Callable[[Path], object]) -> Act:
    """Return an act that puts a file, a folder or a link that is not of the run into the run folder."""

    def act(trial: Trial) -> None:
        make(trial.run_folder() / name)
        trial.strays.add(name)

    return act


def text(path: Path) -> None:
    """Write a file."""
    path.write_text("not of the run")


def link(path: Path) -> None:
    """Create a link to nowhere."""
    path.symlink_to("/nowhere/at/all")


STRAYS: dict[str, Act] = {
    "tmp_file": stray(".tmp-checkpoint-3", text),
    "tmp_state": stray(".tmp-trainer_state.json-17", text),
    "tmp_folder": stray(".tmp-model", Path.mkdir),
    "checkpoint_foo": stray("checkpoint-foo", Path.mkdir),
    "checkpoint_leading_zero": stray("checkpoint-007", Path.mkdir),
    "checkpoint_empty": stray("checkpoint-9", Path.mkdir),
    "checkpoint_file": stray("checkpoint-8", text),
    "checkpoint_link": stray("checkpoint-7", link),
    "notes": stray("notes.txt", text),
    "link": stray("link", link),
}


ROWS = "`metrics.jsonl` or `completions.jsonl`"
RESUMES = Outcome(codes(0))
FINISHED = '{"finished": true}'


def names(path: str) -> Outcome:
    """Return the outcome: resumes with the right results, or exit code 2 with the name of the file."""
    return Outcome(codes(0, _2=path), same=False)


def between() -> Iterator[Entry]:
    """Yield the entries of damages in the folder of a crashed run."""

    def entry(name: str, run: str, act: Act, outcome: Outcome = RESUMES) -> Entry:
        return Entry(name, f"Resumed run: {fault}", run, act, outcome, begin="crashed")

    usual = {"remove": remove, "truncate": truncate, "zero": zero, "flip": flip, "rename": rename}
    usual |= {"empty": empty, "garbage": garbage}
    lines = {"cut_line": cut_line, "missing_line": missing_line, "repeated_line": repeated_line}
    fault = f"{ROWS} removed, cut, zeroed, altered, with missing or repeated lines"
    for name in ("metrics.jsonl", "completions.jsonl"):
        for kind, damage in (usual | lines).items():
            yield entry(f"{kind}.{name}", "lag" if kind in ("remove", "truncate") else "hf", on(name, damage))
    logs = {"remove": "train.log", "truncate": "train.log", "flip": "environment.json"}
    for kind, damage in usual.items():
        fault = "`config.yaml` removed, emptied or replaced by random bytes"
        if kind not in ("flip", "truncate"):
            yield entry(f"{kind}.config", "hf", on("config.yaml", damage))
        fault = "`train.log`, `environment.json` or `generator.log` removed, cut or altered"
        yield entry(f"{kind}.log", "lag", on(logs.get(kind, "generator.log"), damage))
    fault = instead = "a folder in place of a file, or a read-only file"
    for name in ("metrics.jsonl", "completions.jsonl", "train.log", "config.yaml", "environment.json"):
        outcome = Outcome(codes(0, _1=name, _2=name), same=False)
        yield entry(f"folder.{name}", "hf", on(name, folder_instead), outcome)
    fault, cut = "`trainer_state.json` with other content", '{"update": 3, "epi'
    for kind, text in {"null": "null", "list": "[]", "finished": FINISHED, "cut": cut, "empty": ""}.items():
        yield entry(f"state_{kind}", "hf", state_with(text), names("trainer_state.json"))
    fault = checkpoint = "a checkpoint removed, renamed, or one of its files damaged"
    for pattern, kinds in {
        "checkpoint/COMPLETE": [*usual],
        "checkpoint/model/model.safetensors": ["truncate", "flip", "zero", "remove"],
        "checkpoint/optimizer.pt": ["truncate", "flip", "rename"],
        "checkpoint/counters.json": ["flip", "empty", "remove"],
        "checkpoint/random.pt": ["zero", "remove"],
        "checkpoint/in_flight.pt": ["flip", "truncate"],
        "checkpoint/model/config.json": ["flip", "remove"],
        "checkpoint/": ["remove", "rename"],
    }.items():
        for kind in kinds:
            short = pattern.strip("/").rpartition("/")[2]
            run = "lag" if short == "in_flight.pt" else "hf"
            yield entry(f"{kind}.checkpoint.{short}", run, on(pattern, usual[kind]))
    fault = "all checkpoints damaged"
    yield entry("flip.all_checkpoints", "hf", all_checkpoints)
    fault = checkpoint
    for run in ("zero2", "ranks", "ppo", "lora", "reward", "sft"):
        pattern = "checkpoint/**/*.pt" if run in ("zero2", "ranks") else "checkpoint/**/*.*"
        yield entry(f"flip.checkpoint.{run}", run, on(pattern, flip))
    fault = "unrelated files, folders and links beside the files of the run"
    for kind, act in STRAYS.items():
        yield entry(f"stray.{kind}", "hf", act)
    fault = instead
    outcome = Outcome(codes(0, _1="annot write|ermission", _2="annot|ermission"), same=False)
    yield entry("read_only.metrics", "hf", on("*.json*", write_protect), outcome)


def without_folder(name: str) -> Act:
    """Return a repair that removes the folder in place of a file."""

    def repair(trial: Trial) -> None:
        for path in trial.out.glob(f"*/{name}"):
            if path.is_dir():
                path.rmdir()

    return repair


def clear_tmpdir(trial: Trial) -> None:
    """Remove all files in TMPDIR, as a cleaning job of the system does."""
    for path in trial.temporary.iterdir():
        discard(path)


def during() -> Iterator[Entry]:
    """Yield the entries of damages in the folder of an active run."""
    group, at = "Active run: run folder removed or renamed", Moment("wait", (2, 3, 4))
    lost = Outcome(codes(_1="out/"), same=False)
    for name, damage in {"run_folder": remove, "run_folder_renamed": rename}.items():
        yield Entry(f"during.{name}", group, "hf", on("../tldr_mini-*", damage), lost, at)
    late, rows = Moment("wait", (3, 4)), f"Active run: {ROWS} removed, cut or replaced by a folder"
    for name in ("metrics.jsonl", "completions.jsonl"):
        for kind, damage in {"remove": remove, "truncate": truncate, "folder": folder_instead}.items():
            outcome, repair = Outcome(codes(0, _1=name), reported=name), without_folder(name)
            yield Entry(f"during.{kind}.{name}", rows, "hf", on(name, damage), outcome, late, repair=repair)
    others = "Active run: log, config, lock or checkpoint removed or damaged"
    for kind, pattern, damage in (
        ("log", "train.log", remove),
        ("environment", "environment.json", remove),
        ("config", "config.yaml", remove),
        ("config_garbage", "config.yaml", garbage),
        ("generator_log", "generator.log", remove),
        ("lock", ".lock*", remove),
        ("checkpoint", "checkpoint/", remove),
        ("checkpoint_file", "checkpoint/optimizer.pt", truncate),
    ):
        yield Entry(f"during.{kind}", others, "lag", on(pattern, damage), at=late)
    scratch, outcome = "Active run: files in TMPDIR removed", Outcome(codes(0, _1="error:"))
    yield Entry("during.tmpdir", scratch, "lag", clear_tmpdir, outcome, ANY)
    gone = Outcome(codes(0, _1="out/"), reported="removed|missing|lost|deleted|no longer")
    act, at = on("../tldr_mini-*", remove), Moment("wait", (2, 3))
    yield Entry("during.run_folder_then_again", group, "lag", act, gone, at)


def finished() -> Iterator[Entry]:
    """Yield the entries of damages in the folder of a finished run, whose command is started again."""

    def entry(name: str, run: str, act: Act, outcome: Outcome) -> Entry:
        begin = "finished" if run == "hf" else "new"
        return Entry(f"finished.{name}", f"Finished run: {fault}", run, act, outcome, begin=begin)

    fault = "`trainer_state.json` with other content"
    for kind, text in {"null": "null", "finished": FINISHED, "list": "[]", "cut": "{"}.items():
        for run in ("hf", "extend", "evaluate"):
            yield entry(f"state_{kind}.{run}", run, state_with(text), names("trainer_state.json"))
    fault, outcome = "model or metrics removed or damaged", codes(0, _1="error:", _2="error:")
    for kind, pattern, damage in (
        ("model", "model", remove),
        ("weights", "model/model.safetensors", truncate),
        ("weights_removed", "model/model.safetensors", remove),
        ("metrics", "metrics.jsonl", remove),
        ("metrics_line", "metrics.jsonl", cut_line),
    ):
        for run in ("hf", "evaluate", "extend"):
            yield entry(f"{kind}.{run}", run, on(pattern, damage), Outcome(outcome, same=False))
    fault = "unrelated files, folders and links"
    for kind, act in STRAYS.items():
        outcome = RESUMES if kind != "tmp_folder" else Outcome(codes(0), same=False)
        yield entry(f"stray.{kind}", "evaluate", act, outcome)


def cached() -> Iterator[Entry]:
    """Yield the entries of damages in `cache_dir`."""
    group = "Cache folder: models and pairs removed before the run"
    for kind, pattern, same in (
        ("sft_removed", "cache/sft-*", True),
        ("reward_removed", "cache/reward-*", True),
        ("pairs_removed", "cache/pairs-*", False),  # pairs are made only for a missing reward model
        ("sft_model_removed", "cache/sft-*/model", False),
        ("reward_model_removed", "cache/reward-*/model", False),
        ("all_removed", "cache", True),
    ):
        outcome = Outcome(codes(0, _2="cache/"), same=same)
        yield Entry(f"cache.{kind}", group, "hf", on(pattern, remove, top="trial"), outcome)
    group = "Cache folder: files of models cut, zeroed or altered before the run"
    for kind, pattern, damage in (
        ("weights_cut", "cache/*/model/model.safetensors", truncate),
        ("weights_zeroed", "cache/*/model/model.safetensors", zero),
        ("weights_flipped", "cache/*/model/model.safetensors", flip),
        ("tokenizer", "cache/*/model/tokenizer*.json", truncate),
        ("config", "cache/*/model/config.json", garbage),
        ("state", "cache/*/trainer_state.json", empty),
    ):
        outcome = Outcome(codes(0, _1="cache/|NaN|nan|finite", _2="cache/"), same=False)
        yield Entry(f"cache.{kind}", group, "hf", on(pattern, damage, top="trial"), outcome)
    group, act = "Cache folder: removed during the run", on("cache", remove, top="trial")
    allowed = codes(0, _1="cache", _2="cache")
    at, outcome = Moment(LOAD, spread_s=1.0), Outcome(allowed, gone="cache")
    yield Entry("cache.removed_during", group, "lag", act, outcome, at)
    at = Moment(LOAD, spread_s=3.0)
    yield Entry("cache.removed_during_stages", group, "stages", act, Outcome(allowed), at)


ENTRIES = (*between(), *during(), *finished(), *cached())
