"""Tests that every backend gives the results of plain torch on one rank of the CPU.

The backends run on one and two ranks (gloo, CPU), and on two ranks with a pretended GPU each.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose, run_name
from tests import needs, pretended_gpu
from tests.end_to_end.conftest import TINY, assert_same_end, nightly, rows

BACKENDS = ("torch", "zero0", "zero1", "zero2", "zero3", "fsdp2")
OFFLOADS = ("zero2_offload", "zero3_offload")
ALWAYS = (
    "torch",
    "zero2",
    "zero3",
    "fsdp2",
)  # make test-all, on two ranks; on one rank complete runs are enough
SIZES = (1, 2)
GPUS = "2 GPUs"  # two ranks with a pretended GPU each, see tests/pretended_gpu
PROGRAM = "tests.end_to_end.backend_steps"
LIMIT_S = 500

# The first run with offloading compiles DeepSpeed's CPU optimizer for all later ones: minutes of CPU time.
COMPILES = shutil.which(os.environ.get("CXX", "c++")) is not None
NO_GPUS = pretended_gpu.unavailable()


def group_of(size: int | str, name: str) -> str:
    """Return the group of a backend on a number of ranks: one command runs the backends of a group."""
    return "always" if size in SIZES and name == "torch" or size == 2 and name in ALWAYS else "nightly"


def cases(sizes: tuple[int | str, ...], names: tuple[str, ...]) -> list:
    """Return the parameters (size, name) with their marks."""

    def marks(size: int | str, name: str) -> list[pytest.MarkDecorator]:
        return [
            *([pytest.mark.nightly] if group_of(size, name) == "nightly" else []),
            *([pytest.mark.skipif(not COMPILES, reason=needs.CPU_ADAM)] if name in OFFLOADS else []),
            *([pytest.mark.skipif(bool(NO_GPUS), reason=str(NO_GPUS))] if size == GPUS else []),
        ]

    return [
        pytest.param(size, name, id=f"{name} on {size}", marks=marks(size, name))
        for size in sizes
        for name in names
    ]


PLAIN = cases((*SIZES, GPUS), BACKENDS)
OFFLOAD = cases(SIZES, OFFLOADS)
RESHARDED = cases((1, 3), BACKENDS + OFFLOADS)  # resumed from a checkpoint of two ranks
EVERY = [*PLAIN[1:], *OFFLOAD]  # all except plain torch on one rank, which the others are compared with
ON_ONE = [name if name == "torch" else nightly(name) for name in BACKENDS]
ALSO_ON_ONE = [nightly(1), 2]


def ranks(size: int, *words: object, gpus: bool = False) -> str:
    """Return the output of a module of the tests in `size` processes with the variables of torchrun.

    With `gpus`, each process has a pretended GPU. With -s it is not forked (tests/forks.py), because the
    library of the device must be loaded before torch.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if gpus:
        environment |= {**pretended_gpu.environment(), "LOCAL_WORLD_SIZE": str(size)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    processes = []
    for rank in range(size):
        if size > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, *(["-s"] if gpus else []), "-m", *map(str, words)]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)
    return "\n".join(said)


class Steps(dict):
    """The results of backend_steps.py by (number of ranks, backend), computed when a test needs them."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, key: tuple[int | str, str]) -> dict:
        size, name = key
        group = group_of(size, name)
        names = [each for each in BACKENDS + OFFLOADS * COMPILES if group_of(size, each) == group]
        folder = self.base / f"{group} {size}"
        folder.mkdir()
        if size == GPUS:
            names = [each for each in names if each not in OFFLOADS]
            ranks(2, PROGRAM, "cuda", ",".join(names), folder, gpus=True)
        elif size == 2:
            ranks(2, PROGRAM, "cpu", ",".join(names), folder)
            (self.base / "checkpoints").mkdir(exist_ok=True)
            for each in names:
                (self.base / "checkpoints" / each).symlink_to(folder / each)
        else:
            for each in names:
                self[2, each]  # its checkpoints, from which this number of ranks resumes
            ranks(size, PROGRAM, "cpu", ",".join(names), folder, self.base / "checkpoints")
        for each in names:
            self[size, each] = torch.load(folder / f"{each}.pt", weights_only=True, map_location="cpu")
        return self[key]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return the results of backend_steps.py by (number of ranks, backend)."""
    return Steps(tmp_path_factory.mktemp("steps"))


def same_rows(found, expected):
    """Check that losses and gradient norms agree to 1e-4, and other metrics to 1e-3."""
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert {"loss/policy", "policy/grad_norm", "lr"} <= row.keys() == wanted.keys()
        for name in wanted:
            if name.startswith("loss/") or name == "policy/grad_norm":
                assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
            else:
                assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), name


