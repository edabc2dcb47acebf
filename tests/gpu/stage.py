"""Main program of the process of one stage.

python -m tests.gpu.stage <module>:<function> <device> <folder> <folder of materials> <file descriptor>

Messages are lines of JSON that are written to the file descriptor: {"part": name} when a part begins,
{"fact": {...}} for each fact, {"end": true} after the last part.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.report import Report


def main(address: str, device: str, folder: str, materials: str, descriptor: str) -> None:
    """Run the function of a stage."""
    os.set_inheritable(int(descriptor), False)

    def send(message: dict[str, Any]) -> None:
        os.write(int(descriptor), (json.dumps(message) + "\n").encode())

    send({"part": "start of the stage"})
    report = Report(device, Path(folder), Path(materials), send)
    name, _, function = address.partition(":")
    getattr(import_module(name), function)(report)
    send({"end": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
