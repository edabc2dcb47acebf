"""Settings of `hydra/sweeper=search`, a search for the best values of keys with Optuna."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from rlhf.config.schema import Choice, Section, entry, number

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
    n_trials: int = number(20, least=1, means="trials of the whole study, over all sessions")
    n_jobs: int = number(1, least=1, means="trials in parallel, with a launcher that runs jobs in parallel")
    direction: Direction | None = entry(None, means="null: the direction in which objective_metric is better")
    sampler: Sampler = Sampler.tpe
    seed: int = number(1, least=0, means="seed of the sampler")
    warmup_trials: int = number(
        4, least=0, means="finished trials before results guide the sampler and the pruner"
    )
    pruner: Pruner = Pruner.median
    warmup: float = number(
        0.2, least=0, most=1, means="part of a run's updates before which the run is not pruned"
    )
    max_failure_rate: float = number(
        1.0, least=0, most=1, means="largest share of failed trials among those that run in parallel"
    )
    storage: str | None = entry(
        None, means="file of the study, or URL of a database; null: <output_dir>/.search/"
    )
    study_name: str | None = entry(None, means="null: derived from the settings of the search")
    params: dict[str, str] | None = entry(None, means="search space of a recipe, as in the basic sweeper")


ConfigStore.instance().store(group="hydra/sweeper", name="search_schema", node=SearchConfig)
