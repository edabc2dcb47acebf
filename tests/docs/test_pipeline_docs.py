"""Tests that the commands and metrics in docs/runs.md and in the README are correct."""

import re
from pathlib import Path

import pytest

from rlhf import evaluate, pipeline, relabel
from rlhf.runs.folder import RunFolder
from rlhf.stages import evaluation
from rlhf.words.compose import compose

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / name).read_text() for name in ("README.md", "docs/runs.md"))
COMMANDS = re.findall(r"python -m rlhf\.(evaluate|relabel|pipeline) ([^`\n]+)", TEXT)


def words_of(typed: str, folder: Path) -> list[str]:
    """Return the arguments of a command, with a folder or a model name in place of each placeholder."""
    typed = re.sub(r"outputs/<run name>", str(folder), typed)
    typed = typed.replace("<hub name>", "me/pairs").replace("gold.path=<model>", "gold.path=me/judge")
    return typed.replace("output=<folder>", f"output={folder}/new").replace("<folder>", str(folder)).split()


@pytest.mark.parametrize(("name", "typed"), [c for c in COMMANDS if "..." not in c[1]])
def test_command_of_the_docs_is_accepted(tmp_path, name, typed):
    folder = RunFolder(tmp_path)
    folder.write_config(compose([]))
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    module = {"evaluate": evaluate, "relabel": relabel, "pipeline": pipeline}[name]
    own, words = module.COMMAND.split(words_of(typed, tmp_path))
    if name == "evaluate" and "run" not in own:
        assert evaluation.alone(own["models"].split(","), words).start == "models/first"
    elif name == "evaluate":
        assert evaluation.run_folder(own["run"]) == folder
        evaluation.changed(folder, words)
    elif name == "relabel":
        assert relabel.pairs_of(words).gold.name == "reward_model" and own["output"]
    else:
        pipeline.config_of(words)


def test_docs_have_commands_of_evaluate_relabel_and_pipeline(tmp_path):
    assert {name for name, _ in COMMANDS} == {"evaluate", "relabel", "pipeline"} and len(COMMANDS) >= 9


def test_metrics_in_the_docs_are_the_metrics_of_an_evaluation():
    from rlhf.training import evaluators, recorder

    source = "".join(Path(module.__file__).read_text() for module in (recorder, evaluators))
    docs = (ROOT / "docs" / "runs.md").read_text()
    named = set(re.findall(r"`(eval/\w+?)(?:_low|_high)?`", docs))
    measured = set(re.findall(r'"(eval/\w+?)"', source))
    assert named == measured - {"eval/margin", "eval/reward"}
