"""Tests of the models that `rlhf.evaluate` compares."""

from rlhf.models.folder import CARD
from rlhf.stages.evaluation import named_models
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
