"""Tests of docs/reference/faults.md: the same command resumes the run with identical results."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.engines.engine import TorchEngine
from rlhf.generators.hf.generator import HFGenerator
from rlhf.generators.process import WorkerGenerator
from rlhf.loggers.logger import JsonlLogger
from rlhf.processes import signals
from rlhf.runs.folder import RunFolder, complete_checkpoints, versions
from rlhf.stages.run import run
from rlhf.tasks.tldr_mini import TLDRMiniSource
from rlhf.training import checkpoint
from rlhf.training.evaluators import PolicyEvaluator
from rlhf.training.recorder import Recorder
from rlhf.words.compose import compose, run_name
from tests import needs
from tests.end_to_end.conftest import TINY, assert_same_end, nightly, wait_for
from tests.served_teacher import Reader, Stub

RUN = ["schedule.total_episodes=80", "schedule.save_every=1", "schedule.eval_every=2", "algo.ties=keep"]
LAG = [*RUN, "schedule.max_lag=1"]
PPO = ["algo=ppo", *RUN[:3], "schedule.log_every=3"]
SFT = ["algo=sft", "schedule.total_episodes=32", "schedule.save_every=1", "schedule.eval_every=2"]
ONLY_AT_SIGNALS = "schedule.save_every=0"  # does not change the results

# Programs that run the training command and send one signal to their own process.
AT = """
import os, signal
from rlhf.train import main
def once(kind, name, due, number):
    function = getattr(kind, name)
    def strike(self, *arguments):
        if due(*arguments):
            os.kill(os.getpid(), number)
        return function(self, *arguments)
    setattr(kind, name, strike)
"""
SIGTERM_AFTER_UPDATE_2 = (
    AT
    + """
from rlhf.training.recorder import Recorder
once(Recorder, "flush", lambda state, *_: state.update == 2, signal.SIGTERM)
main()
"""
)
DIES_IN_A_CHECKPOINT = (
    AT
    + """
import rlhf.training.checkpoint as checkpoint
write = checkpoint.sync
def sync(path):
    if "checkpoint-2" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    write(path)
checkpoint.sync = sync
main()
"""
)
DIES_IN_A_TRANSFER = (
    AT
    + """
from rlhf.generators.weights import SharedWeights
write = SharedWeights.write
def some(weights):
    yield next(iter(weights))
    os.kill(os.getpid(), signal.SIGKILL)
def strike(self, weights, version):
    return write(self, some(weights) if version == 2 else weights, version)
