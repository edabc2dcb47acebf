"""Tests of the models that `rlhf.evaluate` compares."""

from rlhf.models.folder import CARD
from rlhf.stages.evaluation import signature


def test_an_edited_model_card_does_not_change_the_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = signature(str(tmp_path))
    (tmp_path / CARD).write_text("license: mit")
    assert signature(str(tmp_path)) == before
    (tmp_path / "config.json").write_text("{ }")
    assert signature(str(tmp_path)) != before
