"""Sections of the schedule, the optimizer and evaluation during training.

A new key is one field: `entry` and `number` (`rlhf.config.schema`) declare its meaning, default and bounds,
and whether it is part of the name of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Affects, Choice, Section, dotted, entry, number, option, plain

MOST_EPISODES = 10**9
_MOMENTUM = 0.95
DEFAULT_EPOCHS = 3  # passes over the data of a task that reads your own data


class Update(Choice):
    """The time at which a generator loads new weights."""

    between = "between", "between requests, in the order in which requests and weights were sent"
    in_flight = "in_flight", "at once, even during a request"


class Order(Choice):
    """Which groups (a prompt with its samples) are trained next."""

    fifo = "fifo", "in the order of their starts, in whole batches"
    completed = "completed", "complete groups"


class Stale(Choice):
    """What happens to a group that would be older than the bound when it is trained."""

    wait = "wait", "the trainer waits for it, before it is too old"
    drop = "drop", "it is discarded"
    cut = "cut", "it ends at once, with the tokens that it has"


class Unit(Choice):
    """What starts together when slots of the generators are free."""

    group = "group", "all samples of a prompt"
    sequence = "sequence", "one sample"


class Dropped(Choice):
    """What happens to the prompt of a discarded group."""

    again = "again", "it starts again, before new prompts"
    skip = "skip", "it is left out"


class LRSchedule(Choice):
    """The learning rate after warm-up. Decays end at 0; skipped and overflowed steps count."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Optimizer(Choice):
    """The optimizer of the trained weights."""

    adamw = "adamw"
    muon = "muon", "Muon for the matrices of hidden layers, AdamW for all other weights"
    adamw_8bit = "adamw_8bit", "AdamW with moments of 8 bits"


class ESSScaling(Choice):
    """The factor of the learning rate of one step, given s = min(1, ESS / B / on-policy ESS / B)."""

    none = "none", "1"
    sqrt = "sqrt", "sqrt(s), for Adam"
    linear = "linear", "s"


@dataclass(kw_only=True, slots=True)
class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    optimizer: Optimizer = entry(Optimizer.adamw, added=True)
    lr: float = number(MISSING, above=0, means="learning rate", remedy="3e-06")
    schedule: LRSchedule = LRSchedule.linear
    warmup: float = number(
        0.0,
        least=0,
        counts="optimizer steps",
        means="optimizer steps of warm-up, w; below 1: a fraction of the run; step t, from 0, has "
        "(t + 1) / (w + 1) of the learning rate",
    )
    max_grad_norm: float | None = number(
        1.0,
        above=0,
        means="gradients are scaled down to this norm; ppo: one norm over policy and value model; null: no "
        "clipping",
    )
    momentum: float = number(
        _MOMENTUM, least=0, below=1, means="decay rate of the momentum of Muon", added=True
    )
    eps: float = number(
        1e-8,
        above=0,
        means="epsilon in the denominator of Adam, also for ppo (Huang et al., arXiv 2403.17031: 1e-5)",
    )
    betas: tuple[float, float] = entry((0.9, 0.999), means="decay rates of Adam's moments")
    weight_decay: float = number(
        0.0, least=0, means="decay of all trained weights towards zero, also of biases, norms and embeddings"
    )
    ess_scaling: ESSScaling = entry(
        ESSScaling.none,
        means="lower the learning rate of a step whose samples are stale (VCPO), by their effective sample "
        "size (ESS)",
        added=True,
    )
    ess_on_policy: float = number(
        1.0, above=0, most=1, means="ESS of on-policy samples as a fraction of their number", added=True
    )

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if `betas` are not two numbers in [0, 1)."""
        yield from Section.problems(self, at)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            key = dotted(at, "betas")
            yield (
                f"{key} must be two numbers >= 0 and < 1 (decay rates of the gradient and of its square), "
                f"got [{','.join(map(plain, self.betas))}]; set {key}=[0.9,0.999]"
            )

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning if the momentum of Muon is set and the optimizer is not Muon."""
        if self.optimizer is not Optimizer.muon and self.momentum != _MOMENTUM:
            yield (
                f"{at}.momentum={plain(self.momentum)} has no effect with {at}.optimizer="
                f"{self.optimizer.value}; set {at}.optimizer=muon"
            )


