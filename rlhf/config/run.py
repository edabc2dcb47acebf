"""Sections of a run: schedule, optimizer, evaluation, clock, resuming, loggers, searches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from rlhf.config.schema import Affects, Choice, Section, entry, missing_package, number, option
from rlhf.core.formatting import hide
from rlhf.core.machine import refusal

# Sections of the schedule, the optimizer and evaluation during training.
#
# A new key is one field: `entry` and `number` (`rlhf.config.schema`) declare its meaning, default and bounds,
# and whether it is part of the name of a run.


MOST_EPISODES = 10**9
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
    lr: float = number(MISSING, "learning rate", above=0, remedy="3e-06")
    schedule: LRSchedule = LRSchedule.linear
    warmup: float = number(0.0, least=0, counts="optimizer steps")
    """optimizer steps of warm-up, w; below 1: a fraction of the run; step t, from 0, has (t + 1) / (w + 1) of
    the learning rate"""
    max_grad_norm: float | None = number(1.0, above=0)
    """gradients are scaled down to this norm; ppo: one norm over policy and value model; null: no clipping"""
    momentum: float = number(0.95, when="optimizer=muon", least=0, below=1, added=True)
    """decay rate of the momentum of Muon"""
    eps: float = number(1e-8, above=0)
    """epsilon in the denominator of Adam, also for ppo (Huang et al., arXiv 2403.17031: 1e-5)"""
    betas: tuple[float, float] = entry((0.9, 0.999), "decay rates of Adam's moments")
    weight_decay: float = number(0.0, least=0)
    """decay of all trained weights towards zero, also of biases, norms and embeddings"""
    ess_scaling: ESSScaling = entry(ESSScaling.none, added=True)
    """lower the learning rate of a step whose samples are stale (VCPO), by their effective sample size (ESS)
"""
    ess_on_policy: float = number(1.0, when="ess_scaling!=none", above=0, most=1, added=True)
    """ESS of on-policy samples as a fraction of their number"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if `betas` are not two numbers in [0, 1)."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            reason = "decay rates of the gradient and of its square"
            yield self.refused(at, "betas", "be two numbers >= 0 and < 1", reason)


