"""Rows about run folders, and about the commands that read them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.bad_inputs.row import RL, TINY, Row

# A finished run whose only checkpoint is that of update 2 of 4.
FINISHED = f"{RL} schedule.save_every=2".replace("total_episodes=64", "total_episodes=128")
lock = threading.Lock()
made: set[Path] = set()


def finished(folder: Path) -> Path:
    """Copy a finished run into a row's folder, and return the run folder. The first call trains."""
    kept = folder.parents[1] / "finished"
    with lock:
        if kept not in made:
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            for path in folder.iterdir():
                (kept / path.name).symlink_to(path.resolve())
            root = Path(__file__).resolve().parents[2]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
            command = [sys.executable, "-m", "rlhf.train", *shlex.split(FINISHED)]
            subprocess.run(command, cwd=kept, env=environment, check=True, capture_output=True)
            made.add(kept)
    shutil.copytree(kept / "outputs", folder / "outputs")
    return run_folder(folder)


def run_folder(folder: Path) -> Path:
    """Return the only run folder of a row."""
    (found,) = (path.parent for path in (folder / "outputs").glob("*/config.yaml"))
    return found


def after(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that copies a finished run into a row's folder and changes the run folder."""

    def prepare(folder: Path) -> None:
        change(finished(folder))

    return prepare


def unfinished(run: Path) -> None:
    """Make a run look interrupted after its checkpoint."""
    (run / "trainer_state.json").unlink()
    shutil.rmtree(run / "model")


def broken_metrics(run: Path) -> None:
    """Append a line that is no JSON to the metrics of an interrupted run, before its last line."""
    unfinished(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], "garbage", lines[-1], ""]))


def broken_config(run: Path) -> None:
    """Make config.yaml of a finished run invalid."""
    (run / "config.yaml").write_text(": : [")


def broken_config_unfinished(run: Path) -> None:
    """Make config.yaml of an interrupted run invalid."""
    unfinished(run)
    broken_config(run)


def damaged_checkpoint(run: Path) -> None:
    """Change a byte of the checkpoint of an interrupted run."""
    unfinished(run)
    (file,) = list(run.glob("checkpoint-*/*.safetensors"))[:1] or list(run.glob("checkpoint-*/*.pt"))[:1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def broken_state(run: Path) -> None:
    """Make trainer_state.json of a finished run invalid."""
    (run / "trainer_state.json").write_text("{")


def state_list(run: Path) -> None:
    """Replace trainer_state.json of a finished run by a list."""
    (run / "trainer_state.json").write_text("[1, 2]")


def other_run(run: Path) -> None:
    """Rename the folder of a finished run, so that a command can name it by hydra.run.dir."""
    run.rename(run.with_name("other"))


def broken_model(run: Path) -> None:
    """Cut the weights of a finished run in half."""
    file = run / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def two_runs(run: Path) -> None:
    """Add a run folder with an invalid config.yaml beside a finished run."""
    shutil.copytree(run, run.with_name("broken"))
    broken_config(run.with_name("broken"))


def cut_metrics(run: Path) -> None:
    """Cut the last line of the metrics of an interrupted run, as after a full disk."""
    unfinished(run)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-20])


def a_file(folder: Path) -> None:
    """Write a file where the output folder would be."""
    (folder / "o").write_text("x\n")


def again(
    name: str, change: Callable[[Path], object], *says: str, typed: str = "progress=off", **others: object
) -> Row:
    """Return a row that starts the command of a finished run again, after a change of the run folder."""
    shown = others.pop("shown", "") or (change.__doc__ or "").rstrip(".").lower()
    return Row(f"e_{name}", typed, says, base=FINISHED, prepare=after(change), shown=shown, **others)  # type: ignore[arg-type]


