"""The work of the benchmark. Imports the standard library only, because both environments import it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

EPISODES = 64  # per update


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Sequence lengths and the micro-batch size."""

    shortest_prompt: int  # tokens; prompt lengths are evenly spaced from shortest to longest
    longest_prompt: int  # tokens
    response: int  # tokens; every response has this length, because the models never sample the end token
    micro_batch: int  # sequences per forward pass in training


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of a GPT-NeoX (Pythia)."""

    layers: int
    hidden_size: int
    heads: int
    vocabulary: int
    context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """The number of updates of one run."""

    warmup: int
    measured: int


WORKS = {
    "short": Work(shortest_prompt=24, longest_prompt=24, response=48, micro_batch=64),
    "tldr": Work(shortest_prompt=128, longest_prompt=384, response=53, micro_batch=16),
}
SHAPES = {
    "nano": Shape(
        layers=2, hidden_size=128, heads=4, vocabulary=372, context=512
    ),  # the shape of model=pythia
    "14m": Shape(layers=6, hidden_size=128, heads=4, vocabulary=50304, context=2048),  # pythia-14m
    "410m": Shape(layers=24, hidden_size=1024, heads=16, vocabulary=50304, context=2048),  # pythia-410m
}
SAMPLES = {"dpo": 2, "rloo": 4, "grpo": 4, "ppo": 1, "async_grpo": 4}  # per prompt
ENVIRONMENTS = {"ppo": "bench-ppo", "async_grpo": "bench-async"}  # of TRL, by algorithm; all others: bench
LENGTHS = {
    "short-nano": Length(warmup=2, measured=8),
    "short-14m": Length(warmup=1, measured=2),
    "tldr-nano": Length(warmup=1, measured=4),
    "tldr-14m": Length(warmup=1, measured=1),
    "short-410m": Length(warmup=2, measured=4),
    "tldr-410m": Length(warmup=2, measured=4),
}  # by part
MAX_LAG = 4  # of asynchronous cases: schedule.max_lag, and max_staleness of TRL (its default)
ASYNC_LENGTH = Length(warmup=10, measured=20)  # many times MAX_LAG: batches sampled in advance do not count
GPU_PARTS = ("short-410m", "tldr-410m")  # too large for a CPU
CPU_PARTS = tuple(part for part in LENGTHS if part not in GPU_PARTS)
GPU_THREADS = 8  # CPU threads of a run on a GPU
SIDES = ("ours", "trl", "trl-released")  # trl-released: without the changes of `tune` in theirs.py
TUNED = ("rloo", "grpo")  # algorithms that `tune` changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case of the comparison: the settings that both sides share."""

    work: str
    model: str
    algo: str
    threads: int  # CPU threads
    gpu: bool = False  # True: CUDA, bfloat16 over float32 weights; False: CPU, float32
    warmup: int  # updates before the measured updates
    measured: int  # measured updates
    temperature: float = 1.0  # TRL's online DPO always computes log-probs at temperature 1
    lr: float = 1e-6  # small, so that the models hardly change
    sampler: str = "hf"  # or "vllm": both sides sample with vLLM on the GPU that they train on

    @property
    def part(self) -> str:
        """Work and model, for example `tldr-14m`."""
        return f"{self.work}-{self.model}"

    @property
    def name(self) -> str:
        """Work, model, algorithm, and threads, `gpu` or `gpu-vllm`, for example `tldr-14m-dpo-2`."""
        where = "gpu" if self.gpu else str(self.threads)
        return "-".join([self.part, self.algo, where, *(["vllm"] if self.sampler == "vllm" else [])])

    @property
    def environment(self) -> str:
        """The environment of TRL: .venv-<environment>, made from requirements/<environment>.txt."""
        return ENVIRONMENTS.get(self.algo, "bench")

    @property
    def asynchronous(self) -> bool:
        """Whether both sides sample on a second GPU with vLLM while they train."""
        return self.algo == "async_grpo"

    @property
    def samples(self) -> int:
        """Samples per prompt (K)."""
        return SAMPLES[self.algo]

    @property
    def prompts(self) -> int:
        """Prompts per update (N)."""
        return EPISODES // self.samples

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.warmup + self.measured

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths of an update in tokens, ascending; every update has the same prompts."""
        first, last = WORKS[self.work].shortest_prompt, WORKS[self.work].longest_prompt
        return [round(first + (last - first) * i / (self.prompts - 1)) for i in range(self.prompts)]

    def counts(self) -> dict[str, int]:
        """Return the counts that both sides must have after all measured updates."""
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
        """Return the folder of the policy and its tokenizer."""
        return materials / self.model / "policy"

    def reward(self, materials: Path) -> Path:
        """Return the folder of the reward model."""
        return materials / self.model / "reward"

    def data(self, materials: Path) -> Path:
        """Return the folder with the prompts of one update, and equal validation data (not used)."""
        return materials / f"{self.part}-{self.prompts}"

    def dump(self) -> str:
        """Return the case as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Case:
        """Return a case from JSON."""
        return Case(**json.loads(text))


def cases(
    parts: list[str], algos: list[str], threads: list[int], gpu: bool = False, sampler: str = "hf"
) -> list[Case]:
    """Return all combinations as cases."""
    return [
        Case(
            work=part.split("-")[0],
            model=part.split("-")[1],
            algo=algo,
            threads=count,
            gpu=gpu,
            sampler=sampler,
            warmup=length.warmup,
            measured=length.measured,
        )
        for part, algo, count in product(parts, algos, threads)
        for length in [ASYNC_LENGTH if algo == "async_grpo" else LENGTHS[part]]
    ]
