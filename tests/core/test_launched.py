"""The rank of a process and the number of ranks, read from the environment variables of the launcher."""

import pytest

from rlhf.core.launched import (
    is_first_rank,
    local_rank,
    local_world_size,
    missing_variables,
    rank,
    world_size,
)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_PROCID")
MASTER = ("MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launch(monkeypatch):
    def launch(**variables):
        for name in (*VARIABLES, *MASTER):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 1, True)),  # no launcher
        ({"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}, (5, 8, 1, 4, False)),
        ({"WORLD_SIZE": 4}, (0, 4, 0, 4, True)),  # all ranks are here unless the launcher says otherwise
        ({"WORLD_SIZE": 4, "LOCAL_SIZE": 2}, (0, 4, 0, 2, True)),  # DeepSpeed's launcher
        ({"SLURM_PROCID": 3}, (0, 1, 0, 1, False)),  # before the variables of the rank are set
        ({"SLURM_PROCID": 3, "RANK": 0}, (0, 1, 0, 1, True)),
    ],
)
def test_rank_and_numbers_of_ranks_are_those_of_the_launcher(launch, variables, expected):
    launch(**{name: str(value) for name, value in variables.items()})
    assert (rank(), world_size(), local_rank(), local_world_size(), is_first_rank()) == expected


def test_ranks_without_the_address_of_the_first_rank_cannot_connect(launch):
    launch()
    assert missing_variables() == []
    launch(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_PORT="29500")
    assert missing_variables() == ["MASTER_ADDR"]
    launch(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert missing_variables() == []
