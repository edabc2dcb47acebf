"""history.jsonl of a study: looks at the claims, claims when the runs started, and other events."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf.core import files
from rlhf.study.spec import Spec

LOOK, CLAIMS = "look", "claims"  # kinds of events


def events(spec: Spec, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind, in the order of time."""
    return [event for event in files.read_lines(_file(spec), ["kind", "time"]) if event["kind"] == kind]


def record(spec: Spec, kind: str, **content: object) -> None:
    """Append an event with its time (UTC)."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    files.append(_file(spec), [{"kind": kind, "time": time, **content}])


def record_claims(spec: Spec) -> None:
    """Record the claims, unless an earlier call has done so; call this when the first table run starts."""
    if not events(spec, CLAIMS):
        record(spec, CLAIMS, claims=dict(spec.claims))


def added_later(spec: Spec) -> set[str]:
    """Return the sentences of claims that were added or changed after the runs started."""
    first = next(iter(events(spec, CLAIMS)), None)
    return (
        set() if first is None else {s for s, text in spec.claims.items() if first["claims"].get(s) != text}
    )


def look(spec: Spec, rows: object) -> int:
    """Record a look at the claims unless nothing changed since the last one; return the number of looks."""
    seen, mark = events(spec, LOOK), files.digest([rows, dict(spec.claims)])
    if seen and seen[-1]["rows"] == mark:
        return len(seen)
    record(spec, LOOK, rows=mark, seeds=len(spec.seeds))
    return len(seen) + 1


def _file(spec: Spec) -> Path:
    return spec.folder / "history.jsonl"
