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
from rlhf.core.batch import Batch, Budget, Rollouts, microbatches
from rlhf.core.errors import RunError, UserError
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


def test_missing_eos_score_replaces_the_score_of_a_response_without_end():
    assert words_scorer(missing_eos_score=-5)(rollouts()).scores.tolist() == [[1, -5], [-5, 1], [2, 1]]


def test_missing_eos_penalty_is_subtracted_from_the_score_of_a_response_without_end():
    assert words_scorer(missing_eos_penalty=0.5)(rollouts()).scores.tolist() == [[1, 1.5], [2.5, 1], [2, 1]]


def test_a_judge_score_ignores_missing_eos_settings():
    assert words_scorer(missing_eos_score=-5).score(rollouts()).tolist() == [[1, 2], [3, 1], [2, 1]]


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


def test_missing_eos_settings_of_a_weighted_scorer_apply_to_the_weighted_sum():
    assert weighted(missing_eos_score=-9)(rollouts()).scores.tolist() == [[1, -9], [-9, 2], [4, 2]]
    assert weighted(missing_eos_penalty=10)(rollouts()).scores.tolist() == [[1, -8], [-6, 2], [4, 2]]


def test_a_weighted_judge_score_ignores_missing_eos_settings():
    assert weighted(missing_eos_score=-9).score(rollouts()).tolist() == [[1, 4], [6, 2], [4, 2]]


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


def test_a_function_receives_prompt_response_and_reference(tmp_path):
    body = "return 100 * int(prompt[1:]) + 10 * len(response.split()) + int(reference[1:])"
    scores = function(tmp_path, body)(rollouts()).scores
    assert scores.tolist() == [[811, 821], [932, 912], [1023, 1013]] and scores.dtype == torch.float32


def test_a_batched_function_receives_lists_and_gives_the_same_scores(tmp_path):
    body = (
        "return [100 * int(p[1:]) + 10 * len(r.split()) + int(ref[1:])"
        " for p, r, ref in zip(prompts, responses, references)]"
    )
    scores = function(tmp_path, body, LISTS, batched=True)(rollouts()).scores
    assert scores.tolist() == [[811, 821], [932, 912], [1023, 1013]]


@pytest.mark.parametrize("value", ["None", "'1.0'", "float('nan')", "math.inf", "[1.0]", "1e300", "b'1'"])
def test_a_score_that_is_no_finite_number_stops_the_run_and_names_the_row(tmp_path, value):
    with pytest.raises(RunError) as stopped:
        function(tmp_path, f"return 1.0 if response != 'w4' else {value}")(rollouts())
    text = str(stopped.value)
    assert text.startswith(f"scorer.parts.own.path={tmp_path}/own.py:score returned ")
    assert "row 9 of the data, response 'w4'; a score must be a finite number" in text


@pytest.mark.parametrize("value", [1, True, torch.tensor(1.0), torch.tensor([1.0]), numpy.float32(1)])
def test_numbers_and_tensors_of_one_number_are_scores(value):
    assert as_score(value) == 1.0


@pytest.mark.parametrize(
    ("body", "got"),
    [("return [1.0] * 5", "5 scores"), ("return 1.0", "float 1.0"), ("return None", "NoneType None")],
)
def test_a_batched_function_must_give_a_score_for_each_response(tmp_path, body, got):
    with pytest.raises(RunError) as stopped:
        function(tmp_path, body, LISTS, batched=True)(rollouts())
    assert f"returned {got} for 6 responses, the first of row 8" in str(stopped.value)
    assert "scorer.parts.own.batched=true" in str(stopped.value)


@pytest.mark.parametrize("batched", [False, True])
def test_an_exception_in_a_function_is_reported_with_function_line_and_row(tmp_path, batched):
    with pytest.raises(RunError) as stopped:
        function(tmp_path, "raise KeyError('x')", LISTS, batched=batched)(rollouts())
    text = str(stopped.value)
    assert f"own.py:score raised KeyError: 'x' ({tmp_path}/own.py, line 3)" in text and "row 8" in text
    assert isinstance(stopped.value.__cause__, KeyError)


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


@pytest.mark.parametrize("code", ["3", "'my message'", ""])
def test_sys_exit_in_a_function_is_an_error_of_the_run(tmp_path, code):
    with pytest.raises(RunError, match=r"own.py:score called sys.exit\(.*row 8.*; correct the function"):
        function(tmp_path, f"import sys; sys.exit({code})")(rollouts())


def test_an_exception_while_a_batched_function_yields_scores_is_reported(tmp_path):
    with pytest.raises(RunError, match=r"raised ZeroDivisionError.*own.py, line 3.*\(it receives lists\)"):
        function(tmp_path, "return (1 / 0 for _ in responses)", LISTS, batched=True)(rollouts())


def test_a_function_that_returns_a_list_for_one_response_is_reported_with_the_setting_for_lists(tmp_path):
    with pytest.raises(RunError, match=r"returned \[0.0, 0.0.*set scorer.parts.own.batched=true if it takes"):
        function(tmp_path, "return [0.0 for _ in response]")(rollouts())


def test_a_score_beyond_float32_is_reported_with_the_limit(tmp_path):
    with pytest.raises(RunError, match=r"returned 1e\+300 for .*a finite number below 3.4e38"):
        function(tmp_path, "return 1e300")(rollouts())


@pytest.mark.parametrize("result", ["{*range(6)}", "{'scores': [1.0]}", "'123456'"])
def test_a_batched_function_must_not_return_a_set_a_dict_or_text(tmp_path, result):
    with pytest.raises(RunError, match="it must return a list with one score per response"):
        function(tmp_path, f"return {result}", LISTS, batched=True)(rollouts())


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("def other(): ...", "score", "must name a function of {file} (there is no score in it, only other)"),
        ("score = 3", "score", "must name a function (score is of type int)"),
        (
            "def score(prompt): ...",
            "score",
            "messages or of columns of the data (score takes (prompt): too many positional arguments)",
        ),
        (
            "def score(prompt, messages, x): ...",
            "score",
            "without a parameter response, messages would be the response",
        ),
        ("def score(tests, /, response): ...", "score", "arguments before / have no names"),
        ("1 / 0", "score", "(importing it raised ZeroDivisionError: division by zero, in {file}, line 1)"),
        ("def (", "score", "(importing it raised SyntaxError"),
    ],
)
def test_an_invalid_function_is_a_user_error(tmp_path, source, name, said):
    file = tmp_path / "own.py"
    file.write_text(source + "\n")
    with pytest.raises(UserError) as refused:
        FunctionScorer(FunctionScorerConfig(path=f"{file}:{name}"), scorer_context(TOKENIZER, "gold"))
    text = str(refused.value)
    assert (
        "gold.path must name" in text
        and said.format(file=file) in text
        and f", got '{file}:{name}'; " in text
    )


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


def test_a_batch_of_a_single_scorer_has_no_parts():
    assert isinstance(batch := words_scorer()(rollouts()), Batch) and batch.parts is None
