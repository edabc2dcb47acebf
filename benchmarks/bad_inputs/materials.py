"""Data, models and reward functions, valid and broken, for the rows.

`ensure` makes all files once; a change of a module that makes files makes the files again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from benchmarks.bad_inputs.data_files import make_data
from benchmarks.bad_inputs.first_day_files import make_day_models, make_day_rewards, make_first_day
from benchmarks.bad_inputs.model_files import make_models

HERE = Path(__file__).parent
SOURCES = (
    "materials.py",
    "data_files.py",
    "model_files.py",
    "reward_functions.py",
    "first_day_files.py",
    "first_day_functions.py",
)


def ensure(folder: Path) -> Path:
    """Return `folder` with all materials; make the materials if they are missing or out of date."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()
    mark = folder.with_name("materials.digest")
    if not (mark.exists() and mark.read_text() == digest):
        print("making data and models ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make_rewards(folder)
        make_data(folder / "data")
        make_models(folder / "models")
        make_first_day(folder / "day")
        make_day_rewards(folder)
        make_day_models(folder / "models")
        mark.write_text(digest)
    return folder


def make_rewards(folder: Path) -> None:
    """Write my_rewards.py and modules that cannot be imported."""
    shutil.copy(HERE / "reward_functions.py", folder / "my_rewards.py")
    function = "def brief(prompt, response, reference):\n    return len(response) / 100\n"
    modules = {
        "raising": f"raise RuntimeError('no licence found')\n{function}",
        "syntax": "import sys\n\ndef brief(prompt, response, reference)\n    return 0.5\n",
        "indented": function.replace("    return", "return"),
        "missing_import": f"import a_library_that_is_missing\n{function}",
        "missing_name": f"from os import a_name_that_is_missing\n{function}",
        "exiting": f"import sys\nsys.exit(4)\n{function}",
        "empty": "",
        "undefined": "brief = a_function_that_is_missing\n",
    }
    for name, text in modules.items():
        (folder / f"{name}_rewards.py").write_text(text)
    (folder / "latin_rewards.py").write_bytes("# für\n".encode("latin-1") + function.encode())
