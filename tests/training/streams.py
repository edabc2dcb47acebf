"""What a stream is built from, without a training run."""

from types import SimpleNamespace

from rlhf.config.run import ScheduleConfig
from rlhf.core.metrics import Timer
from rlhf.core.state import TrainState
from rlhf.terminal.console import Phases
from rlhf.training.stream import StreamContext


def context(
    generator, prompts, sampling, lag, updates, *, update=0, batch=1, wall_s=0.0, schedule=None, **settings
):
    """Return the context of a stream whose next update is `update`; `settings` are further fields."""
    state = TrainState(num_updates=updates, update=update, wall_s=wall_s)
    recorder = SimpleNamespace(timer=Timer(), add=lambda metrics: None, groups=lambda lines: None)
    given = {"seed": 3, "pad_id": 0, "recorder": recorder, "phases": Phases()}
    return StreamContext(
        generator=generator,
        prompts=iter(prompts),
        sampling=sampling,
        schedule=ScheduleConfig(prompts_per_update=batch, max_lag=lag, **(schedule or {})),
        state=state,
        **given | settings,
    )
