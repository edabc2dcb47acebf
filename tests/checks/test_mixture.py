"""Rules about `task=mixture` and `scorer=mixture`: messages before a run, and remedies that are valid."""

import json

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.words.compose import compose


@pytest.fixture
def words(tmp_path) -> list[str]:
    """Return the arguments of a run on a mixture of two files, with a tiny model."""
    found = ["task=mixture", "debug=tiny"]
    for name in ("sums", "words"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(
            "".join(json.dumps({"prompt": f"{name} {i}", "response": "#### 1"}) + "\n" for i in range(9))
        )
        found += [f"+schema/task@task.parts.{name}=local", f"task.parts.{name}.path={file}"]
    return [*found, "scorer=answer"]


def test_a_mixture_of_files_is_valid(words):
    cfg = compose([*words, "+task.weights.sums=3"])
    assert problems(cfg) == [] and cfg.task.shares == {"sums": 0.75, "words": 0.25}


@pytest.mark.parametrize(
    ("added", "begin"),
    [
        (["~task.parts"], "task.parts must contain at least one task"),
        (["+task.weights.other=1"], "task.weights must name parts of the mixture (sums, words), got other"),
        (["+task.weights.sums=0"], "task.weights.sums must be > 0"),
        (["+task.weights.sums=nan"], "task.weights.sums must be > 0"),
        (["task.path=data.jsonl"], "task.path must be null for task=mixture"),
        (["+schema/task@task.parts.A-b=arithmetic"], "task.parts must have names of lower-case letters"),
        (["+schema/task@task.parts.inner=mixture"], "task.parts.inner.parts must contain"),
        (["task.parts.sums.path=none.jsonl"], "task.parts.sums.path must name a file or folder"),
        (["task.parts.sums.path=null"], "task.parts.sums.path must name a file or folder for task=local"),
        (["task.parts.sums.columns.response=q"], "task.parts.sums.columns.response must name"),
        (["+schema/task@task.parts.talk=chat"], "task.parts must all have dialogues or all have texts"),
        (["+schema/task@task.parts.x=gsm8k", "task.parts.x.template=y"], "task.parts.x.template must"),
        (["scorer=mixture"], "scorer.parts must have a scorer for each part of the task (sums, words)"),
        (["scorer@gold=mixture"], "gold.parts must have a scorer for each part"),
        (["scorer=facts"], "scorer must not be facts for task=mixture"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_before_the_run(words, added, begin):
    if added == ["~task.parts"]:
        words, added = ["task=mixture", "debug=tiny", "scorer=answer"], []
    found = problems(compose([*words, *added]))
    assert any(text.startswith(begin) for text in found), found


def test_the_scorers_of_a_mixture_have_the_names_of_its_parts(words):
    parts = ["scorer=mixture", "+scorer@scorer.parts.sums=answer", "+scorer@scorer.parts.other=answer"]
    found = problems(compose([*words, *parts]))
    assert any("got other; leave it out" in text for text in found)
    parts[-1] = "+scorer@scorer.parts.words=reward_model"
    assert problems(compose([*words, *parts])) == []


def test_a_program_can_score_the_part_that_it_is_made_for(words):
    parts = ["+schema/task@task.parts.posts=tldr_mini", "scorer=mixture"]
    programs = {"sums": "answer", "words": "answer", "posts": "facts"}
    parts += [f"+scorer@scorer.parts.{name}={program}" for name, program in programs.items()]
    assert problems(compose([*words, *parts])) == []
    wrong = compose([*words, *parts, "scorer@scorer.parts.words=facts"])
    assert any(
        text.startswith("scorer@scorer.parts.words must not be facts for task=local")
        for text in problems(wrong)
    )


def test_a_limit_of_prompt_tokens_of_a_part_gives_a_warning(words):
    (message,) = (
        text for text in warnings(compose([*words, "task.parts.sums.max_prompt_tokens=9"])) if "9" in text
    )
    assert message.startswith("task.parts.sums.max_prompt_tokens has no effect")


def test_unknown_options_and_keys_of_a_part_are_explained(command, words):
    answer = command(*words, "+schema/task@task.parts.x=locl")
    assert answer.code == 2 and "did you mean" in answer.err and "local" in answer.err
    answer = command("task=mixture", "task.parts.x.path=a")
    assert answer.code == 2 and "choose it by schema/task@task.parts.x=<task>" in answer.err
    answer = command(*words, "task.parts.sums.pth=a")
    assert answer.code == 2 and "did you mean task.parts.sums.path?" in answer.err
