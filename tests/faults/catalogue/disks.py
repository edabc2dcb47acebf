"""Full, slow, read-only and lost file systems. Most entries mount a small file system, which needs root."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.faults.catalogue.signals import AFTER, KILL, MOMENTS, TERM, to
from tests.faults.entry import LOAD, Act, Entry, Moment, Outcome, codes
from tests.faults.trial import FILLER, Trial

NO_ROOM = "No space left|no space|disk|annot write"


def mount(trial: Trial, place: Path, mib: int) -> None:
    """Mount an empty file system of `mib` MiB until the end of the trial."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", place], check=True)
    trial.mounted.append(place)


def mounted(top: str, mib: int) -> Act:
    """Return a preparation that mounts a small file system at a folder of the trial, with its content."""

    def prepare(trial: Trial) -> None:
        place = trial.temporary if top == "TMPDIR" else trial.folder / top
        mount(trial, place, mib)

    return prepare


def fill(top: str, most_free: int) -> Act:
    """Return an act that fills the file system of a folder up to a random number of bytes."""

    def act(trial: Trial) -> None:
        place = trial.temporary if top == "TMPDIR" else trial.folder / top
        keep = trial.draw.randrange(most_free + 1)
        space = os.statvfs(place)
        count = max(space.f_bavail * space.f_frsize - keep, 0)
        with suppress(OSError), (place / FILLER).open("wb", buffering=0) as file:
            while count > 0:
                count -= file.write(bytes(min(count, 2**16)))
        trial.note(f"{top} has {keep:,} bytes left")

    return act


def clear(top: str) -> Act:
    """Return a repair that removes the filler."""

    def repair(trial: Trial) -> None:
        place = trial.temporary if top == "TMPDIR" else trial.folder / top
        (place / FILLER).unlink(missing_ok=True)

    return repair


def short_of(top: str, most_free: int) -> Act:
    """Return an act that fills the disk for up to 1 s."""
    filled, cleared = fill(top, most_free), clear(top)

    def act(trial: Trial) -> None:
        filled(trial)
        time.sleep(trial.draw.uniform(0.1, 1.0))
        cleared(trial)

    return act


def small_files(trial: Trial) -> None:
    """Limit the size of files that the command can write from now on (RLIMIT_FSIZE)."""
    most = trial.draw.choice((0, 1000, 100_000, 1_000_000))
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(trial.session.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(trial.session.process.pid, resource.RLIMIT_FSIZE, (most, hard))
    trial.note(f"files have at most {most:,} bytes")


def unmount(trial: Trial) -> None:
    """Detach the file system of the output folder, like a file server that was lost."""
    subprocess.run(["umount", "-l", trial.out], check=True)
    trial.note("out detached")


def read_only(trial: Trial) -> None:
    """Mount the output folder read-only."""
    for words in (["--bind", trial.out, trial.out], ["-o", "remount,ro,bind", trial.out]):
        subprocess.run(["mount", *words], check=True)
    trial.mounted.append(trial.out)


def writable(trial: Trial) -> None:
    """Undo `read_only`."""
    subprocess.run(["umount", trial.mounted.pop()], check=True)


def slow(trial: Trial) -> None:
    """Let each fsync and rename of the command take up to 0.3 s longer."""
    trial.inside["slow_disk"] = round(trial.draw.uniform(0.02, 0.2), 3)
    trial.note(f"fsync and rename take {trial.inside['slow_disk']} s longer")


def entries() -> Iterator[Entry]:
    """Yield the entries."""
    full = Outcome(codes(0, _1=NO_ROOM, _2=NO_ROOM))
    for phase in ("load", "sampling", "update", "row", "checkpoint", "evaluation", "end"):
        for name, most in (("full", 4096), ("short", 3 * 2**20)):
            yield Entry(
                f"disk_{name}.{phase}",
                "Disks: output folder full, or with up to 3 MiB left",
                "lag" if phase == "sampling" else "hf",
                fill("out", most),
                full,
                at=MOMENTS[phase],
                repair=clear("out"),
                prepare=mounted("out", 64),
                needs="root",
            )
    yield Entry(
        "disk_full.start",
        "Disks: output folder full, or with up to 3 MiB left",
        "hf",
        fill("out", 4096),
        full,
        repair=clear("out"),
        prepare=mounted("out", 64),
        needs="root",
    )
    for phase in ("sampling", "checkpoint"):
        yield Entry(
            f"disk_short_of_space.{phase}",
            "Disks: output folder full, or with up to 3 MiB left",
            "hf",
            short_of("out", 4096),
            full,
            at=MOMENTS[phase],
            prepare=mounted("out", 64),
            needs="root",
        )
    yield Entry(
        "disk_full.tmpdir",
        "Disks: TMPDIR or `cache_dir` full",
        "lag",
        fill("TMPDIR", 4096),
        Outcome(codes(0, _1="error:", _2="error:")),
        at=Moment(LOAD),
        repair=clear("TMPDIR"),
        prepare=mounted("TMPDIR", 8),
        needs="root",
    )
    yield Entry(
        "disk_full.cache",
        "Disks: TMPDIR or `cache_dir` full",
        "stages",
        fill("cache", 2**20),
        full,
        at=Moment(LOAD, spread_s=3.0),
        repair=clear("cache"),
        prepare=mounted("cache", 64),
        needs="root",
    )
    for run, moment in (
        ("rollouts", MOMENTS["sampling"]),
        ("ppo", MOMENTS["checkpoint"]),
        ("pipeline", Moment(LOAD, spread_s=3.0)),
        ("zero2", MOMENTS["checkpoint"]),
    ):
        yield Entry(
            f"disk_full.{run}",
            "Disks: output folder full, or with up to 3 MiB left",
            run,
            fill("out", 2**20),
            full,
            at=moment,
            repair=clear("out"),
            prepare=mounted("out", 64),
            needs="root" if run != "zero2" else "root deepspeed",
        )
    for phase in ("row", "checkpoint", "end"):
        yield Entry(
            f"file_limit.{phase}",
            "Disks: limit of the file size (RLIMIT_FSIZE), as with a quota",
            "hf",
            small_files,
            Outcome(codes(0, 1, 120)),  # the limit also applies to the file with the output; Python: 120
            at=MOMENTS[phase],
        )
    yield Entry(
        "disk_lost.sampling",
        "Disks: file system of the output folder lost during the run",
        "hf",
        unmount,
        Outcome(codes(0, _1="out/")),
        at=MOMENTS["sampling"],
        prepare=mounted("out", 64),
        needs="root",
    )
    for begin in ("new", "crashed"):
        yield Entry(
            f"disk_read_only.{begin}",
            "Disks: output folder read-only before the run",
            "hf",
            read_only,
            Outcome(codes(_2="ead-only|annot be written|writ")),
            repair=writable,
            begin=begin,
            needs="root",
        )
    for run in ("hf", "lag", "stages"):
        yield Entry(
            f"disk_slow.{run}", "Disks: fsync and rename slower by up to 0.2 s", run, slow, Outcome(codes(0))
        )
    for name, number, moment in (("kill", KILL, MOMENTS["checkpoint"]), ("term", TERM, MOMENTS["sampling"])):
        yield Entry(
            f"disk_slow.{name}",
            "Disks: fsync and rename slower by up to 0.2 s",
            "hf",
            to("trainer", number),
            Outcome(AFTER[number]),
            at=Moment(moment.phase, moment.counts, spread_s=0.8),
            prepare=slow,
        )


ENTRIES = tuple(entries())
