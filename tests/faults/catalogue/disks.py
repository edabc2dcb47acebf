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
    room = {"repair": clear("out"), "prepare": mounted("out", 64), "needs": "root"}
    group = "Disks: output folder full, or with up to 3 MiB left"
    for phase in ("load", "sampling", "update", "row", "checkpoint", "evaluation", "end"):
        for name, most in (("full", 4096), ("short", 3 * 2**20)):
            run, act = "lag" if phase == "sampling" else "hf", fill("out", most)
            yield Entry(f"disk_{name}.{phase}", group, run, act, full, MOMENTS[phase], **room)
    yield Entry("disk_full.start", group, "hf", fill("out", 4096), full, **room)
    for phase in ("sampling", "checkpoint"):
        act, name = short_of("out", 4096), f"disk_short_of_space.{phase}"
        yield Entry(name, group, "hf", act, full, MOMENTS[phase], **room | {"repair": None})
    other, at, outcome = "Disks: TMPDIR or `cache_dir` full", Moment(LOAD), codes(0, _1="error:", _2="error:")
    small = {"repair": clear("TMPDIR"), "prepare": mounted("TMPDIR", 8), "needs": "root"}
    yield Entry("disk_full.tmpdir", other, "lag", fill("TMPDIR", 4096), Outcome(outcome), at, **small)
    late = Moment(LOAD, spread_s=3.0)
    small = {"repair": clear("cache"), "prepare": mounted("cache", 64), "needs": "root"}
    yield Entry("disk_full.cache", other, "stages", fill("cache", 2**20), full, late, **small)
    sampling, saving = MOMENTS["sampling"], MOMENTS["checkpoint"]
    for run, at in (("rollouts", sampling), ("ppo", saving), ("pipeline", late), ("zero2", saving)):
        yield Entry(f"disk_full.{run}", group, run, fill("out", 2**20), full, at, **room)
    group = "Disks: limit of the file size (RLIMIT_FSIZE), as with a quota"
    for phase in ("row", "checkpoint", "end"):
        outcome = Outcome(codes(0, 1, 120))  # the limit also applies to the file with the output; Python: 120
        yield Entry(f"file_limit.{phase}", group, "hf", small_files, outcome, MOMENTS[phase])
    group = "Disks: file system of the output folder lost during the run"
    lost, place = Outcome(codes(0, _1="out/")), mounted("out", 64)
    yield Entry("disk_lost.sampling", group, "hf", unmount, lost, sampling, prepare=place, needs="root")
    group, refused = (
        "Disks: output folder read-only before the run",
        codes(_2="ead-only|annot be written|writ"),
    )
    for begin in ("new", "crashed"):
        more = {"repair": writable, "begin": begin, "needs": "root"}
        yield Entry(f"disk_read_only.{begin}", group, "hf", read_only, Outcome(refused), **more)
    group = "Disks: fsync and rename slower by up to 0.2 s"
    for run in ("hf", "lag", "stages"):
        yield Entry(f"disk_slow.{run}", group, run, slow)
    for name, number, moment in (("kill", KILL, saving), ("term", TERM, sampling)):
        at = Moment(moment.phase, moment.counts, spread_s=0.8)
        act, outcome = to("trainer", number), Outcome(AFTER[number])
        yield Entry(f"disk_slow.{name}", group, "hf", act, outcome, at, prepare=slow)


ENTRIES = tuple(entries())
