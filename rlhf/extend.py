"""Command `python -m rlhf.extend run=<folder> schedule.total_episodes=<n>`: train a run longer.

    python -m rlhf.extend run=<folder> schedule.total_episodes=<n> [key=value ...]

A finished or interrupted run continues in its folder, from its last valid checkpoint, until its new length
(`schedule.total_epochs=<n>` if the length of the run is set in epochs). Only the length can change, and
settings that do not change results, such as `progress`. Without a length, an unfinished run is resumed.

The exit codes are the exit codes of `rlhf.train`.
"""

from __future__ import annotations

from rlhf.experiment import Experiment
from rlhf.launch.command_line import Command

COMMAND = Command(
    name="rlhf.extend",
    usage="run=<folder> schedule.total_episodes=<n> [key=value ...]",
    does=(
        "Trains a finished or interrupted run longer, in the same folder, from its last\n"
        "checkpoint, until schedule.total_episodes (or schedule.total_epochs, if the run\n"
        "has this unit). All other settings that change results stay the same. The\n"
        "learning-rate schedule is the schedule of the new length. Without a length, an\n"
        "unfinished run is resumed."
    ),
    own={"run": "run folder"},
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(_command)


def _command(own: dict[str, str], overrides: list[str]) -> None:
    """Extend a run.

    Args:
        own: the command's own arguments, by name.
        overrides: the new length of the run, and other settings.

    Raises:
        UserError: the run does not exist or has no checkpoint, or an override is not allowed.
    """
    Experiment.open(COMMAND.required(own, "run", overrides)).extend(*overrides)


if __name__ == "__main__":
    main()
