"""A training loop of one's own (`loop=`): same bits as the built-in loop, kills, identity, mistakes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf.train
from rlhf import Experiment, UserError
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import assert_same_end, rows

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
RUN = ("algo=grpo", "schedule.minibatches=2", "schedule.epochs=2")
RUN += ("schedule.total_episodes=64", "schedule.prompts_per_update=4")
RUN += ("scorer.missing_eos_score=null",)  # so that scores do not tie
LAG = (*RUN, "schedule.max_lag=1", "schedule.save_every=1", "schedule.eval_every=2")


@pytest.fixture
def documented(tmp_path, monkeypatch) -> None:
    """Make a folder with the files of docs/python.md the working directory."""
    for name in ("my_loop", "my_loss"):
        (code,) = re.findall(rf"```python\n# {name}.py\n(.*?)```", PAGE, re.S)
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_loop", "my_loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("words", [RUN, LAG], ids=["synchronous", "asynchronous"])
def test_the_documented_loop_gives_the_metrics_and_weights_of_the_built_in_loop(
    words, command, finished, documented
):
    own = Experiment(*command, *words, "loop=my_loop.py:loop")
    own.run()
    assert_same_end(own.files, finished(*words))
    assert own.folder.name != Experiment(*command, *words).folder.name


def test_the_documented_loss_gives_the_weights_of_dapo(command, finished, documented):
    words = ("algo.kl_coef=0", "algo.clip_high=0.28", *RUN[1:])
    own = Experiment(*command, "algo=grpo", *words, "loop=my_loss.py:loop")
    own.run()
    built_in = finished("algo=dapo", *RUN[1:])
    both = [(folder.model / "model.safetensors").read_bytes() for folder in (own.files, built_in)]
    assert both[0] == both[1]
    norms = [[row["policy/grad_norm"] for row in rows(each) if "lr" in row] for each in (own.files, built_in)]
    assert norms[0] == norms[1] and len(norms[0]) == 4 and min(norms[0]) > 0


KILLED = """
import os, signal
from pathlib import Path

def loop(session):
    for rollouts in session.sample():
        batch = session.annotate(session.score(rollouts))
        for minibatch in session.minibatches(session.credit(batch)):
            session.forward_backward(minibatch)
            if session.state.update == 2 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            session.step()
        session.sync(batch)
"""


def test_a_loop_that_is_killed_resumes_with_equal_results_and_another_loop_is_another_run(
    tiny, command, finished, documented, tmp_path
):
    (tmp_path / "fragile.py").write_text(KILLED)
    words = [*command, *LAG, "loop=fragile.py:loop", f"hydra.run.dir={tmp_path / 'run'}"]
    path = os.pathsep.join([str(Path(rlhf.train.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    start = [sys.executable, "-m", "rlhf.train", *words]
    killed = subprocess.run(start, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = RunFolder(tmp_path / "run")
    assert folder.last_checkpoint() == folder.path / "checkpoint-2"
    with pytest.raises(UserError, match=r"folder of a run with other settings.*loop=fragile.py:loop"):
        run(tiny(*LAG, "loop=my_loop.py:loop"), folder)
    run(tiny(*LAG, "loop=fragile.py:loop"), folder)
    assert_same_end(folder, finished(*LAG))


def test_a_loop_as_an_object_is_one_of_this_process(command, documented):
    from my_loop import loop  # of a module, so that the command line can resume it

    named = Experiment(*command, *RUN, loop=loop)
    assert named.overrides[-1] == "loop=my_loop:loop" and not named.warnings()
    seen = []

    def watched(session):
        seen.append(session.state.num_updates)
        loop(session)

    words = [word for word in (*command, *RUN) if not word.startswith("scorer")]
    own = Experiment(*words, loop=watched, reward=lambda response: float(len(response)))
    assert not own.problems() and own.folder != named.folder
    assert sum("exists only in this process" in warning for warning in own.warnings()) == 2
    own.run()
    assert seen == [4] and own.status == "finished"
    (problem,) = Experiment(*command, *RUN, loop=5).problems()
    assert problem.startswith("loop must name a function")
    with pytest.raises(UserError, match="loop must not be given together with loop=a.py:b"):
        Experiment(*command, *RUN, "loop=a.py:b", loop=watched)


@pytest.mark.parametrize(
    ("code", "address", "says"),
    [
        ("def loop(session): pass", "mine.py:lop", r"did you mean loop=mine\.py:loop"),
        ("def loop(): pass", "mine.py:loop", r"write def loop\(session\)"),
        ("def loop(session, more): pass", "mine.py:loop", r"write def loop\(session\)"),
        ("class Loop: pass", "mine.py:Loop", "is a class"),
        ("raise OSError", "mine.py:loop", r"OSError, in .*mine\.py, line 1"),
        (None, "mine.py:loop", r"no file 'mine\.py'"),
    ],
)
def test_a_function_that_is_no_loop_is_an_error_before_anything_is_loaded(
    code, address, says, command, tmp_path, monkeypatch
):
    if code is not None:
        (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(*command, *RUN, f"loop={address}")
    (problem,) = experiment.problems()
    assert problem.startswith("loop must name a ") and re.search(says, problem)
