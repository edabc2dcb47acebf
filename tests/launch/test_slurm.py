"""The rank variables of tasks that SLURM or the local executor of submitit starts."""

import os
import signal
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlhf.core.errors import Interrupted
from rlhf.launch.command_line import PORTS, name_rank, rank_environment, requeue

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
    assert int(port) in PORTS


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
    assert "WORLD_SIZE" not in os.environ
    monkeypatch.delenv("RANK")
    name_rank()
    assert os.environ["WORLD_SIZE"] == "7" and os.environ["MASTER_ADDR"] == "10.0.0.1"


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
def test_the_main_address_is_the_first_host_of_the_node_list(nodes, first):
    assert rank_environment({**STEP, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


@pytest.mark.parametrize(("shorthand", "counts"), [("2(x3),1", "2221"), ("8", "8")])
def test_the_tasks_of_each_node_are_parsed_from_the_slurm_notation(shorthand, counts):
    for node, count in enumerate(counts):
        step = {**STEP, "SLURM_STEP_TASKS_PER_NODE": shorthand, "SLURM_NODEID": str(node)}
        assert rank_environment(step)["LOCAL_WORLD_SIZE"] == count


@pytest.mark.parametrize(("answer", "requeued"), [("RUNNING None", True), ("COMPLETING None", False)])
def test_an_element_of_an_array_asks_slurm_about_itself_and_is_requeued_unless_cancelled(
    monkeypatch, answer, requeued
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # also the id of the array
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    answers = {"--jobs=7_3": answer, "--jobs=7": "PENDING BeginTime\nRUNNING None"}
    monkeypatch.setattr("subprocess.run", lambda words, **_: SimpleNamespace(stdout=f"{answers[words[2]]}\n"))
    called = []
    killed = ["bash", "-c", "kill -TERM $$; echo requeued"]  # as SLURM ends the command that requeues a job
    usual = signal.getsignal(signal.SIGTERM)

    def ask(*_):
        called.append(subprocess.Popen(killed, stdout=subprocess.PIPE).communicate()[0])

    before = signal.signal(signal.SIGUSR2, ask)
    try:
        with pytest.raises(SystemExit) if requeued else nullcontext():
            requeue(Interrupted("", signal.SIGUSR2))
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.signal(signal.SIGTERM, usual)
    assert called == [b"requeued\n"] * requeued
