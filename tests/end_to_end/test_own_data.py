"""A user's first hour: the commands of the docs, with local files and a tiny local Llama."""

import csv
import gzip
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.checks.check import problems
from rlhf.core.errors import UserError
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.tasks.source import word_tokenizer
from rlhf.words.compose import compose
from tests.end_to_end.conftest import rows
from tests.forks import ROOT
from tests.tiny_models import tiny_lm

THINGS = ("tea", "bread", "soup", "rice", "jam", "pie", "salad", "pasta")
WORDS = [
    *(f" {word}" for word in ("How", "do", "I", "make", "Take", "water", "and", "heat", "No", *THINGS)),
    "?",
    ".",
]
SMALL = [
    *("task.max_prompt_tokens=24", "generator.response_length=12", "optim.lr=1e-3"),
    *("schedule.prompts_per_update=8", "schedule.total_epochs=0.3", "eval.prompts=4", "progress=off"),
]


def question(number: int) -> str:
    return f" How do I make {THINGS[number % 8]} and {THINGS[number // 8]}?"


def documented(page: str, *parts: str) -> list[str]:
    """Return the arguments of the only `rlhf.train` command of a page that contains all `parts`."""
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    found = [
        line
        for line in re.findall(r"^    python -m rlhf.train (.*)", text, re.M)
        if all(part in line for part in parts)
    ]
    assert len(found) == 1, found
    return shlex.split(re.sub("(<.*?>)", r"'\1'", found[0]))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a folder with a random Llama, and its tokenizer without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "mine"
    tokenizer = word_tokenizer(WORDS, r" ?\w+|[^\w\s]")
    tiny_lm("llama", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def train(tmp_path, model, capfd, monkeypatch) -> Callable[..., tuple[RunFolder, str]]:
    """`train(*overrides)` checks and runs a config in `tmp_path`, and returns the run folder and the output.

    `<model>` in an override stands for the local model.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()

    def go(*overrides: str) -> tuple[RunFolder, str]:
        cfg = compose([*(each.replace("<model>", str(model)) for each in overrides), *SMALL])
        assert problems(cfg) == []
        folder = RunFolder(Path(cfg.output_dir) / f"{cfg.algo.name}-{cfg.generator.name}")
        run(cfg, folder)
        return folder, " ".join(capfd.readouterr().out.split())

    return go


def write(file: str, rows_of_file: list[dict]) -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))


def test_prompts_and_a_reward_function(train):
    write("data/tea.jsonl", [{"prompt": question(i)} for i in range(40)])
    code = re.findall(
        r"```python\n(# my_rewards.py.*?)```", (ROOT / "docs" / "data-model-reward.md").read_text(), re.S
    )
    Path("my_rewards.py").write_text(code[0])
    folder, output = train(*documented("data-model-reward.md", "data/tea.jsonl", "scorer=function"))
    assert "train: 36 rows" in output
    assert "validation: 4 rows, split off" in output
    assert "columns: prompt" in output
    assert "prompt tokens: median 8, 95% at most 8, longest 8" in output
    last = rows(folder)[-1]
    assert "eval/score" in last
    assert "eval/win_rate" not in last, "there are no references to compare with"


def test_sft_on_answers(train):
    answer = " Take water and heat water."
    write("data/qa.jsonl", [{"question": question(i), "answer": answer} for i in range(40)])
    folder, output = train(*documented("data-model-reward.md", "data/qa.jsonl", "algo=sft"))
    assert "columns: question as prompt, answer as response" in output
    assert "response tokens: median 7," in output
    assert rows(folder)[-1]["eval/loss"] < rows(folder)[0]["eval/loss"]


def test_sft_on_a_csv_file_with_other_column_names(train):
    with Path("data/FAQ.CSV").open("w", newline="", encoding="utf-8-sig") as stream:
        table = csv.writer(stream)
        table.writerow(["frage", "antwort"])
        table.writerows([question(i), " Take water and heat water."] for i in range(40))
    columns = "task.columns.prompt=frage", "task.columns.response=antwort"
    folder, output = train("task=local", "algo=sft", "task.path=data/FAQ.CSV", *columns, "model.base=<model>")
    assert "columns: frage as prompt, antwort as response" in output
    assert rows(folder)[-1]["eval/loss"] < rows(folder)[0]["eval/loss"]


def test_pairs_for_a_reward_model_for_offline_dpo_and_for_online_dpo_with_the_reward_model(train):
    write(
        "data/pairs.jsonl",
        [{"prompt": question(i), "chosen": " Take water.", "rejected": " No."} for i in range(40)],
    )
    trained, output = train(*documented("data-model-reward.md", "data/pairs.jsonl algo=reward"))
    assert "columns: prompt, chosen, rejected" in output
    assert "eval/accuracy" in rows(trained)[-1]
    offline, output = train(*documented("data-model-reward.md", "data/pairs.jsonl", "generator=dataset"))
    assert "columns: prompt, chosen, rejected" in output
    assert "eval/accuracy" in rows(offline)[-1]
    online = documented("data-model-reward.md", "data/pairs.jsonl", "algo=dpo", "<reward model>")
    folder, _ = train(*(each.replace("<reward model>", str(trained.model)) for each in online))
    assert {"eval/score", "eval/win_rate_vs_initial"} <= rows(folder)[-1].keys()


def test_pairs_in_a_compressed_file(train):
    pairs = ({"prompt": question(i), "chosen": " Take water.", "rejected": " No."} for i in range(40))
    Path("data/pairs.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(pair) + "\n" for pair in pairs).encode())
    )
    folder, _ = train(
        "task=local", "algo=dpo", "generator=dataset", "task.path=data/pairs.jsonl.gz", "model.policy=<model>"
    )
    assert "eval/accuracy" in rows(folder)[-1]


def test_dialogues_for_a_base_model_without_a_chat_template(train):
    answer = {"role": "assistant", "content": " Take water and heat water."}
    dialogues = [{"messages": [{"role": "user", "content": question(i)}, answer]} for i in range(40)]
    write("dialogues.jsonl", dialogues)
    folder, output = train(*documented("data-model-reward.md", "dialogues.jsonl"))
    assert "columns: messages" in output
    assert rows(folder)[-1]["eval/loss"] < rows(folder)[0]["eval/loss"]


def nothing(response: str) -> float:
    return 0.0


def distilled(folder: Path, model: Path, hint: str, epochs: float, *words: str) -> RunFolder:
    """Return the folder of a run whose teacher, the initial policy, reads each prompt behind a hint."""
    write(
        str(folder / "data.jsonl"), [{"prompt": question(i), "hint": hint + question(i)} for i in range(40)]
    )
    run_folder = RunFolder(folder / "run")
    words = (f"task.path={folder}/data.jsonl", f"model.policy={model}", "task.teacher_column=hint", *words)
    scorer = "scorer=function", "scorer.path=tests.end_to_end.test_own_data:nothing"
    length = (
        f"schedule.total_epochs={epochs}",
        "schedule.log_every=1",
        "optim.lr=1e-3",
        "optim.schedule=constant",
    )
    cfg = compose(["task=local", "algo=distill", *words, *scorer, *SMALL, *length, "schedule.eval_every=0.5"])
    assert problems(cfg) == []
    run(cfg, run_folder)
    return run_folder


def trained(folder: RunFolder, metric: str) -> list[float]:
    return [row[metric] for row in rows(folder) if metric in row]


@pytest.mark.parametrize("adapters", [[], ["model.lora.rank=4"]])
def test_a_policy_learns_to_answer_as_if_it_had_read_the_column_of_its_teacher(tmp_path, model, adapters):
    folder = distilled(tmp_path, model, " No.", 4, *adapters)
    divergence, kl = trained(folder, "distill/divergence"), trained(folder, "eval/kl")
    assert divergence[0] > 1e-2 and sum(divergence[-5:]) / 5 < divergence[0] / 2
    assert trained(folder, "objective/kl")[0] != 0, "the log-probs of the teacher are those behind the hint"
    assert kl[0] == 0 < kl[-1], "at the prompts of the policy"


def test_a_teacher_that_reads_the_same_prompts_teaches_nothing(tmp_path, model):
    folder = distilled(tmp_path, model, "", 0.3)
    for metric in ("distill/divergence", "objective/kl", "policy/grad_norm"):  # Adam then steps by the signs
        assert abs(trained(folder, metric)[0]) < 1e-5


@pytest.mark.parametrize(
    ("row", "said"),
    [({}, "task.teacher_column must name a column.*prompt.*got hint"), ({"hint": None}, "line .* with null")],
)
def test_a_column_of_the_teacher_that_cannot_be_read_is_an_error(train, row, said):
    write("data/hints.jsonl", [{"prompt": question(i), **row} for i in range(40)])
    scorer = "scorer=function", "scorer.path=tests.end_to_end.test_own_data:nothing"
    words = "task.path=data/hints.jsonl", "model.policy=<model>", "task.teacher_column=hint"
    with pytest.raises(UserError, match=said):
        train("task=local", "algo=distill", *words, *scorer)
