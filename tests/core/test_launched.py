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


def test_a_process_without_a_launcher_is_the_only_rank(launch):
    launch()
    assert (rank(), world_size(), local_rank(), local_world_size(), is_first_rank()) == (0, 1, 0, 1, True)


def test_a_launcher_numbers_the_ranks(launch):
    launch(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert (rank(), world_size(), local_rank(), local_world_size(), is_first_rank()) == (5, 8, 1, 4, False)


def test_local_world_size_is_world_size_unless_the_launcher_sets_it(launch):
    launch(WORLD_SIZE="4")
    assert local_world_size() == 4
    launch(WORLD_SIZE="4", LOCAL_SIZE="2")  # DeepSpeed's launcher
    assert local_world_size() == 2


def test_only_slurm_task_zero_is_first_rank_before_rank_variables_are_set(launch):
    launch(SLURM_PROCID="3")
    assert not is_first_rank() and rank() == 0
    launch(SLURM_PROCID="3", RANK="0")
    assert is_first_rank()


def test_ranks_without_the_address_of_the_first_rank_cannot_connect(launch):
    launch()
    assert missing_variables() == []
    launch(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_PORT="29500")
    assert missing_variables() == ["MASTER_ADDR"]
    launch(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert missing_variables() == []
