"""Tests that recipes and sweeps are valid, keep their values, and state their hardware and memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf import plan, relabel
from rlhf.checks import check
from rlhf.checks.check import as_objects, checked
from rlhf.config.root import Config
from rlhf.core.machine import Machine
from rlhf.memory import plan as memory
from rlhf.memory import sizes, times, uses
from rlhf.memory.uses import CONTEXT, GIB
from tests.docs import snapshots
from tests.docs.snapshots import RECIPES, RELABELS, SEARCHES, SNAPSHOTS, SWEEPS, header, kept, objects

DOCS = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("size", ["410m", "1b", "2_8b"])
@pytest.mark.parametrize("algo", ["ppo", "rloo", "bok"])
def test_asynchronous_batch_size_is_that_of_the_published_recipes(size, algo):
    cfg = objects(f"experiment=tldr_{size}_{algo}_async")
    assert (cfg.schedule.prompts_per_update if algo == "bok" else cfg.episodes_per_update) == 504
    assert cfg.num_updates() == 256


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_recipes_and_sweeps_have_the_values_of_their_snapshots(name):
    assert SNAPSHOTS[name]() == kept()[name], "if the change is intended, run `make snapshots`"


def test_every_snapshot_belongs_to_a_recipe_or_a_sweep():
    assert kept().keys() == SNAPSHOTS.keys()


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    return tmp_path


def words(name: str, pairs: Path) -> list[str]:
    """Return the arguments of a recipe's command, with names for placeholders and without `output=`."""
    said = re.split(r" -m rlhf\.(?:train|relabel output=\S+) ", header("experiment", name)["Command"])[1]
    said = said.replace("<SFT>", "some/sft").replace("<reward model>", "some/reward")
    return said.replace("<pairs>", str(pairs)).split()


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every package look installed."""
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    # the warning about a small disk depends on the machine of the test
    monkeypatch.setattr("rlhf.checks.inputs.shutil.disk_usage", lambda folder: SimpleNamespace(free=2**50))


@pytest.mark.parametrize("name", RECIPES)
def test_command_of_a_recipe_is_a_valid_run(name, pairs, everything_installed):
    chosen = words(name, pairs)
    assert chosen[0] == f"experiment={name}"
    doubts = check.warnings(checked(as_objects(snapshots.compose(*chosen), chosen)))
    if name in RELABELS:
        judge = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
        assert relabel.pairs_of(chosen).gold.described == judge
    assert [each for each in doubts if not each.startswith("schedule.update=in_flight")] == []


OF_PAPER = {name: "Paper" for name in RECIPES if "Paper" in header("experiment", name)}
CURRENT = [name for name in RECIPES if name not in OF_PAPER]  # recipes of models that people start with today


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_begins_with_paper_hardware_time_metric_and_command(name):
    said = header("experiment", name)
    assert list(said)[:5] == [OF_PAPER.get(name, "Source"), "Hardware", "Time", "Metric", "Command"]
    ranks = objects(f"experiment={name}").backend.ranks
    start = "python" if ranks in (1, None) else f"torchrun --nproc-per-node {ranks}"
    command = "relabel output=outputs/tldr-relabelled" if name in RELABELS else "train"
    assert said["Command"].startswith(f"{start} -m rlhf.{command} experiment={name}")


def size_of(model_type: str, hidden: int, layers: int, vocabulary: int, **more: int) -> dict[str, Any]:
    """Return the keys of a model's config.json that determine the model size."""
    heads = more.pop("heads", 32)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": model_type, "tie_word_embeddings": False, "vocab_size": vocabulary, **sizes, **more}


PUBLISHED = {
    r"pythia-?410m": size_of("gpt_neox", 1024, 24, 50304, heads=16),
    r"pythia-?1b": size_of("gpt_neox", 2048, 16, 50304, heads=8),
    r"pythia-?2.8b": size_of("gpt_neox", 2560, 32, 50304),
    r"pythia-?6.9b": size_of("gpt_neox", 4096, 32, 50432),
    r"rho": size_of("llama", 2048, 22, 32000, num_key_value_heads=4, intermediate_size=5632),
    r"Llama|some": size_of("llama", 4096, 32, 128256, num_key_value_heads=8, intermediate_size=14336),
}


