"""Local data folders, error messages for invalid folders, and the tasks that read them."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from rlhf.assembly.parts import make
from rlhf.checks.check import warnings
from rlhf.checks.inputs import data_folders
from rlhf.config.algorithms import Data, Trains
from rlhf.config.tasks import GSM8KConfig, PreferencesConfig, TaskConfig, TLDRConfig, TLDRMiniConfig
from rlhf.core.errors import UserError
from rlhf.tasks.files import Splits, folder_problems, has_dialogues
from rlhf.words.compose import compose
from tests import needs

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=needs.GSM8K)

ROWS = {"query": ["a", "b"], "reference_response": ["c", "d"]}
PAIRS = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}


WRITERS = {
    "jsonl": Dataset.to_json,
    "json": lambda rows, file: Path(file).write_text(json.dumps(list(rows))),
    "parquet": Dataset.to_parquet,
    "csv": Dataset.to_csv,
}
KINDS = [*WRITERS, "saved"]


def write(folder: Path, kind: str, columns: dict[str, list[str]]) -> Path:
    dataset = Dataset.from_dict(columns)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "saved":
        DatasetDict({"train": dataset, "validation": dataset}).save_to_disk(str(folder))
    else:
        for split in ("train", "validation"):
            WRITERS[kind](dataset, str(folder / f"{split}.{kind}"))
    return folder


def split_columns(folder: Path) -> dict[str, list[str]]:
    splits = Splits(str(folder), "task.path")
    return {name: splits.columns(name) for name in splits.files}


def content(dataset: Dataset) -> dict[str, list[str]]:
    """Return the columns of a data set without the places of its rows."""
    return {name: values for name, values in dataset.to_dict().items() if name != "place"}


def run(task: TaskConfig, data: Data = Data.prompts, trains: Trains = Trains.policy) -> Any:
    """Return the parts of a config that the rules of `rlhf.checks.inputs` read."""
    algo = SimpleNamespace(name="some", trains=trains)
    pairs = data is Data.preferences
    return SimpleNamespace(task=task, reads_pairs=pairs, algo=algo, generator=SimpleNamespace(name="hf"))


def problems(task: TaskConfig, **of_run: Any) -> list[str]:
    return [*task.problems("task"), *data_folders(run(task, **of_run))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_each_kind_is_checked_and_loaded(tmp_path: Path, kind: str):
    folder = write(tmp_path / kind, kind, ROWS)
    assert split_columns(folder) == {"train": list(ROWS), "validation": list(ROWS)}
    config = TLDRConfig(path=str(folder))
    assert problems(config) == []
    assert content(make(config).prompts("validation")) == ROWS


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_column_is_reported_with_the_existing_columns(tmp_path: Path, kind: str):
    folder = write(tmp_path / kind, kind, {"query": ["a"], "answer": ["b"]})
    (first, second) = problems(TLDRConfig(path=str(folder)))
    assert first.startswith("task.path must have the columns query, reference_response in its split train")
    assert "with query, answer; rename or add reference_response" in first
    assert "split validation" in second
    with pytest.raises(ValueError, match="rename or add reference_response"):
        make(TLDRConfig(path=str(folder))).prompts("train")


def test_what_is_missing_is_a_problem_before_anything_is_loaded_with_its_remedy(tmp_path: Path):
    (write(tmp_path, "jsonl", ROWS) / "validation.jsonl").unlink()
    for task, said in (
        (TLDRConfig(path=str(tmp_path / "none")), "none (no such folder); set task.path=<folder>"),
        (TLDRConfig(path=str(tmp_path / "train.jsonl")), "(a file)"),
        (
            TLDRConfig(path=str(tmp_path)),
            "with train; add validation.jsonl with the columns query, ",
        ),
        (PreferencesConfig(), "set task.path=<folder> or task.preferences_name=<hub name>"),
        (GSM8KConfig(template="Solve this."), "task.template must contain {question}"),
    ):
        (problem,) = problems(task)
        assert said in problem


@pytest.mark.parametrize("kind", KINDS)
def test_an_unusable_row_is_a_problem_before_the_run_in_every_format(tmp_path: Path, kind: str):
    write(tmp_path / kind, kind, {"query": ["a", "b"], "reference_response": ["c", None]})  # type: ignore[list-item]
    path, columns = str(tmp_path / kind), ("query", "reference_response")
    found = list(folder_problems("task.path", path, columns, ["train"], "why"))
    if kind == "csv":
        assert found == []
        return
    assert " 2 of " in found[0] and "with null; correct or remove the rows" in found[0]
    with pytest.raises(UserError, match=" 2 of .*with null"):
        make(TLDRConfig(path=path)).prompts("train")


@pytest.mark.parametrize("lost", ["data-00000-of-00001.arrow", "state.json"])
def test_a_saved_data_set_without_a_file_is_a_problem_before_the_run(tmp_path: Path, lost: str):
    folder = write(tmp_path / "saved", "saved", ROWS)
    (folder / "train" / lost).unlink()
    (problem,) = folder_problems("task.path", str(folder), list(ROWS), ["train"], "why")
    assert problem.startswith("task.path must contain a complete data set of datasets.save_to_disk, got ")
    assert problem.endswith("; save the data set again")


@pytest.mark.parametrize("kind", KINDS)
def test_dialogues_stored_as_texts_are_read_as_dialogues_from_every_format(tmp_path: Path, kind: str):
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in "cd"]
    texts = {name: [json.dumps(turns[number])] * 2 for number, name in enumerate(("chosen", "rejected"))}
    source = make(PreferencesConfig(path=str(write(tmp_path, kind, {"prompt": ["a", "b"], **texts}))))
    assert [row["prompt"] for row in source.preferences("train")] == [turns[0][:1]] * 2


def test_a_hub_name_as_a_path_is_a_problem_that_names_the_key_of_hub_names():
    (problem,) = problems(PreferencesConfig(path="some/pairs"), data=Data.preferences)
    assert problem.endswith("set task.preferences_name=some/pairs instead of task.path")
    (problem,) = problems(TLDRConfig(path="some/prompts"))
    assert problem.endswith("set task.prompts_name=some/prompts instead of task.path")
    (problem,) = problems(TLDRMiniConfig(path="some/prompts"))
    assert problem.endswith("set task.path=<folder>"), "the task has no key for hub names"


def test_pairs_come_from_preferences_path_or_by_default_from_path(tmp_path: Path):
    rows, pairs = write(tmp_path / "rows", "jsonl", ROWS), write(tmp_path / "pairs", "jsonl", PAIRS)
    both = TLDRConfig(path=str(rows), preferences_path=str(pairs))
    assert problems(both, data=Data.preferences) == []
    assert content(make(both).preferences("train")) == PAIRS
    assert content(make(both).prompts("train")) == ROWS
    only = TLDRConfig(path=str(pairs))
    assert problems(only, data=Data.preferences, trains=Trains.reward) == []
    assert content(make(only).preferences("train")) == PAIRS


def test_a_policy_trained_on_pairs_needs_references_to_be_evaluated(tmp_path: Path):
    pairs = write(tmp_path, "jsonl", PAIRS)
    found = problems(TLDRConfig(path=str(pairs)), data=Data.preferences, trains=Trains.policy)
    assert len(found) == 2
    assert all("the policy is evaluated on it" in problem for problem in found)


def test_an_unused_preferences_path_gives_a_warning():
    def found(*words: str) -> list[str]:
        return [text for text in warnings(compose([*words, "task.preferences_path=x"])) if "_path" in text]

    (warning,) = found("task=tldr")
    assert warning.startswith("task.preferences_path has no effect")
    assert not found("task=tldr", "algo=reward")
    assert not found("task=preferences"), "prompts come from the pairs"


def test_an_embedded_task_requires_preferences_path_for_pairs():
    with pytest.raises(ValueError, match=r"task\.preferences_path must name a folder of preference pairs"):
        make(TLDRMiniConfig()).preferences("train")


def test_an_unreachable_hub_data_set_is_a_user_error():
    source = make(TLDRConfig(prompts_name="nobody/nothing-of-this-name"))
    with pytest.raises(ValueError, match=r"task\.prompts_name must name .* set task\.path=<local folder>"):
        source.prompts("train")


def test_preferences_give_prompts_with_chosen_as_reference(tmp_path: Path):
    config = PreferencesConfig(path=str(write(tmp_path, "parquet", PAIRS)))
    assert problems(config, data=Data.preferences) == []
    prompts = make(config).prompts("validation")
    expected = {"query": PAIRS["prompt"], "reference_response": PAIRS["chosen"]}
    assert content(prompts) == expected | {"rejected": PAIRS["rejected"]}


def test_the_validation_split_of_preferences_may_have_another_name(tmp_path: Path):
    write(tmp_path, "jsonl", PAIRS)
    (tmp_path / "validation.jsonl").rename(tmp_path / "test.jsonl")
    assert problems(PreferencesConfig(path=str(tmp_path)))
    config = PreferencesConfig(path=str(tmp_path), validation_split="test")
    assert problems(config) == []
    assert content(make(config).preferences("validation")) == PAIRS


@pytest.mark.process
def test_checking_a_folder_imports_neither_torch_nor_datasets(tmp_path: Path):
    write(tmp_path, "parquet", ROWS)
    code = (
        "import sys; from rlhf.tasks.files import Splits; import rlhf.config.tasks;"
        f"Splits({str(tmp_path)!r}, 'task.path').columns('train');"
        "print([m for m in ('torch', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_gsm8k
def test_gsm8k_as_published_has_the_papers_prompt_and_the_end_of_train_is_the_validation_split():
    source = make(GSM8KConfig(path=str(GSM8K)))
    rows = [source.prompts(split) for split in ("train", "validation", "test")]
    parts = [set(each["query"]) for each in rows]
    assert [*map(len, rows)] == [7000, 473, 1319] and not parts[0] & (parts[1] | parts[2])
    assert problems(source.config) == []
    row = rows[0][0]
    assert row["query"].startswith("[MATH_TASK] Problem:\nNatalia sold clips to 48 of her friends")
    assert row["query"].endswith("May?\n\nSolution:") and row["reference_response"].endswith("#### 72")


def test_gsm8k_with_chat_asks_the_question_as_a_message_with_the_form_of_the_answer(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = make(GSM8KConfig(path=str(tmp_path), chat=True, validation_size=1))
    assert source.conversational and has_dialogues(source.config)
    row = source.prompts("train")[0]
    (message,) = row["messages"]
    assert message["role"] == "user" and message["content"].startswith("0 + 1?\n\n")
    assert "####" in message["content"] and "query" not in row and "#### 1" in str(row["reference_response"])
    own = make(GSM8KConfig(path=str(tmp_path), chat=True, template="Q: {question}"))
    assert own.config.question_format == "Q: {question}"
