"""The section of task=reasoning_gym: what is refused before anything is loaded."""

import importlib.util

import pytest

from rlhf.checks.check import problems
from rlhf.config.scorers import ReasoningGymConfig
from rlhf.words.compose import compose


def test_the_default_config_has_no_problem():
    assert not problems(compose(["task=reasoning_gym", "algo=grpo"]))
    assert not list(ReasoningGymConfig().job_problems("task"))


@pytest.mark.parametrize("name", ["codeio", "composite", "ransom_note"])
def test_data_sets_without_reproducible_examples_of_their_own_are_refused_by_name(name):
    (problem,) = ReasoningGymConfig(dataset=name).problems("task")
    assert problem.startswith(f"task.dataset must not be {name} (")


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = ReasoningGymConfig().problems("task")
    assert "pip install -e '.[reasoning]'" in problem


def test_generated_problems_have_no_path_and_a_template_contains_the_question():
    (path,) = ReasoningGymConfig(path="data").problems("task")
    assert path.startswith("task.path must be null")
    (template,) = ReasoningGymConfig(template="Solve this.").problems("task")
    assert template.startswith("task.template must contain {question}")


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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["task=arithmetic", "scorer=reasoning_gym"], "scorer must not be reasoning_gym for task=arithmetic"),
        (
            ["task=reasoning_gym", "generator=dataset", "generator.path=rows"],
            "scorer must not be reasoning_gym with saved rollouts",
        ),
        (
            [
                "scorer=weighted",
                "+scorer@scorer.parts.right=reasoning_gym",
                "generator=dataset",
                "generator.path=rows",
            ],
            "scorer@scorer.parts.right must not be reasoning_gym with saved rollouts",
        ),
    ],
)
def test_the_scorer_needs_the_problems_of_its_task(words, text):
    assert any(found.startswith(text) for found in problems(compose(["algo=grpo", *words])))
