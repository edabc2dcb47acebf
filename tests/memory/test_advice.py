"""Errors, warnings and settings about memory, limits of tokens, and the command rlhf.plan."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf import plan as command_module
from rlhf.core.machine import Machine
from rlhf.memory import sizes
from rlhf.memory.plan import plan, problems, rows, savings, warnings, with_token_limit
from rlhf.memory.uses import GIB
from rlhf.stages.words import describe
from rlhf.words.compose import compose
from tests.memory.plans import PYTHIA_2_8B, TWO_GPUS, gpus, local_model, needs

LARGE_BATCH = ["backend.micro_batch=16384", "schedule.prompts_per_update=8192",
               "schedule.total_episodes=163840"]  # fmt: skip
LLAMA_70B = {
    "model_type": "stablelm",  # as llama, but without a check of the names of its tensors
    "vocab_size": 128256,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([*LARGE_BATCH, "backend.tokens=100000000"], "backend.micro_batch"),
        (["generator.batch_size=16384", "eval.prompts=16384", "model.layers=8"], "generator.batch_size"),
        (["algo=sft", "eval.batch_size=16384", "eval.prompts=16384", "model.layers=8"], "eval.batch_size"),
        (["model.hidden_size=8192", "model.layers=32"], "model.hidden_size"),
    ],
)
def test_the_error_of_a_run_that_does_not_fit_names_a_value_that_fits(words, key):
    (problem,) = problems(compose(words))
    assert problem.startswith(f"{key} must be small enough for the 16.0 GiB of RAM")
    got, _, fitting = problem.rpartition(f"; set {key}=")
    assert int(fitting) < int(got.rpartition("got ")[2])
    assert not problems(compose([*words, f"{key}={fitting}"])) or key == "model.hidden_size"


def test_the_error_of_a_too_large_model_names_settings_that_fit_together():
    words = ["model=pythia_1b", "model.policy=EleutherAI/pythia-1b", "scorer=facts", "generator=hf"]
    (problem,) = problems(compose(words))
    remedy = problem.rpartition("; set ")[2].split()
    assert "model.lora.rank=16" in remedy and problems(compose([*words, *remedy])) == []


def test_a_share_of_colocated_vllm_that_does_not_fit_gets_the_nearest_share_that_fits(machine, pythia):
    machine(gpus(1))
    words = [*pythia, "generator=vllm_colocated", "backend.micro_batch=2"]
    for share in (0.8, 0.05):
        problem, *_ = problems(compose([*words, f"generator.memory={share}"]))
        assert f"got {share}; set generator.memory=0." in problem
        assert problems(compose([*words, f"generator.memory={problem.rpartition('=')[2]}"])) == []


def test_a_gpu_with_too_little_memory_for_the_annotator_is_refused_with_a_remedy(machine, tmp_path):
    machine(Machine(ram=256 * GIB, gpus=(160 * GIB, 36 * GIB)))
    folder = local_model(tmp_path / "pythia", PYTHIA_2_8B)
    words = ["backend.device=cuda", "schedule.max_lag=1", f"model.policy={folder}", f"model.reward={folder}"]
    assert problems(compose(words)) == []
    (problem,) = problems(compose([*words, "generator.annotate=true"]))
    assert "GPU 1" in problem and "generator.annotate=false" in problem


def test_a_judge_that_does_not_fit_is_refused_with_a_remedy_that_works(machine, tmp_path):
    folder = local_model(tmp_path / "judge", PYTHIA_2_8B)
    judged = ["algo=reward", f"model.policy={folder}", "scorer@gold=reward_model", f"gold.path={folder}"]
    (use,) = plan(compose([*judged, "gold.batch_size=2"]), trains=False).uses
    machine(Machine(ram=int(use.bytes)))
    (problem,) = problems(compose([*judged, "gold.batch_size=512"]), trains=False)
    assert problem.startswith("gold.batch_size must be small enough for the ") and "got 512; set " in problem
    fitting = compose([*judged, problem.rpartition("; set ")[2]])
    assert problems(fitting, trains=False) == [] != warnings(fitting, trains=False)
    machine(Machine(ram=GIB))
    (problem,) = problems(compose(judged), trains=False)
    assert problem.startswith("gold.path must be") and problem.endswith("or set model.dtype=bfloat16")


def test_a_run_that_may_not_fit_gives_a_warning(machine):
    cfg = compose(["backend.tokens=1000000"])
    assert warnings(cfg) == []
    machine(Machine(ram=int(plan(cfg).uses[0].bytes * 1.05)))
    (warning,) = warnings(cfg)
    assert warning.startswith("the run may need about 1.") and "RAM (process 0.6 GiB, " in warning
    assert problems(cfg) == []


def test_the_plan_is_unknown_if_models_are_not_downloaded(monkeypatch):
    monkeypatch.setattr(sizes, "named_size", lambda name: None)
    cfg = compose(["model=pythia_410m", "task=tldr"])
    made = plan(cfg)
    assert not made.uses and made.unknown["model.policy"] == "mnoukhov/pythia410m-sft-tldr"
    assert problems(cfg) == warnings(cfg) == []
    ((_, told),) = rows(made)
    assert told.startswith("unknown until these models are downloaded: model.policy=mnoukhov/")


def test_a_limit_of_tokens_bounds_the_sequences_of_the_plan():
    words = ["schedule.prompts_per_update=512", "schedule.total_episodes=10240"]
    cfg = compose(words)
    limit = 64 * (cfg.task.max_prompt_tokens + cfg.generator.response_length)
    few = needs([*words, "backend.micro_batch=64"])["RAM"]
    unlimited, limited, automatic = (
        needs([*words, "backend.micro_batch=1024", f"backend.tokens={tokens}"])["RAM"]
        for tokens in ("null", limit, 0)
    )
    assert limited["training"] == few["training"] < unlimited["training"]
    reads = "log-probs and scores"
    assert few[reads] < limited[reads] <= unlimited[reads]
    assert automatic["training"] == unlimited["training"], "all 1,024 sequences fit"


def test_the_automatic_limit_of_tokens_fits_the_machine():
    words = [*LARGE_BATCH, "backend.tokens=0"]
    cfg = with_token_limit(compose(words))
    assert plan(cfg).uses[0].bytes <= 0.9 * 16 * GIB and problems(compose(words)) == []
    shown = "at most 16384, and at most what fits into the memory"
    assert ("sequences per forward", shown) in describe(compose(words), 8192)
    on_gpus = with_token_limit(compose(LARGE_BATCH), TWO_GPUS).backend.tokens
    assert on_gpus == with_token_limit(compose(words), TWO_GPUS).backend.tokens, "the default on a GPU"
    assert with_token_limit(compose(LARGE_BATCH)) == cfg, "the default on a CPU with too little memory"
    assert with_token_limit(compose([])).backend.tokens is None, "no limit if the memory suffices"
    double = replace(cfg, backend=replace(cfg.backend, tokens=2 * cfg.backend.tokens))
    assert plan(double).uses[0].bytes > 0.9 * 16 * GIB, "the next larger limit does not fit"


def test_a_small_model_and_your_own_data_fit_a_laptop_with_the_defaults(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(9)))
    for model, forward in (("HuggingFaceTB/SmolLM2-135M-Instruct", 8), ("Qwen/Qwen2.5-0.5B-Instruct", 2)):
        cfg = compose(["task=local", f"task.path={prompts}", "algo=rloo", f"model.policy={model}",
                       "scorer=facts", "generator=hf"])  # fmt: skip
        assert problems(cfg) == []
        assert with_token_limit(cfg).backend.tokens == forward * (512 + 256)


def test_settings_that_need_less_memory_are_named_with_the_memory_that_they_need():
    words = ["model.hidden_size=512", "model.layers=8", "backend.tokens=1000000"]
    device, less = savings(compose(words))
    assert device == "RAM" and list(less) == sorted(less, key=less.get)
    assert {"model.gradient_checkpointing", "backend.micro_batch"} <= {each.split("=")[0] for each in less}
    for override, size in less.items():
        (use,) = plan(compose([*words, override])).uses
        assert use.bytes == size < plan(compose(words)).uses[0].bytes


def test_the_summary_has_one_memory_row_for_each_device(machine, pythia):
    shown = dict(describe(compose([]), 8192))
    assert shown["memory (RAM)"].startswith("about 1.0 GiB of 16.0 GiB: process 0.6 GiB, training 0.4 GiB")
    names = [name for name, _ in rows(plan(compose([*pythia, "generator=vllm"]), TWO_GPUS))]
    assert names == ["memory (vLLM's share of GPU 1)", "memory (GPU 0)", "memory (RAM)"]


@pytest.mark.process
def test_a_70b_model_is_rejected_before_torch_is_imported_and_leaves_no_files(tmp_path):
    folder = local_model(tmp_path / "llama", LLAMA_70B)
    script = f"""
