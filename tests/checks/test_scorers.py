"""Tests of scorer settings: rejected values, warnings, and weighted scorers from overrides and from files."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rlhf.checks import check
from rlhf.config.schema import SCHEMAS
from rlhf.config.scorers import ScorerConfig, WeightedScorerConfig
from rlhf.words.catalogue import options
from rlhf.words.compose import compose
from rlhf.words.identity import run_name

DOCS = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()

MIX = "scorer=weighted +scorer@scorer.parts.x"
NO_SUCH = "NO_SUCH_TOKEN_OF_THE_TESTS"

PROBLEMS = {  # overrides: text that one of the problems must contain
    "scorer.missing_eos_penalty=1": "scorer.missing_eos_score must be null with "
    "scorer.missing_eos_penalty=1 (it replaces the score that the other lowers), got -1; set ",
    "scorer.missing_eos_penalty=-1": "scorer.missing_eos_penalty must be >= 0",
    "scorer.missing_eos_penalty=inf": "scorer.missing_eos_penalty must be finite",
    "scorer.missing_eos_score=nan": "scorer.missing_eos_score must be finite",
    "gold.missing_eos_penalty=-1": "gold.missing_eos_penalty must be >= 0",
    "scorer.weight=2": "scorer.weight must be 1 outside of a weighted scorer",
    f"{MIX}=facts scorer.weight=2": "scorer.weight must be 1",
    f"{MIX}=facts scorer.parts.x.weight=nan": "scorer.parts.x.weight must be finite",
    f"{MIX}=facts scorer.parts.x.missing_eos_penalty=-1": "scorer.parts.x.missing_eos_penalty must be >= 0",
    "scorer=weighted": "scorer.parts must contain at least one scorer (the score is their weighted sum"
    "), got {}; set +scorer@scorer.parts.<name>=<scorer>",
    "scorer@gold=weighted": "gold.parts must contain at least one scorer",
    f"{MIX}=labels": "scorer@scorer.parts.x must be a scorer that judges a text by itself",
    f"{MIX}=none": "scorer@scorer.parts.x must be a scorer that judges a text by itself",
    f"{MIX}=weighted": "scorer@scorer.parts.x must be a scorer that judges a text by itself",
    f"{MIX}=answer": "scorer@scorer.parts.x must not be answer for task=tldr_mini",
    f"{MIX}=facts task=arithmetic": "scorer@scorer.parts.x must not be facts for task=arithmetic",
    f"{MIX}=reward_model scorer.parts.x.path=./nowhere": "scorer.parts.x.path must name a model on the hub",
    f"{MIX}=reward_model task=tldr model=pythia_410m model.reward=null": "model.reward must name a model for",
    "scorer@gold=weighted +scorer@gold.parts.x=reward_model": "gold.parts.x.path must name a reward model ("
    "the judge must not be the model that training sees), got null; set gold.parts.x.path=",
    "scorer=function": "scorer.path must be <module>:<function> or <file>.py:<function> (it names a Python "
    "function), got null; set scorer.path=my_module:my_function",
    "scorer=function scorer.path=json": "scorer.path must be <module>:<function>",
    "scorer=function scorer.path=json:": "scorer.path must be <module>:<function>",
    "scorer=function scorer.path=json:a.b": "scorer.path must be <module>:<function>",
    "scorer=function scorer.path=nowhere:f": "(no module 'nowhere'), got 'nowhere:f'",
    "scorer=function scorer.path=nowhere.inside:f": "(no module 'nowhere'), got",
    "scorer=function scorer.path=json.nowhere:f": "(no module 'json.nowhere'), got",
    "scorer=function scorer.path=json.decoder.nowhere:f": "no module 'json.decoder.nowhere'",
    "scorer=function scorer.path=./nowhere.py:f": "(no file './nowhere.py' here), got './nowhere.py:f'",
    "scorer@gold=function": "gold.path must be <module>:<function>",
    f"{MIX}=function": "scorer.parts.x.path must be <module>:<function>",
    "scorer=http": "scorer.url must be http://<host>/<path> or https://<host>/<path> (texts are posted "
    "there), got null; set scorer.url=http://127.0.0.1:8000/score",
    "scorer=http scorer.url=127.0.0.1:8000": "scorer.url must be http://",
    "scorer=http scorer.url=ftp://host/x": "scorer.url must be http://",
    "scorer=http scorer.url=http://host:99999/x": "scorer.url must be http://",
    "scorer=http scorer.batch_size=0": "scorer.batch_size must be >= 1",
    "scorer=http scorer.concurrency=0": "scorer.concurrency must be >= 1",
    "scorer=http scorer.retries=-1": "scorer.retries must be >= 0",
    "scorer=http scorer.timeout_s=0": "scorer.timeout_s must be > 0",
    f"scorer=http scorer.token_variable={NO_SUCH}": f"{NO_SUCH}, which is not set; run: export ",
    "scorer@gold=http": "gold.url must be http://",
}

MISTAKES = {  # wrong overrides: text that the message must contain
    "scorer=weighted scorer@scorer.parts.x=facts": "scorer.parts.x must be chosen before it is set",
    "scorer=weighted +scorer.parts.x=facts": "got +scorer.parts.x=facts; choose it by scorer@scorer.parts.x=",
    "scorer=weighted scorer.parts.x.weight=2": "weight=2; choose it by scorer@scorer.parts.x=",
    "scorer@gold=weighted gold.parts.x.weight=2": "choose it by scorer@gold.parts.x=",
    f"{MIX}=fact": "did you mean scorer@scorer.parts.x=facts?",
    f"{MIX}=http scorer.parts.x.ulr=y": "must be a setting of scorer@scorer.parts.x=http",
    f"{MIX}=http +scorer.parts.x.ulr=y": "did you mean scorer.parts.x.url?",
    f"{MIX}=http scorer.parts.x.weight=high": "scorer.parts.x.weight must be a number, got 'high'",
    "scorer=facts +scorer@scorer.parts.x=facts": "it belongs to scorer=weighted",
}


def block(language: str) -> str:
    """Return the first code block of a language in docs/rewards.md."""
    found = re.search(rf"```{language}\n(.*?)```", DOCS, re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("overrides", PROBLEMS)
def test_problem_is_found_with_its_rule_value_and_remedy(overrides):
    found = check.problems(compose(overrides.split()))
    assert any(PROBLEMS[overrides] in text for text in found), found
    assert all(", got " in text and "; " in text for text in found)


@pytest.mark.parametrize("typed", MISTAKES)
def test_wrong_override_of_a_weighted_scorer_gives_one_error_message(command, typed):
    answer = command(*typed.split())
    assert answer.code == 2 and len(answer.err.splitlines()) == 1 and answer.err.startswith("error: ")
    assert MISTAKES[typed] in answer.err


def test_weighted_scorer_can_be_composed_on_the_command_line(command, tmp_path):
    (tmp_path / "own_rewards.py").write_text("def short(prompt, response, reference):\n    return 1.0\n")
    answer = command(
        "scorer=weighted",
        "+scorer@scorer.parts.model=reward_model",
        "+scorer@scorer.parts.short=function",
        "scorer.parts.short.path=own_rewards.py:short",
        "scorer.parts.short.weight=0.5",
    )
    assert answer.code == 0, answer.err
    ((cfg, _),) = answer.runs
    assert isinstance(cfg.scorer, WeightedScorerConfig)
    weights = {name: (part.name, part.weight) for name, part in cfg.scorer.parts.items()}
    assert weights == {"model": ("reward_model", 1.0), "short": ("function", 0.5)}


def test_weighted_scorer_file_of_the_docs_runs(command, tmp_path):
    folder = tmp_path / "own" / "scorer"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(block("yaml"))
    (tmp_path / "my_rewards.py").write_text(block("python"))
    answer = command("--config-dir", str(tmp_path / "own"), "scorer=mine", "scorer.parts.model.weight=2")
    assert answer.code == 0, answer.err
    assert {n: p.weight for n, p in answer.runs[0][0].scorer.parts.items()} == {"model": 2, "brief": 0.5}


def test_shipped_weighted_scorer_is_valid_when_its_parts_fit_the_task():
    cfg = compose(["task=arithmetic", "scorer=reward_and_answer", "scorer.parts.answer.weight=2"])
    assert not check.problems(cfg) and cfg.scorer.reads_reward
    swapped = compose(["scorer=reward_and_answer", "scorer@scorer.parts.answer=facts"])
    assert not check.problems(swapped)


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
    monkeypatch.setattr("rlhf.config.services.refusal", lambda url: None)  # no service is needed here
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


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            "scorer=function scorer@gold=function scorer.path=heapq:merge gold.path=heapq:merge",
            "scorer",
        ),
        ("scorer=http scorer@gold=http scorer.url=http://h/x gold.url=http://h/x", "scorer"),
        (f"{MIX}=facts", "scorer@scorer.parts.x"),
        (
            f"{MIX}=reward_model model.reward=a/b scorer@gold=reward_model gold.path=a/b",
            "scorer@scorer.parts.x",
        ),
    ],
)
def test_training_with_the_judge_as_scorer_gives_a_warning(overrides, key):
    cfg = compose(overrides.split())
    (found,) = check.warnings(cfg)
    assert found.startswith(f"{key} and scorer@gold are the same") and not check.problems(cfg)


@pytest.mark.parametrize(
    "overrides",
    [
        "scorer=function scorer@gold=function scorer.path=difflib:ndiff gold.path=heapq:merge",
        "scorer=http scorer@gold=http scorer.url=http://h/x gold.url=http://h/y",
        f"{MIX}=reward_model scorer@gold=weighted +scorer@gold.parts.x=facts",
        f"{MIX}=reward_model",
        "scorer@gold=weighted +scorer@gold.parts.x=facts",
    ],
)
def test_judge_that_differs_from_the_scorer_gives_no_warning(overrides):
    assert not check.warnings(compose(overrides.split()))


def test_missing_eos_score_of_the_judge_gives_a_warning():
    found = check.warnings(compose(["gold.missing_eos_score=-1"]))
    assert found == ["gold.missing_eos_score=-1 has no effect (the scores of a judge are not changed)"]


def test_every_scorer_and_its_settings_are_documented():
    assert all(f"| `{option}` |" in DOCS for option in options("scorer"))
    for name in ("reward_model", "answer", "function", "http", "weighted"):
        common = {field.name for field in fields(ScorerConfig)}
        own = {field.name for field in fields(SCHEMAS[f"schema/scorer/{name}"])} - common
        (row,) = re.findall(rf"^\| `{name}` \|.*$", DOCS, re.M)
        assert own <= set(re.findall(r"`(\w+)`", row.rpartition(" | ")[2]))


@pytest.mark.parametrize("task", ["arithmetic", "gsm8k", "reasoning_gym", "calculator", "tldr_mini"])
def test_the_defaults_of_a_task_give_no_warning_about_the_judge(task):
    assert not [
        text for text in check.warnings(compose([f"task={task}", "algo=grpo"])) if "are the same" in text
    ]
