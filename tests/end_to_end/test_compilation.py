"""A whole run with compiled blocks."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import rows

pytestmark = pytest.mark.nightly

# One pass over prompts and responses, so that the compiler makes only two graphs: with and without gradients.
SMALL = ["algo=sft", "model.shared_prefix=false", "model.hidden_size=16", "model.heads=4", "model.layers=2"]


def test_a_run_with_compiled_blocks_has_the_losses_of_a_run_without(tiny, tmp_path):
    folders = [RunFolder(tmp_path / value) for value in ("false", "true")]
    for folder in folders:
        run(tiny(*SMALL, f"backend.compile={folder.path.name}"), folder)
    usual, compiled = (rows(folder) for folder in folders)
    assert len(usual) == len(compiled)
    for expected, found in zip(usual, compiled, strict=True):
        for name, value in expected.items():
            if isinstance(value, float):
                assert found[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name
    assert any("loss/policy" in row for row in usual) and any("eval/loss" in row for row in usual)
    log = (folders[1].path / "train.log").read_text()
    assert "compiled blocks: " in log and "yes; outputs differ by at most" in log
    assert "WARNING" not in log
