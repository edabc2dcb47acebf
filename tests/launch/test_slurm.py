"""The rank variables of tasks that SLURM or the local executor of submitit starts."""

from signal import SIGUSR2
from subprocess import CompletedProcess

import pytest

from rlhf.core.errors import Interrupted
from rlhf.launch import command_line
from rlhf.launch.command_line import first_host, name_rank, rank_environment, tasks_of_node

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-04,09]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
LOCAL = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_JOB_ID": "99",
}


def test_a_slurm_task_gets_the_rank_variables_of_torchrun():
    made = rank_environment(STEP)
    port = made.pop("MASTER_PORT")
    assert made == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
    }
    assert int(port) in command_line.PORTS


def test_tasks_of_a_step_share_a_master_port_and_other_steps_use_other_ports():
    def port(**changes):
        return rank_environment({**STEP, **changes})["MASTER_PORT"]

    assert port(SLURM_PROCID="0", SLURM_NODEID="0") == port()
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="1235")}) == 3


def test_a_task_of_the_local_submitit_executor_gets_rank_variables():
    made = rank_environment(LOCAL)
    assert (made["RANK"], made["WORLD_SIZE"], made["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    assert made["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {**LOCAL, "SUBMITIT_LOCAL_NTASKS": "1"},
    ],
)
def test_a_single_task_or_a_batch_script_gets_no_rank_variables(environ):
    assert rank_environment(environ) == {}


def test_local_rank_is_zero_if_the_task_sees_only_one_gpu():
    assert rank_environment({**STEP, "CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "0"
    assert rank_environment({**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2"})["LOCAL_RANK"] == "1"


def test_variables_set_by_the_user_or_by_torchrun_are_not_overwritten(monkeypatch):
    # setenv and delenv also make monkeypatch remove the variables that name_rank sets.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("RANK", "0")
    name_rank()
    assert "WORLD_SIZE" not in command_line.os.environ
    monkeypatch.delenv("RANK")
    name_rank()
    assert (
        command_line.os.environ["WORLD_SIZE"] == "7" and command_line.os.environ["MASTER_ADDR"] == "10.0.0.1"
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[03-04,09],login", "gpu03"),
        ("rack[1-2]node[08-10,12]", "rack1node08"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("gpu[5,7].site.org", "gpu5.site.org"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_is_parsed(nodes, first):
    assert first_host(nodes) == first


def test_the_tasks_of_each_node_are_parsed_from_the_slurm_notation():
    assert [tasks_of_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    assert tasks_of_node("8", 0) == 8


def test_an_element_of_an_array_asks_slurm_about_itself(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # also the id of the array
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    states = {"--jobs=7_3": "RUNNING None\n", "--jobs=7": "PENDING BeginTime\nRUNNING None\n"}
    answer = lambda words, **_: CompletedProcess(words, 0, states[words[2]])  # noqa: E731
    monkeypatch.setattr(command_line.subprocess, "run", answer)
    assert command_line._was_preempted(Interrupted("", SIGUSR2))
