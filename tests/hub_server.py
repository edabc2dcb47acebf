"""A server that speaks the part of the hub's API that uploads of model folders need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants, metadata_load
from huggingface_hub.utils import HFValidationError, validate_repo_id

TOKEN = "hf_of_the_test"


class Hub:
    """The state of the server.

    Attributes:
        created: the bodies of the requests that create repositories.
        files: the files of each repository: name -> path -> content.
        commits: the number of commits.
        refused: the next commit is refused.
        checked: the model cards that were checked.
    """

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.commits = 0
        self.refused = False
        self.checked: list[str] = []
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of a request."""
        if method == "PUT":
            self.large[path.rpartition("/")[2]] = body
            return 200, {}
        if path == "/api/validate-yaml":
            return self.validated(json.loads(body)["content"])
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.created.append(asked)
            known = name in self.files
            self.files.setdefault(name, {})
            return (409 if known else 200), {"url": f"{self.url}/{name}"}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self.target(each) for each in objects]}
        name, _, call = path.removeprefix("/api/models/").partition("/")
        owner, (repository, _, call) = name, call.partition("/")
        files = self.files[f"{owner}/{repository}"]
        if call.startswith("preupload/"):
            rows = json.loads(body)["files"]
            return 200, {"files": [self.mode(row["path"], files) for row in rows]}
        if call.startswith("commit/"):
            if self.refused:
                return 403, {"error": "no right to write"}
            self.commits += 1
            for row in map(json.loads, body.splitlines()):
                value = row["value"]
                if row["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif row["key"] == "lfsFile":
                    files[value["path"]] = self.large[value["oid"]]
            address = f"{self.url}/{owner}/{repository}/commit/{self.commits}"
            return 200, {"commitUrl": address, "commitOid": str(self.commits)}
        return 200, {"id": f"{owner}/{repository}", "sha": str(self.commits)}

    def target(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return where a large file is uploaded."""
        return asked | {"actions": {"upload": {"href": f"{self.url}/large/{asked['oid']}"}}}

    def mode(self, path: str, files: dict[str, bytes]) -> dict[str, Any]:
        """Return how a file is uploaded, and the id of the content that the repository has."""
        large = path.endswith(".safetensors")
        content = files.get(path)
        oid = None
        if content is not None:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
            oid = (hashlib.sha256(content) if large else blob).hexdigest()
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def validated(self, card: str) -> tuple[int, Any]:
        """Return an error for a card without a license, or with the name of something outside the hub."""
        self.checked.append(card)
        data = loaded(card)
        names = [*data.get("datasets", []), *([data["base_model"]] if "base_model" in data else [])]
        errors = [] if data.get("license") else ["license is missing"]
        for name in names:
            try:
                validate_repo_id(name)
            except HFValidationError as error:
                errors.append(str(error))
        return (400 if errors else 200), {"errors": [{"message": text} for text in errors], "warnings": []}


def loaded(card: str) -> dict[str, Any]:
    """Return the metadata of a card."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".md") as file:
        file.write(card)
        file.flush()
        return metadata_load(file.name) or {}


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self.chunks())
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            public = self.command == "PUT" or path == "/api/validate-yaml"
            authorized = public or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, found = (
                hub.answer(self.command, path, body) if authorized else (401, {"error": "no token"})
            )
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        do_GET = do_POST = do_PUT = respond  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def in_place_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a server that the real client of the hub uses, logged in, in place of the hub."""
    hub = Hub()
    with serving(hub):
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has no storage of this kind
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