SharedWeights.write = strike
main()
"""
)


def start(words, *command):
    return subprocess.Popen(
        [sys.executable, *command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(words) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", *words], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def uninterrupted(finished):
    """`uninterrupted(*words)` returns the folder of a finished run without a fault, made once."""
    return finished


@pytest.fixture(autouse=True)
def artefacts(uninterrupted):
    """Make the SFT model, pairs and reward model first, so that a fault affects the run and not a stage."""
    uninterrupted(*RUN)


def at(patch, kind, name, due, strike):
    """Patch the method `name` of `kind` so that it first calls `strike()` if `due(*arguments)` is true."""
    function = getattr(kind, name)

    def struck(self, *arguments, **more):
        if due(*arguments):
            strike()
        return function(self, *arguments, **more)

    patch.setattr(kind, name, struck)


def after_update(update):
    return lambda state, *_: state.update == update


def raising(error):
    def strike():
        raise error

    return strike


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.forks(False)  # new Python processes, as a user starts them
def test_run_killed_after_a_checkpoint_resumes_with_identical_results(tiny, command, tmp_path, uninterrupted):
    words, folder = [*command, *RUN], RunFolder(tmp_path / run_name(tiny(*RUN)))
    process = start(words, "-m", "rlhf.train")
    wait_for(lambda: folder.last_checkpoint() is not None, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not folder.finished()

    told = finish(words)

    assert "resumed from update" in told
    assert "\nfinished: 5 updates, 80 episodes" in told and "win rate vs. references" in told
    assert_same_end(folder, uninterrupted(*RUN))


@pytest.mark.forks(False)
@pytest.mark.parametrize("divergence", ["exact", nightly("k1"), nightly("served")])
def test_a_killed_distillation_with_lag_resumes_with_identical_results(
    divergence, tiny, command, tmp_path, uninterrupted, request
):
    teacher = uninterrupted("algo=grpo", "optim.lr=1e-3").model
    run = ["algo=distill", *RUN[:3], "schedule.max_lag=4", f"model.reference={teacher}"]
    run += [] if divergence == "served" else [f"algo.divergence={divergence}"]
    if divergence == "served":
        lm, tokenizer = (kind.from_pretrained(teacher) for kind in (AutoModelForCausalLM, AutoTokenizer))
        stub = Stub(Reader(lm, tokenizer, str(teacher)))
        stub.start()
        request.addfinalizer(stub.stop)
        run += ["generator.temperature=1", "algo.top=6", f"algo.teacher.url={stub.url}"]
    folder, expected = RunFolder(tmp_path / run_name(tiny(*run))), uninterrupted(*run)
    process = start([*command, *run], "-m", "rlhf.train")
    wait_for(lambda: folder.last_checkpoint() is not None, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not folder.finished()
    assert "resumed from update" in finish([*command, *run])
    assert_same_end(folder, expected)


def test_run_killed_in_a_checkpoint_resumes_from_the_previous_checkpoint(
    tiny, command, tmp_path, uninterrupted
):
    words, folder = [*command, *RUN], RunFolder(tmp_path / run_name(tiny(*RUN)))
    process = start(words, "-c", DIES_IN_A_CHECKPOINT)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL, out
    assert folder.last_checkpoint() == folder.path / "checkpoint-1", (
        "the incomplete checkpoint must be ignored"
    )
    assert list(folder.path.glob(".tmp-checkpoint-2"))

    assert "resumed from update 1 of 5" in finish(words)

    assert_same_end(folder, uninterrupted(*RUN))
    assert not list(folder.path.glob(".tmp-*")), "the incomplete checkpoint must be removed"


def test_run_killed_in_a_weight_transfer_resumes_with_identical_results(
    tiny, command, tmp_path, uninterrupted
):
    words, folder = [*command, *LAG], RunFolder(tmp_path / run_name(tiny(*LAG)))
    process = start(words, "-c", DIES_IN_A_TRANSFER)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL, out
    assert "resumed from update 1 of 5" in finish(words)
    assert_same_end(folder, uninterrupted(*LAG))


# -- signals ---------------------------------------------------------------------------------------


def test_sigterm_ends_the_command_with_a_checkpoint_and_exit_code_75(tiny, command, tmp_path, uninterrupted):
    words, folder = [*command, *RUN, ONLY_AT_SIGNALS], RunFolder(tmp_path / run_name(tiny(*RUN)))
    process = start(words, "-c", SIGTERM_AFTER_UPDATE_2)
    told, _ = process.communicate(timeout=500)
    assert process.returncode == os.EX_TEMPFAIL == 75, told
    assert "SIGTERM: stopping after the current update, with a checkpoint" in told
    last = folder.path / "checkpoint-2"
    assert told.splitlines()[-1] == (
        "interrupted by SIGTERM after update 2 of 5 (dpo of pythia on tldr_mini); "
        f"checkpoint: {last}; the same command resumes from it"
    )
    assert folder.last_checkpoint() == last and "interrupted by SIGTERM" in folder.log.read_text()
    assert "Traceback" not in told and not list(folder.path.glob(".tmp*"))

    assert "resumed from update 2 of 5" in finish(words)

    assert_same_end(folder, uninterrupted(*RUN))


def signal_self(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "place", "update", "words"),
    [
        (signal.SIGTERM, (TorchEngine, "optimizer_step", lambda *_: True), 1, RUN),
        (signal.SIGUSR1, (PolicyEvaluator, "__call__", after_update(0)), 0, RUN),
        nightly(signal.SIGTERM, (PolicyEvaluator, "__call__", after_update(2)), 2, LAG),
        nightly(signal.SIGUSR1, (Recorder, "flush", after_update(2)), 2, PPO),
        nightly(signal.SIGTERM, (Recorder, "flush", after_update(3)), 3, [*LAG, "generator.worker=false"]),
        (signal.SIGUSR1, (Recorder, "flush", after_update(1)), 1, SFT),
    ],
    ids=["in a step", "in the first evaluation", "in an evaluation", "ppo", "in line", "sft"],
)
def test_resume_after_a_signal_equals_an_uninterrupted_run(
    tiny, tmp_path, monkeypatch, uninterrupted, number, place, update, words
):
    cfg, folder = tiny(*words, ONLY_AT_SIGNALS), RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        at(patch, *place, signal_self(number))
        with pytest.raises(Interrupted, match=f"by {number.name} after update {update} "):
            run(cfg, folder)
    last = folder.last_checkpoint()
    assert last is None if update == 0 else last.name == f"checkpoint-{update}"
    assert signal.getsignal(number) is signal.SIG_DFL
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*words))


@pytest.fixture
def ctrl_c():
    """Make Ctrl-C interrupt a run, also in a background job of a shell, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal_self(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("update", "words"),
    [nightly(1, RUN), (2, RUN), nightly(5, RUN), nightly(2, SFT)],
    ids=["not due", "due", "last", "sft"],
)
def test_resume_after_ctrl_c_equals_an_uninterrupted_run(
    tiny, tmp_path, monkeypatch, uninterrupted, ctrl_c, update, words
):
    cfg, folder, evaluated = tiny(*words, ONLY_AT_SIGNALS), RunFolder(tmp_path / "run"), []
    with monkeypatch.context() as patch:
        at(patch, PolicyEvaluator, "__call__", lambda state: evaluated.append(state.update), None)
        at(patch, Recorder, "flush", after_update(update), ctrl_c)
        with pytest.raises(Interrupted, match=rf"by Ctrl-C after update {update} of .*same command resumes"):
            run(cfg, folder)
    assert update not in evaluated, "a signal does not start the evaluation that is due"
    assert folder.last_checkpoint().name == f"checkpoint-{update}"
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*words))


