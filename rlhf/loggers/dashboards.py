"""What every dashboard gets about a run: its id, which the run folder stores, and its settings."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from rlhf.core.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.runs.folder import RunFolder


def run_id(folder: RunFolder, dashboard: str) -> str:
    """Return the id of the run in a dashboard; the first call creates the id and stores it in the run folder.

    The name of the folder is not a unique id: a run that `resume=never` starts again has the same name, and a
    run in another `output_dir` may have the same name. With equal ids, the rows of such runs would be mixed.

    Args:
        folder: the run folder.
        dashboard: the option of the config group `logger`.
    """
    if (stored := stored_id(folder, dashboard)) is not None:
        return stored
    name = re.sub(r"[/\\#?%:]", "-", folder.path.name)[:100]  # forbidden at W&B; at most 128 characters
    made = f"{name}-{secrets.token_hex(4)}"
    store_id(folder, dashboard, made)
    return made


def stored_id(folder: RunFolder, dashboard: str) -> str | None:
    """Return the stored id of the run in a dashboard; None: there is none yet."""
    file = _id_file(folder, dashboard)
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def store_id(folder: RunFolder, dashboard: str, value: str) -> None:
    """Store the id of the run in a dashboard in the run folder."""
    file = _id_file(folder, dashboard)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{value}\n")


def _id_file(folder: RunFolder, dashboard: str) -> Path:
    """Return the file of an id: `<dashboard>/run_id` in the run folder."""
    return folder.path / dashboard / "run_id"


def described(folder: RunFolder) -> dict[str, Any]:
    """Return config.yaml and environment.json of the run as one dictionary; neither contains secrets."""
    return {
        **folder.read_config(),
        "environment": json.loads(folder.environment.read_text(encoding="utf-8")),
    }
