"""task=reasoning_gym and its scorer: generated problems, and the traps of the package's verifiers."""

import datasets
import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.assembly.training import build_scorer, build_task
from rlhf.config.algorithms import Data
from rlhf.config.scorers import ReasoningGymConfig
from rlhf.core.errors import UserError
from rlhf.processes.ranks import ALONE
from rlhf.text.encoding import encode_completions
from rlhf.words.compose import compose

SMALL = {"train_size": 4, "validation_size": 2, "test_size": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep generated problems in a folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def source(dataset, **settings):
    return make(ReasoningGymConfig(dataset=dataset, **{**SMALL, **settings}))


def scored(dataset, *responses, **settings):
    """Return the scores and the verifier errors of responses to the first held-out problem of a data set.

    `{}` in a response stands for the answer of the package.
    """
    sizes = [f"task.{name}={size}" for name, size in SMALL.items()]
    words = [f"scorer.{name}={value}" for name, value in settings.items()]
    cfg = compose(["task=reasoning_gym", "algo=grpo", f"task.dataset={dataset}", *sizes, *words])
    tokenizer = make(cfg.task).tokenizer()
    cfg.task.max_prompt_tokens = 10_000
    prompts = build_task(cfg, tokenizer, Data.prompts, 1).held_out(1)
    answer = prompts.references[0].removeprefix("<answer>").removesuffix("</answer>")
    texts = [[text.replace("{}", answer) for text in responses]]
    ended = torch.ones(1, len(responses), dtype=torch.bool)
    rollouts = encode_completions(prompts, texts, tokenizer, response_length=None, ended=ended)
    batch = build_scorer(cfg, "scorer", tokenizer, ALONE)(rollouts)
    return batch.scores[0].tolist(), batch.parts["verifier_errors"][0].tolist()


# -- problems --------------------------------------------------------------------------------------


def test_neighbouring_seeds_share_no_problem_and_training_has_no_held_out_question():
    questions = {
        (seed, split): set(source("gcd", data_seed=seed).prompts(split)["query"])
        for seed in (0, 1)
        for split in ("train", "validation", "test")
    }
    assert sum(map(len, questions.values())) == len(set.union(*questions.values())) == 16
    few = source("count_bits", arguments={"max_n": 40}, train_size=200, validation_size=16, test_size=1)
    train, held_out = (few.prompts(split)["query"] for split in ("train", "validation"))
    assert len(train) and not set(train) & set(held_out)


def test_a_data_set_whose_problems_are_all_held_out_is_an_error():
    with pytest.raises(UserError, match="task.arguments must give more problems than the held-out examples"):
        source("count_bits", arguments={"min_n": 1, "max_n": 2}, validation_size=64).prompts("train")


def test_problems_are_generated_once_and_then_come_from_the_cache(monkeypatch):
    first = source("gcd").prompts("train")["query"][:]
    monkeypatch.setattr("reasoning_gym.create_dataset", None)  # a second generation would fail
    assert source("gcd").prompts("train")["query"][:] == first
    with pytest.raises(UserError, match="with which gcd makes 4 problems .TypeError: "):
        source("gcd", data_seed=1).prompts("train")


def test_the_embedded_tokenizer_has_a_token_for_each_character_and_each_mark_of_an_answer():
    made = source("chain_sum")
    row, tokenizer = made.prompts("train")[0], made.tokenizer()
    assert len(tokenizer) == made.config.vocabulary_size
    assert tokenizer.decode(tokenizer(row["query"])["input_ids"]) == row["query"]
    assert row["reference_response"].startswith("<answer>")
    assert len(tokenizer.tokenize(row["reference_response"])) == len(row["reference_response"]) - 15


@pytest.mark.parametrize(
    "dataset", ["graph_color", "rubiks_cube", "boxnet", "rush_hour", "propositional_logic"]
)
def test_problems_without_a_stored_answer_have_no_reference_that_a_judge_could_score(dataset):
    assert not any(source(dataset).prompts("validation")["reference_response"])
    assert source(dataset, chat=True).prompts("validation")["reference_response"][0] == []
    row = source("chain_sum", chat=True).prompts("train")[0]
    (message,) = row["messages"]
    assert message["role"] == "user" and message["content"].endswith("between <answer> and </answer>.")
    assert row["reference_response"][0]["role"] == "assistant" and "query" not in row


# -- verifiers -------------------------------------------------------------------------------------


WHOLE = ["<answer>{}</answer>", "<answer>it is {}</answer>"]
RAISES = ["<answer>x</answer>", "<answer>{}</answer>"]
LAST = ["<answer>{}</answer>", "{}", "<answer>0.5</answer> or <answer> {}\n</answer>", "<answer>{}"]


@pytest.mark.parametrize(
    ("dataset", "responses", "settings", "scores", "errors"),
    [
        ("chain_sum", LAST, {}, [1, 0, 1, 0], 0),  # only between the marks, and the last one
        ("chain_sum", ["{}"], {"pattern": "null"}, [1], 0),
        ("spell_backward", WHOLE, {}, [1, 0], None),  # a longer text has no full score
        ("chain_sum", WHOLE, {}, [1, 0], None),
        ("prime_factorization", RAISES, {}, [0, 1], 1),  # a verifier that raises
        *((name, ["", "x"], {"exact": "false"}, [0, 0], None) for name in ("countdown", "puzzle24")),
        ("fraction_simplification", ["", "x"], {"exact": "false"}, [0, 0], None),
        *((name, RAISES[:1], {}, [0], None) for name in ("countdown", "puzzle24", "fraction_simplification")),
        ("game_of_life_halting", ["x", "<answer>{}</answer>"], {}, [0, 1], None),
        *(
            (name, WHOLE[:1], {}, [1], 0) for name in ("arc_agi", "rearc", "knights_knaves")
        ),  # tuples; objects
    ],
)
def test_the_last_answer_between_the_marks_is_verified(dataset, responses, settings, scores, errors):
    found, raised = scored(dataset, *responses, **settings)
    assert found == scores and errors in (None, sum(raised))


def test_the_score_of_a_verifier_without_exact_may_be_a_part():
    full, part = scored("chain_sum", *WHOLE, exact="false")[0]
    assert full == 1 and 0 < part < 1


def of_responses(*responses, **words):
    """Return the scores of responses to the first held-out problem of gcd; `{}` is the answer."""
    sizes = [f"task.{name}={size}" for name, size in SMALL.items()]
    chosen = [f"{name}={value}" for name, value in words.items()]
    cfg = compose(["task=reasoning_gym", "algo=grpo", "task.dataset=gcd", *sizes, *chosen])
    tokenizer = make(cfg.task).tokenizer()
    prompts = build_task(cfg, tokenizer, Data.prompts, 1).held_out(1)
    ended = torch.ones(1, len(responses), dtype=torch.bool)
    texts = [[text.replace("{}", prompts.references[0]) for text in responses]]
    rollouts = encode_completions(prompts, texts, tokenizer, response_length=None, ended=ended)
    return build_scorer(cfg, "scorer", tokenizer, ALONE)(rollouts).scores.tolist()


def test_a_verifier_may_be_a_part_of_a_sum_and_functions_receive_the_problem(tmp_path):
    part = {"+scorer@scorer.parts.right": "reasoning_gym", "scorer.parts.right.weight": 2}
    assert of_responses("{}", "<answer>x</answer>", scorer="weighted", **part) == [[2, 0]]
    file = tmp_path / "own.py"
    file.write_text("def score(response, entry, dataset): return 'question' in entry and dataset == 'gcd'\n")
    assert of_responses("1", scorer="function", **{"scorer.path": f"{file}:score"}) == [[1]]
