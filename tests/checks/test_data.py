"""Rules for the data of a run: dialogues, mixtures, folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose, load_config, run_name
from tests.model_folders import write_model, write_tokenizer

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
MISSING = "model.chat_template must be set for dialogues"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a causal language model whose tokenizer has no chat template."""
    folder = tmp_path / "base"
    write_model(folder)
    write_tokenizer(folder)
    return folder


def write_rows(folder: Path, row: dict) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    return file


def found(base: Path, *words: str) -> list[str]:
    """Return the errors about templates of an SFT run."""
    cfg = compose(["algo=sft", f"model.base={base}", "task.max_prompt_tokens=64", *words])
    return [problem for problem in problems(cfg) if "chat_template" in problem]


def test_dialogues_in_a_local_file_need_a_chat_template(base, tmp_path):
    words = ["task=local", f"task.path={write_rows(tmp_path, {'messages': TURNS})}"]
    (problem,) = found(base, *words)
    assert problem.startswith(MISSING) and "set model.chat_template=plain" in problem
    assert found(base, *words, "model.chat_template=plain") == []
    write_rows(tmp_path, TEXTS)
    assert found(base, *words) == [], "texts need none"
    write_rows(tmp_path, {"messages": TURNS})
    write_tokenizer(base, chat_template="{{ messages }}")
    assert found(base, *words) == []


TEXTS = {"prompt": "a", "response": "b"}
PAIRS = {"prompt": "a", "chosen": "b", "rejected": "c"}


def chat(base: Path, file: Path, *words: str) -> bool:
    algo = ("algo=rloo", f"model.policy={base}")
    return compose(["task=local", f"task.path={file}", *(words or algo)]).task.chat


def test_texts_are_messages_if_the_model_has_a_chat_template(base, tmp_path):
    for row in (TEXTS, PAIRS, {"question": "a"}):
        assert not chat(base, write_rows(tmp_path, row))
    write_tokenizer(base, chat_template="{{ '<a>' }}{{ messages }}")
    for row in (TEXTS, PAIRS, {"question": "a"}):
        file = write_rows(tmp_path, row)
        assert chat(base, file) and not chat(
            base, file, "algo=rloo", f"model.policy={base}", "task.chat=false"
        )
        assert chat(base, file, "algo=sft", f"model.base={base}")
        assert not chat(base, file, "algo=rloo", f"model.base={base}")
        assert chat(base, file, "scorer@gold=reward_model", f"gold.path={base}"), "rlhf.relabel has no policy"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"prompt": TURNS[:1], "response": TURNS[1:]},
        {"prompt": "<a> formatted", "response": "b"},
        {"prompt": "<eos>formatted"},
        {"prompt": "a", "chosen": "a b", "rejected": "a c"},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ],
)
def test_rows_with_a_format_of_their_own_stay_as_they_are(base, tmp_path, row):
    write_tokenizer(base, chat_template="{{ '<a>' }}{{ messages }}")
    assert not chat(base, write_rows(tmp_path, row))


def test_a_template_that_the_run_names_makes_messages(base, tmp_path):
    words = ("algo=rloo", f"model.policy={base}", "model.chat_template=plain")
    assert chat(base, write_rows(tmp_path, TEXTS), *words)


def test_the_name_of_a_run_with_texts_for_a_base_model_does_not_depend_on_the_key(base, tmp_path):
    words = ["task=local", f"task.path={write_rows(tmp_path, TEXTS)}", "algo=rloo", f"model.policy={base}"]
    assert run_name(compose(words)) == run_name(compose([*words, "task.chat=false"]))
    write_tokenizer(base, chat_template="{{ messages }}")
    assert run_name(compose(words)) == run_name(compose([*words, "task.chat=true"]))


def test_a_stored_config_without_the_key_keeps_its_texts(base, tmp_path):
    write_tokenizer(base, chat_template="{{ messages }}")
    cfg = compose(
        ["task=local", f"task.path={write_rows(tmp_path, TEXTS)}", "algo=rloo", f"model.policy={base}"]
    )
    folder = RunFolder(tmp_path / "run")
    folder.write_config(cfg)
    assert load_config(folder.config).task.chat
    text = folder.config.read_text()
    folder.config.write_text(text.replace("  chat: true\n", ""))
    assert not load_config(folder.config).task.chat and "chat: true" in text


