"""Tests of the algorithm in docs/python.md, the options in docs/start.md and the memory in hardware.md."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from rlhf import plan
from rlhf.config import algorithms
from rlhf.config.algorithms import AlgoConfig
from rlhf.config.schema import PARTS, SCHEMAS
from rlhf.core.machine import Machine
from rlhf.memory import plan as memory
from rlhf.memory.uses import GIB, gib
from rlhf.words.compose import compose

ROOT = Path(__file__).parents[2]
PYTHON = (ROOT / "docs" / "python.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()


def blocks(language: str) -> list[str]:
    section = PYTHON.partition("\n## Add an algorithm\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.S | re.M)


@pytest.fixture
def reinforce(tmp_path, monkeypatch) -> Iterator[type[AlgoConfig]]:
    """Yield the config section of the algorithm in docs/python.md, without writing files into the package."""
    objective, section, *_ = blocks("python")
    name, file = "rlhf.objectives.reinforce", tmp_path / "reinforce.py"
    file.write_text(objective)
    spec = spec_from_file_location(name, file)
    monkeypatch.setitem(sys.modules, name, module_from_spec(spec))
    spec.loader.exec_module(sys.modules[name])
    names = dict(vars(algorithms))
    exec(section, names)  # the page appends this code to rlhf/config/algorithms.py
    yield names["ReinforceConfig"]
    del PARTS[SCHEMAS.pop("schema/algo/reinforce")]


def test_the_added_algorithm_of_the_docs_composes(tmp_path, reinforce):
    import hydra
    from omegaconf import OmegaConf

    from rlhf.words.catalogue import conf_dir

    (tmp_path / "conf" / "algo").mkdir(parents=True)
    (tmp_path / "conf" / "algo" / "reinforce.yaml").write_text(*blocks("yaml"))
    search = [f"hydra.searchpath=[file://{tmp_path / 'conf'}]"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose(
            "config",
            [*search, "algo=reinforce", "schedule.total_episodes=8", "schedule.prompts_per_update=8"],
        )
    assert OmegaConf.to_object(cfg).algo == reinforce()


def test_the_plan_of_the_docs_is_what_the_command_prints(monkeypatch, capsys):
    text = (ROOT / "docs" / "hardware.md").read_text()
    shown = text.partition("```text\n$ python -m rlhf.plan ")[2]
    words, _, table = shown.partition("```")[0].partition("\n")
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(ram=16 * GIB))
    monkeypatch.setattr(sys, "argv", ["plan.py", *words.split()])
    plan.main()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed if line] == table.splitlines() != []


def test_the_memory_table_of_the_docs_is_what_the_plan_estimates():
    page = (ROOT / "docs" / "hardware.md").read_text()
    command = re.search(r"    python -m rlhf.plan (task=gsm8k (?:.|\n)*?)\n\n", page)[1].replace("\\\n", " ")
    cfg, machine = compose(command.split()), Machine(ram=2**40)
    names = {"Llama 3.2 1B": "meta-llama/Llama-3.2-1B", "Qwen 2.5 7B": "Qwen/Qwen2.5-7B",
             "Llama 3.1 8B": cfg.model.policy}  # fmt: skip
    rows = re.findall(r"^\| (\w+ \S+ \dB) \| (all weights|LoRA) \| (.*) \|$", page, re.M)
    assert len(rows) == 6
    for model, trained, cells in rows:
        lora = replace(cfg.model.lora, rank=16 if trained == "LoRA" else 0)
        for cell, prompt, response in zip(
            cells.split(" | "), (512, 1024, 1024), (512, 3072, 7168), strict=True
        ):
            changed = replace(
                cfg,
                model=replace(cfg.model, policy=names[model], lora=lora),
                task=replace(cfg.task, max_prompt_tokens=prompt),
                generator=replace(cfg.generator, response_length=response),
            )
            assert gib(memory.plan(changed, machine).uses[0].bytes) == cell, (model, trained, response)


def test_start_names_every_option_of_its_groups_and_no_other():
    from rlhf.words import catalogue

    section = START.partition("\n## Change settings\n")[2].partition("\n## ")[0]
    table = {
        name: re.findall(r"`(\w+)`", row)
        for name, row in re.findall(r"^\| (\w+) \| (`.*?) \|", section, re.M)
    }
    table["algo"] = table.pop("algorithm")
    assert {"model", "task", "scorer", "environment", "generator", "backend", "logger"} < table.keys()
    for group, named in table.items():
        assert sorted(named) == sorted(catalogue.options(group)), group