@dataclass(kw_only=True, slots=True)
class ScheduleConfig(Section):
    """How long a run is, how large its batches are, and how far off-policy it may be."""

    total_episodes: int | None = number(None, least=1, most=MOST_EPISODES, remedy="12800")
    """responses of the whole run"""
    total_epochs: float | None = number(
        None,
        "passes over the data, instead of total_episodes; with task=local or task=preferences and both "
        f"null: {DEFAULT_EPOCHS}",
        above=0,
        remedy="1",
    )
    prompts_per_update: int = number(MISSING, "N, prompts of one update over all ranks", least=1, remedy="64")
    minibatches: int = number(1, "optimizer steps in one pass over a rollout batch", least=1)
    epochs: int = number(1, "passes over a rollout batch", least=1)
    max_lag: int = number(0, least=0)
    """later rollout batches in flight while a batch is trained on; 0: synchronous"""
    update: Update = entry(Update.between, "when the generator loads new weights")
    order: Order = entry(Order.fifo, "which groups are trained next", added=True)
    max_age: int | None = number(None, least=1, remedy="8", added=True)
    """largest age of a trained group, in updates, with order=completed; null: no bound"""
    stale: Stale = entry(Stale.wait, "what happens to a group at max_age", "max_age!=null", added=True)
    unit: Unit = entry(Unit.group, "what starts together when slots are free", added=True)
    dropped: Dropped = entry(Dropped.again, "the prompt of a discarded group", "stale=drop", added=True)
    refill: int = number(0, least=0, added=True)
    """most groups without signal (equal scores) that groups of other prompts replace for an update, in
    multiples of N; 0: none"""
    replay: int = number(1, least=1, added=True)
    """last rollout batches from which the prompts of an update are drawn; 1: only the new batch"""
    solved_at: float | None = number(None, remedy="0.9", added=True)
    """mean score of a prompt's samples from which on later epochs leave the prompt out; null: none is left
    out"""
    pass_rate: float | None = number(None, least=0, most=1, remedy="0.5", added=True)
    """later epochs begin with the prompts whose last mean score is nearest to this; null: their order is
    random"""
    eval_every: float = number(0.2, least=0, counts="updates")
    """updates between evaluations, besides those before and after training; below 1: a fraction of the run;
    more than the run has: only before and after; 0: none at all"""
    save_every: float = number(0.25, least=0, counts="updates", affects=Affects.nothing)
    """updates between checkpoints; below 1: a fraction of the run; 0: never"""
    log_every: float = number(1, least=0, counts="updates", affects=Affects.nothing)
    """updates between training rows; below 1: a fraction of the run; 0: never"""

    @property
    def in_flight(self) -> bool:
        """Whether a generator may load new weights during a request."""
        return self.update is Update.in_flight

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if `max_lag` is above `max_age`."""
        if self.max_age is not None and self.max_age < self.max_lag:
            reason = "groups start up to that many updates ahead"
            yield self.refused(at, "max_age", f"be >= {at}.max_lag={self.max_lag}", reason, self.max_lag)


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation during training."""

    prompts: int = number(256, "held-out prompts or pairs of an evaluation", least=1)
    batch_size: int = number(256, least=1, affects=Affects.speed)
    """sequences decoded in parallel if the generator does not sample"""
    temperature: float = number(0.01, "sampling temperature; the default is near-greedy", above=0)
    samples: int = number(3, least=0, affects=Affects.nothing)
    """completions in the terminal after the last evaluation; 0: none"""

    attempts: int = number(0, least=0, added=True)
    """further responses of each held-out prompt, at generator.temperature, for eval/pass_at_<k> with k = 1,
    2, 4, ... up to attempts, where answers are checked; 0: none"""

    best_of: int = number(0, least=0, added=True)
    """responses of each held-out prompt, at generator.temperature, before training: best_of.jsonl has the
    best of 1, 2, 4, ... of them by the scorer; 0: none"""

    @property
    def passes(self) -> dict[str, int]:
        """The number k of each metric `pass_at_<k>`: the powers of 2 up to `attempts`."""
        return {f"pass_at_{2**power}": 2**power for power in range(self.attempts.bit_length())}

    @property
    def asked(self) -> bool:
        """Whether `prompts` is not the default; a split with fewer prompts then deserves a warning."""
        return self.prompts != EvalConfig().prompts


# Sections of the clock (`clock=...`): whose time decides which weights sample which tokens.


@option("clock", "wall", part="rlhf.training.events:build")
class ClockConfig(Section):
    """The time of this machine: generators sample as fast as they can."""

    virtual: ClassVar[bool] = False  # True: generators and trainer work in virtual time

    name: str = entry("wall", added=True)


@option("clock", "virtual", part="rlhf.training.events:VirtualStream")
class VirtualConfig(ClockConfig):
    """The virtual time of a cluster that is simulated in this process, the same on every machine."""

    virtual: ClassVar[bool] = True

    slots: int | None = number(None, least=1, remedy="64")
    """sequences decoded at the same time; null: as many as can be in flight, N K (max_lag + 1)"""
    step_s: float = number(1.0, "seconds of a decoding step of one sequence", above=0)
    step_growth: float = number(0.0, "growth of these seconds with each running sequence", least=0)
    prefill: float = number(0.0, least=0)
    """steps per token that is encoded: prompts, messages of environments, and both after each load"""
    spread: float = number(0.0, "standard deviation of the log of a factor on the steps per token", least=0)
    shared: float = number(0.8, least=0, most=1)
    """part of the spread that belongs to the prompt, not to the sample"""
    longest: float | None = number(None, least=1, remedy="20")
    """largest factor, as a multiple of its median; null: no limit"""
    stretch: float = number(1.0, least=1)
    """exponent: n of at most T tokens take T (n / T)^stretch steps, times the factor; 1: n steps, 8: a tail
    of long responses that the policy can learn to avoid"""
    balance: float = number(1.0, above=0)
    """seconds of an update, as a multiple of the ideal generation of its batch"""
    train_s: float | None = number(None, least=0, remedy="10")
    """constant seconds of an update, instead of balance"""
    train_token_s: float = number(0.0, when="train_s!=null", least=0)
    """with train_s, further seconds per token of the batch"""
    score_s: float = number(0.0, "seconds from the end of a group until it is scored", least=0)
    sync_s: float = number(0.0, least=0)
    """seconds from the end of training until the generators have the weights"""
    pause_s: float = number(0.0, "seconds after a load in which no sequence advances", least=0)

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