def published_size(name: str) -> sizes.ModelSize | None:
    own = (config for pattern, config in PUBLISHED.items() if re.search(pattern, name))
    return sizes.config_size(sizes.published_config(name) or next(own))


def judging(cfg: Config) -> float:
    """Return the bytes on a GPU that scores pairs: the judge's weights and a full-length forward."""
    size = published_size(cfg.gold.path).scoring()
    batch = cfg.gold.batch_size
    tokens = uses.Tokens(prompts=batch, samples=1, prompt=512, response=128, apart=False)
    forward = uses.Forward(size=size, tokens=tokens, precision=uses.BFLOAT16, device="cuda")
    return CONTEXT + 2 * size.parameters + forward.inference()


@pytest.mark.parametrize("name", RECIPES)
def test_memory_in_the_recipe_header_is_that_of_the_plan(name, pairs, monkeypatch):
    cfg = objects(*words(name, pairs))
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, str(cfg.backend.ranks or 1))
    monkeypatch.setattr(sizes, "named_size", published_size)
    if name in RELABELS:
        needed = judging(cfg) / GIB
    else:
        gpus = () if cfg.backend.ranks is None else (80 * GIB,) * 8
        made = memory.plan(cfg, Machine(2**42, gpus))
        needed = next(use.bytes for use in made.uses if use.device.startswith(("GPU", "RAM"))) / GIB
    (said,) = re.findall(r"about (\d+) GiB", header("experiment", name)["Hardware"])
    assert math.isclose(int(said), needed, rel_tol=0.1, abs_tol=1), f"the plan needs {needed:.0f} GiB"


@pytest.mark.parametrize("name", CURRENT)
def test_time_in_the_recipe_header_is_that_of_the_plan_and_says_that_it_is_an_estimate(name, pairs):
    said, cfg = header("experiment", name)["Time"], objects(*words(name, pairs))
    (hours, device) = re.match(r"about ([\d.]+) h with (\S+(?: \d+)?) \(estimate", said).groups()
    device = "cpu" if device == "cpu" else device
    rates = times.DEVICES[device]
    machine = Machine(2**42, (int(rates.get("gib", 0) * GIB),) * 8 if device != "cpu" else ())
    clock = times.Clock(cfg, rates, machine)
    found = times.run_s(cfg, clock, times.update_s(cfg, clock.phases())) / 3600
    assert math.isclose(float(hours), found, rel_tol=0.1, abs_tol=0.06), f"the plan needs {found:.2f} h"
    assert "not measured" in said or device == "cpu"


@pytest.mark.parametrize("name", CURRENT)
def test_recipe_is_printed_and_planned_without_a_gpu_and_a_download(
    command, called, monkeypatch, everything_installed, pairs, name
):
    printed = command(*words(name, pairs), "--cfg", "job")
    assert printed.code == 0 and f"name: {objects(f'experiment={name}').model.name}" in printed.out
    monkeypatch.setattr("rlhf.plan.check_memory", lambda cfg: None)  # of this machine
    price = [] if "h with cpu" in header("experiment", name)["Time"] else ["price_per_gpu_hour=2"]
    code, out, err = called(plan.main, *words(name, pairs), *price)
    assert code == 0, err
    assert re.search(r"an update +[\d.]+ s", out) and ("its price with" in out) == bool(price)


def test_recipe_with_adapters_fits_into_24_gb(pairs):
    cfg = objects(*words("gsm8k_qwen3_4b_grpo_lora", pairs))
    (gpu,) = (use for use in memory.plan(cfg, Machine(2**42, (24 * GIB,))).uses if use.device == "GPU 0")
    assert gpu.bytes < uses.NEARLY * 24 * GIB


