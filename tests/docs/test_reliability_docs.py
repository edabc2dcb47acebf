"""Tests that every fault in docs/reference/faults.md has a test and that the exit codes are correct."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "reference" / "faults.md").read_text()
COLUMNS = ["fault", "reaction", "repeated work", "exit code"]

# Faults, as written on the page, each with the names of its tests.
FAULTS_AND_TESTS = """
`kill -9` of the trainer
    test_run_killed_after_a_checkpoint_resumes_with_identical_results
    test_a_killed_distillation_with_lag_resumes_with_identical_results
    test_a_killed_trainer_leaves_no_process_and_resumes_to_the_same_rows
    test_a_killed_distillation_with_lag_resumes_with_identical_results
`kill -9` while a checkpoint is written
    test_run_killed_in_a_checkpoint_resumes_from_the_previous_checkpoint
`kill -9` while weights are sent to the generator
    test_run_killed_in_a_weight_transfer_resumes_with_identical_results
    test_a_process_ends_with_its_trainer_and_leaves_no_files
`kill -9` of `rlhf.pipeline`
    test_chain_killed_in_every_stage_resumes_and_ends_like_an_uninterrupted_run
`kill -9` or SIGTERM of `rlhf.relabel`
    test_interrupted_relabelling_resumes_and_gives_identical_pairs
SIGTERM, SIGUSR1 or SIGUSR2 during training
    test_sigterm_ends_the_command_with_a_checkpoint_and_exit_code_75
    test_resume_after_a_signal_equals_an_uninterrupted_run
signal while the trainer waits for the generator
    test_signal_during_a_wait_for_the_generator_interrupts_the_run
signal when an evaluation is due
    test_resume_after_ctrl_c_equals_an_uninterrupted_run
signal during an evaluation
    test_a_signal_ends_a_running_evaluation_which_the_next_session_repeats
signal after the last evaluation
    test_a_signal_after_the_last_evaluation_lets_the_run_finish
SIGTERM during a stage (SFT model, pairs, reward model)
    test_resume_after_a_signal_in_each_stage_equals_an_uninterrupted_run
second SIGTERM
    test_a_second_signal_ends_a_blocked_process_and_its_children_at_once
Ctrl-C
    test_ctrl_c_ends_trainer_and_worker_processes
    test_resume_after_ctrl_c_equals_an_uninterrupted_run
second Ctrl-C
    test_a_second_signal_ends_a_blocked_process_and_its_children_at_once
signal to the generator process
    test_the_generator_process_ignores_stop_signals
the program that reads the output, such as `head`, ends
    test_a_closed_pipe_does_not_end_the_process_and_train_log_is_complete
    test_a_closed_pipe_of_both_outputs_does_not_end_the_process
generator process killed
    test_a_worker_killed_in_the_middle_of_a_run_changes_no_row
    test_a_lost_job_is_repeated_with_the_same_version
    test_a_process_killed_while_idle_is_replaced_and_leaves_no_files
generator process killed while it loads weights
    test_a_lost_job_is_repeated_with_the_same_version
generator process hangs
    test_a_lost_job_is_repeated_with_the_same_version
generator process not ready within `generator.start_limit_s`
    test_a_lost_job_is_repeated_with_the_same_version
rank 0 or a generator takes longer than `backend.timeout_s`
    test_ranks_wait_for_a_busy_rank_longer_than_the_time_limit_of_a_collective
annotator process killed
    test_an_annotator_killed_in_the_middle_of_a_run_changes_no_row
the trainer is killed while a process starts, samples or answers
    test_a_process_ends_with_its_trainer_and_leaves_no_files
no complete answer within `scorer.timeout_s` seconds
    test_timeout_s_limits_the_whole_try
    test_a_timeout_is_retried_then_stops_the_run
endless or huge answer
    test_an_answer_is_read_up_to_a_limit
    test_a_huge_answer_stops_the_run_with_little_memory
`Retry-After` longer than `scorer.timeout_s`
    test_a_retry_after_above_timeout_s_stops_the_run_at_once
