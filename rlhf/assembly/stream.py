"""Construction of the stream of rollouts: in the time of this machine, or in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.assembly.training import training_sampling
from rlhf.config.clock import VirtualConfig
from rlhf.config.schedule import Dropped, Unit
from rlhf.core.batch import Rollouts
from rlhf.training.checkpoint import unpack
from rlhf.training.rules import Rules
from rlhf.training.stream import Stream
from rlhf.training.virtual import VirtualStream

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.training.loop import Parts


def build_stream(cfg: Config, parts: Parts, state: TrainState, saved: Any = None) -> Stream | VirtualStream:
    """Return the rollouts of all remaining updates.

    Args:
        cfg: the config of the run.
        parts: the parts of the run.
        state: the counters of the run.
        saved: the state of the stream in a checkpoint; None: the run begins.
    """
    if cfg.clock.virtual:
        return _virtual(cfg, parts, state, saved)
    in_flight: list[Rollouts] = [unpack(packed) for packed in saved or []]
    first = state.update + len(in_flight)
    return Stream(
        parts.generator,
        itertools.islice(parts.prompts, state.num_updates - first),
        replace(training_sampling(cfg), request=first),
        cfg.schedule.max_lag,
        parts.recorder.timer,
        in_flight,
        parts.phases,
    )


def _virtual(cfg: Config, parts: Parts, state: TrainState, saved: Any) -> VirtualStream:
    assert isinstance(cfg.clock, VirtualConfig)
    schedule, sampling = cfg.schedule, training_sampling(cfg)
    rules = Rules(
        order=schedule.order,
        batch=schedule.prompts_per_update,
        samples=sampling.samples,
        max_lag=schedule.max_lag,
        max_age=schedule.max_age,
        stale=schedule.stale,
        total=state.num_updates * schedule.prompts_per_update,
    )
    stream = VirtualStream(
        parts.generator.parts(),
        parts.prompts,
        sampling,
        rules,
        cfg.clock,
        parts.recorder,
        updates=state.num_updates,
        seed=cfg.seed,
        in_flight=schedule.in_flight,
        whole=schedule.unit is Unit.group,
        again=schedule.dropped is Dropped.again,
        phases=parts.phases,
    )
    if saved is not None:
        stream.load_state_dict(saved)
    return stream
