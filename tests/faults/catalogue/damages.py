"""Damages of files and folders, and acts that inflict them on a random file of a trial."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.entry import Act
from tests.faults.trial import Trial

Damage = Callable[[Trial, Path], None]

# -- damages ---------------------------------------------------------------------------------------


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


def stray_file(name: str) -> Act:
    """Return an act that writes a file into the run folder."""

    def act(trial: Trial) -> None:
        (trial.run_folder() / name).write_text("not of the run")
        trial.strays.add(name)

    return act


def stray_folder(name: str) -> Act:
    """Return an act that creates a folder in the run folder."""

    def act(trial: Trial) -> None:
        (trial.run_folder() / name).mkdir()
        trial.strays.add(name)

    return act


def stray_link(name: str) -> Act:
    """Return an act that creates a link to nowhere in the run folder."""

    def act(trial: Trial) -> None:
        (trial.run_folder() / name).symlink_to("/nowhere/at/all")
        trial.strays.add(name)

    return act


STRAYS: dict[str, Act] = {
    "tmp_file": stray_file(".tmp-checkpoint-3"),
    "tmp_state": stray_file(".tmp-trainer_state.json-17"),
    "tmp_folder": stray_folder(".tmp-model"),
    "checkpoint_foo": stray_folder("checkpoint-foo"),
    "checkpoint_leading_zero": stray_folder("checkpoint-007"),
    "checkpoint_empty": stray_folder("checkpoint-9"),
    "checkpoint_file": stray_file("checkpoint-8"),
    "checkpoint_link": stray_link("checkpoint-7"),
    "notes": stray_file("notes.txt"),
    "link": stray_link("link"),
}
