"""docs/reliability.md: every fault of the page has a test, and its exit codes are those of the command."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "reliability.md").read_text()
COLUMNS = ["fault", "reaction", "repeated work", "exit code"]

ASYNC = "end_to_end/test_async.py"
BACKENDS = "end_to_end/test_backends.py"
CHECKPOINT = "training/test_checkpoint.py"
JOBS = "commands/test_jobs.py"
PIPELINE = "end_to_end/test_pipeline.py"
RANKS = "end_to_end/test_ranks.py"
RELABEL = "end_to_end/test_relabel.py"
RUN = "end_to_end/test_run.py"
SIGNALS = "processes/test_signals.py"
SLURM = "end_to_end/test_slurm.py"
SURVIVAL = "end_to_end/test_survival.py"
SWEEPS = "end_to_end/test_sweeps.py"
SWEEP_COMMANDS = "commands/test_sweeps.py"
WORKER = "processes/test_worker.py"

TESTS: dict[str, dict[str, list[str]]] = {  # fault, as on the page -> its tests by file
    "`kill -9` of the trainer": {
        SURVIVAL: ["test_killed_in_the_middle_of_a_run", "test_killed_at_random_moments"],
        ASYNC: ["test_a_killed_trainer_leaves_no_process_and_goes_on_to_the_same_rows"],
    },
    "`kill -9` while a checkpoint is written": {SURVIVAL: ["test_killed_in_the_middle_of_a_checkpoint"]},
    "`kill -9` while weights are sent to the generator": {
        SURVIVAL: ["test_killed_in_the_middle_of_a_weight_transfer"],
        WORKER: ["test_a_process_ends_with_its_trainer_and_leaves_nothing"],
    },
    "`kill -9` of `rlhf.pipeline`": {
        PIPELINE: ["test_killed_in_every_stage_it_goes_on_and_ends_as_it_would_have"]
    },
    "`kill -9` or SIGTERM of `rlhf.relabel`": {
        RELABEL: ["test_what_was_interrupted_goes_on_and_ends_the_same"]
    },
    "SIGTERM during training": {
        SURVIVAL: [
            "test_sigterm_ends_the_command_with_a_checkpoint_and_75",
            "test_interrupted_and_gone_on_with_equals_uninterrupted",
        ]
    },
    "SIGUSR1 or SIGUSR2 during training": {
        SURVIVAL: ["test_interrupted_and_gone_on_with_equals_uninterrupted"]
    },
    "signal while the trainer waits for the generator": {
        SURVIVAL: ["test_interrupted_while_the_generator_is_waited_for"]
    },
    "signal after the last update": {SURVIVAL: ["test_a_signal_after_the_last_update_lets_the_run_finish"]},
    "SIGTERM during a stage (SFT model, pairs, reward model)": {
        SURVIVAL: ["test_interrupted_in_each_stage_made_on_the_way"]
    },
    "second SIGTERM": {SIGNALS: ["test_a_second_sigterm_ends_the_process_at_once_whatever_it_is_doing"]},
    "Ctrl-C": {ASYNC: ["test_ctrl_c_ends_trainer_and_worker"]},
    "signal to the generator process": {ASYNC: ["test_signals_to_stop_are_the_trainers_to_obey"]},
    "generator process killed": {
        ASYNC: ["test_a_worker_killed_in_the_middle_of_a_run_changes_no_row"],
        WORKER: [
            "test_a_lost_request_is_sampled_again_by_the_same_version",
            "test_a_process_killed_while_it_waits_is_replaced",
        ],
    },
    "generator process killed while it loads weights": {
        WORKER: ["test_a_process_lost_while_it_takes_weights_takes_them_again"]
    },
    "generator process hangs": {WORKER: ["test_a_lost_request_is_sampled_again_by_the_same_version"]},
    "annotator process killed": {ASYNC: ["test_an_annotator_killed_in_the_middle_of_a_run_changes_no_row"]},
    "process lost more than `generator.restarts` times": {
        ASYNC: ["test_a_worker_that_cannot_be_replaced_ends_the_run"],
        WORKER: ["test_a_process_lost_too_often_stops_the_run"],
    },
    "weights arrive damaged in the generator": {WORKER: ["test_weights_that_did_not_arrive_stop_the_run"]},
    "`kill -9` of a rank": {RANKS: ["test_a_rank_that_is_killed_ends_the_run_and_fewer_ranks_can_go_on"]},
    "a rank hangs": {RANKS: ["test_a_rank_that_hangs_ends_the_run_when_the_others_have_waited"]},
    "error in one rank": {RANKS: ["test_an_error_of_one_rank_is_told"]},
    "ZeRO checkpoint of another number of ranks": {
        BACKENDS: ["test_a_divided_checkpoint_is_refused_to_other_ranks_before_anything_is_loaded"]
    },
    "a job of a sweep fails": {
        SWEEP_COMMANDS: ["test_jobs_that_fail_are_listed_at_the_end_and_the_others_are_kept"],
        SWEEPS: ["test_what_fails_is_listed_and_the_others_are_kept"],
    },
    "a SLURM job of a sweep dies": {
        SLURM: ["test_a_job_that_fails_or_dies_is_listed_and_the_others_are_kept"]
    },
    "SIGTERM during a sweep": {
        JOBS: ["test_a_signal_ends_a_sweep_and_the_jobs_that_are_left_are_not_started"]
    },
    "time limit or preemption of a SLURM job": {
        SLURM: [
            "test_a_job_that_hits_its_time_limit_is_requeued_and_ends_as_undisturbed",
            "test_a_job_that_is_preempted_goes_on_later",
            "test_a_job_of_two_nodes_is_stopped_requeued_and_ends_as_undisturbed",
        ]
    },
    "a SLURM job is cancelled": {
        SLURM: ["test_a_sweep_that_lost_its_terminal_finds_its_jobs_and_ctrl_c_cancels_them"]
    },
    "the terminal of a SLURM sweep is lost": {
        SLURM: ["test_a_sweep_that_lost_its_terminal_finds_its_jobs_and_ctrl_c_cancels_them"]
    },
    "disk full while a checkpoint is written": {
        SURVIVAL: [
            "test_a_checkpoint_without_room_costs_nothing_but_itself",
            "test_a_disk_that_fills_up_costs_checkpoints_and_then_the_model",
        ],
        CHECKPOINT: ["test_a_checkpoint_without_room_is_a_warning_and_the_last_one_stays"],
    },
    "disk full while the final model is written": {
        SURVIVAL: [
            "test_a_model_without_room_is_an_error_that_names_the_last_checkpoint",
            "test_a_disk_that_fills_up_costs_checkpoints_and_then_the_model",
        ]
    },
    "disk full while metrics or another file is written": {
        SURVIVAL: [
            "test_a_row_without_room_is_an_error_that_names_the_file",
            "test_a_disk_that_is_full_ends_the_run_without_a_traceback",
        ]
    },
    "a checkpoint file is truncated": {
        SURVIVAL: ["test_a_damaged_checkpoint_is_passed_over"],
        CHECKPOINT: ["test_a_file_that_is_not_as_it_was_written_is_noticed_and_named"],
    },
    "a checkpoint file is altered": {SURVIVAL: ["test_a_damaged_checkpoint_is_passed_over"]},
    "all checkpoints are damaged": {
        SURVIVAL: ["test_where_every_checkpoint_is_damaged_the_run_starts_again_unless_it_must_go_on"]
    },
    "a new checkpoint is incomplete after writing": {
        CHECKPOINT: ["test_an_older_checkpoint_is_kept_until_the_new_one_is_as_it_was_written"]
    },
    "loss or gradient norm is NaN or infinite": {
        RUN: ["test_a_loss_that_is_not_finite_stops_the_run_and_names_what_is_needed_to_go_on"]
    },
    "other settings in the same folder": {SURVIVAL: ["test_other_settings_are_refused"]},
    "other training examples": {SURVIVAL: ["test_other_data_are_refused_before_a_model_is_loaded"]},
    "other versions of torch, transformers or vLLM": {SURVIVAL: ["test_other_libraries_are_warned_of"]},
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


LINES = [line for line in DOCS.partition("## Faults\n")[2].splitlines() if line.startswith("|")]
TABLES = [cells(line) for line in LINES if not line.startswith("|---")]
ROWS = [row for row in TABLES if row[0] != "fault"]


def names_in(file: str) -> set[str]:
    """The names of a file's tests; none if there is no such file."""
    path = ROOT / "tests" / file
    body = ast.parse(path.read_text()).body if path.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_each_table_has_its_columns():
    heads = [row for row in TABLES if row[0] == "fault"]
    assert len(heads) > 5 and all(head == COLUMNS for head in heads) and len(ROWS) > 20
    assert all(len(row) == len(COLUMNS) and all(row) for row in ROWS)


def test_each_fault_of_the_page_has_tests():
    assert sorted(row[0] for row in ROWS) == sorted(TESTS)


@pytest.mark.parametrize("fault", TESTS)
def test_the_tests_of_a_fault_exist(fault):
    assert TESTS[fault]
    for file, names in TESTS[fault].items():
        assert names and set(names) <= names_in(file), f"{file} has not all of {names}"


def test_each_test_of_survival_belongs_to_a_fault():
    named = {name for tests in TESTS.values() for name in tests.get(SURVIVAL, [])}
    assert names_in(SURVIVAL) == named


def test_exit_codes_are_those_that_the_command_names():
    from rlhf import train

    named = set(re.findall(r"\d+", train.__doc__.partition("Exit codes:")[2]))
    killed = {"137"}  # the shell's for kill -9
    assert {code for row in ROWS for code in re.findall(r"\d+", row[3])} <= named | killed
