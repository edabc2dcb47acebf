"""Bundles: the repeated update is that of the run, and the run does not notice."""

import hashlib

import pytest

from rlhf.core.errors import UserError
from rlhf.referee.bundle import bundle
from rlhf.referee.replay import load

pytestmark = pytest.mark.run


def contents(folder):
    """Return a digest of each file below a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_bundles_repeat_the_updates_of_a_run_and_leave_its_folder_as_it_is(trained, recorded, tmp_path):
    run = trained()
    before = contents(run.path)
    first, last = load(recorded(update=1)), load(recorded(update=2))  # without a checkpoint before, and with
    assert contents(run.path) == before
    assert first.header["same_row"] is last.header["same_row"] is True
    assert first.header["after"] == last.header["before"] != last.header["after"]
    assert {f"step{i}/{name}" for i in (1, 2) for name in ("rows", "logprobs", "logprob_grads")} < {
        *last.tensors
    }
    assert sorted([*last.tensors["step1/rows"], *last.tensors["step2/rows"]]) == [*range(8)]
    with pytest.raises(UserError, match="1 to 2"):
        bundle(run, 3, tmp_path / "no.safetensors")
    assert not [*tmp_path.iterdir()]


def test_a_bundle_without_weights_and_texts_has_neither(trained, tmp_path):
    file = tmp_path / "small.safetensors"
    bundle(trained(), 1, file, weights=False, texts=False)
    small = load(file)
    assert not {"texts", "references"} & small.header["batch"].keys()
    assert {name.split("/")[1] for name in small.tensors if name.startswith("file/")} == {"tokenizer"}
