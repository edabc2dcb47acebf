"""The training that usually follows a supervised run, with its model: a reward model, DPO or RL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf.checks.check import problems
from rlhf.config.algo import Trains
from rlhf.config.compose import compose
from rlhf.config.mistakes import CONFIG_ERRORS
from rlhf.config.reproduction import options, settings
from rlhf.core.formatting import short_path
from rlhf.core.pasting import override

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.runs.folder import RunFolder

# Settings that all stages share: data, models, judge, device, and the length of responses.
_SHARED = re.compile(r"\+?(schema/\w+@)?(task|model|scorer@gold|gold|backend|generator\.response_length)\b")
_OF_A_STAGE = ("model.base", "model.policy", "model.reward", "model.reference")
_REWARD_FUNCTION = "<file>.py:<function>"


def next_stage(cfg: Config, folder: RunFolder, start: str | None) -> dict[str, Any] | None:
    """Return the overrides of the training that follows the run `cfg`, by key; None: none is known.

    | after | data | next stage |
    |---|---|---|
    | SFT | answers that a program checks | GRPO |
    | SFT | generated posts | online DPO, which makes pairs and a reward model first |
    | SFT | preference pairs | reward model |
    | SFT | other prompts | RLOO with a reward function that the user names |
    | reward model | preference pairs | online DPO with the reward model |

    Args:
        cfg: the config of the run, before the run made models that the config does not name.
        folder: the run folder, with the final model.
        start: the model that the run started from.
    """
    if not cfg.algo.supervised or (found := settings(cfg)) is None:
        return None
    defaults = dict(options(compose([override(key, found[key]) for key in ("algo", "task")])))
    shared = {
        key: value
        for key, value in found.items()
        if _SHARED.match(key) and key not in _OF_A_STAGE and (key == "task" or value != defaults.get(key))
    }
    read_by_rl = [key for key, *_ in cfg.task.needs(pairs=False, evaluates=True)]
    for stage in candidates(cfg, short_path(folder.model), start):
        if stage["algo"] != "reward" and "task.preferences_path" not in read_by_rl:
            shared.pop("task.preferences_path", None)
        overrides = {"algo": stage.pop("algo"), **shared, **stage}
        if _REWARD_FUNCTION in stage.values() or valid(overrides):
            return overrides
    return None


def candidates(cfg: Config, model: str, start: str | None) -> Iterator[dict[str, Any]]:
    """Yield overrides of stages after the run `cfg`, the best first.

    Args:
        cfg: the config of the run.
        model: the folder of the final model.
        start: the model that the run started from.
    """
    if cfg.algo.trains is Trains.reward:
        yield {"algo": "dpo", "model.policy": start, "model.reward": model}
        return
    if cfg.gold.verifies:
        yield {"algo": "grpo", "model.policy": model}
    if cfg.task.embedded:
        yield {"algo": "dpo", "model.policy": model}
    yield {"algo": "reward", "model.policy": model}
    yield {"algo": "rloo", "model.policy": model, "scorer": "function", "scorer.path": _REWARD_FUNCTION}


def valid(overrides: dict[str, Any]) -> bool:
    """Return whether overrides compose to a config without problems."""
    try:
        return not problems(compose([override(key, value) for key, value in overrides.items()]))
    except CONFIG_ERRORS:
        return False
