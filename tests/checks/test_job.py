"""Checks in the process of a job: reward functions, services, hooks, the tracking server."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rlhf.checks.check import check_job, hooks_exist
from rlhf.core import machine
from rlhf.core.errors import UserError
from rlhf.loggers.logger import Hook, load_hooks
from rlhf.words.compose import compose


@pytest.fixture
def listening():
    """Return the address of a port on this machine that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/score"


@pytest.fixture
def guarded():
    """Yield the address of a service that answers with `status` unless the key is KEY, and its requests."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            server.asked.append((self.command, self.path))
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            right = self.headers["Authorization"] == "Bearer KEY"
            self.send_response(server.otherwise if right else server.status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST = answer

        def log_message(self, *words): ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.status, server.otherwise = [], 401, 200
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


SERVICES = {
    "scorer=http scorer.url={url}": "scorer.token_variable",
    "scorer@gold=http gold.url={url}/score": "gold.token_variable",
    "generator=vllm_server generator.urls=[{url}]": "generator.key_variable",
}


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("given", [None, "wrong-key", "KEY"])
@pytest.mark.parametrize("words", SERVICES)
def test_a_service_that_refuses_the_key_is_a_user_error(guarded, monkeypatch, tmp_path, words, given, status):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    guarded.status, variable = status, SERVICES[words]
    arguments = words.format(url=guarded.url).split()
    if given is not None:
        monkeypatch.setenv("OWN_KEY", given)
        arguments.append(f"{variable}=OWN_KEY")
    cfg = compose(arguments)
    if given == "KEY":
        check_job(cfg)
        return
    with pytest.raises(UserError) as refused:
        check_job(cfg)
    (text,) = refused.value.problems
    assert text.startswith(f"{variable} must ") and text.count(guarded.url) == 1 and str(status) in text
    assert f"set {variable}={'OWN_KEY' if given else 'SERVICE_KEY'}" in text and "wrong-key" not in text


@pytest.mark.parametrize("otherwise", [200, 302, 404, 500])
@pytest.mark.parametrize("words", SERVICES)
def test_another_answer_to_the_question_for_the_key_is_no_error(guarded, words, otherwise):
    guarded.status = otherwise
    check_job(compose(words.format(url=guarded.url).split()))
    assert len(guarded.asked) == 1  # no redirect is followed


def test_a_reward_function_is_imported_in_the_process_of_the_job(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(p, r, a): return 0.0\nraise ValueError('no licence')\n")
    cfg = compose(["scorer=function", f"scorer.path={file}:score"])
    with pytest.raises(UserError, match=f"raised ValueError: no licence, in {file}, line 2"):
        check_job(cfg)


def test_a_service_that_refuses_connections_is_a_user_error(listening, monkeypatch):
    monkeypatch.setattr(machine, "_CONNECT_S", 0.2)
    check_job(compose(["scorer=http", f"scorer.url={listening}"]))
    cfg = compose(["scorer@gold=http", "gold.url=http://127.0.0.1:9/score"])
    with pytest.raises(UserError) as refused:
        check_job(cfg)
    text = str(refused.value)
    assert "gold.url must be the address of a service that accepts connections (Connection refused)" in text
    assert ", got http://127.0.0.1:9/score; start the service" in text


def test_a_service_behind_a_proxy_is_not_tried(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert machine.refusal("http://no-such-host.invalid/score") is None
    assert machine.refusal("http://127.0.0.1:9/score") == "Connection refused"


def test_a_slow_connection_is_not_refused(monkeypatch):
    def late(*_):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", late)
    assert machine.refusal("http://127.0.0.1:9/score") is None


def test_a_refused_run_leaves_no_folder(command, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(p, r, a): return 0.0\nraise ValueError('no licence')\n")
    answer = command("scorer=function", "scorer.path=own.py:score")
    assert answer.code == 2 and "no licence" in answer.err and not answer.runs
    assert not list(tmp_path.glob("outputs/*"))


FILE = """
import rlhf

class Good(rlhf.Hook):
    def after_update(self, state, metrics): ...

class Misspelled(rlhf.Hook):
    def after_updates(self, state, metrics): ...

class NoHook: ...

class Takes(rlhf.Hook):
    def __init__(self, value): ...
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_hooks.py").write_text(FILE)
    (tmp_path / "broken_hooks.py").write_text("class Half(:")
    (tmp_path / "raising_hooks.py").write_text(
        "import rlhf\nclass Any(rlhf.Hook): ...\nraise ValueError('no')"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_hooks", "must be <module>:<Class>"),
        ("nowhere:Good", "no module 'nowhere'"),
        ("nowhere.py:Good", "no file 'nowhere.py' here"),
        ("own_hooks.py:Goood", "hooks=[own_hooks.py:Good]"),
        ("broken_hooks.py:Half", "SyntaxError"),
        ("raising_hooks.py:Any", "ValueError: no"),
        ("own_hooks.py:Misspelled", "rename it after_update"),
        ("own_hooks.py:NoHook", "class NoHook(rlhf.Hook)"),
        ("own_hooks.py:Takes", "can be built without arguments"),
    ],
)
def test_a_class_that_cannot_be_imported_or_is_no_hook_is_refused(here, path, said):
    cfg = compose([f"hooks=['{path}']"])
    found = list(hooks_exist(cfg))
    if not found:  # an import does not show it
        with pytest.raises(UserError) as error:
            load_hooks(cfg.hooks)
        found = list(error.value.problems)
    assert len(found) == 1 and said in found[0]


def test_hooks_are_built_in_their_order(here):
    first, second = load_hooks(["own_hooks.py:Good", "own_hooks:Good"])
    assert isinstance(first, Hook) and isinstance(second, Hook)


@pytest.fixture
def closed() -> str:
    """Return host and port that refuse connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_tracking_server_that_refuses_connections_is_an_error(closed):
    with pytest.raises(UserError, match=f"logger.mlflow.uri must .*got http://{closed}; start the server"):
        check_job(compose(["logger=mlflow", f"logger.mlflow.uri='http://{closed}'"]))


def test_the_password_in_the_variable_of_the_server_is_not_shown(closed, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@{closed}")
    check_job(compose([]))
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI must") as refused:
        check_job(compose(["logger=mlflow"]))
    assert "hunter2" not in str(refused.value)


def test_a_local_store_needs_no_server():
    check_job(compose(["logger=[mlflow,trackio]"]))
