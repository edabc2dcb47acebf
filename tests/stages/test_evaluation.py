"""Evaluations: the models that are compared, their prompts, the table of results."""

from __future__ import annotations

import pytest
from rich.console import Console

from rlhf.models.folder import CARD
from rlhf.stages.evaluation import named_models, short_names, table
from rlhf.stages.run import at_start
from rlhf.words.compose import compose
from tests.model_folders import write_model


def test_an_edited_model_card_does_not_change_the_model(tmp_path):
    folder = write_model(tmp_path / "model")

    def identity() -> str:
        return named_models([folder])[0].files

    before = identity()
    (tmp_path / "model" / CARD).write_text("license: mit")
    assert identity() == before
    with (tmp_path / "model" / "config.json").open("a") as file:
        file.write("\n")
    assert identity() != before


def test_chat_templates_read_the_time_of_the_start_of_the_run(tmp_path):
    started = "2001-02-03T04:05:06"
    words = ["algo=rloo", "task=tldr", "model=pythia_410m"]
    assert at_start(compose(words), started).model.clock == started
    own = compose([*words, "model.clock=2026-01-31"])
    assert at_start(own, started) == own and at_start(compose([]), started) == compose([])


RUN, OTHER = (f"outputs/tldr_mini-pythia-dpo-hf-lag0-seed{seed}-a4c04dc{seed}" for seed in (1, 2))


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["outputs/artefacts/sft-tldr_mini/model", "model"], ["sft-tldr_mini", "model"]),
        (["a/x/model/", "b/x/model"], ["a", "b"]),
        (["a/checkpoint-1/model", "a/checkpoint-2/model"], ["checkpoint-1", "checkpoint-2"]),
        (["HuggingFaceTB/SmolLM2-135M-Instruct", "model"], ["SmolLM2-135M-Instruct", "model"]),
        ([f"{RUN}/model", f"{OTHER}/model"], ["…-hf-lag0-seed1-a4c04dc1", "…-hf-lag0-seed2-a4c04dc2"]),
        (["a/" + "x" * 30, "b/y" + "x" * 30], ["1 " + "x" * 20, "2 " + "x" * 20]),
        (["X/c/model", "Y/c/model", "b/X"], ["1 X", "Y", "3 X"]),
    ],
)
def test_a_model_is_named_by_the_part_of_its_path_that_others_lack(models, names):
    assert short_names(models) == names


@pytest.mark.parametrize("count", [1, 3, 6])
def test_no_path_is_divided_and_a_table_fits_in_80_columns(count):
    models = [f"{RUN}/checkpoint-{n}/model" for n in range(count - 1)] + [f"{OTHER}/model"]
    settings = {"split": "test", "generator": "hf", "scorer": f"{RUN}/model", "gold": f"{OTHER}/model"}
    figures = {
        "eval/kl": 1.0,
        "eval/kl_low": -1000.0,
        "eval/kl_high": 1000.0,
        "eval/loss": 2.0,
        "update": 10**6,
    }
    console = Console(width=80)
    with console.capture() as shown:
        found = table([{"model": model, "settings": settings, **figures} for model in models], 80)
        console.print(found, soft_wrap=True, markup=False)
    text = shown.get()
    assert "…" not in text.replace("…-hf-lag0-seed2-a4c04dc2", ""), (
        "only the name of the long path is shortened"
    )
    for path in (f"{RUN}/model", models[-1]):
        assert path in text
    lines = [line for line in text.splitlines() if "outputs/" not in line]
    assert max(map(len, lines)) <= 80 and text.count("1.000 [-1,000, 1,000]") == count