def command(name: str, module: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row of another command, with a finished run at hand."""
    others = {"prepare": after(lambda run: None), **others}
    shown = f"`{module} {typed}`"
    return Row(f"e_{name}", typed, says, module=module, shown=str(others.pop("shown", shown)), **others)  # type: ignore[arg-type]


def shell(name: str, shown: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row that is a command line of bash."""
    return Row(f"e_{name}", typed, says, shown=shown, shell=True, **others)  # type: ignore[arg-type]


def on_a_disk(size: str, typed: str, then: str = "true") -> str:
    """Return a command line that trains with a small file system at the folder `d`.

    Args:
        size: the size of the file system.
        typed: arguments of the run.
        then: a command after the file system is mounted.
    """
    script = f"mount -t tmpfs -o size={size} none d && {then} && {TRAIN} {typed}"
    return f"mkdir d && unshare -m bash -c {shlex.quote(script)}"


TRAIN = f"$PYTHON -m rlhf.train {RL}"
STARTED = "until ls outputs/*/metrics.jsonl 2>/dev/null; do sleep 0.1; done"

ROWS = (
    # the rows of the first table
    again(
        "config_broken",
        broken_config_unfinished,
        "config.yaml",
        "resumed from update 2",
        code=0,
        keeps=True,
        shown="config.yaml of an interrupted run broken",
    ),
    again(
        "config_broken_finished",
        broken_config,
        code=None,
        keeps=True,
        shown="config.yaml of a finished run broken",
    ),
    shell(
        "deleted",
        "run folder deleted during the run",
        f"{TRAIN} schedule.total_episodes=1600 & pid=$!; {STARTED}; rm -r outputs; wait $pid",
        "outputs",
        code=None,  # 0 if the run writes a file while rm empties the folder, so that rm fails
        keeps=True,
    ),
    command(
        "model_config_missing",
        "rlhf.evaluate",
        "run=RUN only=model",
        "config.json",
        prepare=after(lambda run: (run / "model" / "config.json").unlink()),
    ),
    command("split", "rlhf.evaluate", "run=RUN split=tset", "split"),
    Row(
        "e_output_file",
        "output_dir=o",
        ("output_dir",),
        base=RL,
        prepare=a_file,
        shown="output_dir is a file",
    ),
    shell("disk_64k", "full disk (64 KiB)", on_a_disk("64k", "output_dir=d"), "disk", code=None, keeps=True),
    shell(
        "disk_700k",
        "room for the model, not for a checkpoint (700 KiB)",
        on_a_disk("700k", "output_dir=d schedule.save_every=2"),
        code=None,
        keeps=True,
    ),
    again("metrics_broken", broken_metrics, "metrics.jsonl", code=None, keeps=True),
    again("metrics_cut", cut_metrics, code=0, keeps=True),
    again(
        "model_deleted",
        lambda run: shutil.rmtree(run / "model"),
        "model",
        code=None,
        keeps=True,
        shown="model/ deleted from a finished run",
    ),
    again(
        "more_episodes",
        other_run,
        "extend",
        typed="hydra.run.dir=outputs/other schedule.total_episodes=256",
        shown="hydra.run.dir of the finished run, more episodes",
    ),
    again(
        "other_lr",
        other_run,
        "optim.lr",
        typed="hydra.run.dir=outputs/other optim.lr=1e-5",
        shown="hydra.run.dir of another run, other lr",
    ),
    command("pipeline_typo", "rlhf.pipeline", "taks=tldr_mini", "did you mean task", prepare=None),
    command(
        "report_empty", "rlhf.report", "empty", "empty", prepare=lambda folder: (folder / "empty").mkdir()
    ),
    command("report_missing", "rlhf.report", "nowhere", "nowhere", prepare=None),
    shell(
        "read_only",
        "read-only file system",
        on_a_disk("4m", "output_dir=d/x", "mount -o remount,ro d"),
        "read-only",
        code=2,
    ),
    again("state_broken", broken_state, "trainer_state.json"),
    shell(
        "two",
        "the same command twice at once",
        f"{TRAIN} schedule.total_episodes=9600 > first.log 2>&1 & pid=$!; {STARTED}; "
        f"{TRAIN} schedule.total_episodes=9600; code=$?; wait $pid; echo first: $?; exit $code",
        "another process",
        "first: 0",
        code=2,
        keeps=True,
    ),
    # further rows
    again("finished", lambda run: None, "finished already", code=0, shown="the same command again"),
    again("resumed", unfinished, "resumed from update 2", code=0, keeps=True, shown="an interrupted run"),
    again("checkpoint_damaged", damaged_checkpoint, "checkpoint-2", code=0, keeps=True),
    again("state_list", state_list, "trainer_state.json"),
    again(
        "never",
        lambda run: None,
        "moved the existing run",
        typed="resume=never",
        code=0,
        keeps=True,
        shown="resume=never",
    ),
    Row(
        "e_run_dir_file", "hydra.run.dir=o", ("o",), base=RL, prepare=a_file, shown="hydra.run.dir is a file"
    ),
    command("evaluate_missing", "rlhf.evaluate", "run=outputs/nowhere", "nowhere"),
    command("evaluate_no_run", "rlhf.evaluate", "runs=RUN", "did you mean run="),
    command("evaluate_model_folder", "rlhf.evaluate", "run=models/smol", "models/smol", prepare=None),
    command("evaluate_only", "rlhf.evaluate", "run=RUN only=checkpoint-9", "checkpoint-9"),
    command("evaluate_flag", "rlhf.evaluate", "--run RUN", "run="),
    command("evaluate_key", "rlhf.evaluate", "run=RUN eval.promts=16", "did you mean eval.prompts?"),
    command(
        "evaluate_config_broken", "rlhf.evaluate", "run=RUN", "config.yaml", prepare=after(broken_config)
    ),
    command(
        "evaluate_weights_broken",
        "rlhf.evaluate",
        "run=RUN only=model",
        "model.safetensors",
        prepare=after(broken_model),
    ),
    command("report_file", "rlhf.report", "my_rewards.py", "my_rewards.py", prepare=None),
    command(
        "report_broken_run", "rlhf.report", "outputs", "broken", code=0, keeps=True, prepare=after(two_runs)
    ),
    command("report_flag", "rlhf.report", "outputs --colour", "--colour"),
    command(
        "plan_typo", "rlhf.plan", "algo=dpo model=pythia_410", "did you mean model=pythia_410m?", prepare=None
    ),
    command("plan_flag", "rlhf.plan", "--model=pythia_410m", "write model=pythia_410m", prepare=None),
    command("relabel_no_output", "rlhf.relabel", "task=tldr_mini", "output=", prepare=None),
    command("pipeline_split", "rlhf.pipeline", "split=tset", "split", prepare=None),
    command("extend_fewer", "rlhf.extend", "run=RUN schedule.total_episodes=16", "schedule.total_episodes"),
    command("extend_other", "rlhf.extend", "run=RUN schedule.total_episodes=256 optim.lr=1", "optim.lr"),
    command("extend_missing", "rlhf.extend", "run=outputs/nowhere schedule.total_episodes=256", "nowhere"),
    command("extend", "rlhf.extend", "run=RUN schedule.total_episodes=256", code=0, keeps=True),
    command(
        "no_module",
        "rlhf.trian",
        "seed=1",
        "rlhf.trian",
        prepare=None,
        code=1,
        keeps=False,
        alone=True,
        remark="Python's own message",
    ),
    Row("e_cfg", f"{TINY} --cfg job", code=0, shown="`--cfg job`"),
    Row("e_help", "--help", ("algo",), code=0, shown="`--help`"),
)
