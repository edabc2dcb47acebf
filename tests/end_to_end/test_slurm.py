"""Tests of jobs on a real SLURM with two nodes, as in docs/hardware.md.

The tests start SLURM on this machine and stop it at the end. The job with a time limit of one minute runs in
the background while other tests run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.prerequisites import complete
from rlhf.stages.run import run
from rlhf.study.file import read_spec
from rlhf.study.rows import read_rows
from rlhf.study.spec import Spec
from rlhf.words.compose import compose, run_name
from tests import needs
from tests.end_to_end.conftest import TINY, assert_same_end, rows, wait_for
from tests.study.test_kills import TIMES

pytestmark = pytest.mark.forks(False)

ROOT = Path(__file__).parents[2]
LOCAL_SLURM = ROOT / "launchers" / "local_slurm.sh"
SCORERS = "tests.end_to_end.sweep_scorers"
SLURM = ["hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1"]
PATIENT = [
    "algo=rloo",
    "backend.threads=1",  # another number of threads rounds differently
    "scorer=function",
    "scorer.batched=true",
    f"scorer.path={SCORERS}:patient",
    "schedule.total_episodes=160",  # five updates
    "schedule.save_every=0",  # a checkpoint only when the run is stopped
]


@pytest.fixture(scope="module")
def slurm():
    """Yield the environment in which commands use the SLURM of these tests."""
    if not shutil.which("slurmctld"):
        pytest.skip(needs.SLURM)
    if os.getuid() != 0:
        pytest.skip(needs.ROOT)
    # SLURM stops when this command ends, and the command ends when its stdin closes. So SLURM stops even if
    # the tests are killed.
    ask = 'echo "$SLURM_CONF"; cat >/dev/null'
    with subprocess.Popen(
        [LOCAL_SLURM, "run", "bash", "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        conf = process.stdout.readline().strip()
        assert conf, "SLURM did not start; its output is above"
        yield {
            **os.environ,
            "SLURM_CONF": conf,
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "PATIENT": "1",
        }
        process.stdin.close()
    assert not Path(conf).exists()


@pytest.fixture(scope="module")
def words(cache_dir):
    return [*TINY, f"cache_dir={cache_dir}"]


def train(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the training command, with stdout and stderr in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf.train", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a command, check that its exit code is `code`, and return its output."""
    out, _ = process.communicate(timeout=500)
    assert process.returncode == code, out
    return out


def folder_of(words: list[str], output_dir: Path) -> RunFolder:
    return RunFolder(output_dir / run_name(compose(words)))


def ask(slurm: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=slurm, capture_output=True, text=True, check=True).stdout.strip()


def job_of(output_dir: Path) -> str:
    """Return the id of the only job of a sweep."""
    (record,) = (output_dir / ".submitit").glob("*.job")
    return record.read_text().split()[0]


def in_update_2(folder: RunFolder):
    """Return a function that checks whether the run is in update 2, where its scorer waits."""
    return lambda: folder.metrics.exists() and any("lr" in row for row in rows(folder))


@pytest.fixture(scope="module")
def uninterrupted(slurm, words, tmp_path_factory):
    """Return the folder of an uninterrupted run, made by a job with the settings of the other tests.

    PATIENT is not set, so the scorer does not wait.
    """
    output_dir = tmp_path_factory.mktemp("undisturbed")
    calm = {name: value for name, value in slurm.items() if name != "PATIENT"}
    output_of(train(["-m", *words, *PATIENT, f"output_dir={output_dir}", *SLURM], calm))
    return folder_of([*words, *PATIENT], output_dir)


