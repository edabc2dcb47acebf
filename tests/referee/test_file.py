"""Tests of the batch file: what is read, and that a malformed file is one message of a UserError."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save, save_file

from rlhf.core.errors import UserError
from rlhf.referee.audit import audit
from rlhf.referee.file import BatchFile, checked, read, write
from tests.referee.trainer import step


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-1.safetensors"


def problems(path) -> tuple[str, ...]:
    """Return the problems of a file that must not be read."""
    with pytest.raises(UserError) as error:
        read(path)
    return error.value.problems


def written(path, header=None, **tensors):
    given, its = step("grpo", 1)
    write(path, {name: x for name, x in (given | tensors).items() if x is not None}, its | (header or {}))
    return path


def test_a_written_file_is_read_with_masks_as_bool_and_numbers_as_float64(path):
    file = read(written(path))
    assert file.mask.dtype == torch.bool and file["logprobs"].dtype == torch.float64
    assert torch.equal(file["logprobs"].float(), step("grpo", 1)[0]["logprobs"])
    assert file.path == path and file.header["claims"]["kl_coef"] == 0.05
    assert read(written(path, unknown_key=torch.zeros(2))).header["framework"] == "trainer.py"


def test_all_problems_of_a_file_are_named_at_once(path):
    short = torch.zeros(24, 7)
    found = problems(written(path, response_mask=None, old_logprobs=short, rewards=short))
    assert len(found) == 3
    assert all(any(name in each for each in found) for name in ("response_mask", "old_logprobs", "rewards"))


@pytest.mark.parametrize("schema", [2, "1", None])
def test_another_schema_is_refused(path, schema):
    (problem,) = problems(written(path, header={"schema": schema}))
    assert "schema 1" in problem


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a text\n",
        pickle.dumps({"logprobs": [1.0]}),
        (10 * 2**30).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little"),
        save({"logprobs": torch.zeros(4, 4)})[:-8],  # truncated
        save({"logprobs": torch.zeros(4, 4)}),  # no header of the format
        save({"logprobs": torch.zeros(4, 4)}, {"rlhf": "{"}),
        save({"logprobs": torch.zeros(4, 4)}, {"rlhf": "[" * 100_000}),
        save({"logprobs": torch.zeros(4, 4)}, {"rlhf": "[]"}),
    ],
)
def test_what_is_no_batch_file_is_one_message(path, content):
    path.write_bytes(content)
    assert len(problems(path)) == 1


def test_a_folder_and_a_missing_file_are_one_message(tmp_path):
    assert len(problems(tmp_path)) == len(problems(tmp_path / "none")) == 1


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "ref_logprobs", "logprob_grads", "rewards", "advantages", "losses"])  # fmt: skip
def test_a_number_that_is_not_finite_where_tokens_are_trained_is_refused(path, name):
    given = step("grpo", 1)[0][name].clone()
    given.view(-1)[0] = torch.nan
    (problem,) = problems(written(path, **{name: given}))
    assert problem.startswith(name) and "nan" in problem


@pytest.mark.parametrize("setting", ["grpo", "ppo", "truncate", "distill"])
def test_numbers_at_padding_are_not_read(setting):
    """NaN outside the mask, and NaN in place of the padding, must not reach a sum, a ratio or a gradient."""
    tensors, header = step(setting, 1)
    padding = tensors["response_mask"] == 0
    assert padding.any()
    for name, x in tensors.items():
        if x.shape == padding.shape and x.is_floating_point() and not name.endswith("_grads"):
            tensors[name] = x.masked_fill(padding, torch.nan)
    findings = audit(checked(BatchFile(tensors, header)))
    assert {each.state for each in findings} == {"ok"}


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ({"claims": [1]}, "claims"),
        ({"eos_ids": "x"}, "eos_ids"),
        ({"grad_norms": {"one": 1.0}}, "grad_norms"),
        ({"kind": "other"}, "kind"),
        ({"tokens": "many"}, "tokens"),
    ],
)
def test_a_malformed_header_is_refused(path, header, name):
    (problem,) = problems(written(path, header=header))
    assert problem.startswith(name)


@pytest.mark.parametrize(
    "tensors",
    [
        {"all_index": torch.arange(24), "all_rewards": torch.zeros(3), "all_group": torch.zeros(3)},
        {"all_index": torch.arange(24) - 1, "all_rewards": torch.zeros(24), "all_group": torch.zeros(24)},
        {"losses": torch.zeros(3)},
        {"advantages": torch.zeros(24, 1, 1)},
        {"logprobs": torch.zeros(24, 20, dtype=torch.complex64)},
        {"logprobs": torch.zeros(24, 0)},
        {"values": torch.zeros(24, 19)},
    ],
)
def test_malformed_tensors_are_refused(path, tensors):
    assert problems(written(path, **tensors))


def test_pairs_must_have_an_even_number_of_rows(path):
    mask = torch.ones(3, 2)
    save_file(
        {"response_mask": mask, "logprobs": -mask}, path, {"rlhf": json.dumps({"schema": 1, "kind": "pairs"})}
    )
    assert "3 rows" in problems(path)[0]


def test_states_after_the_last_token_are_read_with_one_more_column():
    """Values may have T or T + 1 columns; without `value_mask`, the states are those before the tokens."""
    tensors, header = step("ppo", 1)
    wide = {
        name: torch.nn.functional.pad(tensors[name], (0, 1)) for name in ("values", "old_values", "returns")
    }
    wide["value_grads"] = torch.nn.functional.pad(tensors["value_grads"], (0, 1))
    findings = audit(checked(BatchFile(tensors | wide, header)))
    assert {each.state for each in findings} == {"ok"}
