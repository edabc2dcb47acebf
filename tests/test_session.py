"""Tests of the test tools: the check for processes in unmarked tests, and forked processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SHOW = (
    "import os, sys\n"
    "print(sys.argv, os.getcwd(), os.environ['WHO'], os.getppid())\n"
    "print('err', file=sys.stderr)"
)
STARTS_A_CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(1000)"
)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_test_without_a_mark_cannot_start_a_python_process():
    with pytest.raises(AssertionError, match="starts a Python process: mark it `process`"):
        subprocess.run([sys.executable, "-c", ""])


@pytest.mark.process
@pytest.mark.parametrize("forked", [pytest.param(True, marks=pytest.mark.forks), False])
class TestProcesses:
    """A forked program behaves like a program in a new Python process."""

    def test_arguments_folder_environment_output_and_parent(self, forked, tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", SHOW, "a", "b"],
            cwd=tmp_path, env={**os.environ, "WHO": "me"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout == f"['-c', 'a', 'b'] {tmp_path} me {os.getpid()}\n"
        assert (done.stderr, done.returncode) == ("err\n", 0)

    @pytest.mark.parametrize(
        ("program", "code"),
        [
            ("raise SystemExit(5)", 5),
            ("raise SystemExit('why')", 1),
            ("1 / 0", 1),
            ("raise KeyboardInterrupt", -signal.SIGINT),
            ("import os; os.abort()", -signal.SIGABRT),
        ],
    )
    def test_exit_codes(self, forked, program, code):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == code
        assert ("Traceback" in done.stderr) == (program in ("1 / 0", "raise KeyboardInterrupt"))

    def test_input_inherited_files_and_threads_that_end_late(self, forked):
        read, write = os.pipe()
        program = (
            "import os, sys, threading\n"
            "def late(): os.write(int(sys.argv[1]), sys.stdin.readline().encode())\n"
            "threading.Thread(target=late).start()"
        )
        subprocess.run(
            [sys.executable, "-c", program, str(write)], input="line\n", text=True, pass_fds=[write]
        )
        os.close(write)
        with os.fdopen(read) as file:
            assert file.read() == "line\n"

    def test_process_group_ctrl_c_and_orphaned_child(self, forked):
        words = [sys.executable, "-c", STARTS_A_CHILD]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, process_group=0)
        child = psutil.Process(int(process.stdout.readline()))
        try:
            assert os.getpgid(child.pid) == os.getpgid(process.pid) == process.pid == child.ppid()
            wait_for(lambda: "import time; time.sleep(1000)" in child.cmdline())
            process.kill()
            assert process.wait() == -signal.SIGKILL
            wait_for(lambda: child.ppid() != process.pid)
            child.send_signal(signal.SIGINT)
            assert psutil.wait_procs([child], timeout=60)[1] == []
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


class Special(subprocess.Popen):
    """A process with more methods, as `rlhf.processes.worker.Spawned`."""


@pytest.mark.process
@pytest.mark.forks
def test_a_process_of_a_subclass_of_popen_is_forked_too():
    code = "import sys; print('torch' in sys.modules)"
    with Special([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == "True\n"
