"""The section of task=reasoning_gym: what is refused before anything is loaded."""

import pytest


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["task.dataset=chain_sums"], "got chain_sums; set task.dataset=chain_sum"),
        (["+task.arguments.terms=2"], "must be arguments of chain_sum (allow_negation, max_digits, "),
        (["+task.arguments.min_terms=-1"], "that it accepts (AssertionError: min_terms must be positive)"),
    ],
)
def test_unknown_data_sets_and_arguments_end_the_command_before_the_run_folder_exists(command, words, text):
    answer = command("task=reasoning_gym", "algo=grpo", *words)
    assert answer.code == 2 and not answer.runs
    assert text in answer.err
