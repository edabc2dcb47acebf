"""Tests of scorer settings: rejected values, warnings, and weighted scorers from overrides and from files."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rlhf.checks import check
from rlhf.config.schema import SCHEMAS
from rlhf.config.scorers import ScorerConfig
from rlhf.words.catalogue import options
from rlhf.words.compose import compose, run_name

DOCS = (Path(__file__).parents[2] / "docs" / "data-model-reward.md").read_text()

MIX = "scorer=weighted +scorer@scorer.parts.x"


def block(language: str, heading: str) -> str:
    """Return the first code block of a language below a heading of docs/data-model-reward.md."""
    found = re.search(rf"```{language}\n(.*?)```", DOCS.partition(f"\n### {heading}\n")[2], re.S)
    assert found is not None
    return found[1]


def test_weighted_scorer_file_of_the_docs_runs(command, tmp_path):
    folder = tmp_path / "own" / "scorer"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(block("yaml", "Weighted sum"))
    (tmp_path / "my_rewards.py").write_text(block("python", "Python function"))
    answer = command("--config-dir", str(tmp_path / "own"), "scorer=mine", "scorer.parts.model.weight=2")
    assert answer.code == 0, answer.err
    assert {n: p.weight for n, p in answer.runs[0][0].scorer.parts.items()} == {"model": 2, "brief": 0.5}


def test_reward_function_in_a_package_is_imported_with_the_package(tmp_path, monkeypatch):
    package = tmp_path / "package_of_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0\n")
    (package / "inside.py").write_text("def f(prompt, response, reference): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check.problems(compose(["scorer=function", f"scorer.path={package.name}.inside:f"]))
    assert f"ZeroDivisionError: division by zero, in {package / '__init__.py'}, line 1" in found
    (package / "__init__.py").write_text("# corrected\n")
    assert not check.problems(compose(["scorer=function", f"scorer.path={package.name}.inside:f"]))
    (found,) = check.problems(compose(["scorer=function", f"scorer.path={package.name}.beside:f"]))
    assert f"(no module '{package.name}.beside'), got" in found


def test_url_with_a_password_is_rejected_and_the_password_is_not_shown():
    found = check.problems(compose(["scorer=http", "scorer.url=http://me:hunter2@host/x"]))
    assert len(found) == 1 and "scorer.url must not contain a user name or password" in found[0]
    assert "hunter2" not in found[0]


def test_saved_files_contain_the_name_of_the_token_variable_and_not_the_token(command, monkeypatch):
    monkeypatch.setenv("SCORE_TOKEN", "hunter2")
    monkeypatch.setattr("rlhf.config.generators.refusal", lambda url: None)  # no service is needed here
    words = ["scorer=http", "scorer.url=http://127.0.0.1:1/score", "scorer.token_variable=SCORE_TOKEN"]
    answer = command(*words)
    folder = answer.runs[0][1]
    folder.write_config(answer.runs[0][0])
    folder.write_environment()
    dumps = [folder.config.read_text(), folder.environment.read_text(), command(*words, "--cfg", "job").out]
    assert "SCORE_TOKEN" in dumps[0] and not any("hunter2" in text for text in dumps)


@pytest.mark.parametrize("key", ["timeout_s=1", "retries=9", "concurrency=9", "token_variable=SCORE_TOKEN"])
def test_connection_settings_of_a_service_do_not_change_the_run_name(key):
    http, part = ["scorer=http", "scorer.url=http://host/x"], [*f"{MIX}=http".split()]
    assert run_name(compose([*http, f"scorer.{key}"])) == run_name(compose(http))
    assert run_name(compose([*part, f"scorer.parts.x.{key}"])) == run_name(compose(part))
    assert run_name(compose([*part, "scorer.parts.x.weight=2"])) != run_name(compose(part))


def test_every_scorer_and_its_settings_are_documented():
    assert all(f"| `{option}` |" in DOCS for option in options("scorer"))
    for name in ("reward_model", "answer", "function", "http", "weighted"):
        common = {field.name for field in fields(ScorerConfig)}
        own = {field.name for field in fields(SCHEMAS[f"schema/scorer/{name}"])} - common
        (row,) = re.findall(rf"^\| `{name}` \|.*$", DOCS, re.M)
        assert own <= set(re.findall(r"`(\w+)`", row.rpartition(" | ")[2]))
