"""The steps of this project's own bundles as batch files: the audit agrees with every algorithm."""

import pytest

from rlhf.audit import main
from rlhf.core.errors import UserError
from rlhf.referee.audit import audit
from rlhf.referee.replay import batch_file, load, token_table
from tests.referee.test_replay import ALGORITHMS

pytestmark = pytest.mark.run
UNKNOWN = ("oapl", "distill")  # their losses have no recipe


def states(file, step):
    """Return the state of each term of a step."""
    return {each.term: (each.state, each.text) for each in audit(batch_file(load(file), step))}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "grpo" else pytest.mark.nightly) for each in ALGORITHMS],
)
def test_the_audit_agrees_with_every_step_of_every_algorithm(trained, recorded, name):
    words = [f"algo={name}"] if name != "grpo" else []  # one run for all tests
    words += [f"model.reference={trained().model}"] if name == "distill" else []
    if name in UNKNOWN:
        with pytest.raises(UserError, match="no recipe"):
            batch_file(load(recorded(*words)), 1)
        return
    for step in (1, 2):
        found = states(recorded(*words), step)
        assert found["mask"][0] == "ok"
        assert not {term: text for term, (state, text) in found.items() if state == "wrong"}
        assert found["loss"][0] == "ok"


def test_a_step_that_a_bundle_does_not_have_is_a_mistake(recorded):
    with pytest.raises(UserError, match="1 to 2"):
        batch_file(load(recorded()), 3)


def test_the_table_of_a_response_has_its_tokens_and_a_page_escapes_them(
    recorded, tmp_path, monkeypatch, capsys
):
    batch = load(recorded())
    row = int(batch.tensors["step2/rows"][1])
    table = token_table(
        load(recorded()), 2, 6
    )  # of 4 samples of each prompt, the second of the second prompt
    assert len(table) == int(batch.tensors["batch/response_mask"][row, 1].sum())
    assert [*table.columns][:4] == ["token", "mask", "sampler", "trainer"]
    trainer = table["trainer"].tolist()
    assert trainer == batch.tensors["step2/logprobs"][row, 1][: len(trainer)].tolist()
    page, rows = tmp_path / "page.html", ["--step", "2", "--sample", "6"]
    monkeypatch.setattr("rlhf.referee.replay.printable", lambda text: f"<script>{text}")
    main([str(recorded()), *rows, "--html", str(page)])
    assert "<script>" not in page.read_text("utf-8") and "&lt;script&gt;" in page.read_text("utf-8")
    assert "trainer" in capsys.readouterr().out
    with pytest.raises(UserError, match="16 responses"):
        token_table(load(recorded()), 2, 17)