@dataclass(kw_only=True, slots=True)
class ScheduleConfig(Section):
    """How long a run is, how large its batches are, and how far off-policy it may be."""

    total_episodes: int | None = number(
        None, least=1, most=MOST_EPISODES, means="responses of the whole run", remedy="12800"
    )
    total_epochs: float | None = number(
        None,
        above=0,
        means="passes over the data, instead of total_episodes; with task=local or task=preferences and both "
        f"null: {DEFAULT_EPOCHS}",
        remedy="1",
    )
    prompts_per_update: int = number(
        MISSING, least=1, means="N, prompts of one update over all ranks", remedy="64"
    )
    minibatches: int = number(1, least=1, means="optimizer steps in one pass over a rollout batch")
    epochs: int = number(1, least=1, means="passes over a rollout batch")
    max_lag: int = number(
        0, least=0, means="later rollout batches in flight while a batch is trained on; 0: synchronous"
    )
    update: Update = entry(Update.between, means="when the generator loads new weights")
    order: Order = entry(Order.fifo, means="which groups are trained next", added=True)
    max_age: int | None = number(
        None,
        least=1,
        means="largest age of a trained group, in updates, with order=completed; null: no bound",
        remedy="8",
        added=True,
    )
    stale: Stale = entry(Stale.wait, means="what happens to a group at max_age", added=True)
    unit: Unit = entry(Unit.group, means="what starts together when slots are free", added=True)
    dropped: Dropped = entry(Dropped.again, means="the prompt of a discarded group", added=True)
    refill: int = number(
        0,
        least=0,
        means="most groups without signal (equal scores) that groups of other prompts replace for an update, "
        "in multiples of N; 0: none",
        added=True,
    )
    replay: int = number(
        1,
        least=1,
        means="last rollout batches from which the prompts of an update are drawn; 1: only the new batch",
        added=True,
    )
    solved_at: float | None = number(
        None,
        means="mean score of a prompt's samples from which on later epochs leave the prompt out; null: none "
        "is left out",
        remedy="0.9",
        added=True,
    )
    eval_every: float = number(
        0.2,
        least=0,
        counts="updates",
        means="updates between evaluations, besides those before and after training; below 1: a fraction of "
        "the run; more than the run has: only before and after; 0: none at all",
    )
    save_every: float = number(
        0.25,
        least=0,
        counts="updates",
        means="updates between checkpoints; below 1: a fraction of the run; 0: never",
        affects=Affects.nothing,
    )
    log_every: float = number(
        1,
        least=0,
        counts="updates",
        means="updates between training rows; below 1: a fraction of the run; 0: never",
        affects=Affects.nothing,
    )

    @property
    def off_policy(self) -> bool:
        """Whether a batch may contain samples of older weights than those that are trained."""
        return self.max_lag > 0 or self.replay > 1

    @property
    def in_flight(self) -> bool:
        """Whether a generator may load new weights during a request."""
        return self.update is Update.in_flight

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if `max_lag` is 0 with `update=in_flight`, or above `max_age`."""
        yield from Section.problems(self, at)
        if self.in_flight and self.max_lag < 1:
            yield (
                "schedule.max_lag must be >= 1 with schedule.update=in_flight (otherwise no request is "
                f"running when the weights change), got {self.max_lag}; set schedule.max_lag=1"
            )
        age, lag = self.max_age, self.max_lag
        if age is not None and age < lag:
            yield (
                "schedule.max_age must be >= schedule.max_lag (groups start up to that many updates ahead), "
                f"got {age} with schedule.max_lag={lag}; set schedule.max_age={lag}"
            )


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation during training."""

    prompts: int = number(256, least=1, means="held-out prompts or pairs of an evaluation")
    batch_size: int = number(
        256,
        least=1,
        means="sequences decoded in parallel if the generator does not sample",
        affects=Affects.speed,
    )
    temperature: float = number(0.01, above=0, means="sampling temperature; the default is near-greedy")
    samples: int = number(
        3,
        least=0,
        means="completions in the terminal after the last evaluation; 0: none",
        affects=Affects.nothing,
    )

    @property
    def asked(self) -> bool:
        """Whether `prompts` is not the default; a split with fewer prompts then deserves a warning."""
        return self.prompts != EvalConfig().prompts


# Sections of the clock (`clock=...`): whose time decides which weights sample which tokens.


@option("clock", "wall", part="rlhf.training.events:build")
@dataclass(kw_only=True, slots=True)
class ClockConfig(Section):
    """The time of this machine: generators sample as fast as they can."""

    virtual: ClassVar[bool] = False  # True: generators and trainer work in virtual time

    name: str = entry("wall", added=True)


@option("clock", "virtual", part="rlhf.training.events:VirtualStream")
@dataclass(kw_only=True, slots=True)
class VirtualConfig(ClockConfig):
    """The virtual time of a cluster that is simulated in this process, the same on every machine."""

    virtual: ClassVar[bool] = True

    name: str = "virtual"
    slots: int | None = number(
        None,
        least=1,
        means="sequences decoded at the same time; null: as many as can be in flight, N K (max_lag + 1)",
        remedy="64",
    )
    step_s: float = number(1.0, above=0, means="seconds of a decoding step of one sequence")
    step_growth: float = number(0.0, least=0, means="growth of these seconds with each running sequence")
    prefill: float = number(
        0.0,
        least=0,
        means="steps per token that is encoded: prompts, messages of environments, and both after each load",
    )
    spread: float = number(
        0.0, least=0, means="standard deviation of the log of a factor on the steps per token"
    )
    shared: float = number(
        0.8, least=0, most=1, means="part of the spread that belongs to the prompt, not to the sample"
    )
    longest: float | None = number(
        None, least=1, means="largest factor, as a multiple of its median; null: no limit", remedy="20"
    )
    stretch: float = number(
        1.0,
        least=1,
        means="exponent: n of at most T tokens take T (n / T)^stretch steps, times the factor; "
        "1: n steps, 8: a tail of long responses that the policy can learn to avoid",
    )
    balance: float = number(
        1.0, above=0, means="seconds of an update, as a multiple of the ideal generation of its batch"
    )
    train_s: float | None = number(
        None, least=0, means="constant seconds of an update, instead of balance", remedy="10"
    )
    train_token_s: float = number(0.0, least=0, means="with train_s, further seconds per token of the batch")
    score_s: float = number(0.0, least=0, means="seconds from the end of a group until it is scored")
    sync_s: float = number(
        0.0, least=0, means="seconds from the end of training until the generators have the weights"
    )
    pause_s: float = number(0.0, least=0, means="seconds after a load in which no sequence advances")

    def seconds_of_step(self, running: int) -> float:
        """Return the seconds of a decoding step with `running` sequences."""
        return self.step_s * (1 + self.step_growth * running)

    def seconds_of_update(self, steps: float, tokens: int, slots: int) -> float:
        """Return the seconds of training on a batch.

        Args:
            steps: decoding steps of all sequences of the batch, summed.
            tokens: tokens of the batch.
            slots: sequences that are decoded at the same time.
        """
        if self.train_s is not None:
            return self.train_s + self.train_token_s * tokens
        return self.balance * steps * self.seconds_of_step(slots) / slots
