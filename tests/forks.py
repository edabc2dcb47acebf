"""Python processes that start within 0.1 s: a process that has imported the libraries forks them.

The imports of `python -m rlhf.train` take about five seconds of CPU time. Most tests that start processes
test something else. In those tests `subprocess.Popen` and its subclasses fork a program that begins with
`sys.executable -m` or `sys.executable -c` from the server of the calling process.

    process that calls Popen ── socket: arguments, environment, files ──▶ server (imports, no thread)
            └── child: the program ◀──────────── clone(CLONE_PARENT) ────────────┘

The child is a child of the caller, not of the server. The caller can wait for the child and kill it. When the
caller dies, the child is an orphan. A program that may start Python processes gets its own server before it
begins. `/proc/<pid>/cmdline` of a child names the program; `/proc/<pid>/environ` is that of the server.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib.util
import io
import os
import pickle
import platform
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rlhf.core import launched

ROOT = Path(__file__).parents[1]
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # number of the system call clone
CLONE_PARENT = 0x8000
SUPPORTED = sys.platform == "linux" and CLONE is not None
OWN_FILES = 256  # file descriptors from this number on are free in a server
TITLE = 4096  # bytes for the arguments that `ps` and psutil show
ALONE = ("rlhf.processes.worker",)  # modules that start no further Python processes
SAME_USER = (None, None, None, -1)  # the defaults of group, groups, user and umask
READY = "ready"
# A child ignores those of these signals that its parent ignores.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Libraries that start threads when they are imported: OpenBLAS (numpy) and the memory pool of pyarrow.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

PRELOADED = (
    "torch.distributed.run",
    "deepspeed",  # transformers imports this package, and this package MLflow, when a model is saved
    "datasets",
    "peft",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "rlhf.stages.run",
    "rlhf.stages.evaluation",
    "rlhf.assembly.training",
    "rlhf.train",
    "rlhf.evaluate",
    "rlhf.pipeline",
    "rlhf.generators.process",
    "rlhf.generators.hf.generator",
    "rlhf.scorers.scorer",
)


execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Server:
    """The server of this process."""

    socket: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    owner = 0  # pid of the process that the server forks for
    lock = threading.Lock()


class Started(subprocess.Popen):
    """A process that Python starts anew."""

    _execute_child = execute_child


def connected() -> socket.socket:
    """Return the connection to the server of this process; the first call starts the server."""
    with Server.lock:
        if Server.socket is None or Server.owner != os.getpid():
            Server.owner, Server.socket = os.getpid(), None
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), " " * TITLE]
            own = {**os.environ, **NO_THREADS, "PYTHONPATH": str(ROOT)}
            with theirs:
                Server.process = Started(
                    command, env=own, cwd=ROOT, pass_fds=[theirs.fileno()], process_group=0
                )
            assert receive(ours) == (READY, [])
            Server.socket = ours
        return Server.socket


def fork_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
    """Fork a Python program from the server of this process, as a method of `subprocess.Popen`."""
    shell, *ends = rest[2:9]
    *user, start_new_session, process_group = rest[10:]
    special = shell or executable or preexec_fn or not close_fds or tuple(user) != SAME_USER
    listed = not isinstance(args, (str, bytes, os.PathLike))
    if special or not listed or not parsed(args):
        execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        return
    server = connected()
    p2cread, _, _, c2pwrite, _, errwrite = ends
    request = {
        "args": [os.fspath(arg) for arg in args],
        "env": dict(os.environ if env is None else env),
        "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
        "files": [0, 1, 2, *pass_fds],
        "ignored": [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
        "session": start_new_session,
        "group": process_group,
    }
    files = [end if end != -1 else number for number, end in enumerate((p2cread, c2pwrite, errwrite))]
    try:
        with Server.lock:
            send(server, request, [*files, *pass_fds])
            self.pid, _ = receive(server)
    finally:
        self._close_pipe_fds(*ends)
    self._child_created = True


class Popen(subprocess.Popen):
    """`subprocess.Popen` that forks Python programs."""

    _execute_child = fork_child


def install(forks: bool = True) -> None:
    """Let `subprocess.Popen` and its subclasses fork Python programs, or start them anew."""
    subprocess.Popen._execute_child = fork_child if forks else execute_child  # type: ignore[attr-defined]


def parsed(args: Any) -> tuple[set[str], str, str, list[str]] | None:
    """Return the flags, `-m` or `-c`, module or code, and arguments of a Python program, else None."""
    args = [os.fspath(arg) for arg in args]
    if args[0] != sys.executable:
        return None
    for place, word in enumerate(args[1:], 1):
        if word in ("-m", "-c"):
            return set(args[1:place]), word, args[place + 1], args[place + 2 :]
        if word not in ("-u", "-P"):
            return None
    return None


# -- messages --------------------------------------------------------------------------------------

LENGTH = struct.Struct("<Q")


def send(sock: socket.socket, message: Any, files: list[int] | None = None) -> None:
    """Send a message and open files."""
    data = pickle.dumps(message)
    data = LENGTH.pack(len(data)) + data
    sent = socket.send_fds(sock, [data[:1]], files or [])
    sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message and its open files.

    Raises:
        EOFError: the other side has ended.
    """
    data, files, _, _ = socket.recv_fds(sock, 1, 64)
    while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack(data[: LENGTH.size])[0]:
        if not (more := sock.recv(1 << 16)):
            raise EOFError
        data += more
    return pickle.loads(data[LENGTH.size :]), files


