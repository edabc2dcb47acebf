"""Settings of a run as a program: resuming, progress, loggers, searches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hydra.core.config_store import ConfigStore

from rlhf.config.schema import Choice, Section, entry, missing_package, number, option
from rlhf.core.formatting import hide
from rlhf.core.machine import refusal

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
        for module in self.modules:
            extra = self.modules[0]
            yield from missing_package(
                f"logger={extra}", module, extra, otherwise=f"leave logger={extra} out"
            )


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