@pytest.mark.parametrize(
    ("words", "kind"), [(RUN, HFGenerator), nightly(LAG, WorkerGenerator)], ids=["in line", "worker"]
)
def test_a_signal_ends_a_running_evaluation_which_the_next_session_repeats(
    tiny, tmp_path, monkeypatch, uninterrupted, ctrl_c, words, kind
):
    cfg, folder, recorded = tiny(*words, ONLY_AT_SIGNALS), RunFolder(tmp_path / "run"), []
    asked = []

    def second_evaluation(prompts, sampling):
        asked.append(sampling.purpose)
        return asked.count("eval-kl") == 2 and sampling.purpose == "eval-kl"

    with monkeypatch.context() as patch:
        at(patch, Recorder, "evaluation", lambda state, _: recorded.append(state.update), None)
        at(patch, kind, "submit", second_evaluation, ctrl_c)
        with pytest.raises(Interrupted, match="by Ctrl-C after update 2 of 5"):
            run(cfg, folder)
    assert recorded == [0]
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*words))


def test_a_signal_after_the_last_evaluation_lets_the_run_finish(tiny, tmp_path, monkeypatch, uninterrupted):
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        at(patch, TorchEngine, "save_model", lambda *_: True, signal_self(signal.SIGTERM))
        run(tiny(*RUN, ONLY_AT_SIGNALS), folder)
    assert_same_end(folder, uninterrupted(*RUN))


def test_signal_during_a_wait_for_the_generator_interrupts_the_run(
    tiny, tmp_path, monkeypatch, uninterrupted
):
    cfg, folder, told = tiny(*LAG, ONLY_AT_SIGNALS), RunFolder(tmp_path / "run"), []
    monkeypatch.setattr(signals, "PATIENCE_S", 0.2)
    monkeypatch.setattr(signals, "tell", told.append)
    submit = WorkerGenerator.submit

    def stop_the_generator(self, prompts, sampling):
        if (sampling.purpose, sampling.request) == ("train", 2):
            os.kill(self.process.pid, signal.SIGSTOP)
            threading.Timer(0.3, signal_self(signal.SIGUSR1)).start()
            threading.Timer(1.0, os.kill, (self.process.pid, signal.SIGCONT)).start()
        return submit(self, prompts, sampling)

    with (
        monkeypatch.context() as patch,
        pytest.raises(Interrupted, match="by SIGUSR1 after update [23] of 5"),
    ):
        patch.setattr(WorkerGenerator, "submit", stop_the_generator)
        run(cfg, folder)
    assert "SIGUSR1: stopping after the current update" in told[0]
    assert "still waiting for the current operation" in told[1] and len(told) == 2
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*LAG))