import sys
from rlhf.memory import plan as memory
from rlhf.core.machine import Machine
memory.this_machine = lambda: Machine(ram=64 * 2**30)
sys.argv = ["train.py", "model.policy={folder}", "scorer=facts"]
from rlhf.train import main
try:
    main()
except SystemExit as stop:
    print(stop.code, sorted({{"torch", "transformers", "vllm", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "2 []\n"
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert error.startswith("error: model.policy must be small enough for the 64.0 GiB of RAM")
    for said in ("policy 788 GiB", f"got {folder}; ", "set model.policy to a smaller model", "model.dtype"):
        assert said in error
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_sweep_job_that_does_not_fit_is_rejected_with_exit_code_2(command, tmp_path):
    folder = local_model(tmp_path / "llama", LLAMA_70B)
    answer = command("-m", f"model.policy={folder}", "scorer=facts", "seed=1")
    assert answer.code == 2 and not answer.runs
    assert "model.policy must be small enough for the 16.0 GiB of RAM" in answer.err


def test_a_finished_run_is_reported_on_a_machine_with_too_little_memory(command, machine):
    assert command().code == 0
    folder = next(Path("outputs").iterdir())
    (folder / "trainer_state.json").write_text(json.dumps({"finished": True, "result": {}}))
    machine(Machine(ram=GIB // 2))
    assert "finished already" in command().out
    assert command("resume=never").code == 2 and folder.is_dir(), "rejected before its folder is moved aside"


# -- the command python -m rlhf.plan ---------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch, called, tmp_path):
    """`planned(*words)` runs the command in an empty folder and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: called(command_module.main, *words)


def test_the_command_prints_each_part_and_creates_no_files(planned, tmp_path):
    code, out, err = planned("algo=ppo")
    assert code == 0 and err == "" and not list(tmp_path.iterdir())
    for said in ("RAM: about ", " of 16.0 GiB", "value model: optimizer", "while training", "the most",
                 "x (192 + 40) tokens", "million parameters x 8 bytes"):  # fmt: skip
        assert said in out
    assert planned("--help")[1].startswith("Usage: python -m rlhf.plan")


def test_the_command_prints_the_table_before_the_error(planned, tmp_path):
    folder = local_model(tmp_path / "llama", LLAMA_70B)
    code, out, err = planned(f"model.policy={folder}", "scorer=facts")
    assert code == 2 and "70.55 billion parameters x 4 bytes" in out
    assert err.startswith("error: model.policy must be small enough for the 16.0 GiB of RAM")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algo.beat=1"], "did you mean algo.beta?"),
        (["algo.beta=-1"], "algo.beta must be > 0"),
        (["-m"], "-m must be a flag of this command"),
        (["--config-dir", "nowhere"], "--config-dir must name a folder laid out like conf/"),
    ],
)
def test_the_command_reports_config_errors_with_exit_code_2(planned, words, said):
    code, out, err = planned(*words)
    assert code == 2 and out == "" and err.startswith("error: ") and said in err


def test_the_command_accepts_a_config_folder_of_the_user(planned, own_conf):
    assert planned("--config-dir", str(own_conf), "experiment=fine")[0] == 0


@pytest.mark.process
def test_the_command_imports_neither_torch_nor_libraries_that_import_torch(tmp_path):
    script = (
        "import sys; sys.argv = ['plan.py', 'algo=ppo']; from rlhf.plan import main; main();"
        "print(sorted({'torch', 'transformers', 'datasets', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    assert not list(tmp_path.iterdir())
