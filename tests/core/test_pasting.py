"""Tests that printed commands and settings can be pasted: the shell and Hydra read what was meant."""

from __future__ import annotations

import ast
import random
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlhf.core.errors import lines, literal, python_command, setting
from rlhf.words.mistakes import readable, texts

SIGNS = [*"ab.5/_-+:@,=[]{}()#'\"\\ $%&*!?;<>|~`^\t\nüé中", "${x}", "null", "1e3", ".5", "it's", "\\${"]
PATHS = [
    *(
        "data/a b",
        "data/a,b",
        "it's",
        'the "best"',
        "a=b",
        "[1]",
        "{x}",
        "a#b",
        "naïve/中文",
        "$HOME",
        "${x}",
        "\\\\${x}",
    ),
    *("a\\b", "~/x", "null", ".5", "-x", "a;rm -r b", "(a)", "a,b.py:f", "", " ", "a!b", "100%"),
]


def read(word: str) -> object:
    """Return the value that a run reads if the shell gets `word`."""
    [argument] = readable(shlex.split(word))
    override = OverridesParser.create().parse_override(argument)
    cfg = OmegaConf.create({"key": None})
    OmegaConf.update(cfg, "key", override.value())
    return cfg.key


@pytest.mark.parametrize("path", PATHS)
def test_a_printed_setting_is_read_as_it_was(path):
    assert read(setting("key", path)) == path


def test_printed_settings_of_random_texts_are_read_as_they_were():
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choice(SIGNS) for _ in range(draw.randint(1, 8)))
        assert read(setting("key", text)) == text


def test_printed_values_that_are_no_texts_are_read_as_they_were():
    for value in (None, True, 0.5, 3, ["a,b", "c d"]):
        assert read(setting("key", value)) == value


@pytest.mark.parametrize("path", PATHS)
def test_a_path_in_a_printed_line_of_python_is_the_path(path):
    program, flag, code = shlex.split(python_command(f"x = {literal(path)}"))
    assert (program, flag) == ("python", "-c")
    assert ast.literal_eval(code.removeprefix("x = ")) == path


def test_a_long_command_is_divided_into_lines_that_the_shell_joins():
    words = ["python -m rlhf.train", *(setting(f"key{n}", "a path, with a comma") for n in range(5))]
    shown = list(lines(*words))
    assert len(shown) > 1 and all(len(line) <= 80 for line in shown)
    assert shlex.split("\n".join(shown).replace("\\\n", " ")) == shlex.split(" ".join(words))


@pytest.mark.parametrize("path", [path for path in PATHS if path.strip()])
def test_an_argument_that_is_a_list_of_texts_can_contain_any_path(path):
    [argument] = shlex.split(setting("models", path))
    assert texts(argument.partition("=")[2]) == [path]
    [argument] = shlex.split(setting("models", [path, "b"]))
    assert texts(argument.partition("=")[2]) == [path, "b"]


def test_an_argument_that_is_a_list_of_texts_is_divided_at_commas(tmp_path):
    assert texts("a/b,c") == ["a/b", "c"]
    assert texts("[a/b,c]") == ["a/b", "c"]
    assert texts("ü b,[c") == ["ü b", "[c"]
    (tmp_path / "a,b").mkdir()
    assert texts(f"{tmp_path}/a,b") == [f"{tmp_path}/a,b"]


@pytest.mark.parametrize("name", ["a,b", "[a]", "it's", 'a"b', "{a}", "a (1)", "$x"])
def test_the_path_of_an_existing_file_is_read_as_a_path(tmp_path, name):
    (tmp_path / name).mkdir()
    assert read(shlex.quote(f"key={tmp_path}/{name}")) == f"{tmp_path}/{name}"
    (tmp_path / name / "r.py").touch()
    assert read(shlex.quote(f"key={tmp_path}/{name}/r.py:f")) == f"{tmp_path}/{name}/r.py:f"