# Settings of resuming, of the progress display and of prerequisite stages.


class Resume(Choice):
    """What to do with a run folder that exists."""

    auto = "auto", "resume from its last complete checkpoint"
    never = "never", "move the folder aside and start again"
    must = "must", "fail if there is no checkpoint to resume from"


class Progress(Choice):
    """The form of the progress display."""

    auto = "auto", "live in a terminal, else plain lines"
    live = "live"
    plain = "plain"
    off = "off"


@dataclass(kw_only=True, slots=True)
class StagesConfig(Section):
    """The stages that make prerequisites of a run: SFT model, preference pairs, reward model.

    A run of an embedded task makes the prerequisites that its config does not name. Runs of other tasks load
    models and data from the hub or, to try a recipe offline, use tiny stand-ins.
    """

    seed: int = entry(0, "seed of every stage; the run's own seed does not change the stages")
    sft: list[str] = entry(list, "overrides of the SFT stage, as on the command line")
    reward: list[str] = entry(list, "overrides of the reward-model stage")
    pairs: int = entry(4096, "prompts for which two responses are sampled")
    pairs_temperature: float = entry(0.7, "sampling temperature of the pairs")
    label_noise: float = number(0.0, least=0, most=1, added=True)
    """share of the training pairs whose two responses are exchanged"""
    members: int = number(1, "reward models, with different seeds: an ensemble", least=1, added=True)
    stand_ins: bool = entry(False, added=True)
    """tiny models and generated data, where a hub task names no model or folder"""


# Sections of the loggers. `logger=[wandb,mlflow]` turns on both; metrics.jsonl is always written.


class WandbMode(Choice):
    """Where Weights & Biases sends a run. `offline` writes to the run folder, for a later `wandb sync`."""

    online = "online"
    offline = "offline"