@pytest.fixture(scope="module")
def two_ranks(words, tmp_path_factory):
    """Return the folder of an uninterrupted run on two ranks, started by torchrun.

    One rank rounds differently and may sample other tokens.
    """
    output_dir = tmp_path_factory.mktemp("two_ranks")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rlhf.train"]
    subprocess.run(
        [sys.executable, *torchrun, *words, *PATIENT, f"output_dir={output_dir}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return folder_of([*words, *PATIENT], output_dir)


@pytest.fixture(scope="module")
def limited(slurm, words, tmp_path_factory, uninterrupted):
    """Start a sweep whose only job will reach its time limit; yield the process and the output folder."""
    output_dir = tmp_path_factory.mktemp("limited")
    limit = ["hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=20"]
    sweep = train(["-m", *words, *PATIENT, f"output_dir={output_dir}", *SLURM, *limit], slurm)
    yield sweep, output_dir
    sweep.kill()


def test_each_task_of_a_step_is_a_rank_and_finds_the_others(slurm):
    program = (
        "from rlhf.launch.command_line import name_rank; name_rank()\n"
        "import json, os, torch; from rlhf.processes.ranks import Ranks\n"
        "ranks = Ranks.join(torch.device('cpu'), 60)\n"
        "names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR'\n"
        "total = ranks.sum(torch.tensor(2.0 ** ranks.rank)).item()\n"
        "print(json.dumps([*(os.environ[name] for name in names), total]))\n"
        "torch.distributed.barrier(); torch.distributed.destroy_process_group()"
    )
    srun = ["srun", "--nodes=2", "--ntasks=3", "--distribution=block", sys.executable, "-c", program]
    answers = sorted(json.loads(line) for line in ask(slurm, *srun).splitlines())
    first = "127.0.0.1"
    assert answers == [
        ["0", "3", "0", "2", first, 7.0],
        ["1", "3", "1", "2", first, 7.0],
        ["2", "3", "0", "1", first, 7.0],
    ]


def test_batch_script_is_not_a_rank_in_a_job_of_two_tasks(slurm, tmp_path):
    program = (
        "import os; from rlhf.launch.command_line import name_rank; name_rank();"
        " print(os.environ.get('RANK', 'alone'))"
    )
    out = tmp_path / "out"
    wrapped = f'--wrap={sys.executable} -c "{program}"'
    ask(slurm, "sbatch", "--wait", "--ntasks=2", f"--output={out}", wrapped)
    assert out.read_text() == "alone\n"


@pytest.mark.nightly
def test_sweep_submits_one_job_per_run_and_when_repeated_only_missing_runs(slurm, limited, words, tmp_path):
    sweep = ["-m", "algo=dpo,rloo", "seed=1,2", *SLURM, *words, f"output_dir={tmp_path}"]
    text = output_of(train(sweep, slurm))
    folders = [
        folder_of([*words, f"algo={algo}", f"seed={seed}"], tmp_path)
        for algo in ("dpo", "rloo")
        for seed in (1, 2)
    ]
    assert all(folder.finished() for folder in folders)
    assert text.count("submitted as job") == text.count("done, in") == 4

    shutil.rmtree(folders[3].path)
    text = output_of(train(sweep, slurm))
    assert text.count("finished already") == 3 and text.count("submitted as job") == 1
    assert "algo=rloo seed=2: done, in" in text and folders[3].finished()


@pytest.mark.nightly
def test_failed_and_killed_jobs_are_listed_and_other_results_are_kept(slurm, limited, words, tmp_path):
    scorers = ",".join(f"{SCORERS}:{name}" for name in ("fails", "length", "dies")).replace(":", r"\:")
    sweep = ["-m", "algo=rloo", "scorer=function", "scorer.batched=true", f"scorer.path={scorers}"]
    text = output_of(train([*sweep, *SLURM, *words, f"output_dir={tmp_path}"], slurm), code=1)
    assert text.count(": done, in") == 1
    _, _, listed = text.partition("error: 2 of 3 jobs failed; the others are kept")
    assert "no score for these" in listed and "the job ended without a result" in listed
    assert listed.count(f"{tmp_path}/tldr_mini-pythia-rloo") == 2
    assert listed.count("_log.") == 1, "the log of the job that ended without a result must be listed"


@pytest.mark.nightly
def test_two_node_job_is_stopped_requeued_and_ends_like_an_uninterrupted_run(
    slurm, limited, words, tmp_path, two_ranks
):
    script = str(ROOT / "launchers" / "train.sbatch")
    log = tmp_path / "log"
    job = ask(
        slurm,
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=30", f"--output={log}"),
        *(script, *words, *PATIENT, f"output_dir={tmp_path}"),
    )
    folder = folder_of([*words, *PATIENT], tmp_path)
    queued = lambda: job in ask(slurm, "squeue", "--noheader", "--format=%i").split()  # noqa: E731
    wait_for(lambda: in_update_2(folder)() or not queued())
    assert queued(), log.read_text()
    ask(slurm, "scancel", "--signal=USR1", job)
    wait_for(lambda: not queued())
    text = log.read_text()
    assert text.count("interrupted by SIGUSR1 after update 2 of 5") == 1
    assert text.count("resumed from update 2 of 5") == 1
    assert "Restarts=1" in ask(slurm, "scontrol", "show", "job", job)
    assert_same_end(folder, two_ranks)


PRETENDED = r"""#!/bin/bash
# In place of Python: rlhf.serve has its address until it gets SIGINT, rlhf.train prints what it was given
echo "$2 $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME, key $RLHF_KEY: ${*:3}"
if [ "$2" = rlhf.train ]; then sleep "$WAITS"; exit "$CODE"; fi
while [ "$1" != --announce ]; do shift; done
[ "$FAILS" = start ] && exit 1
trap 'echo "server $SLURM_PROCID stops"; exit 0' INT
echo "http://$SLURMD_NODENAME:1$SLURM_LOCALID" >"$2"
[ "$FAILS" = later ] && exit 1
while :; do sleep 0.1; done
"""


@pytest.fixture
def pretend(slurm, tmp_path):
    """`pretend(**variables)` runs a job of two nodes, with pretended trainer and servers.

    Returns the log and the state of the job.
    """
    tool, log = tmp_path / "python", tmp_path / "log"
    tool.write_text(PRETENDED)
    tool.chmod(0o755)

    def call(**given: str) -> tuple[str, str]:
        own = {"PYTHON": str(tool), "SERVE": "model --dtype bfloat16", "CODE": "0", "WAITS": "0", "FAILS": ""}
        script = str(ROOT / "launchers" / "train_with_servers.sbatch")
        log.unlink(missing_ok=True)
        job = subprocess.run(
            ["sbatch", "--parsable", "--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={log}", script]
            + ["algo=dpo", "scorer.path=a b"],
            env={**slurm, **own, **given},
            capture_output=True,
            text=True,
        ).stdout.strip()
        assert not list((ROOT / "outputs" / ".servers").glob(f"{job}.*"))
        return log.read_text(), ask(slurm, "scontrol", "show", "job", job)

    return call


def test_last_nodes_of_a_job_serve_until_the_trainer_ends(pretend):
    text, state = pretend(SERVERS_PER_NODE="2", CODE="3")
    assert "ExitCode=3:0" in state and "Restarts=0" in state
    lines = re.findall(r"^(rlhf\.\w+) (\d) of 2 on (\S+), key (\S+): (.*)$", text, re.M)
    assert len({key for *_, key, _ in lines}) == 1 and len(lines[0][3]) == 44, "all have the same key"
    served = {number: (host, words) for name, number, host, _, words in lines if name == "rlhf.serve"}
    for number in "01":
        host, words = served[number]
        assert host == "127.0.0.2" and words.startswith(f"--host 127.0.0.2 --port 800{number} --announce ")
        assert words.endswith("model --dtype bfloat16") and f"server {number} stops" in text
    trained = {number: (host, words) for name, number, host, _, words in lines if name == "rlhf.train"}
    urls = "generator.urls=[http://127.0.0.2:10,http://127.0.0.2:11]"
    words = f"algo=dpo scorer.path=a b generator=vllm_server generator.key_variable=RLHF_KEY {urls}"
    assert trained == {"0": ("127.0.0.1", words), "1": ("127.0.0.1", words)}


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ({"FAILS": "start"}, 1, "a server did not start; its output is above"),
        ({"FAILS": "later", "WAITS": "60"}, 1, "a server ended for good, so the run ends"),
        ({"SERVE": ""}, 2, "SERVE must be the model and the flags of rlhf.serve"),
        ({"SERVER_NODES": "2"}, 2, "--nodes above SERVER_NODES (2)"),
    ],
)
def test_job_ends_if_its_servers_cannot_serve(pretend, given, code, told):
    text, state = pretend(**given)
    assert told in text
    assert f"ExitCode={code}:0" in state


