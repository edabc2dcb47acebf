"""The steps of this project's own bundles as batch files: the audit agrees with every algorithm."""

import pytest

from rlhf.core.errors import UserError
from rlhf.referee.audit import audit
from rlhf.referee.replay import as_page, batch_file, load, token_table
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
        assert not {term: text for term, (state, text) in found.items() if state == "wrong"}
        assert found["loss"][0] == "ok"


def test_a_step_that_a_bundle_does_not_have_is_a_mistake(recorded):
    with pytest.raises(UserError, match="1 to 2"):
        batch_file(load(recorded()), 3)


def test_the_table_of_a_response_has_its_tokens_and_a_page_escapes_them(recorded):
    batch = load(recorded())
    row = int(batch.tensors["step2/rows"][1])
    table = token_table(
        load(recorded()), 2, 6
    )  # of 4 samples of each prompt, the second of the second prompt
    assert table.row_count == int(batch.tensors["batch/response_mask"][row, 1].sum())
    assert [column.header for column in table.columns][:5] == ["#", "token", "mask", "sampler", "trainer"]
    trainer = [float(cell) for cell in table.columns[4].cells]
    assert trainer == pytest.approx(
        batch.tensors["step2/logprobs"][row, 1][: len(trainer)].tolist(), rel=1e-3
    )
    table.add_row("<script>")
    assert "<script>" not in as_page(table)
    with pytest.raises(UserError, match="16 responses"):
        token_table(load(recorded()), 2, 17)
