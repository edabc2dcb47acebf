"""Tests of the parts of a model card: the origin of the model, its license, and names without paths."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.core.state import TrainState
from rlhf.stages import words as model_card
from rlhf.stages.words import UNKNOWN, algorithm, data, origin, public, public_value, row
from rlhf.words.catalogue import options
from rlhf.words.compose import compose


def card(folder: Path, *lines: str) -> str:
    """Write a model card with these lines of metadata, and return its folder."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("\n".join(["---", *lines, "---", "# Text"]))
    return str(folder)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["license: apache-2.0", "base_model: EleutherAI/pythia-410m"],
         {"base_model": "EleutherAI/pythia-410m", "license": "apache-2.0"}),
        (["license: mit", "base_model: [a/b, c/d]"], {"base_model": "a/b", "license": "mit"}),
        (["license: other", "license_name: own", "license_link: https://example.org/license"],
         {"license": "other", "license_name": "own", "license_link": "https://example.org/license"}),
        (["license: other", "license_name: own", "license_link: LICENSE"],  # not a file of the web
         {"license": "other", "license_name": "own"}),
    ],
)  # fmt: skip
def test_license_and_base_model_are_those_that_the_card_of_a_local_folder_states(tmp_path, lines, found):
    assert origin(card(tmp_path / "base", *lines)) == {"base_model": None, **found}


@pytest.mark.parametrize(
    "lines", [["license: [a"], ["- a"], ["license: 3"], ["base_model: /home/me/model"], ["base_model: 3"], []]
)
def test_without_a_readable_statement_license_and_base_model_are_unknown(tmp_path, lines):
    found = origin(card(tmp_path / "base", *lines))
    assert found == {"base_model": None, "license": UNKNOWN}
    (tmp_path / "base" / "README.md").unlink()
    assert origin(str(tmp_path / "base")) == found


def test_the_card_of_a_hub_model_is_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "cached_folder", lambda name: {"me/it": tmp_path / "cached"}.get(name))
    card(tmp_path / "cached", "license: mit", "base_model: other/base")
    assert origin("me/it") == {"base_model": "me/it", "license": "mit"}
    assert origin("me/other") == {"base_model": "me/other", "license": UNKNOWN}


def test_texts_of_the_config_lose_paths_and_addresses(tmp_path):
    (tmp_path / "judge.py").touch()
    for text, shown in {
        "/home/me/models/pythia": "pythia",
        "~/runs/tldr-dpo/model": "tldr-dpo/model",
        "../runs/x/checkpoint-8/": "x/checkpoint-8",
        f"{tmp_path}/judge.py:score": "judge.py:score",
        "http://10.0.0.7:8000/score": "<url>",
        "EleutherAI/pythia-410m": "EleutherAI/pythia-410m",
        "facts": "facts",
        "{role}\n/no path": "{role}\n/no path",
    }.items():
        assert public(text) == shown
    assert public_value(["optim.lr=2e-5", 'model.base="/home/me/it"', "a/b", 0.9]) == [
        "optim.lr=2e-5",
        "model.base=it",
        "a/b",
        0.9,
    ]


def test_relative_paths_that_exist_lose_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    assert public("data/mine") == "mine" and public("data/other") == "data/other"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["task=tldr_mini"], ([], [])),
        (["task=gsm8k"], ([], ["openai/gsm8k"])),
        (["task=gsm8k", "task.path=/data/gsm"], (["gsm"], [])),
        (["task=preferences", "algo=reward", "task.preferences_name=a/b"], ([], ["a/b"])),
        (["task=tldr", "algo=reward", "task.preferences_path=/data/pairs"], (["pairs"], [])),
    ],
)
def test_the_training_data_have_a_hub_name_or_the_name_of_a_folder(words, found):
    assert data(compose(words)) == found


@pytest.mark.parametrize("algo", ["dpo", "grpo", "ppo", "sft", "reward", "cispo"])
def test_the_algorithm_is_described_with_its_source(algo):
    text = algorithm(compose([f"algo={algo}"]))
    assert "](https://arxiv.org/abs/" in text and "\n" not in text


def rendered(*words: str) -> str:
    """Return the card of a run of this config that was not evaluated."""
    cfg, state = compose(list(words)), TrainState(num_updates=8, update=8, episode=64)
    recorder = SimpleNamespace(first={}, evaluated={}, evaluated_on=0)
    return model_card.model_card(cfg, cfg, Path("run"), 12, recorder, state)


def test_each_algorithm_has_a_description_of_its_own():
    assert len({algorithm(compose([f"algo={name}"])) for name in options("algo")}) == len(options("algo"))


def test_the_command_shows_no_path_of_this_machine():
    hidden = "```\n\nLocal folders and files appear by name only.\n"
    shown = rendered("task=gsm8k", "task.path=/data/me/gsm", "model.base=/data/me/base")
    assert "\n    task.path=gsm" in shown and "/data" not in shown and hidden in shown
    assert hidden not in rendered("seed=2")


def test_a_config_of_python_has_no_command(monkeypatch):
    monkeypatch.setattr(model_card, "settings", lambda cfg: None)
    assert "\n## Command\n\nThe config of the run was made in Python; " in rendered("seed=2")


def test_tables_have_the_rows_of_the_run(tmp_path):
    base = card(tmp_path / "base", "license: mit", "base_model: a/b")
    found = rendered("algo=rloo", "scorer=facts", f"model.policy={base}", "model.lora.rank=4", "seed=3")
    assert found.partition("## Training\n\n")[2].startswith(
        "|  |  |\n| --- | --- |\n| base model | base |\n| origin of the base model | a/b |\n"
        "| license of the base model | mit |\n| task | tldr_mini |\n"
        "| data | generated by the task: 12 prompts |\n| algorithm | rloo |\n| reward | facts |\n"
        "| length | 8 updates, 64 episodes |\n| LoRA | rank 4, merged into the weights |\n| seed | 3 |\n\n"
    )
    assert "| reward |" not in rendered("algo=sft")


def test_cells_of_a_table_contain_no_signs_of_the_table():
    assert row("x|y", "1\n2") == "| x\\|y | 1 2 |"