@pytest.mark.nightly
@pytest.mark.timeout(2400)  # vLLM starts three times
def test_job_with_a_node_that_samples_is_requeued_and_ends_like_an_uninterrupted_run(slurm, words, tmp_path):
    """SIGUSR1, which SLURM sends before a time limit, stops the trainer; the servers sample until its end."""
    pytest.importorskip("vllm", reason=needs.VLLM)
    given = [*words, *PATIENT]
    model = complete(compose(given), run).model.policy
    log, out = tmp_path / "log", [f"output_dir={tmp_path}"]
    job = ask(
        {**slurm, "SERVE": f"{model} --memory 0.01 --max-num-seqs 32 --max-model-len 208 --port 0"},
        *("sbatch", "--parsable", "--ntasks-per-node=1", "--time=60", f"--output={log}"),
        *(str(ROOT / "launchers" / "train_with_servers.sbatch"), *given, *out),
    )
    folder = folder_of([*given, "generator=vllm_server", "generator.key_variable=RLHF_KEY"], tmp_path)
    queued = lambda: job in ask(slurm, "squeue", "--noheader", "--format=%i").split()  # noqa: E731
    wait_for(lambda: in_update_2(folder)() or not queued(), seconds=800)
    assert queued(), log.read_text()
    shared = ROOT / "outputs" / ".servers"
    assert [each.stat().st_mode & 0o777 for each in shared.glob(f"{job}.*/key")] == [0o600]
    ask(slurm, "scancel", "--signal=USR1", job)
    wait_for(lambda: not queued(), seconds=800)
    text = log.read_text()
    assert folder.finished(), text
    assert text.count("interrupted by SIGUSR1 after update 2 of 5") == 1
    assert text.count("resumed from update 2 of 5") == 1
    assert text.count("ready: http://127.0.0.2:") == text.count("SIGINT: stopping the server") == 2
    state = ask(slurm, "scontrol", "show", "job", job)
    assert "Restarts=1" in state and "JobState=COMPLETED" in state
    assert not list(shared.glob(f"{job}.*"))

    calm = {name: value for name, value in slurm.items() if name != "PATIENT"}
    local = [*given, "generator=vllm_server", "generator.memory=0.01", "generator.max_num_seqs=32"]
    output_of(train([*local, f"output_dir={tmp_path}"], calm))
    assert_same_end(folder, folder_of(local, tmp_path))