def same_weights(found, expected, rtol=1e-4, atol=1e-6):
    assert list(found) == list(expected), "names of weights or their order differ"
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
@pytest.mark.parametrize(("size", "name"), EVERY)
def test_losses_gradient_norms_and_weights_equal_those_of_plain_torch(size, name, algo, steps):
    found, expected = steps[size, name][algo], steps[1, "torch"][algo]
    same_rows(found["rows"], expected["rows"])
    same_weights(found["weights"], expected["weights"])
    torch.testing.assert_close(found["ref_logprobs"], expected["ref_logprobs"], rtol=0, atol=1e-5)
    norms = [row["policy/grad_norm"] for row in expected["rows"]]
    assert norms[0] > 0.5, "the norm before clipping must exceed max_grad_norm"
    assert len(set(norms)) == len(norms), "each update must have a different gradient norm"
    assert expected["rows"][1]["policy/lr_scale"] < 0.9, "the second step must be made with a lower rate"


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
@pytest.mark.parametrize(("size", "name"), PLAIN)
def test_resumed_equals_uninterrupted(size, name, algo, steps):
    found = steps[size, name][algo]
    assert found["resumed"]["steps"] == 3
    assert found["resumed"]["row"] == found["rows"][2]
    same_weights(found["resumed"]["weights"], found["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
@pytest.mark.parametrize(("size", "name"), OFFLOAD)
def test_resumed_equals_uninterrupted_up_to_rounding_with_the_optimizer_on_the_cpu(size, name, algo, steps):
    # The optimizer updates its powers of beta by multiplication, and computes the powers anew after loading.
    found = steps[size, name][algo]
    same_rows([found["resumed"]["row"]], found["rows"][2:])
    same_weights(found["resumed"]["weights"], found["weights"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
@pytest.mark.parametrize(("size", "name"), RESHARDED)
def test_a_checkpoint_of_two_ranks_resumes_on_another_number_of_ranks(size, name, algo, steps):
    found, expected = steps[size, name]["other ranks"][algo], steps[2, name][algo]
    assert found["steps"] == 3
    same_rows([found["row"]], expected["rows"][2:])
    same_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
@pytest.mark.parametrize(("size", "name"), PLAIN)
def test_a_step_with_non_finite_loss_or_gradient_changes_no_weight(size, name, algo, steps):
    found = steps[size, name][algo]["failed"]
    assert [index for _, index in found["said"]] == [[0, 1, 2]] * 2
    loss, gradient = (what for what, _ in found["said"])
    assert "loss/policy nan" in loss
    assert "loss/policy nan" not in gradient and gradient.endswith(("norm nan", "norm inf"))
    same_weights(found["after"], found["before"], rtol=0, atol=0)
    assert found["next"] == steps[size, name][algo]["rows"][1], "a failed step must not change the next step"


@pytest.mark.parametrize("size", ALSO_ON_ONE)
def test_zero3_gathers_two_of_twelve_blocks_at_a_time_with_adapters_and_gradient_checkpointing(size, steps):
    """Frozen weights that the backward pass gathers for the recomputation are released again."""
    found = steps[size, "zero3"]["adapted"]
    assert found["between"] == [0, 0] and found["most"] < 0.25 * found["all"]
    assert steps[size, "zero2"]["adapted"]["most"] == found["all"]


@pytest.mark.parametrize("size", ALSO_ON_ONE)
def test_zero3_divides_the_weights_of_the_trained_model_and_of_the_reference(size, steps):
    for algo in ("dpo", "ppo"):
        assert steps[size, "zero3"][algo]["kept"] == (0, 0), "between steps no weight is gathered"
        assert min(steps[size, "zero2"][algo]["kept"]) > 0


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_ranks_do_not_deadlock_on_prompts_and_responses_of_one_token(size, name, steps):
    found, expected = steps[size, name]["short"], steps[1, "torch"]["short"]
    same_rows(found["rows"], expected["rows"])
    same_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_training_works_after_inference_has_gathered_weights(size, name, steps):
    found, expected = steps[size, name]["defaults"], steps[1, "torch"]["dpo"]
    same_rows(found["rows"], expected["rows"][:2])


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
@pytest.mark.parametrize(("size", "name"), EVERY)
def test_entropy_and_weights_of_pairs_give_the_steps_of_plain_torch(size, name, algo, steps):
    found, expected = steps[size, name]["extras"][algo], steps[1, "torch"]["extras"][algo]
    same_rows(found["rows"], expected["rows"])
    same_weights(found["weights"], expected["weights"])
    assert {"dpo": "weighting/ess", "ppo": "policy/entropy"}[algo] in expected["rows"][0]


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_bfloat16_is_autocast_over_float32_weights(size, name, steps):
    found, expected = steps[size, name]["bfloat16"], steps[1, "torch"]["bfloat16"]
    exact_rows = steps[1, "torch"]["dpo"]["rows"][:2]
    for row, wanted, exact in zip(found["rows"], expected["rows"], exact_rows, strict=True):
        assert row["policy/grad_norm"] == pytest.approx(wanted["policy/grad_norm"], rel=0.05)
        assert row["policy/grad_norm"] != exact["policy/grad_norm"]
    assert {weight.dtype for weight in found["weights"].values()} == {torch.float32}
    assert found["reference"] == ["torch.bfloat16"]
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0.02, atol=0.1)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in found["weights"].values())


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_a_borrowed_model_computes_in_bfloat16_what_its_float32_weights_compute(size, name, steps):
    dtypes, logits, expected = steps[size, name]["bfloat16"]["borrowed"]
    assert torch.equal(logits, expected)
    assert dtypes == ["torch.bfloat16", "torch.float32"][not name.startswith(("zero3", "fsdp2")) :]


@pytest.mark.parametrize("teacher", ["another model", "tied", "adapters", "served"])
@pytest.mark.parametrize(("size", "name"), EVERY)
def test_distillation_gives_the_steps_of_plain_torch(size, name, teacher, steps):
    """A divided teacher is gathered; a teacher that is the policy without adapters shares its weights.

    Of a served teacher, every rank asks for its part of the candidates.
    """
    found, expected = steps[size, name]["distilled"][teacher], steps[1, "torch"]["distilled"][teacher]
    same_rows(found["rows"], expected["rows"])
    same_weights(found["weights"], expected["weights"])
    first, wanted = found["rows"][0], expected["rows"][0]
    for key in ("loss/policy", "policy/grad_norm"):
        assert first[key] == pytest.approx(wanted[key], rel=1e-5), key


def test_zero3_gathers_weights_of_linear_layers_in_bfloat16_only_if_the_forward_is_bfloat16(steps):
    gathered = steps[2, "zero3"]["bfloat16"]["gathered"]
    assert gathered["torch.bfloat16"] > 3 * gathered["torch.float32"] > 0


@pytest.mark.nightly
def test_zero3_in_bfloat16_has_the_same_loss_on_one_rank_and_on_two(steps):
    first, second = (steps[size, "zero3"]["bfloat16"]["rows"][0]["loss/policy"] for size in SIZES)
    assert first == pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_frozen_models_give_the_same_outputs_as_on_plain_torch(size, name, steps):
    found, expected = steps[size, name]["frozen"], steps[1, "torch"]["frozen"]
    torch.testing.assert_close(found["rewards"], expected["rewards"], rtol=0, atol=1e-5)
    for temperature in (1.0, 0.7):
        logprobs = found["logprobs"][temperature]
        torch.testing.assert_close(logprobs, expected["logprobs"][temperature], rtol=0, atol=1e-5)
    assert not torch.allclose(found["logprobs"][1.0], found["logprobs"][0.7])
    assert found["trained"] == 0


@pytest.mark.parametrize(("size", "name"), PLAIN)
def test_borrowed_and_saved_models_are_complete(size, name, steps):
    found, expected = steps[size, name]["left"], steps[1, "torch"]["left"]
    for kind in ("gpt_neox", "llama"):
        same_weights(found[kind]["weights"], expected[kind]["weights"], rtol=0, atol=0)
        same_weights(found[kind]["saved"], found[kind]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(found[kind]["logits"], expected[kind]["logits"], rtol=0, atol=1e-5)
    assert found["llama"]["tied"] and "lm_head.weight" in found["llama"]["weights"]
    same_weights(found["reward"]["saved"], found["reward"]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize(("size", "name"), PLAIN)
def test_loading_a_checkpoint_runs_no_code(size, name, steps):
    assert not steps[size, name]["ran"]


@pytest.mark.parametrize("name", ON_ONE)
def test_a_single_rank_listens_on_loopback_only(name, steps):
    assert set(steps[1, name]["listening"]) <= {"127.0.0.1", "::1"}


# -- complete runs ---------------------------------------------------------------------------------

RUNS = {  # name -> (number of ranks, arguments)
    "zero2 ppo": (1, ["backend=zero2", "algo=ppo"]),
    # Runs of several ranks have no annotator, whose metric would be an extra one in the run of one rank.
    "zero3 ppo on two": (2, ["backend=zero3", "algo=ppo", "schedule.max_lag=1", "generator.annotate=false"]),
    "zero3 dpo": (1, ["backend=zero3", "algo=dpo", "algo.ties=keep"]),
    "zero3 dpo on two": (
        2,
        ["backend=zero3", "algo=dpo", "generator.annotate=false", "scorer.missing_eos_score=null"],
    ),
    "zero3 reward": (1, ["backend=zero3", "algo=reward"]),
    "fsdp2 ppo on two": (2, ["backend=fsdp2", "algo=ppo", "schedule.max_lag=1", "generator.annotate=false"]),
    "fsdp2 dpo": (1, ["backend=fsdp2", "algo=dpo", "algo.ties=keep"]),
}
OFTEN = ("zero2 ppo", "zero3 ppo on two", "fsdp2 ppo on two")
EVERY_RUN = [name if name in OFTEN else nightly(name) for name in RUNS]


class Runs(dict):
    """Arguments and both folders of each run (the run, and a copy that was resumed), and its addresses."""

    def __init__(self, base: Path, common: list[str]) -> None:
        super().__init__()
        self.base, self.common = base, common

    def __missing__(self, name: str) -> tuple[list[str], Path, Path, set[str]]:
        size, words = RUNS[name]
        words = [*self.common, *words]
        whole, resumed, jobs = (self.base / f"{name} {what}" for what in ("whole", "resumed", "jobs"))
        jobs.write_text(json.dumps([(words, str(whole))]))
        said = ranks(size, "tests.end_to_end.rank_runs", jobs)
        addresses = {
            word for _, words in re.findall("^(listens on) (.*)$", said, re.M) for word in words.split()
        }
        shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("trainer_state.json", "model"))
        jobs.write_text(json.dumps([(words, str(resumed))]))
        ranks(size, "tests.end_to_end.rank_runs", jobs)
        self[name] = words, whole, resumed, addresses
        return self[name]


@pytest.fixture(scope="module")
def runs(cache_dir, tmp_path_factory):
    """Return arguments and both folders of each run by name; a run begins when a test needs it."""
    return Runs(tmp_path_factory.mktemp("runs"), [*TINY, f"cache_dir={cache_dir}"])


@pytest.mark.parametrize("name", EVERY_RUN)
def test_a_run_gives_the_same_metrics_as_on_plain_torch(name, runs, finished):
    _, folder, *_ = runs[name]
    plain = finished(*(word for word in RUNS[name][1] if not word.startswith("backend=")))
    assert len(rows(folder)) == len(rows(plain)) >= 4
    for row, expected in zip(rows(folder), rows(plain), strict=True):
        if expected["update"] == 1:  # policy and reference are equal, so rounding decides which margin is > 0
            row.pop("rewards/accuracies", None), expected.pop("rewards/accuracies", None)
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)
    trained = load_file(folder / "model" / "model.safetensors")
    expected = load_file(plain.model / "model.safetensors")
    assert trained.keys() == expected.keys()


@pytest.mark.parametrize("name", EVERY_RUN)
def test_a_resumed_run_gives_the_same_metrics_and_model(name, runs):
    _, folder, resumed, _ = runs[name]
    assert "resumed from update" in (resumed / "train.log").read_text()
    assert "resumed from update" not in (folder / "train.log").read_text()
    assert rows(resumed) == rows(folder)
    one, other = (load_file(path / "model" / "model.safetensors") for path in (folder, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def test_a_run_of_deepspeed_on_one_rank_listens_on_loopback_only(runs):
    *_, addresses = runs["zero2 ppo"]
    assert addresses <= {"127.0.0.1", "::1"}


def test_a_zero3_run_does_not_change_a_later_run_in_the_same_process(command, tmp_path, finished):
    words = [*command, "algo=sft"]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", "-m", *words, "backend=zero3,torch"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_end(RunFolder(tmp_path / run_name(compose(words))), finished("algo=sft"))


@pytest.mark.parametrize("name", ["zero3 ppo on two", "fsdp2 ppo on two"])
def test_a_divided_checkpoint_is_resumed_and_evaluated_by_another_number_of_ranks(name, runs, tmp_path):
    words, folder, *_ = runs[name]
    other = tmp_path / "resumed"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("trainer_state.json", "model"))
    for command in (["rlhf.train", *words, f"hydra.run.dir={other}"], ["rlhf.evaluate", f"run={other}"]):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("over 1 instead of 2 ranks" in " ".join(done.stdout.split())) is name.startswith("zero")
        assert "FSDP2" not in done.stderr and "Warning" not in done.stderr
    for row, expected in zip(rows(other), rows(folder), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)
    evaluated = [json.loads(line) for line in (other / "evaluations.jsonl").read_text().splitlines()]
    assert {row["model"] for row in evaluated} > {"model"}


def test_offloading_without_a_compiler_is_rejected_before_loading(command, tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", *command, "backend=zero3_offload"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "c++ not found" in done.stderr and "set backend=zero3" in done.stderr
    assert "making" not in done.stdout and "dpo of pythia" not in done.stdout


def test_invalid_deepspeed_settings_are_reported_before_loading(command):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlhf.train", *command, "backend=zero2"),
            "+backend.deepspeed.zero_optimization={overlap_com: true}",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "backend.deepspeed must be settings that DeepSpeed accepts" in done.stderr
    assert "overlap_com" in done.stderr and "Traceback" not in done.stderr
    assert "making" not in done.stdout