def test_recipe_for_several_gpus_can_be_printed_on_any_machine(command):
    answer = command("experiment=tldr_2_8b_dpo_async", "--cfg", "job")
    assert answer.code == 0 and "name: vllm" in answer.out and "ranks: 3" in answer.out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tldr_410m_dpo", ["backend.device must be cpu or auto with a torch that was built without CUDA"]),
        ("tldr_410m_dpo_async", ["backend.device must be", "torchrun --nproc-per-node 3 -m rlhf.train"]),
        ("tldr_2_8b_dpo_4gpu", ["backend.device must be", "1 started"]),
    ],
)
def test_recipe_for_gpus_is_rejected_without_cuda(
    command, monkeypatch, everything_installed, tmp_path, name, said
):
    monkeypatch.setattr(check, "torch_has_cuda", lambda: False)
    answer = command(f"experiment={name}")
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert all(text in answer.err for text in said)


@pytest.mark.parametrize(
    ("words", "ranks", "gpus", "said"),
    [
        (["experiment=tldr_410m_dpo_async"], 3, 4, None),
        (["experiment=tldr_410m_dpo_async"], 3, 3, "4 GPUs here (3 to train, 1 to sample), got 3"),
        (["experiment=tldr_410m_dpo_async"], 4, 5, "4 started"),
        (["experiment=tldr_410m_dpo_async", "backend.ranks=null"], 2, 3, None),
        (["experiment=tldr_410m_dpo_async", "hardware=gpus_1_and_1"], 1, 2, None),
        (["experiment=tldr_410m_dpo_async", "hardware=gpus_1_and_1"], 1, 1, "2 GPUs here (1 to train, 1"),
        (
            ["experiment=tldr_410m_dpo_async", "hardware=gpus_1_and_1", "generator.replicas=2"],
            *(1, 2, "3 GPUs here (1 to train, 2"),
        ),
        (["experiment=tldr_410m_dpo_vllm"], 1, 1, None),
        (["experiment=tldr_410m_dpo_4gpu"], 4, 2, "4 GPUs here (4 to train, 0 to sample), got 2"),
        (["experiment=chat_8b_dpo_async"], 7, 8, None),
        (["experiment=tldr_410m_dpo"], 1, 0, None),  # the number of GPUs is unknown
        ([], 2, 0, None),
    ],
)
def test_processes_and_gpus_are_checked_before_a_run(monkeypatch, words, ranks, gpus, said):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(check, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(check, "this_machine", lambda: Machine(2**40, (2**36,) * gpus))
    found = list(check.process_problems(objects(*words)))
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_several_ranks_need_a_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (found,) = check.process_problems(objects())
    assert found.startswith("WORLD_SIZE must be") and "torchrun --nproc-per-node 2" in found


def test_backend_ranks_below_1_is_rejected(command):
    answer = command("backend.ranks=0")
    assert answer.code == 2 and "backend.ranks must be >= 1" in answer.err


SWEPT = {  # studies of the paper, copied by hand
    "minibatches": ("schedule.minibatches", [1, 2, 4, 8, 16, 32, 64]),
    "epochs": ("schedule.epochs", [1, 2, 3]),
    "samples": ("algo.samples_per_prompt", [2, 4, 8]),
    "lag": ("schedule.max_lag", [0, 1, 2, 4, 8]),
}


def value(cfg: Config, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


@pytest.mark.parametrize("name", SWEEPS)
def test_the_command_of_a_sweep_starts_its_runs(command, monkeypatch, everything_installed, name):
    monkeypatch.setattr("rlhf.checks.check.check_machine", lambda cfg: None)
    said = header("sweep", name)["Command"].partition(" -m rlhf.train ")[2].split()
    answer = command(*said)
    key, values = SWEPT[name]
    assert answer.code == 0, answer.err
    assert [value(cfg, key) for cfg, _ in answer.runs] == values
    assert len({folder.path for _, folder in answer.runs}) == len(values)
    assert len({cfg.schedule.total_episodes for cfg, _ in answer.runs}) == 1
    if name == "minibatches":
        assert [cfg.schedule.prompts_per_update for cfg, _ in answer.runs] == [128 * n for n in values]
    if name == "samples":
        assert [cfg.num_updates() for cfg, _ in answer.runs] == [1024, 512, 256]


def test_sweep_option_can_be_combined_with_other_swept_keys_and_any_run(command):
    answer = command("-m", "sweep=epochs", "seed=1,2")
    assert answer.code == 0, answer.err
    ran = [(cfg.schedule.epochs, cfg.seed, cfg.task.name) for cfg, _ in answer.runs]
    assert ran == [(epochs, seed, "tldr_mini") for epochs in (1, 2, 3) for seed in (1, 2)]


def test_the_search_for_a_learning_rate_stays_in_its_bounds_and_keeps_the_length_of_runs(command):
    words = header("sweep", "lr")["Command"].partition(" -m rlhf.train ")[2].split()
    answer = command(*words)
    assert answer.code == 0, answer.err
    rates = {cfg.optim.lr for cfg, _ in answer.runs}
    assert len(rates) == 10 and all(1e-5 <= rate <= 1e-2 for rate in rates)
    (length,) = {cfg.schedule.total_episodes for cfg, _ in answer.runs}
    assert length == objects("algo=dpo").schedule.total_episodes
    assert "python -m rlhf.train algo=dpo optim.lr=" in answer.out, "without sweep=lr"


def test_every_sweep_is_a_study_of_the_paper_and_starts_without_m():
    assert sorted(SWEPT) == SWEEPS
    for name in (*SWEEPS, *SEARCHES):
        mode = OmegaConf.select(snapshots.compose(f"sweep={name}", with_hydra=True), "hydra.mode")
        assert str(mode).endswith("MULTIRUN"), "a sweep option must start a sweep without -m too"


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the tables below a heading, by their first cell."""
    text = DOCS.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in rows}


def test_the_docs_have_every_recipe_with_its_hardware_and_command():
    text = DOCS.partition("## Recipes\n")[2].partition("\n## ")[0]
    found: dict[str, tuple[str, str]] = {}  # recipe -> GPUs and memory
    for part in text.split("### ")[1:]:
        sizes = re.search(r"^\| recipe \| GPUs \| (.*) \|$", part, re.M)[1].replace("`", "").split(" | ")
        for name, gpus, amounts in re.findall(r"^\| `(\S+)` \| ([\d +]+|CPU) \| (.*) \|$", part, re.M):
            cells = zip(sizes, amounts.split(" | "), strict=True)
            found |= {name.replace("<size>", size): (gpus, gib) for size, gib in cells if gib != "–"}
    assert sorted(found) == RECIPES
    launchers = {
        **dict.fromkeys(("1", "1 + 1", "CPU"), "python"),
        **{n: f"torchrun --nproc-per-node {n[0]}" for n in ("4", "3 + 1", "8", "7 + 1")},
    }
    gpus_in_words = {"1": "one GPU", "4": "four GPUs;", "3 + 1": "four GPUs, three train"}
    gpus_in_words |= {"8": "eight GPUs;", "7 + 1": "eight GPUs, seven train"}
    gpus_in_words |= {"1 + 1": "two GPUs, one trains", "CPU": "a CPU"}
    for name, (gpus, gib) in found.items():
        said = header("experiment", name)
        assert said["Hardware"].startswith(gpus_in_words[gpus]) and f"about {gib} GiB " in said["Hardware"]
        usual = f"{launchers[gpus]} -m rlhf.train experiment={name}"
        assert said["Command"] == usual or f"\n    {said['Command']}\n" in text


def test_the_docs_have_every_sweep_with_its_values_and_command():
    found = table("Sweeps")
    assert sorted(found) == SWEEPS
    for name, (key, values, command) in found.items():
        assert (key.strip("`"), values.split()) == (SWEPT[name][0], [str(v) for v in SWEPT[name][1]])
        assert command == f"`{header('sweep', name)['Command']}`"


def test_the_docs_have_every_hardware_option():
    from rlhf.words.catalogue import options

    assert sorted(table("Other hardware")) == sorted(options("hardware"))


@pytest.mark.parametrize(
    "words", re.findall(r"^    (?:python|torchrun .*) -m rlhf\.train ([^<\n]*)$", DOCS, re.M)
)
def test_other_commands_of_the_docs_are_valid(words, everything_installed):
    chosen = [word.strip("'") for word in words.split() if word != "-m"]
    checked(as_objects(snapshots.compose(*chosen), chosen))