signal while scores of an update are awaited
    test_sigterm_while_scores_are_awaited_writes_a_checkpoint_and_the_run_resumes
signal while scores of an evaluation are awaited
    test_a_signal_while_an_evaluation_waits_for_a_service_leaves_the_evaluation_to_the_next_session
process lost more than `generator.restarts` times
    test_a_run_ends_if_the_generator_exceeds_its_restarts
    test_a_process_lost_too_often_stops_the_run
weights arrive damaged in the generator
    test_a_failed_weight_transfer_stops_the_run
`kill -9` of a rank
    test_killed_rank_ends_the_run_and_one_rank_resumes_it
a rank hangs
    test_hanging_rank_ends_the_run_after_backend_timeout
error in one rank
    test_error_of_one_rank_is_reported_with_its_rank
ZeRO checkpoint of another number of ranks
    test_a_divided_checkpoint_is_resumed_and_evaluated_by_another_number_of_ranks
a job of a sweep fails
    test_jobs_that_fail_are_listed_at_the_end_and_the_others_are_kept
    test_failed_job_is_listed_and_other_results_are_kept
a SLURM job of a sweep dies
    test_failed_and_killed_jobs_are_listed_and_other_results_are_kept
SIGTERM during a sweep
    test_signal_ends_a_sweep_and_the_remaining_jobs_are_not_started
time limit or preemption of a SLURM job
    test_job_at_its_time_limit_is_requeued_and_ends_like_an_uninterrupted_run
    test_preempted_job_resumes_and_ends_like_an_uninterrupted_run
    test_two_node_job_is_stopped_requeued_and_ends_like_an_uninterrupted_run
a SLURM job is cancelled
    test_restarted_sweep_finds_its_queued_job_and_ctrl_c_cancels_the_job
the terminal of a SLURM sweep is lost
    test_restarted_sweep_finds_its_queued_job_and_ctrl_c_cancels_the_job
the same command twice at once: `rlhf.train`, `rlhf.evaluate`, `rlhf.relabel`, `rlhf.extend` or `rlhf.pipeline`
    test_a_folder_in_use_is_refused_and_the_message_names_the_process
    test_a_second_run_in_the_folder_of_an_active_run_is_refused
    test_the_same_evaluation_twice
    test_the_same_relabelling_twice
    test_the_same_extension_twice
    test_the_same_pipeline_twice
the same sweep twice at once
    test_the_same_sweep_twice
two runs need the same missing model or pairs
    test_two_runs_that_need_the_same_missing_models
run folder deleted during the run
    test_a_run_whose_folder_is_deleted_stops_with_one_sentence
`config.yaml` is damaged
    test_a_damaged_config_is_written_again_only_if_the_name_of_the_folder_identifies_the_run
`metrics.jsonl` or `completions.jsonl` is removed, truncated or altered between two sessions
    test_damaged_rows_before_the_checkpoint_are_restored_with_one_message
    test_damaged_metrics_and_a_deleted_model_are_restored_by_a_resume
    test_rows_lost_before_the_checkpoint_are_restored_by_a_resume
`metrics.jsonl` or `completions.jsonl` is removed, truncated or altered during the run
    test_rows_that_are_damaged_during_the_run_are_restored_at_the_next_checkpoint
    test_rows_are_restored_at_the_end_of_the_run
    test_rows_lost_during_the_run_are_restored
rows before a checkpoint of an earlier version are lost
    test_rows_without_a_copy_are_reported_as_lost
    test_rows_without_a_copy_are_reported_as_lost_in_the_state_and_in_the_report
a folder is in place of a file of the run
    test_a_damaged_file_is_named_with_a_remedy_and_unrelated_files_are_ignored
    test_a_file_of_the_run_that_becomes_a_folder_stops_the_run_without_a_traceback
`trainer_state.json` is damaged, or has no result although the run is finished
    test_a_damaged_file_is_named_with_a_remedy_and_unrelated_files_are_ignored
the model of a finished stage (SFT model, reward model) is missing or damaged
    test_a_model_of_a_stage_that_is_missing_is_named_with_the_remedy
