"""Tests of scorers: responses without an end token, weighted sums and reward functions."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from rlhf.config.algorithms import DPOConfig
from rlhf.config.scorers import (
    AnswerScorerConfig,
    FunctionScorerConfig,
    LabelsScorerConfig,
    ScorerConfig,
    WeightedScorerConfig,
)
from rlhf.core.batch import Budget, Rollouts, microbatches
from rlhf.core.errors import RunError
from rlhf.core.formatting import as_score
from rlhf.objectives.dpo import OnlineDPO
from rlhf.scorers.function import FunctionScorer
from rlhf.scorers.scorer import LabelsScorer, TextScorer, WeightedScorer
from rlhf.text.encoding import encode_completions, encode_prompts
from tests.tiny_models import scorer_context, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
RESPONSES = [["w1", "w1 w2"], ["w1 w2 w3", "w4"], ["w5 w6", "w7"]]
ENDED = torch.tensor([[True, False], [False, True], [True, True]])


def rollouts() -> Rollouts:
    """Return three prompts, rows 7 to 9 of a data set, with two responses of one to three words each."""
    prompts = encode_prompts(torch.arange(7, 10), ["w8", "w9", "w10"], ["w1", "w2", "w3"], TOKENIZER)
    return encode_completions(prompts, RESPONSES, TOKENIZER, response_length=None, ended=ENDED)


class WordCount(TextScorer):
    """A scorer that counts the words of the response."""

    def judge(self, prompt: str, response: str, reference: str) -> float:
        return len(response.split())


class Same(TextScorer):
    """A scorer that gives 1 if the response equals the reference, else 0."""

    def judge(self, prompt: str, response: str, reference: str) -> float:
        return float(response == reference)


def words_scorer(**settings) -> TextScorer:
    return WordCount(AnswerScorerConfig(**settings), scorer_context(TOKENIZER))


@pytest.mark.parametrize(
    ("settings", "scores", "of_sum"),
    [
        ({"missing_eos_score": -9}, [[1, -9], [-9, 1], [2, 1]], [[1, -9], [-9, 2], [4, 2]]),
        ({"missing_eos_penalty": 0.5}, [[1, 1.5], [2.5, 1], [2, 1]], [[1, 1.5], [3.5, 2], [4, 2]]),
    ],
)
def test_missing_eos_settings_apply_to_responses_without_end_and_not_to_a_judge(settings, scores, of_sum):
    one = words_scorer(**settings)
    assert one(rollouts()).scores.tolist() == scores and one(rollouts()).parts is None
    assert one.score(rollouts()).tolist() == [[1, 2], [3, 1], [2, 1]]
    assert weighted(**settings)(rollouts()).scores.tolist() == of_sum
    assert weighted(**settings).score(rollouts()).tolist() == [[1, 4], [6, 2], [4, 2]]


def test_the_penalty_on_long_responses_rises_over_the_buffer_and_a_judge_has_none():
    config = AnswerScorerConfig(overlong_buffer=2, overlong_factor=3.0, missing_eos_score=-9)
    scorer = WordCount(config, replace(scorer_context(TOKENIZER), response_length=4))
    assert scorer(rollouts()).scores.tolist() == [[1, -9], [-9, 1], [0.5, 1]], "three of four tokens: 3 / 2"
    assert [each.scores.tolist() for each in scorer.scored(rollouts())] == [[1, 3, 2], [2, 1, 1]]


def test_missing_eos_score_does_not_replace_labels():
    stored = replace(rollouts(), labels=torch.ones(3, 2))
    scorer = LabelsScorer(LabelsScorerConfig(missing_eos_score=-5), scorer_context(TOKENIZER))
    assert scorer(stored).scores.tolist() == [[1, 1]] * 3


def weighted(**settings) -> WeightedScorer:
    parts: dict[str, ScorerConfig] = {
        "words": AnswerScorerConfig(weight=2.0, missing_eos_penalty=1.0),
        "same": AnswerScorerConfig(weight=-1.0),
    }
    kinds = {"scorer.parts.words": WordCount, "scorer.parts.same": Same}
    context = replace(
        scorer_context(TOKENIZER),
        build=lambda section, key: kinds[key](section, scorer_context(TOKENIZER, key)),
    )
    return WeightedScorer(WeightedScorerConfig(parts=parts, **settings), context)


def test_a_weighted_score_is_the_weighted_sum_and_parts_are_kept_unweighted():
    batch = weighted()(rollouts())
    assert batch.parts["words"].tolist() == [[1, 1], [2, 1], [2, 1]]
    assert batch.parts["same"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert batch.scores.tolist() == [[1, 2], [4, 2], [4, 2]]


def test_parts_follow_the_selection_of_rows_and_samples():
    batch = weighted()(rollouts())
    assert batch.select(torch.tensor([2, 0])).parts["words"].tolist() == [[2, 1], [1, 1]]
    assert batch.samples(torch.tensor([[1], [0], [0]])).parts["same"].tolist() == [[0], [0], [0]]
    assert batch.samples(torch.tensor([[0], [0], [1]])).parts["same"].tolist() == [[1], [0], [0]]
    assert batch.to(torch.device("meta")).parts["words"].device.type == "meta"
    for rows, micro, _ in microbatches(batch, Budget(2)):
        assert micro.parts["words"].tolist() == batch.parts["words"][rows].tolist()


def test_metrics_contain_the_mean_score_of_each_part():
    figures = OnlineDPO(DPOConfig()).describe(weighted()(rollouts()))
    assert figures["objective/scores/words"].value() == pytest.approx(8 / 6)
    assert figures["objective/scores/same"].value() == pytest.approx(1 / 6)
    assert figures["objective/scores"].value() == pytest.approx(15 / 6)
    plain = OnlineDPO(DPOConfig()).describe(words_scorer()(rollouts()))
    assert not any(name.startswith("objective/scores/") for name in plain)


# -- functions -------------------------------------------------------------------------------------


def function(tmp_path: Path, body: str, arguments: str = "prompt, response, reference", **settings):
    """Return a scorer that calls a function with the given body, which is written to a file."""
    file = tmp_path / "own.py"
    file.write_text(f"import math\ndef score({arguments}):\n    {body}\n")
    config = FunctionScorerConfig(path=f"{file}:score", **settings)
    return FunctionScorer(config, scorer_context(TOKENIZER, "scorer.parts.own"))


LISTS = "prompts, responses, references"
EACH = "100 * int(p[1:]) + 10 * len(r.split()) + int(a[1:])"


@pytest.mark.parametrize(
    ("body", "arguments", "batched"),
    [
        (f"return {EACH}", "p, r, a", False),
        (f"return [{EACH} for p, r, a in zip(prompts, responses, references)]", LISTS, True),
    ],
)
def test_a_function_receives_prompt_response_and_reference_or_lists_of_them(
    tmp_path, body, arguments, batched
):
    scores = function(tmp_path, body, arguments, batched=batched)(rollouts()).scores
    assert scores.tolist() == [[811, 821], [932, 912], [1023, 1013]] and scores.dtype == torch.float32


@pytest.mark.parametrize("value", ["None", "'1.0'", "float('nan')", "math.inf", "[1.0]", "1e300", "b'1'"])
def test_a_score_that_is_no_finite_number_stops_the_run_and_names_the_row(tmp_path, value):
    with pytest.raises(RunError) as stopped:
        function(tmp_path, f"return 1.0 if response != 'w4' else {value}")(rollouts())
    text = str(stopped.value)
    assert text.startswith(f"scorer.parts.own.path={tmp_path}/own.py:score returned ")
    assert "row 9 of the data, response 'w4'; a score must be a finite number" in text


@pytest.mark.parametrize(
    ("body", "batched", "said"),
    [
        ("raise KeyError('x')", False, r"raised KeyError: 'x' \(.*own.py, line 3\) for row 8"),
        ("raise KeyError('x')", True, r"raised KeyError: 'x' \(.*own.py, line 3\).*row 8"),
        ("import sys; sys.exit('my message')", False, r"called sys.exit\(.*row 8.*; correct the function"),
        ("import sys; sys.exit()", False, r"called sys.exit\(.*row 8.*; correct the function"),
        ("return (1 / 0 for _ in responses)", True, r"raised ZeroDivisionError.*line 3.*it receives lists"),
        ("return [0.0 for _ in responses]", False, r"returned \[0.0, 0.0.*set scorer.parts.own.batched=true"),
        ("return 1e300", False, r"returned 1e\+300 for .*a finite number below 3.4e38"),
        ("return [1.0] * 5", True, "returned 5 scores for 6 responses, the first of row 8.*own.batched=true"),
        ("return 1.0", True, "returned float 1.0 for 6 responses, the first of row 8"),
        ("return None", True, "returned NoneType None for 6 responses"),
        ("return {*range(6)}", True, "it must return a list with one score per response"),
        ("return {'scores': [1.0]}", True, "it must return a list with one score per response"),
        ("return '123456'", True, "it must return a list with one score per response"),
    ],
)
def test_a_function_that_fails_is_reported_with_its_line_the_row_and_a_remedy(tmp_path, body, batched, said):
    with pytest.raises(RunError, match=f"own.py:score {said}|own.py:score .*{said}"):
        function(tmp_path, body, LISTS, batched=batched)(rollouts())


@pytest.mark.parametrize("value", [1, True, torch.tensor(1.0), torch.tensor([1.0]), numpy.float32(1)])
def test_numbers_and_tensors_of_one_number_are_scores(value):
    assert as_score(value) == 1.0


def test_the_line_of_an_exception_is_the_innermost_line_of_the_file_of_the_function(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import json\ndef read(text):\n    return json.loads(text)\ndef score(p, r, a):\n    return read(r)\n"
    )
    scorer = FunctionScorer(FunctionScorerConfig(path=f"{file}:score"), scorer_context(TOKENIZER))
    with pytest.raises(
        RunError,
        match=re.escape(f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}, line 3)"),
    ):
        scorer(rollouts())


def test_a_module_of_the_working_directory_is_imported(tmp_path, monkeypatch):
    (tmp_path / "own_module_of_the_tests.py").write_text("def score(p, r, ref):\n    return len(r.split())\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])  # as in a console script
    path = "own_module_of_the_tests:score"
    scorer = FunctionScorer(FunctionScorerConfig(path=path), scorer_context(TOKENIZER))
    assert scorer(rollouts()).scores.tolist() == [[1, 2], [3, 1], [2, 1]]


def test_a_function_file_may_define_dataclasses_and_keeps_its_state_between_scorers(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass C:\n    n: int = 0\nc = C()\n"
        "def score(p, r, ref):\n    c.n += 1\n    return c.n\n"
    )
    for first in (1, 7):
        scorer = FunctionScorer(FunctionScorerConfig(path=f"{file}:score"), scorer_context(TOKENIZER))
        assert scorer(rollouts()).scores[0, 0] == first