@pytest.mark.nightly
def test_resume_after_a_signal_in_each_stage_equals_an_uninterrupted_run(
    tmp_path, monkeypatch, uninterrupted
):
    cfg = compose([*TINY, *RUN, f"cache_dir={tmp_path / 'cache'}"])
    folder, sigterm = RunFolder(tmp_path / "run"), signal_self(signal.SIGTERM)

    def stage(what):
        (found,) = (RunFolder(path) for path in (tmp_path / "cache").glob(f"{what}-*") if path.is_dir())
        return found

    def interrupted(match, kind, name, due):
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match=match):
            at(patch, kind, name, due, sigterm)
            run(cfg, folder)

    interrupted(r"after update 1 of 2 \(sft of .*/checkpoint-1; the same", Recorder, "flush", after_update(1))
    assert stage("sft").last_checkpoint().name == "checkpoint-1"
    interrupted("outside of training", HFGenerator, "submit", lambda _, how: how.purpose == "pairs")
    assert stage("sft").finished() and not list((tmp_path / "cache").glob("pairs-*/*"))
    interrupted(r"after update 1 of \d+ \(reward of", Recorder, "flush", after_update(1))
    interrupted(  # while the reward model is written: the run itself must not start
        "outside of training", TorchEngine, "save_model", lambda path: "reward" in str(path)
    )
    assert stage("reward").finished() and folder.last_checkpoint() is None
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*RUN))


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def crashed(tiny, tmp_path, made_once):
    """Return the config and folder of a run that crashed in update 4 and has checkpoints 2 and 3."""
    cfg, folder = tiny(*RUN), RunFolder(tmp_path / "run")

    def crash(path):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            at(patch, Recorder, "evaluation", after_update(4), raising(KeyboardInterrupt()))
            run(cfg, RunFolder(path))

    shutil.copytree(made_once("crashed", crash), folder.path)
    assert [path.name for path in complete_checkpoints(folder.path)] == ["checkpoint-2", "checkpoint-3"]
    return cfg, folder


def truncate(file):
    os.truncate(file, 100)


def alter(file):
    with file.open("r+b") as bytes_of:
        bytes_of.seek(-20, os.SEEK_END)
        bytes_of.write(b"?")


@pytest.mark.parametrize(
    ("damage", "name", "why"),
    [
        (truncate, "optimizer.pt", "has 100 bytes"),
        nightly(alter, "model/model.safetensors", "has the checksum"),
        (alter, "counters.json", "has the checksum"),
        (Path.unlink, "in_flight.pt", "cannot be read"),
    ],
)
def test_damaged_checkpoint_is_skipped(crashed, uninterrupted, capsys, damage, name, why):
    cfg, folder = crashed
    damage(folder.path / "checkpoint-3" / name)
    run(cfg, folder)
    told = capsys.readouterr().out
    assert f"checkpoint-3 is damaged and is not used: {name} {why}" in told
    assert "resumed from update 2 of 5" in told
    assert_same_end(folder, uninterrupted(*RUN))


def test_run_restarts_if_all_checkpoints_are_damaged_unless_resume_is_must(
    crashed, tiny, uninterrupted, capsys
):
    cfg, folder = crashed
    for path in complete_checkpoints(folder.path):
        truncate(path / "random.pt")
    with pytest.raises(UserError, match=r"resume=must needs a valid checkpoint"):
        run(tiny(*RUN, "resume=must"), folder)
    assert capsys.readouterr().out.count("is damaged and is not used: random.pt") == 2
    run(cfg, folder)
    assert "resumed from" not in capsys.readouterr().out
    assert_same_end(folder, uninterrupted(*RUN))


# -- another run -----------------------------------------------------------------------------------


def test_other_settings_are_refused(crashed, tiny):
    _, folder = crashed
    before = folder.config.read_text()
    with pytest.raises(UserError, match=r"must not be the folder of a run with other .* set resume=never"):
        run(tiny(*RUN, "algo.beta=0.3"), folder)
    assert folder.config.read_text() == before


def test_other_data_are_refused_before_a_model_is_loaded(crashed, monkeypatch, uninterrupted):
    cfg, folder = crashed
    prompts = TLDRMiniSource.prompts
    with monkeypatch.context() as patch:
        patch.setattr(
            TLDRMiniSource, "prompts", lambda self, split: prompts(self, split).select(range(1, 120))
        )
        patch.setattr("rlhf.assembly.training.build_engine", raising(AssertionError("too late")))
        with pytest.raises(UserError, match=r"task must give the same training examples as .* resume=never"):
            run(cfg, folder)
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*RUN))