files and folders that no run wrote, such as `checkpoint-foo`, `checkpoint-3-copy` or `.tmp-checkpoint-3`
    test_unfinished_files_of_the_run_are_removed_and_those_of_another_process_are_kept
    test_an_older_checkpoint_is_removed_although_a_file_has_its_scratch_name
    test_a_damaged_file_is_named_with_a_remedy_and_unrelated_files_are_ignored
`model/` of a finished run is missing or damaged
    test_the_message_about_a_finished_run_names_the_model_or_how_to_write_it_again
    test_damaged_metrics_and_a_deleted_model_are_restored_by_a_resume
output folder cannot be written
    test_a_file_in_place_of_a_folder_is_refused_unless_the_run_is_only_evaluated
no room for the model or a checkpoint at the start
    test_a_disk_without_room_for_model_or_checkpoint_gives_a_warning
disk full while a checkpoint is written
    test_checkpoint_without_disk_space_is_skipped_with_a_warning
    test_disk_that_fills_up_skips_checkpoints_and_then_fails_at_the_model
    test_a_full_disk_gives_a_warning_and_the_last_checkpoint_is_kept
disk full while the final model is written
    test_full_disk_at_the_final_model_is_an_error_that_names_the_last_checkpoint
    test_disk_that_fills_up_skips_checkpoints_and_then_fails_at_the_model
disk full while metrics or another file is written
    test_full_disk_at_a_metrics_row_is_an_error_that_names_the_file
disk full below a file with the terminal's output
    test_a_full_disk_below_stdout_does_not_end_the_process
a checkpoint file is truncated or altered
    test_damaged_checkpoint_is_skipped
    test_a_damaged_file_is_detected_and_named
all checkpoints are damaged
    test_run_restarts_if_all_checkpoints_are_damaged_unless_resume_is_must
a new checkpoint is incomplete after writing
    test_the_old_checkpoint_is_kept_if_the_new_checkpoint_is_damaged
loss or gradient norm is NaN or infinite
    test_non_finite_loss_stops_the_run_and_names_the_last_checkpoint
other settings in the same folder
    test_other_settings_are_refused
other training examples
    test_other_data_are_refused_before_a_model_is_loaded
other versions of torch, transformers or vLLM
    test_other_library_versions_give_a_warning
"""  # noqa: E501
TESTS = {
    fault: names.split() for fault, names in re.findall(r"^(\S.*)\n((?: +\w+\n)*)", FAULTS_AND_TESTS, re.M)
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


FAULTS = DOCS.partition("## Faults\n")[2].partition("\n## ")[0]
LINES = [line for line in FAULTS.splitlines() if line.startswith("|")]
TABLES = [cells(line) for line in LINES if not line.startswith("|---")]
ROWS = [row for row in TABLES if row[0] != "fault"]


def names_in(*files: Path) -> set[str]:
    """Return the names of the tests in files."""
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}


def test_each_table_has_its_columns():
    heads = [row for row in TABLES if row[0] == "fault"]
    assert len(heads) > 5 and all(head == COLUMNS for head in heads) and len(ROWS) > 20
    assert all(len(row) == len(COLUMNS) and all(row) for row in ROWS)


def test_each_fault_of_the_page_has_tests():
    assert sorted(row[0] for row in ROWS) == sorted(TESTS)


def test_the_tests_of_each_fault_exist():
    found = names_in(*(ROOT / "tests").rglob("test_*.py"))
    assert {fault: names for fault, names in TESTS.items() if not names or not {*names} <= found} == {}


def test_each_test_of_test_survival_belongs_to_a_fault():
    assert names_in(ROOT / "tests" / "end_to_end" / "test_survival.py") <= {*sum(TESTS.values(), [])}


def test_exit_codes_are_those_of_the_command():
    from rlhf import train

    named = set(re.findall(r"\d+", train.__doc__.partition("Exit codes:")[2]))
    killed = {"137"}  # the exit code that a shell reports after kill -9
    assert {code for row in ROWS for code in re.findall(r"\d+", row[3])} <= named | killed
