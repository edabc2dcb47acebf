"""The loop as a simulation: what an update takes with n generators and a lag, by the seconds of its phases.

    python -m benchmarks.schedule outputs/<run>              what the run took, and what is predicted
    python -m benchmarks.schedule outputs/<run> --sweep      its phases with other generators and lags
    python -m benchmarks.schedule --generate 16 --train 1    the same for phases of your own, in seconds
    python -m benchmarks.schedule --figure docs/figures/schedule.png    from 1 to 1000 generators

`simulate` does what the loop does, in events: the trainer keeps `max_lag` later requests under way and waits
for the oldest; request t goes to generator t mod n, which takes newer weights over first; an annotator works
off what comes back in the order in which it comes. `period` says in closed form what that settles to where
all batches take the same.
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

    generate: float  # of a generator
    train: float  # of the trainer: scores and log-probs of its own, optimizer steps, copying of weights
    annotate: float = 0.0  # of the annotator's process
    load: float = 0.0  # of a generator, to take new weights over


# -- the simulation --------------------------------------------------------------------------------


@dataclass(slots=True)
class Timeline:
    """What happened when, in seconds, by request or update from 0."""

    generator: list[int] = field(default_factory=list)  # which sampled
    version: list[int] = field(default_factory=list)  # by which weights
    sampled: list[tuple[float, float]] = field(default_factory=list)  # from, to; loads are not counted
    annotated: list[tuple[float, float]] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)

    def seconds(self, first: int = 0, last: int = -1) -> float:
        """Seconds from the end of update `first` to the end of update `last`."""
        return self.trained[last][1] - self.trained[first][1]

    def waiting(self, first: int = 0, last: int = -1) -> float:
        """The share of that time that the trainer waits."""
        last %= len(self.trained)
        worked = sum(end - start for start, end in self.trained[first + 1 : last + 1])
        return 1 - worked / self.seconds(first, last)

    def idle(self, generators: int, first: int = 0, last: int = -1) -> float:
        """The share of that time that the generators sample nothing."""
        low, high = self.trained[first][1], self.trained[last][1]
        busy = sum(max(0.0, min(end, high) - max(start, low)) for start, end in self.sampled)
        return 1 - busy / (generators * (high - low))


class Loop:
    """The loop, its generators and its annotator, in simulated time."""

    def __init__(self, batches: Sequence[Batch], generators: int, lag: int) -> None:
        self.batches, self.lag = batches, lag
        self.timeline = Timeline()
        self.events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self.order = count()  # of events at the same time
        self.asked = self.update = 0  # requests made, updates done
        self.queues: list[deque[int]] = [deque() for _ in range(generators)]
        self.holds: list[int | None] = [None] * generators  # the version that each has
        self.to_annotate: deque[int] = deque()
        self.ready: set[int] = set()  # batches that can be trained on
        self.waits = False  # the trainer, for the oldest request

    def run(self) -> Timeline:
        """Carry out all updates."""
        blank = [(math.nan, math.nan)] * len(self.batches)
        made = self.timeline
        made.sampled, made.annotated, made.trained = list(blank), list(blank), list(blank)
        self.at(0.0, self.next_batch, 0)
        while self.events:
            now, _, event, number = heappop(self.events)
            event(now, number)
        return made

    def at(self, time: float, event: Callable[[float, int], None], number: int) -> None:
        """Have something happen."""
        heappush(self.events, (time, next(self.order), event, number))

    def next_batch(self, now: float, update: int) -> None:
        """The trainer asks for more, as `rlhf.stream.Stream` does, and takes the oldest batch."""
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
        """A generator begins with the first request of its queue."""
        request = self.queues[generator][0]
        version = self.timeline.version[request]
        if self.holds[generator] != version:
            now += self.batches[request].load
            self.holds[generator] = version
        end = now + self.batches[request].generate
        self.timeline.sampled[request] = (now, end)
        self.at(end, self.answered, request)

    def answered(self, now: float, request: int) -> None:
        """A generator is done with a request."""
        generator = self.timeline.generator[request]
        self.queues[generator].popleft()
        if self.queues[generator]:
            self.sample(now, generator)
        self.to_annotate.append(request)
        if len(self.to_annotate) == 1:
            self.annotate(now)

    def annotate(self, now: float) -> None:
        """The annotator begins with what came back first."""
        request = self.to_annotate[0]
        end = now + self.batches[request].annotate
        self.timeline.annotated[request] = (now, end)
        self.at(end, self.finished, request)

    def finished(self, now: float, request: int) -> None:
        """A batch can be trained on."""
        self.to_annotate.popleft()
        if self.to_annotate:
            self.annotate(now)
        self.ready.add(request)
        if self.waits and request == self.update:
            self.train(now, request)

    def train(self, now: float, update: int) -> None:
        """The trainer begins with a batch."""
        self.waits = False
        self.ready.remove(update)
        end = now + self.batches[update].train
        self.timeline.trained[update] = (now, end)
        self.update = update + 1
        self.at(end, self.next_batch, update + 1)


def simulate(batches: Sequence[Batch], generators: int, lag: int) -> Timeline:
    """What happens when `batches` are trained on, from the moment when all generators are there."""
    return Loop(batches, generators, lag).run()


def period(batch: Batch, generators: int, lag: int) -> float:
    """Seconds of an update where all take the same, when they have settled.

    Each bound is a circle of things that wait for one another: the trainer for itself, the annotator for
    itself, a generator for its request of n before, and all of them for the weights of `lag` + 1 before.
    """
    sampling = batch.load + batch.generate
    around = sampling + batch.annotate + batch.train
    return max(batch.train, batch.annotate, sampling / generators, around / (lag + 1))


def least_lag(batch: Batch, generators: int) -> int:
    """The least lag with which more lag makes no update faster."""
    sampling = batch.load + batch.generate
    best = max(batch.train, batch.annotate, sampling / generators)
    return max(0, math.ceil((sampling + batch.annotate + batch.train) / best - 1e-9) - 1)


# -- batches -----------------------------------------------------------------------------------------


def of_run(run: Run) -> list[Batch]:
    """The phases of the updates of a run."""
    rows = run.trained
    if [row["update"] for row in rows] != list(range(1, len(rows) + 1)):
        sys.exit(f"error: {run.folder} must have a row for each update; run it with schedule.log_every=1")
    load = mean(row.get("time/load_s", 0.0) for row in rows)  # which request it was for is not known
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
    """Batches whose sampling takes longer or shorter: lognormal, `spread` is its deviation over its mean."""
    draw, sigma = Random(seed), math.sqrt(math.log1p(spread**2))
    factors = [draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(number)]
    scale = number / sum(factors)  # the mean is that of `batch`
    return [replace(batch, generate=batch.generate * factor * scale) for factor in factors]


# -- tables ------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["--:"] * len(columns), *rows))


def compared(folders: Sequence[Path]) -> str:
    """What runs took, and what is predicted for them by the phases that they measured, batch by batch.

    Both are counted from the end of the first update on, which waits for processes that start.
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
    """What an update takes with each of `generators` and `lags`."""
    rows = []
    for n in generators:
        for lag in lags:
            if n > lag + 1:
                continue  # the others never have a request
            made, first, last = settled(batches, n, lag)
            shares = made.waiting(first, last), made.idle(n, first, last)
            each = made.seconds(first, last) / (last - first)
            rows.append([str(n), str(lag), f"{each:.4g}", *(f"{share:.1%}" for share in shares)])
    return table(["generators", "max_lag", "an update, s", "trainer waits", "generators idle"], rows)