def test_preempted_job_resumes_and_ends_like_an_uninterrupted_run(slurm, words, tmp_path, uninterrupted):
    sweep = train(["-m", *words, *PATIENT, f"output_dir={tmp_path}", *SLURM], slurm)
    folder = folder_of([*words, *PATIENT], tmp_path)
    wait_for(in_update_2(folder), sweep)
    job = job_of(tmp_path)
    node = ask(slurm, "squeue", "--noheader", f"--jobs={job}", "--format=%N")
    urgent = ("--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null")
    ask(slurm, "sbatch", *urgent, "--wrap=true")
    assert "done, in" in output_of(sweep)
    assert "Restarts=1" in ask(slurm, "scontrol", "show", "job", job)
    assert_same_end(folder, uninterrupted)


@pytest.mark.nightly
def test_restarted_sweep_finds_its_queued_job_and_ctrl_c_cancels_the_job(
    slurm, limited, words, tmp_path, uninterrupted
):
    sweep = ["-m", *words, *PATIENT, f"output_dir={tmp_path}", *SLURM]
    folder = folder_of([*words, *PATIENT], tmp_path)
    lost = train(sweep, slurm)
    wait_for(in_update_2(folder), lost)
    lost.kill()
    lost.wait()
    job = job_of(tmp_path)

    again = train(sweep, slurm)
    assert again.stdout
    assert f"still in the queue as job {job}" in again.stdout.readline()
    again.send_signal(signal.SIGINT)
    text = output_of(again, code=130)
    assert "cancelled 1 jobs" in text and "Traceback" not in text
    wait_for(lambda: job not in ask(slurm, "squeue", "--noheader", "--format=%i").split())
    state = ask(slurm, "scontrol", "show", "job", job)
    assert "JobState=CANCELLED" in state and "Restarts=0" in state, "SLURM must not restart a cancelled job"
    assert folder.last_checkpoint() == folder.path / "checkpoint-2"