# -- the server ------------------------------------------------------------------------------------


def serve(sock: socket.socket) -> dict[str, Any]:
    """Fork a child for each request; return the request in the child. The server ends with its caller."""
    while True:
        try:
            request, files = receive(sock)
        except (EOFError, OSError):
            os._exit(0)
        if sibling() == 0:
            answer = socket.socket(fileno=fcntl.fcntl(sock.detach(), fcntl.F_DUPFD, OWN_FILES))
            move(files, request["files"])
            if request["session"]:
                os.setsid()
            if request["group"] >= 0:
                os.setpgid(0, request["group"])
            for number in SIGNALS:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
            send(answer, os.getpid())  # from now on the caller may send signals to this process and its group
            answer.close()
            return request
        for file in files:
            os.close(file)


def sibling() -> int:
    """Fork a process whose parent is the parent of this one; return its pid, and 0 in the new process."""
    assert len(os.listdir("/proc/self/task")) == 1, "a server has no threads"
    system, python = ctypes.PyDLL(None), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = system.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def move(files: list[int], numbers: list[int]) -> None:
    """Move open files to the file descriptors `numbers`."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, OWN_FILES + max(numbers)) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(request: dict[str, Any]) -> None:
    """Set environment, folder, arguments, import path and standard streams of this child from the request.

    A `sitecustomize.py` on PYTHONPATH is executed, as Python does at its start.
    """
    flags, how, program, words = parsed(request["args"])  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    sys.argv = ["-c" if how == "-c" else "-m", *words]
    sys.orig_argv = request["args"]
    first = [] if "-P" in flags else ["" if how == "-c" else os.getcwd()]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *added, *BASE_PATH]
    if any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    unbuffered = "-u" in flags or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = output(1, unbuffered, "strict")
    sys.stderr = sys.__stderr__ = output(2, unbuffered, "backslashreplace")
    entitle(request["args"])
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def output(number: int, unbuffered: bool, errors: str) -> io.TextIOWrapper:
    """Return standard output or standard error, buffered as in a process that Python starts."""
    binary = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(binary, errors=errors, line_buffering=lines, write_through=unbuffered)


def entitle(args: list[str]) -> None:
    """Write `args` where `ps` and psutil read the arguments of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    title = b"\0".join(map(os.fsencode, args))[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def own_server() -> None:
    """Fork a server for the processes that this process starts; return in this process only."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        Server.socket, Server.owner = ours, os.getpid()
        return
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    entitle(["server of forks"])
    carry_out(serve(theirs))


def carry_out(request: dict[str, Any]) -> None:
    """Run the program of a request in this process, and end the process."""
    become(request)
    _, how, program, _ = parsed(request["args"])  # type: ignore[misc]
    if how == "-m" and program.startswith("rlhf."):
        launched.handle()  # as the import of rlhf does in a new process
    if program not in ALONE:
        own_server()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    code = 0
    try:
        if how == "-c":
            exec(compile(program, "<string>", "exec"), main.__dict__)
        else:
            sys.modules.pop(program, None)  # the module runs as __main__
            runpy._run_module_as_main(program)  # type: ignore[attr-defined]
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


def end(code: int) -> NoReturn:
    """End this process as the interpreter does, without clearing all modules, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


BASE_PATH: list[str] = []


def share_compositions() -> None:
    """Share compositions with the children (tests/compositions.py), beginning with those of tiny runs."""
    from rlhf.words.compose import compose
    from tests import compositions

    compositions.pytest_configure()
    for algo in ("dpo", "ppo", "rloo", "sft", "reward"):
        compose(["debug=tiny", f"algo={algo}"])


def main() -> None:
    """Import the libraries, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    for path in sys.path[1:]:
        if path != str(ROOT):
            BASE_PATH.append(path)
    install()
    os.fsync = lambda file: None  # as in tests/conftest.py
    for module in PRELOADED:
        if importlib.util.find_spec(module.partition(".")[0]):
            __import__(module)
    share_compositions()
    send(sock, READY)
    carry_out(serve(sock))


if __name__ == "__main__":
    sys.modules["tests.forks"] = sys.modules["__main__"]
    main()
