"""Tests of the checks of hooks: addresses without an import, classes with an import."""

from __future__ import annotations

import pytest

from rlhf.checks.check import hooks_exist
from rlhf.core.errors import UserError
from rlhf.loggers.logger import Hook, load_hooks
from rlhf.words.compose import compose

FILE = """
import rlhf

class Good(rlhf.Hook):
    def after_update(self, state, metrics): ...

class Misspelled(rlhf.Hook):
    def after_updates(self, state, metrics): ...

class NoHook: ...

class Takes(rlhf.Hook):
    def __init__(self, value): ...
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_hooks.py").write_text(FILE)
    (tmp_path / "broken_hooks.py").write_text("class Half(:")
    (tmp_path / "raising_hooks.py").write_text(
        "import rlhf\nclass Any(rlhf.Hook): ...\nraise ValueError('no')"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_hooks", "must be <module>:<Class>"),
        ("nowhere:Good", "no module 'nowhere'"),
        ("nowhere.py:Good", "no file 'nowhere.py' here"),
        ("own_hooks.py:Goood", "hooks=[own_hooks.py:Good]"),
        ("broken_hooks.py:Half", "SyntaxError"),
        ("raising_hooks.py:Any", "ValueError: no"),
    ],
)
def test_a_hook_that_cannot_be_imported_is_refused(here, path, said):
    (problem,) = hooks_exist(compose([f"hooks=['{path}']"]))
    assert said in problem and repr(path) in problem


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_hooks.py:Misspelled", "rename it after_update"),
        ("own_hooks.py:NoHook", "class NoHook(rlhf.Hook)"),
        ("own_hooks.py:Takes", "can be built without arguments"),
    ],
)
def test_a_class_that_is_no_hook_is_refused(here, path, said):
    cfg = compose([f"hooks=['{path}']"])
    assert not list(hooks_exist(cfg))
    with pytest.raises(UserError) as error:
        load_hooks(cfg.hooks)
    assert said in str(error.value)


def test_hooks_are_built_in_their_order(here):
    first, second = load_hooks(["own_hooks.py:Good", "own_hooks:Good"])
    assert isinstance(first, Hook) and isinstance(second, Hook)
