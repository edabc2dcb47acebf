"""Tests of the error of a run whose GPU has too little memory, in the trainer or in another process."""

import pickle
import shutil
from functools import partial

import pytest
import torch

from rlhf.assembly.models import full_gpu
from rlhf.core.errors import RunError, explained
from rlhf.engines.engine import TorchEngine
from rlhf.generators.hf import generator as hf
from rlhf.models import forward
from rlhf.processes.worker import answer
from rlhf.runs.folder import RunFolder
from rlhf.stages.evaluation import changed, evaluate
from rlhf.stages.run import run
from rlhf.words.compose import compose

SCORED = ("scorer=facts", "scorer.missing_eos_score=null")
BY_A_MODEL = ("scorer=reward_model", "scorer.missing_eos_score=null")
SAID = "CUDA out of memory. Tried to allocate 20.00 MiB.\nSee the documentation"


@pytest.fixture(autouse=True)
def artefacts(finished):
    """Make the models from which the runs start, so that only the runs themselves lack memory."""
    for scored in (SCORED, BY_A_MODEL):
        finished("algo=dpo", *scored)


def raises(after: int, function):
    """Return `function`, which raises an error of too little memory after some calls."""
    calls = iter(range(after))

    def call(*args, **kwargs):
        if next(calls, None) is None:
            raise torch.OutOfMemoryError(SAID)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("place", "name", "calls", "phase", "setting", "scored"),
    [
        (TorchEngine, "backward", 3, "training", "backend.micro_batch=4", SCORED),
        (hf, "sample", 1, "sampling", "generator.batch_size=128", SCORED),
        (forward, "autocast", 1, "log-probs and scores", "backend.micro_batch=4", SCORED),
        (forward, "autocast", 0, "scores", "scorer.batch_size=16", BY_A_MODEL),
    ],
)
def test_the_error_names_the_phase_the_settings_that_need_less_and_the_last_checkpoint(
    tiny, tmp_path, monkeypatch, place, name, calls, phase, setting, scored
):
    cfg = tiny("algo=dpo", *scored)
    monkeypatch.setattr(place, name, raises(calls, getattr(place, name)))
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError) as error:
        run(cfg, folder)
    said = str(error.value)
    assert said.startswith(f"a GPU has too little memory for {phase} (CUDA out of memory. Tried to allocate")
    assert "See the documentation" not in said
    assert f"; set {setting}, or model.dtype=bfloat16, or model." in said
    last = folder.last_checkpoint()
    assert (last is not None) == (phase == "training") == ("model.gradient_checkpointing=true" in said)
    assert said.endswith(
        f"the last checkpoint is {last}, from which the same command resumes with "
        "model.gradient_checkpointing=true"
        if last
        else "no checkpoint was written yet"
    )


def test_the_settings_of_the_error_compose_and_the_run_resumes_with_gradient_checkpointing(
    tiny, tmp_path, monkeypatch
):
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "backward", raises(3, TorchEngine.backward))
        with pytest.raises(RunError) as error:
            run(tiny("algo=dpo", *SCORED), folder)
    settings = str(error.value).partition("; set ")[2].partition("; the last")[0].split(", or ")
    assert all(compose([setting]) for setting in settings) and len(settings) > 3
    run(tiny("algo=dpo", *SCORED, "model.gradient_checkpointing=true"), folder)
    assert folder.finished() and "resumed from update 1" in folder.log.read_text()


def test_an_evaluation_names_settings_and_no_checkpoint(finished, tmp_path, monkeypatch):
    folder = RunFolder(shutil.copytree(finished("algo=sft").path, tmp_path / "run"))
    monkeypatch.setattr(hf, "sample", raises(0, hf.sample))
    with pytest.raises(RunError, match="too little memory for sampling .*; set eval.batch_size=128") as error:
        evaluate(changed(folder, []), folder)
    assert not any(word in str(error.value) for word in ("checkpoint", "lora"))


def test_the_error_of_another_process_gets_settings_too(tiny, tmp_path):
    failure = answer("generator", "sample", raises(0, None), ())
    failure = pickle.loads(pickle.dumps(failure))  # as it is sent to the trainer
    with (
        pytest.raises(RunError) as error,
        explained(partial(full_gpu, tiny("algo=dpo", "generator=hf", "generator.annotate=true"), None)),
    ):
        raise failure
    said = str(error.value)
    assert said.startswith("the generator failed to sample: OutOfMemoryError: CUDA out of memory.")
    assert (
        "; the traceback is in generator.log; set generator.batch_size=128, or generator.annotate=false"
        in said
    )