@pytest.mark.nightly
def test_job_at_its_time_limit_is_requeued_and_ends_like_an_uninterrupted_run(
    slurm, limited, words, uninterrupted
):
    sweep, output_dir = limited
    assert "done, in" in output_of(sweep)
    job = ask(slurm, "scontrol", "show", "job", job_of(output_dir))
    assert re.search(r"Restarts=[1-9]", job) and "TimeLimit=00:01:00" in job
    assert_same_end(folder_of([*words, *PATIENT], output_dir), uninterrupted)


@pytest.mark.nightly
def test_workers_of_a_study_are_one_array_and_time_limit_and_preemption_change_no_row(slurm, words, tmp_path):
    def study(name: str, environment: dict[str, str], *options: str) -> tuple[Spec, subprocess.Popen[str]]:
        (tmp_path / name).mkdir()
        file = tmp_path / name / "short.yaml"
        settings = json.dumps([*words, *PATIENT[1:]])
        file.write_text(f"study: short\nset: {settings}\nmethods: {{rloo: [algo=rloo]}}\nseeds: 3\n")
        command = [sys.executable, "-m", "rlhf.study", "run", str(file), "--workers", "2", *options]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return read_spec(file), subprocess.Popen(command, env=environment, **pipe)

    spec, running = study("array", slurm, "--slurm", "cpus_per_task=1")
    begun = lambda: [path.parent for path in spec.folder.glob("runs/*/metrics.jsonl")]  # noqa: E731
    wait_for(lambda: sum(in_update_2(RunFolder(folder))() for folder in begun()) == 2, running)
    first, second = (each.read_text().split()[0] for each in sorted(spec.folder.glob("workers/*.job")))
    assert first.endswith("_0") and second == first.replace("_0", "_1") and len(begun()) == 2
    ask(slurm, "scancel", "--signal=USR2", first)  # as SLURM before the time limit
    node = ask(slurm, "squeue", "--noheader", f"--jobs={second}", "--format=%N")
    urgent = ("--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null")
    ask(slurm, "sbatch", *urgent, "--wrap=true")
    assert "[3/3] short rloo seed" in output_of(running)
    for job in (first, second):
        assert re.search("Restarts=[1-9]", ask(slurm, "scontrol", "show", "job", job))

    calm, running = study("calm", {name: value for name, value in slurm.items() if name != "PATIENT"})
    output_of(running)
    rows = [[vars(row) | dict.fromkeys(TIMES) for row in read_rows(each.rows)] for each in (calm, spec)]
    assert rows[0] == rows[1] and len(rows[0]) == 3


def test_setting_that_slurm_rejects_fails_with_exit_code_2(slurm, words, tmp_path):
    wrong = ["hydra.launcher.partition=nope", f"output_dir={tmp_path}"]
    text = output_of(train(["-m", "seed=1,2", *SLURM, *wrong, *words], slurm), code=2)
    assert "error: hydra.launcher must be what SLURM accepts, got:" in text and "Traceback" not in text
    assert "invalid partition specified: nope" in text


@pytest.mark.nightly
def test_sbatch_variables_apply_unless_the_command_line_sets_the_option(slurm, words, tmp_path, limited):
    site = {**slurm, "SBATCH_PARTITION": "nope"}
    sweep = ["-m", *words, "algo=rloo", f"output_dir={tmp_path}", *SLURM]
    assert "invalid partition specified: nope" in output_of(train(sweep, site), code=2)
    assert "done, in" in output_of(train([*sweep, "hydra.launcher.partition=urgent"], site))
