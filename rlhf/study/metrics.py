"""Metrics that tables, figures and claims may name: those of docs/reference/metrics.md that rows keep."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.config.metric_names import KNOWN as KNOWN
from rlhf.study.formula import read_formula
from rlhf.study.spec import Spec


def named(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the metrics that a study names: key of the study file, name."""
    formulas = {f"claims.{said}": read_formula(text) for said, text in spec.claims.items()}
    found = [(f"tasks.{name}.metric", task.metric) for name, task in spec.tasks.items()]
    found += [(f"tables.{place}", each.quantity) for place, each in enumerate(spec.tables)]
    found += [(f"figures.{place}", each.quantity) for place, each in enumerate(spec.figures)]
    sides = ((key, side) for key, each in formulas.items() if each for side in (each.left, each.right))
    found += [(key, side.quantity) for key, side in sides if side]
    yield from ((key, name) for key, name in found if name and "/" in name)
