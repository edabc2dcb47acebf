"""Tests of `python -m rlhf.relabel`: preference pairs reordered by a judge, resume, and push."""

import json

import datasets
import pytest
from huggingface_hub import constants

from rlhf import relabel
from rlhf.assembly.models import build_tokenizer
from rlhf.assembly.parts import make
from rlhf.assembly.training import build_scorer, build_task
from rlhf.config.algorithms import Data
from rlhf.config.root import Config
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.files import append, read_lines
from rlhf.processes.ranks import ALONE
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.tasks.tldr_mini import gold_score
from rlhf.words.compose import compose
from tests.end_to_end.conftest import TINY

PAIRS = {"train": 40, "validation": 12}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a folder of preference pairs.

    A pair has the reference of its own post and the reference of another post. Every tenth pair has the same
    text twice, which is a tie.
    """
    folder = tmp_path_factory.mktemp("pairs")
    made = make(compose([*TINY]).task)
    for split, count in PAIRS.items():
        rows = made.prompts(split).select(range(count))
        texts = rows["reference_response"]
        with (folder / f"{split}.jsonl").open("w") as file:
            for i, query in enumerate(rows["query"]):
                own, other = texts[i], texts[i - 1] if i % 10 else texts[i]
                pair = (own, other) if i % 3 else (other, own)
                file.write(json.dumps({"prompt": query, "chosen": pair[0], "rejected": pair[1]}) + "\n")
    return folder


def config(source, *words) -> Config:
    return relabel.pairs_of([*TINY, f"task.preferences_path={source}", *words])


@pytest.fixture(scope="module")
def relabelled(source, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "pairs"
    relabel.relabel(config(source), output)
    return output


def contents(output) -> dict:
    saved = datasets.load_from_disk(str(output))
    return {split: list(saved[split]) for split in saved}


def test_response_with_the_higher_gold_score_becomes_chosen(source, relabelled):
    for split, rows in contents(relabelled).items():
        before = read_lines(source / f"{split}.jsonl")
        assert len(rows) == len(before) == PAIRS[split]
        for row, pair in zip(rows, before, strict=True):
            scores = [gold_score(pair["prompt"], pair[side]) for side in ("chosen", "rejected")]
            order = ["rejected", "chosen"] if scores[1] > scores[0] else ["chosen", "rejected"]
            assert row["prompt"] == pair["prompt"]
            assert [row["chosen"], row["rejected"]] == [pair[side] for side in order]
            assert [row["chosen_score"], row["rejected_score"]] == pytest.approx(sorted(scores)[::-1])
            assert row["swapped"] == (scores[1] > scores[0])


def test_report_counts_ties_and_leaves_them_out_of_the_agreement(source, relabelled):
    told = json.loads((relabelled / relabel.REPORT).read_text())["splits"]["train"]
    margins = [
        gold_score(pair["prompt"], pair["chosen"]) - gold_score(pair["prompt"], pair["rejected"])
        for pair in read_lines(source / "train.jsonl")
    ]
    ties, agreed = margins.count(0), sum(margin > 0 for margin in margins)
    assert ties >= 4 and 0 < agreed < 40 - ties, "the pairs must include ties, agreements and swaps"
    assert (told["pairs"], told["ties"], told["agreed"], told["swapped"]) == (
        40, ties, agreed, 40 - ties - agreed,
    )  # fmt: skip
    assert told["agreement"] == agreed / (40 - ties)
    assert told["agreement_low"] < told["agreement"] < told["agreement_high"]


@pytest.mark.smoke
def test_reward_model_trains_on_relabelled_pairs(relabelled, cache_dir, tmp_path):
    words = [f"cache_dir={cache_dir}", f"task.preferences_path={relabelled}", "eval.prompts=12"]
    folder = RunFolder(tmp_path / "reward")
    run(compose([*TINY, "algo=reward", *words]), folder)
    assert "eval/accuracy" in folder.finished()["result"]


def test_interrupted_relabelling_resumes_and_gives_identical_pairs(source, relabelled, tmp_path, monkeypatch):
    output, scored = tmp_path / "pairs", []
    monkeypatch.setattr(relabel.memory, "PAIRS", 8)
    write = append

    def struck(file, rows):
        write(file, rows)
        scored.extend(rows)
        if len(scored) == 24:
            with file.open("a") as cut:
                cut.write('{"index": 3, "sco')  # an incomplete line, as a kill leaves it
            raise Interrupted("enough")

    monkeypatch.setattr(relabel, "append", struck)
    with pytest.raises(Interrupted):
        relabel.relabel(config(source), output)
    assert not output.exists() and len(scored) == 24

    relabel.relabel(config(source), output)

    assert len(scored) == sum(PAIRS.values()), "no pair is scored twice"
    assert contents(output) == contents(relabelled)
    assert (output / relabel.REPORT).read_text() == (relabelled / relabel.REPORT).read_text()
    assert list(tmp_path.iterdir()) == [output], "no temporary file is left"


def test_saved_scores_of_another_judge_are_not_reused(source, relabelled, tmp_path, monkeypatch):
    judge = tmp_path / "judge.py"
    judge.write_text("def none(prompt, response, reference):\n    return 0.0\n")
    output = tmp_path / "out" / "pairs"
    monkeypatch.setattr(relabel, "write_data", lambda *_: None)
    relabel.relabel(config(source, "scorer@gold=function", f"gold.path={judge}:none"), output)
    monkeypatch.undo()
    relabel.relabel(config(source), output)
    assert contents(output) == contents(relabelled)


def test_long_prompts_are_left_out_and_counted(source, tmp_path):
    tokenizer = build_tokenizer(compose([*TINY, "algo=sft"]))
    lengths = [len(tokenizer(row["prompt"])["input_ids"]) for row in read_lines(source / "train.jsonl")]
    limit = sorted(lengths)[30]
    relabel.relabel(config(source, f"task.max_prompt_tokens={limit}"), tmp_path / "pairs")
    told = json.loads((tmp_path / "pairs" / relabel.REPORT).read_text())["splits"]["train"]
    assert told["left_out"] == sum(length > limit for length in lengths) > 0
    assert told["pairs"] == len(contents(tmp_path / "pairs")["train"]) == 40 - told["left_out"]


def test_reward_model_judge_scores_with_its_own_tokenizer(source, cache_dir, tmp_path):
    from rlhf.core.batch import Rollouts
    from rlhf.stages.prerequisites import complete
    from rlhf.text.encoding import encode_completions

    model = complete(compose([*TINY, f"cache_dir={cache_dir}"]), run).model.reward
    cfg = config(source, "scorer@gold=reward_model", f"gold.path={model}")
    relabel.relabel(cfg, tmp_path / "pairs")
    tokenizer = relabel.tokenizer_of(cfg)
    gold = build_scorer(cfg, "gold", tokenizer, ALONE)
    assert gold.own_tokenizer is None, "texts must be tokenized only once"
    held_out = build_task(cfg, tokenizer, Data.preferences, 1).held_out(12)
    rollouts: Rollouts = encode_completions(held_out, held_out.completions, tokenizer, None)
    for row, scores in zip(contents(tmp_path / "pairs")["validation"], gold.score(rollouts), strict=True):
        both = sorted(scores.tolist(), reverse=True)
        assert [row["chosen_score"], row["rejected_score"]] == pytest.approx(both, abs=1e-5)


def test_existing_pairs_are_kept_and_other_output_folders_are_refused(
    source, relabelled, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(relabel, "carry_out", lambda *_: pytest.fail("made again"))
    relabel.relabel(config(source), relabelled)
    assert f"relabelled already: {relabelled}" in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(UserError, match="output= must be a new folder .*labelled with other settings"):
        relabel.relabel(config(source, "task.max_prompt_tokens=100"), relabelled)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="output= must be a new folder .*contains something else"):
        relabel.relabel(config(source), tmp_path)


def test_pairs_are_pushed_only_with_push_to_and_as_private_dataset(source, relabelled, monkeypatch):
    pushed = []
    monkeypatch.setattr(datasets.DatasetDict, "push_to_hub", lambda *_, **more: pushed.append(more))
    monkeypatch.setattr(relabel, "is_first_rank", lambda: True)
    words = [*TINY, f"task.preferences_path={source}"]
    monkeypatch.setenv("HF_TOKEN", "of-the-test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    relabel.command({"output": str(relabelled)}, words)
    assert pushed == []
    relabel.command({"output": str(relabelled), "push_to": "me/pairs"}, words)
    assert pushed == [{"private": True, "token": "of-the-test"}]


def test_failed_push_reports_a_remedy_and_hides_the_token(source, relabelled, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of-the-test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(
        RunError, match="push_to=me/pairs must be a reachable repository .* is complete"
    ) as told:
        relabel.command(
            {"output": str(relabelled), "push_to": "me/pairs"}, [*TINY, f"task.preferences_path={source}"]
        )
    assert "of-the-test" not in str(told.value)
