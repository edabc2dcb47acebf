"""Secrets in text: messages, log lines and records show everything else."""

import logging

import pytest

from rlhf.core.formatting import hide, is_secret_key, secret_in
from rlhf.runs.folder import RunFolder, redact, setup_logging
from rlhf.terminal.console import print_error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("got https://me:hunter2@host/x, set", "got https://<redacted>@host/x, set"),
        ("got http://host/x?a=1&token=hunter2#y", "got http://host/x?a=1&token=<redacted>#y"),
        ("'http://host/x?sig=hunter2'", "'http://host/x?sig=<redacted>'"),
        ("+logger.wandb.api_key=hunter2 seed=1", "+logger.wandb.api_key=<redacted> seed=1"),
        ("token hf_hunter2hunter2hunter2", "token <redacted>"),
        ("ghp_hunter2hunter2hunter2hunter2hunter2.", "<redacted>."),
    ],
)
def test_secrets_are_hidden_in_text(text, shown):
    assert hide(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "task.max_prompt_tokens=512 model.pad_token=<|pad|> scorer.token_variable=SCORE_TOKEN",
        "run: export SCORE_TOKEN=<token>, or set scorer.token_variable=null",
        "engine.max_num_batched_tokens=8192 tokens=12",
        "outputs/tldr_mini-pythia-dpo-hf-lag1-seed1-0123abcd/checkpoint-12",
        "http://127.0.0.1:8000/score?version=2&model=llama-3-8b",
        "mail me@host.org, 3 @ 4",
        "dpo must read key=value or group=option",
    ],
)
def test_text_without_secrets_is_unchanged(text):
    assert hide(text) == text and secret_in(text) is None


def test_settings_with_similar_names_are_no_secrets():
    assert not any(map(is_secret_key, ["model.pad_token", "task.max_prompt_tokens", "scorer.token_variable"]))
    assert all(map(is_secret_key, ["+a.api_key", "HF_TOKEN", "env.AWS_SECRET_ACCESS_KEY", "password"]))


def test_no_secret_reaches_stderr_the_terminal_train_log_or_the_record_of_the_command(tmp_path, capsys):
    words = ["scorer.url=http://h/x?token=hunter2", "a.path=hf_hunter2hunter2hunter2", "x.secret=hunter2"]
    log = setup_logging(RunFolder(tmp_path))
    log.warning("cannot reach %s", words[0])
    try:
        raise OSError("http://me:hunter2@host/x")
    except OSError:
        log.exception("failed")
    print_error(f"error: got {words[1]}")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    said = capsys.readouterr()
    written = RunFolder(tmp_path).log.read_text()
    assert "cannot reach" in written and "Traceback" in written and "cannot reach" in said.out
    assert "hunter2" not in said.out + said.err + written + str(redact(words))
    logging.captureWarnings(False)
