"""Simulate the training loop: predict the time of an update for n generators, a lag and given phase times.

    python -m benchmarks.schedule outputs/<run>                         compare a run with its prediction
    python -m benchmarks.schedule outputs/<run> --sweep                 other generators and lags for a run
    python -m benchmarks.schedule --generate 16 --train 1               the same for given phase times
    python -m benchmarks.schedule --figure docs/figures/schedule.png    chart for 1 to 1000 generators

`simulate` is an event simulation. The trainer keeps at most `max_lag` later requests in flight and waits for
the oldest request. Request t goes to generator t mod n, which first loads newer weights. The annotator
processes finished requests in the order of their completion. `period` is the closed form of the steady state
if all batches take the same time.

Check against two runs on two CPU cores, given the measured times of each batch; `generator.batch_size=8`
makes sampling slow:

    W="algo=dpo schedule.max_lag=2 schedule.eval_every=0 schedule.save_every=0"
    W="$W generator.batch_size=8 schedule.total_episodes=3968"
    python -m rlhf.train $W generator.replicas=1 output_dir=outputs/one
    python -m rlhf.train $W generator.replicas=2 output_dir=outputs/two
    python -m benchmarks.schedule outputs/one/* outputs/two/*

With one generator the run took 45.73 s (predicted 45.67 s), with two 47.16 s (predicted 47.02 s): sums of
`time/update_s` after the first update.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean

from rlhf.report.runs import Run, read_run


@dataclass(frozen=True, slots=True)
class Batch:
    """Seconds of the phases of one update."""

    generate: float  # generator: sampling
    train: float  # trainer: its own scores and log-probs, optimizer steps, copying of weights
    annotate: float = 0.0  # annotator process
    load: float = 0.0  # generator: loading new weights


# -- the simulation --------------------------------------------------------------------------------


@dataclass(slots=True)
class Timeline:
    """Events of a simulation in seconds, by request or update (both from 0)."""

    generator: list[int] = field(default_factory=list)  # the generator of each request
    version: list[int] = field(default_factory=list)  # the version of its weights
    sampled: list[tuple[float, float]] = field(default_factory=list)  # start, end; without loading weights
    annotated: list[tuple[float, float]] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)

    def seconds(self, first: int = 0, last: int = -1) -> float:
        """Return the seconds from the end of update `first` to the end of update `last`."""
        return self.trained[last][1] - self.trained[first][1]

    def waiting(self, first: int = 0, last: int = -1) -> float:
        """Return the share of that time in which the trainer waits."""
        last %= len(self.trained)
        worked = sum(end - start for start, end in self.trained[first + 1 : last + 1])
        return 1 - worked / self.seconds(first, last)

    def idle(self, generators: int, first: int = 0, last: int = -1) -> float:
        """Return the share of that time in which a generator is idle, averaged over the generators."""
        low, high = self.trained[first][1], self.trained[last][1]
        busy = sum(max(0.0, min(end, high) - max(start, low)) for start, end in self.sampled)
        return 1 - busy / (generators * (high - low))


class Loop:
    """The trainer, the generators and the annotator in simulated time."""

    def __init__(self, batches: Sequence[Batch], generators: int, lag: int) -> None:
        self.batches, self.lag = batches, lag
        self.timeline = Timeline()
        self.events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self.order = count()  # breaks ties between events at the same time
        self.asked = self.update = 0  # requests submitted, updates finished
        self.queues: list[deque[int]] = [deque() for _ in range(generators)]
        self.versions: list[int | None] = [None] * generators  # version of the weights in each generator
        self.to_annotate: deque[int] = deque()
        self.ready: set[int] = set()  # batches that are ready for training
        self.waits = False  # whether the trainer waits for the oldest request

    def run(self) -> Timeline:
        """Simulate all updates and return their timeline."""
        blank = [(math.nan, math.nan)] * len(self.batches)
        made = self.timeline
        made.sampled, made.annotated, made.trained = list(blank), list(blank), list(blank)
        self.at(0.0, self.next_batch, 0)
        while self.events:
            now, _, event, number = heappop(self.events)
            event(now, number)
        return made

    def at(self, time: float, event: Callable[[float, int], None], number: int) -> None:
        """Schedule an event."""
        heappush(self.events, (time, next(self.order), event, number))

    def next_batch(self, now: float, update: int) -> None:
        """Submit requests as `rlhf.training.stream.Stream` does, then train on the oldest batch or wait."""
        while self.asked < len(self.batches) and self.asked <= update + self.lag:
            request, generator = self.asked, self.asked % len(self.queues)
            self.asked += 1
            self.timeline.generator.append(generator)
            self.timeline.version.append(update)
            self.queues[generator].append(request)
            if len(self.queues[generator]) == 1:
                self.sample(now, generator)
        if update in self.ready:
            self.train(now, update)
        else:
            self.waits = update < len(self.batches)

    def sample(self, now: float, generator: int) -> None:
        """Start the first request in the queue of a generator."""
        request = self.queues[generator][0]
        version = self.timeline.version[request]
        if self.versions[generator] != version:
            now += self.batches[request].load
            self.versions[generator] = version
        end = now + self.batches[request].generate
        self.timeline.sampled[request] = (now, end)
        self.at(end, self.answered, request)

    def answered(self, now: float, request: int) -> None:
        """Finish a request of a generator and pass it to the annotator."""
        generator = self.timeline.generator[request]
        self.queues[generator].popleft()
        if self.queues[generator]:
            self.sample(now, generator)
        self.to_annotate.append(request)
        if len(self.to_annotate) == 1:
            self.annotate(now)

    def annotate(self, now: float) -> None:
        """Start the first request in the queue of the annotator."""
        request = self.to_annotate[0]
        end = now + self.batches[request].annotate
        self.timeline.annotated[request] = (now, end)
        self.at(end, self.finished, request)

    def finished(self, now: float, request: int) -> None:
        """Finish annotating a request; train on it if the trainer waits for it."""
        self.to_annotate.popleft()
        if self.to_annotate:
            self.annotate(now)
        self.ready.add(request)
        if self.waits and request == self.update:
            self.train(now, request)

    def train(self, now: float, update: int) -> None:
        """Start the update on a batch."""
        self.waits = False
        self.ready.remove(update)
        end = now + self.batches[update].train
        self.timeline.trained[update] = (now, end)
        self.update = update + 1
        self.at(end, self.next_batch, update + 1)


def simulate(batches: Sequence[Batch], generators: int, lag: int) -> Timeline:
    """Return the timeline of training on `batches`. All generators are ready at time 0."""
    return Loop(batches, generators, lag).run()


def period(batch: Batch, generators: int, lag: int) -> float:
    """Return the seconds of an update in the steady state if all updates take the same time.

    The result is the largest of four bounds: the trainer, the annotator, a generator that gets every n-th
    request, and a full round of all three, of which `lag` + 1 can overlap.
    """
    sampling = batch.load + batch.generate
    around = sampling + batch.annotate + batch.train
    return max(batch.train, batch.annotate, sampling / generators, around / (lag + 1))


def least_lag(batch: Batch, generators: int) -> int:
    """Return the smallest lag beyond which a larger lag does not make updates faster."""
    sampling = batch.load + batch.generate
    best = max(batch.train, batch.annotate, sampling / generators)
    return max(0, math.ceil((sampling + batch.annotate + batch.train) / best - 1e-9) - 1)


# -- batches -----------------------------------------------------------------------------------------


def of_run(run: Run) -> list[Batch]:
    """Return the phase times of the updates of a run."""
    rows = run.trained
    if [row["update"] for row in rows] != list(range(1, len(rows) + 1)):
        sys.exit(f"error: {run.folder} must have a row for each update; run it with schedule.log_every=1")
    load = mean(row.get("time/load_s", 0.0) for row in rows)  # not recorded per request
    own = ("score", "annotate", "train", "sync")
    return [
        Batch(
            generate=row["time/generate_s"],
            train=sum(row.get(f"time/{name}_s", 0.0) for name in own),
            annotate=row.get("time/annotate_ahead_s", 0.0),
            load=load,
        )
        for row in rows
    ]


def varied(batch: Batch, spread: float, number: int = 4000, seed: int = 0) -> list[Batch]:
    """Return batches with lognormal sampling times; `spread` is standard deviation divided by mean."""
    draw, sigma = Random(seed), math.sqrt(math.log1p(spread**2))
    factors = [draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(number)]
    scale = number / sum(factors)  # keeps the mean of `batch`
    return [replace(batch, generate=batch.generate * factor * scale) for factor in factors]


# -- tables ------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["--:"] * len(columns), *rows))


def compared(folders: Sequence[Path]) -> str:
    """Return a table of measured and predicted times of runs, from the phase times of each batch.

    Both count from the end of the first update, because the first update waits for processes to start.
    """
    found = []
    for run in map(read_run, folders):
        n, lag = run.config.get("generator.replicas", 1), run.config["schedule.max_lag"]
        batches, rows = of_run(run), run.trained
        made = simulate(batches, n, lag)
        took = sum(row["time/update_s"] for row in rows[1:])
        waited = sum(row["time/wait_s"] for row in rows[1:])
        each = [mean(getattr(batch, name) for batch in batches) for name in ("generate", "annotate", "train")]
        found.append(
            [str(n), str(lag), str(len(rows) - 1), *(f"{x:.3f}" for x in each)]
            + [f"{took:.2f}", f"{made.seconds():.2f}", f"{made.seconds() / took:.3f}"]
            + [f"{waited / took:.1%}", f"{made.waiting():.1%}", f"{made.idle(n):.1%}"]
        )
    columns = ["generators", "max_lag", "updates", "generate, s", "annotate, s", "train, s", "measured, s"]
    columns += ["predicted, s", "ratio", "waiting, measured", "predicted", "generators idle"]
    return table(columns, found)


def sweep(batches: Sequence[Batch], generators: Sequence[int], lags: Sequence[int]) -> str:
    """Return a table of the time of an update for each number of generators and each lag."""
    rows = []
    for n in generators:
        for lag in lags:
            if n > lag + 1:
                continue  # the remaining generators never get a request
            made, first, last = settled(batches, n, lag)
            shares = made.waiting(first, last), made.idle(n, first, last)
            each = made.seconds(first, last) / (last - first)
            rows.append([str(n), str(lag), f"{each:.4g}", *(f"{share:.1%}" for share in shares)])
    return table(["generators", "max_lag", "time per update, s", "trainer waits", "generators idle"], rows)


def settled(batches: Sequence[Batch], generators: int, lag: int) -> tuple[Timeline, int, int]:
    """Simulate batches drawn from `batches`; return the timeline and the bounds of its steady state."""
    first = 4 * (generators + lag) + (1000 if len(batches) > 1 else 0)
    # The period of the steady state is the number of generators, or lag + 1 if they wait for weights.
    usual = mean(batch.load + batch.generate for batch in batches) / generators
    around = mean(batch.load + batch.generate + batch.annotate + batch.train for batch in batches) / (lag + 1)
    turn = generators if usual >= around else lag + 1
    last = first + -(-2 * first // turn) * turn
    drawn = Random(0).choices(
        batches, k=last + generators + lag + 1
    )  # more batches than needed, so that no process runs out of work
    return simulate(drawn, generators, lag), first, last


def seconds(batches: Sequence[Batch], generators: int, lag: int) -> float:
    """Return the seconds of an update in the steady state."""
    made, first, last = settled(batches, generators, lag)
    return made.seconds(first, last) / (last - first)


def least_lag_found(batches: Sequence[Batch], generators: int, best: float, within: float) -> int | None:
    """Return the smallest simulated lag with an update of at most `best` x (1 + within); None: not found."""
    low, high = 0, 4
    while seconds(batches, generators, high) > best * (1 + within):
        low, high = high + 1, 2 * high
        if low > 8 * generators + 64:
            return None
    while low < high:
        lag = (low + high) // 2
        if seconds(batches, generators, lag) > best * (1 + within):
            low = lag + 1
        else:
            high = lag
    return low


# -- from 1 to 1000 generators -------------------------------------------------------------------------

RATIOS = (1, 4, 16, 64, 256, 1000)  # seconds of sampling over seconds of training
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
SPREAD, WITHIN = 0.3, 0.05  # spread of uneven sampling times; tolerance of the lag search


def ratios() -> str:
    """Return a table of update times and lags for each of `RATIOS`; the unit is one training update."""
    rows = []
    for ratio in RATIOS:
        batch = Batch(generate=ratio, train=1.0)
        uneven = varied(batch, SPREAD)
        alone = [seconds([batch], 1, lag) for lag in (0, 1)]
        few = [seconds([batch], n, lag) for n, lag in ((2, 2), (8, 8))]
        lag = least_lag(batch, ratio)
        assert math.isclose(seconds([batch], ratio, lag), 1.0) and (
            not lag or seconds([batch], ratio, lag - 1) > 1
        )
        more = ratio + max(1, ratio // 4)
        needed = [least_lag_found(uneven, n, max(1.0, ratio / n), WITHIN) for n in (ratio, more)]
        shown = ["more than tried" if found is None else str(found) for found in needed]
        rows.append([str(ratio), *(f"{x:.4g}" for x in (*alone, *few)), str(ratio), str(lag), shown[0]])
        rows[-1] += [f"{shown[1]} ({more})"]
    columns = ["sampling / training", "n 1, lag 0", "n 1, lag 1", "n 2, lag 2", "n 8, lag 8"]
    columns += ["n needed", "least lag", "least lag, uneven", "25 % more generators"]
    return table(columns, rows)


def draw(file: Path) -> None:
    """Draw three charts: time of an update with enough lag, the lag needed, and the share of waiting time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (time, lag, wait) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for ratio in RATIOS:
        batch = Batch(generate=ratio, train=1.0)
        lags = [least_lag(batch, n) for n in COUNTS]
        took = [seconds([batch], n, each) for n, each in zip(COUNTS, lags, strict=True)]
        name = f"sampling = {ratio} x training"
        time.plot(COUNTS, took, marker="o", markersize=3, label=name)
        lag.plot(COUNTS, lags, marker="o", markersize=3, label=name)
    for axes in (time, lag):
        axes.set(xscale="log", yscale="log", xlabel="generators")
        axes.grid(alpha=0.3)
    lag.plot(COUNTS, COUNTS, color="grey", linestyle=":", label="lag = generators")
    time.set(title="Time per update with enough lag", ylabel="update time / training time")
    lag.set(title="Lag needed", ylabel="smallest sufficient schedule.max_lag")
    time.legend(fontsize=8)
    ratio, most = 64, 128
    counts = [n for n in COUNTS if n <= most]
    lags = [0, *counts]
    batch = Batch(generate=ratio, train=1.0)
    shares = [[100 * (1 - 1 / seconds([batch], n, each)) for each in lags] for n in counts]
    image = wait.imshow(shares, origin="lower", aspect="auto", cmap="viridis_r", vmin=0, vmax=100)
    wait.set_xticks(range(len(lags)), map(str, lags))
    wait.set_yticks(range(len(counts)), map(str, counts))
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            wait.text(
                j,
                i,
                f"{share:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if share > 50 else "black",
            )
    title = f"Waiting time of the trainer: sampling = {ratio} x training"
    wait.set(title=title, xlabel="schedule.max_lag", ylabel="generators")
    figure.colorbar(image, ax=wait, label="share of time, %")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Parse the command line and print the table."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, nargs="*", help="run folders")
    parser.add_argument(
        "--sweep", action="store_true", help="predict other generators and lags for the first run"
    )
    parser.add_argument("--generate", type=float, help="seconds to sample a batch")
    parser.add_argument("--train", type=float, default=1.0, help="seconds to train on a batch (default 1)")
    parser.add_argument("--annotate", type=float, default=0.0, help="seconds to annotate a batch (default 0)")
    parser.add_argument(
        "--load", type=float, default=0.0, help="seconds to load new weights into a generator (default 0)"
    )
    parser.add_argument(
        "--generators", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers to predict"
    )
    parser.add_argument("--lag", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16], help="lags to predict")
    parser.add_argument("--figure", type=Path, help="write a chart of 1 to 1000 generators to this file")
    args = parser.parse_args()
    if args.figure:
        draw(args.figure)
        print(ratios())
    elif args.generate is not None:
        batch = Batch(args.generate, args.train, args.annotate, args.load)
        print(sweep([batch], args.generators, args.lag))
    elif args.folder and args.sweep:
        print(sweep(of_run(read_run(args.folder[0])), args.generators, args.lag))
    elif args.folder:
        print(compared(args.folder))
    else:
        parser.error("a run folder, --generate or --figure must be given (nothing to simulate)")


if __name__ == "__main__":
    main()