@dataclass(kw_only=True, slots=True)
class DashboardConfig(Section):
    """A logger that needs packages of its own."""

    modules: ClassVar[tuple[str, ...]]  # the modules that the logger imports

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for each package that is not installed; the extra has the name of the logger."""
        option = f"logger={self.modules[0]}"
        for module in self.modules:
            yield from missing_package(option, module, self.modules[0], otherwise=f"leave {option} out")


@option("logger", "wandb", part="rlhf.loggers.dashboards:WandbLogger")
class WandbConfig(DashboardConfig):
    """Weights & Biases."""

    modules: ClassVar[tuple[str, ...]] = ("wandb",)

    project: str = entry("rlhf", "project at W&B")
    entity: str | None = entry(None, "user or team at W&B; null: the default of the account")
    group: str | None = entry(None, "groups runs in the W&B interface")
    tags: list[str] | None = entry(None, "labels of the run at W&B")
    mode: WandbMode | None = entry(None)
    """null: the value of the variable WANDB_MODE, online if that is not set"""


@option("logger", "tensorboard", part="rlhf.loggers.dashboards:TensorboardLogger")
class TensorboardConfig(DashboardConfig):
    """TensorBoard event files in `tensorboard/` of the run folder."""

    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)

    flush_secs: int = entry(30, "seconds until buffered rows are written to disk")


@option("logger", "mlflow", part="rlhf.loggers.dashboards:MlflowLogger")
class MlflowConfig(DashboardConfig):
    """MLflow, in a local SQLite store or on a tracking server."""

    modules: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")

    experiment: str = entry("rlhf", "experiment at MLflow")
    uri: str | None = entry(None)
    """address of a tracking server or a database: http://<host>:<port> or sqlite:///<file>; null: the value
    of the variable MLFLOW_TRACKING_URI, mlflow/mlflow.db in output_dir if that is not set"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if MLflow would write files without a database."""
        scheme, separator, _ = (self.uri or "databricks").partition("://")
        if not scheme.startswith("databricks") and (not separator or scheme == "file"):
            rule = "be the address of a tracking server or a database"
            reason = "MLflow does not maintain its store of files"
            yield self.refused(at, "uri", rule, reason, "sqlite:///mlflow.db")

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if the tracking server accepts no connections."""
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        key = f"{at}.uri" if self.uri else "MLFLOW_TRACKING_URI"
        if uri.startswith(("http://", "https://")) and (reason := refusal(uri)):
            yield (
                f"{key} must be the address of a server that accepts connections ({reason}), got "
                f"{hide(uri)}; start the server, correct the address, or leave logger=mlflow out"
            )


@option("logger", "trackio", part="rlhf.loggers.dashboards:TrackioLogger")
class TrackioConfig(DashboardConfig):
    """Trackio, in a local store."""

    modules: ClassVar[tuple[str, ...]] = ("trackio",)

    project: str = entry("rlhf", "project at trackio")
    dir: str | None = entry(None)
    """folder of the store; null: the value of the variable TRACKIO_DIR, trackio/ in output_dir if that is not
    set"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if a variable selects a remote store."""
        for place in ("SPACE_ID", "SERVER_URL", "BUCKET_ID", "DATASET_ID"):
            if os.environ.get(variable := f"TRACKIO_{place}"):
                yield (
                    f"logger=trackio needs a local store (a resumed run reads its rows), got the variable "
                    f"{variable}; run: unset {variable}, and send the project afterwards with trackio sync"
                )


@option("logger", "jsonl")
class LoggersConfig(Section):
    """The loggers that a run uses in addition to metrics.jsonl; null turns a logger off."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    mlflow: MlflowConfig | None = None
    trackio: TrackioConfig | None = None


# Settings of `hydra/sweeper=search`, a search for the best values of keys with Optuna.


SEARCH_SWEEPER = "hydra_plugins.rlhf.SearchSweeper"  # Hydra accepts only sweepers of hydra_plugins


class Direction(Choice):
    """Whether a search maximises or minimises the metric."""

    maximize = "maximize"
    minimize = "minimize"


class Sampler(Choice):
    """The choice of the values of a trial: by the results of earlier trials, or at random."""

    tpe = "tpe"
    random = "random"


class Pruner(Choice):
    """The rule that stops a trial early."""

    median = "median", "its best evaluation is worse than the median of the finished trials at this point"
    none = "none"


@dataclass(kw_only=True, slots=True)
class SearchConfig(Section):
    """The settings of a search."""

    _target_: str = SEARCH_SWEEPER
    n_trials: int = number(20, "trials of the whole study, over all sessions", least=1)
    n_jobs: int = number(1, "trials in parallel, with a launcher that runs jobs in parallel", least=1)
    direction: Direction | None = entry(None, "null: the direction in which objective_metric is better")
    sampler: Sampler = Sampler.tpe
    seed: int = number(1, "seed of the sampler", least=0)
    warmup_trials: int = number(4, "finished trials before results guide the sampler and the pruner", least=0)
    pruner: Pruner = Pruner.median
    warmup: float = number(0.2, "part of a run's updates before which the run is not pruned", least=0, most=1)
    max_failure_rate: float = number(1.0, least=0, most=1)
    """largest share of failed trials among those that run in parallel"""
    storage: str | None = entry(None, "file of the study, or URL of a database; null: <output_dir>/.search/")
    study_name: str | None = entry(None, "null: derived from the settings of the search")
    params: dict[str, str] | None = entry(None, "search space of a recipe, as in the basic sweeper")


ConfigStore.instance().store(group="hydra/sweeper", name="search_schema", node=SearchConfig)
