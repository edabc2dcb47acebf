"""Configs and command lines with secrets are refused, without showing the secret."""

import pytest

from rlhf.checks.check import problems
from rlhf.checks.rules import check_arguments
from rlhf.core.errors import UserError
from rlhf.words.compose import compose


@pytest.mark.parametrize(
    ("override", "key", "what"),
    [
        ("model.policy='https://me:hunter2@host/x'", "model.policy", "a user name or password"),
        ("task.path='https://host/x.jsonl?token=hunter2'", "task.path", "a secret in its query"),
        ("model.tokenizer=hf_hunter2hunter2hunter2hunter2", "model.tokenizer", "a token"),
        ("output_dir=s3://me:hunter2@bucket", "output_dir", "a user name or password"),
        (
            "+backend.deepspeed.monitor.url_of='http://h/?key=hunter2'",
            "backend.deepspeed.monitor.url_of",
            "a secret in its query",
        ),
    ],
)
def test_a_value_with_a_secret_is_refused(override, key, what):
    words = ["task=local", "task.path=x.jsonl"] if override.startswith("task") else []
    words += ["backend=zero0"] if "deepspeed" in override else []
    found = [text for text in problems(compose([*words, override])) if text.startswith(f"{key} must not")]
    assert len(found) == 1 and f"must not contain {what}" in found[0] and "hunter2" not in found[0]


def test_an_argument_that_sets_a_secret_is_refused():
    with pytest.raises(UserError) as refused:
        check_arguments(["seed=1", "+logger.wandb.api_key=hunter2", "+hydra.job.env_set.HF_TOKEN=hunter2"])
    assert [text.partition(" must not be set on the command line")[0] for text in refused.value.problems] == [
        "logger.wandb.api_key",
        "hydra.job.env_set.HF_TOKEN",
    ]
    assert "hunter2" not in str(refused.value)


def test_arguments_with_similar_names_are_accepted():
    check_arguments(["model.pad_token=<|pad|>", "task.max_prompt_tokens=512", "logger.wandb.api_key=null"])


def test_a_refused_secret_leaves_no_file_and_is_not_printed(command, tmp_path):
    for word in ("+logger.wandb.api_key=hunter2", "model.policy='https://me:hunter2@host/x'"):
        answer = command(word)
        assert answer.code == 2 and "hunter2" not in answer.out + answer.err and not answer.runs
    assert not list(tmp_path.iterdir())