def test_other_library_versions_give_a_warning(crashed, monkeypatch, uninterrupted, capsys):
    cfg, folder = crashed
    now = {**versions(), "transformers": "9.9"}
    monkeypatch.setattr(checkpoint, "versions", lambda: now)
    run(cfg, folder)
    told = capsys.readouterr().out
    assert "warning: transformers is 9.9, and was " in told and told.count("metrics may differ") == 1
    assert_same_end(folder, uninterrupted(*RUN))


# -- a full disk -----------------------------------------------------------------------------------

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_checkpoint_without_disk_space_is_skipped_with_a_warning(
    tiny, tmp_path, monkeypatch, uninterrupted, capsys
):
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        at(patch, TorchEngine, "save", lambda path: path.name.endswith(("-2", "-3")), raising(FULL))
        run(tiny(*RUN, "progress=plain"), folder)
    told = capsys.readouterr().out
    assert told.count("warning: no space for ") == 2
    assert [path.name for path in complete_checkpoints(folder.path)] == ["checkpoint-1", "checkpoint-4"]
    assert_same_end(folder, uninterrupted(*RUN))


@pytest.mark.nightly
def test_full_disk_at_the_final_model_is_an_error_that_names_the_last_checkpoint(
    tiny, tmp_path, monkeypatch, uninterrupted
):
    cfg, folder = tiny(*RUN), RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        at(patch, TorchEngine, "save_model", lambda path: path.name == ".tmp-model", raising(FULL))
        with pytest.raises(RunError, match=r"cannot write .*/model: .* last checkpoint: .*/checkpoint-4;"):
            run(cfg, folder)
    assert not folder.finished() and not list(folder.path.glob(".tmp*"))
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*RUN))


@pytest.mark.parametrize("method", [nightly("log"), "evaluation"])
def test_full_disk_at_a_metrics_row_is_an_error_that_names_the_file(
    tiny, tmp_path, monkeypatch, uninterrupted, method
):
    cfg, folder = tiny(*RUN), RunFolder(tmp_path / "run")

    class Full(type(Path())):
        def open(self, *how, **more):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        called = getattr(JsonlLogger, method)

        def without_room(self, row, *rest):
            if row["update"] == 2:
                self.metrics.file = Full(self.metrics.file)
            called(self, row, *rest)

        patch.setattr(JsonlLogger, method, without_room)
        with pytest.raises(
            RunError, match=r"cannot write .*metrics.jsonl: .* last checkpoint: .*/checkpoint-1;"
        ):
            run(cfg, folder)
    run(cfg, folder)
    assert_same_end(folder, uninterrupted(*RUN))


@pytest.fixture
def disk(tmp_path):
    """`disk(mib)` mounts a file system of `mib` MiB and returns its folder."""
    made = tmp_path / "disk"
    made.mkdir()

    def mount(mib):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", made], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(needs.MOUNT)
        return made

    if shutil.which("mount") is None:
        pytest.skip(needs.MOUNT)
    yield mount
    subprocess.run(["umount", "-l", made], capture_output=True)


def test_disk_that_fills_up_skips_checkpoints_and_then_fails_at_the_model(tiny, disk, uninterrupted, capsys):
    # The disk has space for two checkpoints, of 2 and of 6 MiB, and half of a third. torch writes the
    # optimizer and safetensors the final model; their errors on a full disk have different messages.
    place = disk(14)
    cfg, folder = tiny(*RUN, "progress=plain"), RunFolder(place / "run")
    filler = place / "filler"
    filler.write_bytes(bytes(2**20))
    with pytest.raises(RunError, match=r"cannot write .*/model: No space left .*: .*/checkpoint-2;"):
        run(cfg, folder)
    told = capsys.readouterr().out
    assert told.count("(No space left on device): it needs more than the") == 2
    assert not list(folder.path.glob(".tmp*"))
    subprocess.run(["mount", "-o", "remount,size=40m", place], check=True)
    run(cfg, folder)
    assert "resumed from update 2 of 5" in capsys.readouterr().out
    assert_same_end(folder, uninterrupted(*RUN))
