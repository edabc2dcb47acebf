"""Identity of a run: what makes its row stale, and what does not."""

import json

import pytest

from rlhf.checks.machine import composed
from rlhf.study import plan
from rlhf.study.rows import Row

ROW = {name: None for name in Row.__dataclass_fields__}
OWN = ("task=local", "model.policy=gpt2", "scorer=function")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with data, a reward function, and a package whose modules import each other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "a"}))
    (tmp_path / "reward.py").write_text("def reward(prompt, response): return 1.0")
    lab = tmp_path / "lab_of_identity"
    lab.mkdir()
    (lab / "__init__.py").write_text("")
    (lab / "rewards.py").write_text("from lab_of_identity import length\nfrom .length import scale")
    (lab / "length.py").write_text("scale = 1")
    (lab / "other.py").write_text("")
    return tmp_path


def config(*overrides, reward="reward.py:reward"):
    return composed([*OWN, "task.path=data.jsonl", f"scorer.path={reward}", *overrides])


def reason(before, after, results=plan.RESULTS, accept=()):
    row = Row(**{**ROW, "inputs": before, "results": results})
    return plan.stale(row, after, accept)


def test_order_and_spelling_of_overrides_and_the_place_of_a_checkout_are_not_in_the_digest(here):
    one = plan.run_digest(config("seed=2", "optim.lr=1e-4"))
    assert one == plan.run_digest(config("optim.lr=0.0001", "seed=2"))
    assert one == plan.run_digest(config("seed=2", "optim.lr=1e-4", f"task.path={here}/data.jsonl"))
    assert one != plan.run_digest(config("seed=3", "optim.lr=1e-4"))


def test_changed_data_makes_rows_stale(here):
    before = plan.inputs(config())
    assert reason(before, plan.inputs(config("seed=5"))) is None
    (here / "data.jsonl").write_text(json.dumps({"prompt": "ab"}))
    assert reason(before, plan.inputs(config())) == "task.path changed"


def test_changed_source_makes_rows_stale_that_depend_on_it(here):
    by_file = plan.inputs(config())
    by_module = plan.inputs(config(reward="lab_of_identity.rewards:reward"))
    assert by_module.keys() == {
        "task.path",
        *(f"lab_of_identity/{n}.py" for n in ("__init__", "rewards", "length")),
    }
    (here / "lab_of_identity/length.py").write_text("scale = 20")
    (here / "lab_of_identity/other.py").write_text("unused = 1")
    assert reason(by_file, plan.inputs(config())) is None
    after = plan.inputs(config(reward="lab_of_identity.rewards:reward"))
    assert reason(by_module, after) == "lab_of_identity/length.py changed"


def test_another_results_version_makes_rows_stale_unless_the_study_accepts_it():
    assert reason({}, {}) is None
    assert reason({}, {}, results=plan.RESULTS - 1) == "results version 0, now 1"
    assert reason({}, {}, results=plan.RESULTS - 1, accept=(0,)) is None
