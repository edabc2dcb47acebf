"""What both sides are given to do. Standard library alone: each side reads it in its own environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

EPISODES = 64  # of an update


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Lengths, and how the sequences of an update are cut for training."""

    shortest_prompt: int  # tokens; the prompts of an update have lengths evenly from here
    longest_prompt: int  # to here
    response: int  # tokens: the models never end a response, so each has this length
    micro_batch: int  # sequences a forward in training


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A GPT-NeoX (Pythia)."""

    layers: int
    hidden_size: int
    heads: int
    vocabulary: int
    context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """Of one measurement, in updates."""

    warmup: int
    measured: int


WORKS = {
    "short": Work(shortest_prompt=24, longest_prompt=24, response=48, micro_batch=64),
    "tldr": Work(shortest_prompt=128, longest_prompt=384, response=53, micro_batch=16),
}
SHAPES = {
    "nano": Shape(layers=2, hidden_size=128, heads=4, vocabulary=372, context=512),  # that of model=pythia
    "14m": Shape(layers=6, hidden_size=128, heads=4, vocabulary=50304, context=2048),  # pythia-14m
    "410m": Shape(layers=24, hidden_size=1024, heads=16, vocabulary=50304, context=2048),  # pythia-410m
}
SAMPLES = {"dpo": 2, "rloo": 4, "grpo": 4, "ppo": 1}  # of a prompt
LENGTHS = {
    "short-nano": Length(warmup=2, measured=8),
    "short-14m": Length(warmup=1, measured=2),
    "tldr-nano": Length(warmup=1, measured=4),
    "tldr-14m": Length(warmup=1, measured=1),
    "short-410m": Length(warmup=2, measured=4),
    "tldr-410m": Length(warmup=2, measured=4),
}  # by part
GPU_PARTS = ("short-410m", "tldr-410m")  # too large for a CPU
CPU_PARTS = tuple(part for part in LENGTHS if part not in GPU_PARTS)
GPU_THREADS = 8  # of the CPU, beside a GPU
SIDES = ("ours", "trl", "trl-released")  # the last: without what `tune` in theirs.py does for it
TUNED = ("rloo", "grpo")  # what that is for


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison: all that the two sides have in common."""

    work: str
    model: str
    algo: str
    threads: int  # of the CPU
    gpu: bool = False  # CUDA and bfloat16 over float32 weights; else the CPU and float32
    warmup: int  # updates before the measured ones
    measured: int  # updates
    temperature: float = 1.0  # TRL's online DPO trains log-probs at 1, whatever it samples at
    lr: float = 1e-6  # so small that the models stay what they are

    @property
    def part(self) -> str:
        """What is measured together: work and model."""
        return f"{self.work}-{self.model}"

    @property
    def name(self) -> str:
        """Work, model, algorithm and threads or `gpu`: `tldr-14m-dpo-2`."""
        return f"{self.part}-{self.algo}-{'gpu' if self.gpu else self.threads}"

    @property
    def environment(self) -> str:
        """That of TRL's side: .venv-<environment>, from requirements/<environment>.txt."""
        return "bench-ppo" if self.algo == "ppo" else "bench"

    @property
    def samples(self) -> int:
        """K."""
        return SAMPLES[self.algo]

    @property
    def prompts(self) -> int:
        """N."""
        return EPISODES // self.samples

    @property
    def updates(self) -> int:
        """Of the whole run."""
        return self.warmup + self.measured

    @property
    def lengths(self) -> list[int]:
        """Tokens of the prompts of an update, shortest first; every update has the same prompts."""
        first, last = WORKS[self.work].shortest_prompt, WORKS[self.work].longest_prompt
        return [round(first + (last - first) * i / (self.prompts - 1)) for i in range(self.prompts)]

    def counts(self) -> dict[str, int]:
        """What a side must be seen to do in all measured updates."""
        work = WORKS[self.work]
        once = {
            "episodes": EPISODES,
            "prompt_tokens": self.samples * sum(self.lengths),
            "response_tokens": EPISODES * work.response,
            "micro_batches": EPISODES // work.micro_batch,
            "optimizer_steps": 1,
        }
        return {name: self.measured * count for name, count in once.items()}

    def policy(self, materials: Path) -> Path:
        """The folder of policy and tokenizer."""
        return materials / self.model / "policy"

    def reward(self, materials: Path) -> Path:
        """The folder of the reward model."""
        return materials / self.model / "reward"

    def data(self, materials: Path) -> Path:
        """The folder with the prompts of one update, and as many for evaluation, which nobody reads."""
        return materials / f"{self.part}-{self.prompts}"

    def dump(self) -> str:
        """As json."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Case:
        """From json."""
        return Case(**json.loads(text))


def cases(parts: list[str], algos: list[str], threads: list[int], gpu: bool = False) -> list[Case]:
    """All combinations."""
    return [
        Case(
            work=part.split("-")[0],
            model=part.split("-")[1],
            algo=algo,
            threads=count,
            gpu=gpu,
            warmup=LENGTHS[part].warmup,
            measured=LENGTHS[part].measured,
        )
        for part, algo, count in product(parts, algos, threads)
    ]
