"""Compare the estimates of time of `rlhf.plan` with measured runs on this CPU, after one calibration.

    python -m benchmarks.times              the calibration and ten runs: a few minutes of one core
    python -m benchmarks.times --only 1 4   the calibration and some of the runs

Use a machine without other load. The calibration is a run whose measured phases scale the estimates of the
other runs, as `python -m rlhf.plan run=<folder>` does; the median of three counts. The runs differ from it in
algorithm, lengths, batch and model. Models have random weights, prompts have the stated length, and no
response ends before the limit, so the work is that of the estimate. The measured time is the median of the
updates after the first.

Exit code: 1 if an estimate is off by more than a factor of `LIMIT`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.growth import BASE, Point, make, overrides
from rlhf.core.machine import this_machine
from rlhf.memory.times import DEVICES, Clock, from_run, update_s
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import load_config

LIMIT = 1.3
UPDATES = 12  # updates of a run
_LARGER = replace(BASE, hidden_size=256)
RUNS: list[tuple[str, Point, tuple[str, ...]]] = [  # name, sizes, further words
    ("online DPO", replace(BASE, samples=2, prompts=16), ("algo=dpo",)),
    ("GRPO, 8 samples", replace(BASE, samples=8), ("algo=grpo",)),
    ("PPO", BASE, ("algo=ppo", "algo.value_from=policy", "algo.samples_per_prompt=4")),
    ("RLOO, 2 epochs of 2 minibatches", BASE, ("schedule.epochs=2", "schedule.minibatches=2")),
    ("prompts of 256 tokens", replace(BASE, prompt=256), ()),
    ("responses of 128 tokens", replace(BASE, response=128), ()),
    ("batch of 128 responses", replace(BASE, prompts=32), ()),
    ("8 layers of width 256", replace(_LARGER, layers=8), ()),
    ("vocabulary of 32,768 words", replace(BASE, vocabulary=32768), ()),
    ("width 256, adapters", _LARGER, ("model.lora.rank=16",)),
]


def carried_out(point: Point, words: tuple[str, ...], folder: Path) -> RunFolder:
    """Carry out a run with the models and prompts of `benchmarks.growth`, and return its folder."""
    make(point, folder)
    usual = [
        word
        for word in overrides(point, folder)
        if not any(word.split("=")[0] == w.split("=")[0] for w in words)
    ]
    places = [f"output_dir={folder / 'out'}", f"cache_dir={folder / 'cache'}"]
    places.append(f"schedule.total_episodes={UPDATES * point.prompts * point.samples}")
    usual = [word for word in usual if not word.startswith("schedule.total_episodes=")]
    subprocess.run(
        [sys.executable, "-m", "rlhf.train", *words, *usual, *places], check=True, stdout=subprocess.DEVNULL
    )
    (found,) = (folder / "out").iterdir()
    return RunFolder(found)


def measured_s(folder: RunFolder) -> float:
    """Return the median seconds of an update, without the first."""
    rows = map(json.loads, folder.metrics.read_text().splitlines())
    return median([row["time/update_s"] for row in rows if "time/update_s" in row][1:])


def estimated_s(folder: RunFolder, calibration: RunFolder) -> float:
    """Return the estimated seconds of an update of a run, from its config and the calibration."""
    cfg, machine = load_config(folder.config), this_machine()
    phases = Clock(cfg, DEVICES["cpu"], machine).phases()
    return update_s(cfg, from_run(calibration, DEVICES["cpu"], machine, phases))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=int, nargs="+", default=range(1, len(RUNS) + 1), help="numbers of runs, from 1"
    )
    chosen, worst = parser.parse_args().only, 1.0
    with tempfile.TemporaryDirectory() as scratch:
        made: dict[int, RunFolder] = {}
        half = len(chosen) // 2  # a machine changes its pace: calibrations before, amid and after the runs
        for number in (0, *chosen[:half], -1, *chosen[half:], -2):
            name, point, words = RUNS[number - 1] if number > 0 else ("calibration", BASE, ())
            made[number] = carried_out(point, words, Path(scratch) / str(number))
            print(f"{name}: {measured_s(made[number]):.3g} s per update", flush=True)
        calibration = sorted((made[0], made[-1], made[-2]), key=measured_s)[1]
        print("| run | measured, s | estimated, s | ratio |\n| --- | --: | --: | --: |")
        for number in chosen:
            measured, estimated = measured_s(made[number]), estimated_s(made[number], calibration)
            ratio = estimated / measured
            worst = max(worst, ratio, 1 / ratio)
            print(f"| {RUNS[number - 1][0]} | {measured:.3g} | {estimated:.3g} | {ratio:.2f} |")
    print(f"largest factor: {worst:.2f}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
