"""Tests of `python -m rlhf.sample`: lines of the input, dialogues, errors before anything is loaded."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from rlhf import sample
from rlhf.core.files import append
from rlhf.runs.folder import RunFolder
from rlhf.stages import inspection
from rlhf.words.compose import compose
from tests.model_folders import write_model


class Echo:
    """A sampler that keeps the prompts and answers with their number."""

    def __init__(self, cfg, model, seed, chat=None) -> None:
        self.model, self.seed, self.chat, self.asked = model, seed, bool(chat), []
        made.append(self)

    def __call__(self, prompts, **settings):
        self.asked.append((*prompts, settings))
        return [{"response": f" answer [{len(self.asked)}]"}]


made: list[Echo] = []


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the folder of a finished run."""
    folder = RunFolder(tmp_path / "run")
    folder.write_config(compose(["generator.temperature=0.5"]))
    folder.write_state({"finished": True, "result": {}})
    write_model(folder.model)
    return folder.path


@pytest.fixture
def call(monkeypatch, called, run):
    """Return a function that runs the command on an input, and returns exit code, responses and stderr."""
    monkeypatch.setattr(inspection, "Sampler", Echo)
    made.clear()

    def answer(text: str, *words: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, out, err = called(sample.main, *(word.format(run=run) for word in words))
        return code, [line for line in out.splitlines() if "loading" not in line], err

    return answer


def test_each_line_is_continued_as_it_is_by_a_model_that_is_loaded_once(call, run):
    code, out, err = call("What?\\n\n\nTL;DR:", "run={run}")
    assert (code, out, err) == (0, [" answer [1]", " answer [2]"], "")
    (echo,) = made
    settings = {"samples": 1, "temperature": 0.5, "response_length": 40}
    assert echo.model == str(run / "model") and echo.asked == [("What?\n", settings), ("TL;DR:", settings)]


def test_in_a_dialogue_the_model_sees_the_turns_before_until_a_new_one_starts(call):
    words = ("chat=true", "system=Be brief.", "temperature=0.01", "response_length=7", "seed=3")
    assert call("Hi\nWhy?\n/new\nHo", "model={run}/model", *words)[0] == 0
    (echo,) = made
    start = {"role": "system", "content": "Be brief."}
    first, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": " answer [1]"}
    assert [asked[0] for asked in echo.asked] == [
        [start, first],
        [start, first, reply, {"role": "user", "content": "Why?"}],
        [start, {"role": "user", "content": "Ho"}],
    ]
    assert echo.seed == 3
    assert echo.asked[0][1] == {"samples": 1, "temperature": 0.01, "response_length": 7}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "run= is required (run folder"),
        ("run=nowhere", "run= must be the folder of a run"),
        ("model=./nowhere", "no folder './nowhere'"),
        ("run={run} temperature=warm", "temperature= must be a number, got warm; set temperature=0.5"),
        ("run={run} temperature=0", "temperature must be > 0, got 0; set temperature=0.01"),
        ("run={run} response_length=0", "response_length must be >= 1, got 0"),
        ("run={run} chat=yes", "chat= must be true or false, got yes; set chat=true"),
        ("run={run} optim.lr=1", "optim.lr must be something that an evaluation reads"),
        ("run={run} model={run}/model", "model= must not be set with run="),
    ],
)
def test_mistakes_are_refused_before_the_model_is_loaded(call, words, said):
    code, out, err = call("Hi\n", *words.split())
    assert code == 2 and not out and not made
    assert err.startswith("error: ") and said in err


def test_a_run_without_a_final_model_is_refused(call, run):
    (run / "trainer_state.json").unlink()
    code, _, err = call("Hi\n", "run={run}")
    assert code == 2 and "the run must be finished" in err


EPISODE = {
    "update": 2,
    "prompt": "Guess",
    "response": "7 high 3",
    "reference": "3",
    "messages": [
        {"role": "assistant", "content": "7", "reward": -0.5},
        {"role": "user", "content": "too\nhigh\x1b[31m"},
        {"role": "assistant", "content": ""},
    ],
    "score": 0.25,
}


def test_show_prints_the_texts_rewards_and_fates_of_the_last_evaluation_without_a_model(call, run):
    fates = [{}, {"limit": None}, {"limit": "environment.reply_tokens"}]
    rows = [{**EPISODE, "update": 0}, *({**EPISODE, **fate} for fate in fates)]
    append(run / "completions.jsonl", rows)
    append(run / "metrics.jsonl", [{"update": 0, "eval/eos_rate": 1.0}, {"update": 2, "eval/eos_rate": 0.25}])
    (run / "trainer_state.json").unlink()  # the run is not finished
    code, out, _ = call("", "run={run}", "show=9")
    assert code == 0 and not made
    assert "update 2" in out[0] and "3 responses" in out[0] and "0.250" in out[0]
    heads = [line for line in out if line.startswith("[")]
    assert [head.split("reward 0.250")[1].strip() for head in heads[:2]] == ["", "ended"]
    assert heads[2].endswith("cut: environment.reply_tokens")
    texts = out[out.index(heads[0]) + 1 : out.index(heads[1])]
    assert [line.split() for line in texts] == [
        ["prompt", "Guess"],
        ["+", "assistant", "(reward", "-0.500)", "7"],
        ["user", "too"],
        ["high\\x1b[31m"],
        ["+", "assistant", "(empty)"],
        ["reference", "3"],
    ]


def test_show_prints_a_response_of_one_turn_and_no_more_than_it_is_asked_for(call, run):
    append(run / "completions.jsonl", [{"update": 1, "prompt": "a", "response": "b"}] * 3)
    _, out, _ = call("", "run={run}", "show=2")
    shown = "\n".join(" ".join(line.split()) for line in out[1:-1])
    assert shown == "[1]\nprompt a\n+ response b\n[2]\nprompt a\n+ response b"


def test_show_refuses_a_run_without_responses(call):
    code, out, err = call("", "run={run}", "show=2")
    assert (code, out) == (2, []) and "schedule.eval_every=" in err