def test_task_chat_needs_a_format_of_turns_or_a_chat_template_whose_file_exists(base, tmp_path):
    assert found(base, "task=chat")[0].startswith(MISSING)
    assert found(base, "task=chat", "task.turn='{role}{content}'", "task.reply=x") == []
    file = tmp_path / "format.jinja"
    (problem,) = found(base, "task=chat", f"model.chat_template={file}")
    assert problem.startswith("model.chat_template must be a file with a Jinja template or plain")
    file.write_text("{{ messages }}")
    assert found(base, "task=chat", f"model.chat_template={file}") == []


def test_a_chat_template_beside_a_format_of_turns_is_a_warning():
    words = ["task=chat", "algo=sft", "model=llama_8b", "model.chat_template=plain"]
    said = list(warnings(compose([*words, "task.turn='{role}{content}'", "task.reply=x"])))
    assert any("model.chat_template does not format the prompts" in each for each in said)
    assert not any("chat_template" in each for each in warnings(compose(words)))


def test_a_model_with_a_chat_template_that_is_asked_as_a_base_model_gives_a_warning(base):
    def doubts(*words):
        cfg = compose(["task=gsm8k", "algo=rloo", f"model.policy={base}", *words])
        return [warning for warning in warnings(cfg) if "task.chat" in warning]

    assert doubts() == []
    write_tokenizer(base, chat_template="{{ messages }}")
    (warning,) = doubts()
    assert warning.endswith("if it is a chat model, set task.chat=true")
    assert doubts("task.chat=true") == []


@pytest.fixture
def words(tmp_path) -> list[str]:
    """Return the arguments of a run on a mixture of two files, with a tiny model."""
    found = ["task=mixture", "debug=tiny"]
    for name in ("sums", "words"):
        file = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{name} {i}", "response": "#### 1"} for i in range(9)]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        found += [f"+schema/task@task.parts.{name}=local", f"task.parts.{name}.path={file}"]
    return [*found, "scorer=answer"]


def test_a_mixture_of_files_is_valid(words):
    cfg = compose([*words, "+task.weights.sums=3"])
    assert problems(cfg) == [] and cfg.task.shares == {"sums": 0.75, "words": 0.25}


