"""A stand-in for a server of vLLM: it only answers the question for its state, if the key is right.

    python stand_in_server.py <folder> --port <port>

A file `fail` in the folder ends it at its start. Each start adds a line with its process id to `started`.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

FOLDER, PORT = Path(sys.argv[1]), int(sys.argv[3])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        right = self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        body = json.dumps({"start": str(os.getpid()), "max_num_seqs": 1}).encode()
        self.send_response(200 if right else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


if (FOLDER / "fail").exists():
    sys.exit("this server does not start")
with (FOLDER / "started").open("a") as file:
    file.write(f"{os.getpid()}\n")
HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
