"""Whether servers work as the virtual clock predicts: the rules for stale rollouts, over HTTP, in real time.

    python -m benchmarks.server_rules                    all rules, 64 slots on two servers, one minute each
    python -m benchmarks.server_rules pace cut --lag 4 --seconds 0.5

The pool, the stream and the rules are those of a run. The servers answer after a given time instead of
sampling, so the processor of this machine does not limit them: seconds of responses are lognormal (log-sd 1,
0.8 of it from the prompt), and training takes as long as the ideal generation of its batch. The columns are
those of `benchmarks.rollout_rules`, once as predicted (mean and standard deviation over seeds of the same
number of updates) and once as measured.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import mean, stdev
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from aiohttp import web

from benchmarks.rollout_rules import RULES, Setting, run
from rlhf.config.run import ScheduleConfig, Unit, Update
from rlhf.core.batch import Prompts, Sampling
from rlhf.core.launched import derive
from rlhf.core.metrics import Timer
from rlhf.core.state import TrainState
from rlhf.generators.servers.pool import ServerPool
from rlhf.generators.servers.process import ABORT, GENERATE, LOAD, STATUS
from rlhf.generators.servers.server import Server
from rlhf.generators.weights import SharedWeights
from rlhf.terminal.console import Phases
from rlhf.training.events import build
from rlhf.training.stream import StreamContext

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics

_TOKENS = 50
_SPREAD, _SHARED = 1.0, 0.8
_WARM = 0.2  # share of the updates that is left out
_MORE = 1000  # updates of the run after those that are measured, so that the last one is as the others


class TimedServer:
    """A server that answers after the time that a response takes; a load keeps running responses."""

    def __init__(self, slots: int, seconds: float) -> None:
        self.slots, self.seconds, self.version = slots, seconds, "0"
        self.aborted: dict[str, asyncio.Event] = {}

    async def start(self) -> str:
        """Listen, and return the address."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get(STATUS, self.status)
        for route, answer in ((LOAD, self.load), (GENERATE, self.generate), (ABORT, self.abort)):
            app.router.add_post(route, answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End all requests."""
        await self.runner.cleanup()

    async def status(self, request: web.Request) -> web.Response:
        """Return the state."""
        return web.json_response({"start": "1", "version": self.version, "max_num_seqs": self.slots})

    async def load(self, request: web.Request) -> web.Response:
        """Take a version."""
        body = await request.json()
        self.version = str(body["version"])
        return web.json_response(
            {
                "version": body["version"],
                "checksums": {entry[0]: entry[-1] for entry in body["update"]["entries"]},
            }
        )

    async def abort(self, request: web.Request) -> web.Response:
        """End responses early."""
        for name in (await request.json())["request_ids"]:
            if event := self.aborted.get(name.removeprefix("generate-tokens-")):
                event.set()
        return web.Response()

    async def generate(self, request: web.Request) -> web.Response:
        """Answer after the seconds that belong to the prompt and the seed."""
        body, begun = await request.json(), time.monotonic()
        event = self.aborted[body["request_id"]] = asyncio.Event()
        given = body["sampling_params"]
        whole = self.seconds * factor(body["token_ids"][0] - 1, given["seed"])
        most, early = given["max_tokens"], False
        seconds = whole * most / _TOKENS
        try:
            await asyncio.wait_for(event.wait(), seconds)
            early = True
        except TimeoutError:
            pass
        count = max(1, int(_TOKENS * min(1.0, (time.monotonic() - begun) / seconds))) if early else most
        choice = {
            "token_ids": [1] * count,
            "finish_reason": "abort" if early else "length",
            "logprobs": {"content": [{"token_id": 1, "logprob": 0.0}] * count},
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        return web.json_response({"choices": [choice]})


def factor(row: int, seed: int) -> float:
    """Return the seconds of a response as a multiple of their median, given its prompt and its seed."""
    log = Random(derive(row, "prompt")).gauss(0, _SPREAD * _SHARED)
    return math.exp(log + Random(derive(seed, "sample")).gauss(0, _SPREAD * math.sqrt(1 - _SHARED**2)))


def decoding(line: dict[str, Any], seconds: float, batch: int) -> float:
    """Return the seconds in which the responses of a group were decoded, given its line of groups.jsonl."""
    seed = derive(1, "sample", "train", line["group"] // batch, line["row"])
    return sum(
        seconds * factor(line["row"], seed + k) * length / _TOKENS for k, length in enumerate(line["lengths"])
    )


def measure(setting: Setting, seconds: float, updates: int) -> dict[str, float]:
    """Return the figures of a run with timed servers."""
    order, stale = RULES[setting.rule]
    lines: list[dict[str, Any]] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers = [TimedServer(setting.slots // 2, seconds) for _ in range(2)]
    urls = [asyncio.run_coroutine_threadsafe(each.start(), loop).result() for each in servers]
    settings = SimpleNamespace(
        environment=None, stop_ids=(0,), seed=1, pad_id=0, max_num_seqs=setting.slots // 2
    )
    with tempfile.TemporaryDirectory() as folder:
        pool = ServerPool(
            [Server(url, url, None, 30.0, 30.0, 600.0) for url in urls],
            SharedWeights(folder=Path(folder) / "weights"),
            settings,  # type: ignore[arg-type]
            vocabulary=2**31,
            restarts=0,
            in_flight=True,
        )
        state = TrainState(num_updates=updates + _MORE)
        slots = {"busy": 0.0, "wasted": 0.0}  # seconds of slots, of the measured updates

        def add(metrics: Metrics) -> None:
            value = {name.removeprefix("rollouts/"): float(each.total) for name, each in metrics.items()}
            if state.update >= int(_WARM * updates):
                slots["busy"] += value["generators_busy"] * value["update_s"]
                slots["wasted"] += value["wasted"] * value["update_s"]

        recorder = SimpleNamespace(timer=Timer(), add=add, groups=lines.extend)
        stream = build(
            None,  # type: ignore[arg-type]
            StreamContext(
                generator=pool,
                prompts=_prompts(setting.batch),
                sampling=Sampling(
                    samples=setting.samples, temperature=1.0, response_length=_TOKENS, purpose="train"
                ),
                schedule=ScheduleConfig(
                    prompts_per_update=setting.batch,
                    max_lag=setting.lag,
                    update=Update.in_flight,
                    order=order,
                    max_age=None if setting.rule in ("fifo", "pace") else setting.age or setting.lag,
                    stale=stale,
                    unit=Unit.group,
                ),
                state=state,
                seed=1,
                pad_id=0,
                recorder=recorder,  # type: ignore[arg-type]
                phases=Phases(),
            ),
        )
        weights = [("weight", torch.zeros(1))]
        pool.load(weights, 0)
        trained, began = 0.0, time.monotonic()
        for _ in stream:
            if state.update == int(_WARM * updates):
                trained, began, warm = 0.0, time.monotonic(), len(lines)
            own = [line for line in lines if line["update"] == state.update + 1 and line["fate"] != "dropped"]
            work = sum(decoding(line, seconds, setting.batch) for line in own)
            time.sleep(work / setting.slots)
            trained += work / setting.slots
            state.update += 1
            pool.load(weights, state.update)
            if state.update == updates:
                break
        span = time.monotonic() - began
        pool.close()
    for each in servers:
        asyncio.run_coroutine_threadsafe(each.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    kept = [line for line in lines[warm:] if line["fate"] != "dropped"]
    ages = [line["update"] - 1 - line["version"] for line in kept]
    return {
        "use": trained / span,
        "age": mean(ages),
        "oldest": max(ages),
        "thrown away": slots["wasted"] / slots["busy"] if slots["busy"] else 0.0,
        "shorter": mean(length < _TOKENS for line in kept for length in line["lengths"]),
    }


def _prompts(size: int) -> Iterator[Prompts]:
    for start in range(0, 2**30, size):
        rows = torch.arange(start, start + size)
        yield Prompts(
            index=rows,
            texts=[""] * size,
            references=[""] * size,
            prompt_ids=rows[:, None] + 1,
            prompt_mask=torch.ones(size, 1, dtype=torch.bool),
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rules", nargs="*", metavar="RULE", help="fifo, pace, drop, cut, wait (default: the first four)"
    )
    parser.add_argument("--lag", type=int, default=4, help="batches ahead, L (default: 4)")
    parser.add_argument("--updates", type=int, default=60, help="updates of a run (default: 60)")
    parser.add_argument("--seconds", type=float, default=0.6, help="median of a response (default: 0.6)")
    asked = parser.parse_args(argv)
    print("| rule | L | A | use | age | oldest | thrown away | predicted: use | age | oldest | thrown away |")
    print("|---" + "|--:" * 10 + "|", flush=True)
    if wrong := {*asked.rules} - {*RULES}:
        parser.error(f"a rule must be {', '.join(RULES)}, got {min(wrong)}; correct it")
    for rule in asked.rules or ("fifo", "pace", "drop", "cut"):
        age = 3 * asked.lag if rule == "cut" else None
        setting = Setting(rule, asked.lag, age)
        predicted = [run(setting, seed, asked.updates, int(_WARM * asked.updates)) for seed in range(8)]
        found = measure(setting, asked.seconds, asked.updates)
        names = ("use", "age", "oldest", "thrown away")
        cells = [f"{found[name]:.3g}" for name in names]
        for name in names:
            values = [each[name] for each in predicted]
            cells.append(f"{mean(values):.3g} ({stdev(values):.2g})")
        print(f"| {rule} | {asked.lag} | {age or ''} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