@pytest.mark.parametrize(
    ("added", "begin"),
    [
        (["~task.parts"], "task.parts must contain at least one task"),
        (["+task.weights.other=1"], "task.weights must name parts of the mixture (sums, words), got other"),
        (["+task.weights.sums=0"], "task.weights.sums must be > 0"),
        (["+task.weights.sums=nan"], "task.weights.sums must be > 0"),
        (["task.path=data.jsonl"], "task.path must be null with task=mixture"),
        (["+schema/task@task.parts.A-b=arithmetic"], "task.parts must have names of lower-case letters"),
        (["+schema/task@task.parts.inner=mixture"], "task.parts.inner.parts must contain"),
        (["task.parts.sums.path=none.jsonl"], "task.parts.sums.path must name a file or folder"),
        (["task.parts.sums.path=null"], "task.parts.sums.path must name a file or folder for task=local"),
        (["task.parts.sums.columns.response=q"], "task.parts.sums.columns.response must name"),
        (["+schema/task@task.parts.talk=chat"], "task.parts must all have dialogues or all have texts"),
        (["+schema/task@task.parts.x=gsm8k", "task.parts.x.template=y"], "task.parts.x.template must"),
        (["scorer=mixture"], "scorer.parts must have a scorer for each part of the task (sums, words)"),
        (["scorer@gold=mixture"], "gold.parts must have a scorer for each part"),
        (["scorer=facts"], "scorer must not be facts for task=mixture"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_before_the_run(words, added, begin):
    if added == ["~task.parts"]:
        words, added = ["task=mixture", "debug=tiny", "scorer=answer"], []
    found = problems(compose([*words, *added]))
    assert any(text.startswith(begin) for text in found), found


def test_the_scorers_of_a_mixture_have_the_names_of_its_parts(words):
    parts = ["scorer=mixture", "+scorer@scorer.parts.sums=answer", "+scorer@scorer.parts.other=answer"]
    found = problems(compose([*words, *parts]))
    assert any("got other; leave it out" in text for text in found)
    parts[-1] = "+scorer@scorer.parts.words=reward_model"
    assert problems(compose([*words, *parts])) == []


def test_a_program_can_score_the_part_that_it_is_made_for(words):
    parts = ["+schema/task@task.parts.posts=tldr_mini", "scorer=mixture"]
    programs = {"sums": "answer", "words": "answer", "posts": "facts"}
    parts += [f"+scorer@scorer.parts.{name}={program}" for name, program in programs.items()]
    assert problems(compose([*words, *parts])) == []
    wrong = compose([*words, *parts, "scorer@scorer.parts.words=facts"])
    assert any(
        text.startswith("scorer@scorer.parts.words must not be facts for task=local")
        for text in problems(wrong)
    )


def test_a_limit_of_prompt_tokens_of_a_part_gives_a_warning(words):
    (message,) = (
        text for text in warnings(compose([*words, "task.parts.sums.max_prompt_tokens=9"])) if "9" in text
    )
    assert message.startswith("task.parts.sums.max_prompt_tokens has no effect")


PROMPT = '{"query": "a", "reference_response": "b"}'
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
MODELS = ["model.policy=some/policy", "model.reward=some/reward", "task.max_prompt_tokens=64"]


def write(folder: Path, row: str) -> str:
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(row)
    return str(folder)


def of_folders(*overrides: str) -> list[str]:
    return problems(compose(["task=tldr", *MODELS, *overrides]))


@pytest.mark.parametrize(
    ("algo", "reads_prompts", "reads_pairs"),
    [
        (["algo=dpo"], True, False),
        (["algo=dpo", "generator=dataset"], True, True),  # trained on pairs, evaluated on prompts
        (["algo=sft", "model.base=some/base"], True, False),
        (["algo=reward"], False, True),
    ],
    ids=str,
)
def test_the_folders_that_a_run_reads_must_exist(tmp_path, algo, reads_prompts, reads_pairs):
    prompts, pairs = write(tmp_path / "prompts", PROMPT), write(tmp_path / "pairs", PAIR)
    right = [f"task.path={prompts}", f"task.preferences_path={pairs}"]
    assert of_folders(*algo, *right) == []
    for key, read in (("task.path", reads_prompts), ("task.preferences_path", reads_pairs)):
        found = of_folders(*algo, *right, f"{key}={tmp_path / 'nowhere'}")
        assert bool(found) == read and all(text.startswith(f"{key} must be a folder") for text in found)


def test_a_folder_of_pairs_that_a_run_does_not_read_is_a_warning(tmp_path):
    pairs = write(tmp_path / "pairs", PAIR)
    words = ["task=tldr", *MODELS, f"task.preferences_path={pairs}"]
    (warning,) = warnings(compose(words))
    assert warning.startswith("task.preferences_path has no effect with algo=dpo and generator=hf")
    assert warnings(compose([*words, "generator=dataset"])) == []


def test_setting_of_a_data_set_that_is_not_read_gives_a_warning(tmp_path):
    prompts, pairs = write(tmp_path / "prompts", PROMPT), write(tmp_path / "pairs", PAIR)
    words = ["task=preferences", "algo=reward", *MODELS, f"task.preferences_path={pairs}"]
    assert warnings(compose(words)) == []
    found = warnings(compose([*words, f"task.path={prompts}", "task.preferences_name=some/pairs"]))
    assert sorted(text.split(" ")[0] for text in found) == ["task.path", "task.preferences_name"]


def test_chat_reward_model_on_generated_data_needs_no_pairs():
    words = ["task=chat", "model=llama_8b", "algo=reward", "model.policy=some/sft"]
    assert len(problems(compose(words))) == 1
    assert problems(compose([*words, "stages.stand_ins=true"])) == []