def settled(batches: Sequence[Batch], generators: int, lag: int) -> tuple[Timeline, int, int]:
    """A simulation of batches that are drawn from `batches`, and the updates between which it is settled."""
    first = 4 * (generators + lag) + (1000 if len(batches) > 1 else 0)
    # What repeats is the turn of the generators or, where they wait for weights, that of the lag.
    usual = mean(batch.load + batch.generate for batch in batches) / generators
    around = mean(batch.load + batch.generate + batch.annotate + batch.train for batch in batches) / (lag + 1)
    turn = generators if usual >= around else lag + 1
    last = first + -(-2 * first // turn) * turn
    drawn = Random(0).choices(
        batches, k=last + generators + lag + 1
    )  # beyond it, so that nobody is out of work
    return simulate(drawn, generators, lag), first, last


def seconds(batches: Sequence[Batch], generators: int, lag: int) -> float:
    """Seconds of an update, settled."""
    made, first, last = settled(batches, generators, lag)
    return made.seconds(first, last) / (last - first)


def least_lag_found(batches: Sequence[Batch], generators: int, best: float, within: float) -> int | None:
    """The least lag with which an update takes at most `best` x (1 + within), by simulation."""
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
SPREAD, WITHIN = 0.3, 0.05  # of the sampling times of a second set of batches; and how near is near enough


def ratios() -> str:
    """For each ratio: what asynchrony gives, and what it needs; a training update is the unit of time."""
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
        told = ["more than tried" if found is None else str(found) for found in needed]
        rows.append([str(ratio), *(f"{x:.4g}" for x in (*alone, *few)), str(ratio), str(lag), told[0]])
        rows[-1] += [f"{told[1]} ({more})"]
    columns = ["sampling / training", "n 1, lag 0", "n 1, lag 1", "n 2, lag 2", "n 8, lag 8"]
    columns += ["n for 1", "least lag", "least lag, uneven", "with a quarter more"]
    return table(columns, rows)


def draw(file: Path) -> None:
    """Three charts: an update with enough lag, how much is enough, and how long the trainer waits else."""
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
    time.set(title="An update, with enough lag", ylabel="seconds of an update / seconds of training")
    lag.set(title="How much lag is enough", ylabel="least schedule.max_lag")
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
    title = f"The trainer waits: sampling = {ratio} x training"
    wait.set(title=title, xlabel="schedule.max_lag", ylabel="generators")
    figure.colorbar(image, ax=wait, label="share of the time, %")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, nargs="*", help="of a run")
    parser.add_argument("--sweep", action="store_true", help="other generators and lags for the first run")
    parser.add_argument("--generate", type=float, help="seconds of sampling a batch")
    parser.add_argument("--train", type=float, default=1.0, help="seconds of training on it")
    parser.add_argument("--annotate", type=float, default=0.0, help="seconds of annotating it ahead")
    parser.add_argument("--load", type=float, default=0.0, help="seconds a generator takes new weights over")
    parser.add_argument("--generators", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lag", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--figure", type=Path, help="a chart of 1 to 1000 generators goes here")
    words = parser.parse_args()
    if words.figure:
        draw(words.figure)
        print(ratios())
    elif words.generate is not None:
        batch = Batch(words.generate, words.train, words.annotate, words.load)
        print(sweep([batch], words.generators, words.lag))
    elif words.folder and words.sweep:
        print(sweep(of_run(read_run(words.folder[0])), words.generators, words.lag))
    elif words.folder:
        print(compared(words.folder))
    else:
        parser.error("a folder of a run, --generate or --figure must be given (there is nothing to simulate)")


if __name__ == "__main__":
    main()
