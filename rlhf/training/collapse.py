"""The warning of collapse: a rule on the metrics of training that finds a policy which leaves its reference.

A run collapses if the win rate of the policy falls and does not recover, while the training reward may still
rise (Gao et al., arXiv 2210.10760). The rule observes these signals of each training row:

| signal     | value                                                               | unit           | warns |
|------------|---------------------------------------------------------------------|----------------|-------|
| `kl`       | `objective/kl` per response token + `mismatch/kl`, minus its first  | nats per token | above |
| `rise`     | increase of the average of `kl` per update                          | nats per token | above |
| `entropy`  | `objective/entropy` per response token, divided by its first        | share          | below |
| `ess`      | `mismatch/ess`                                                      | share          | below |
| `gradient` | `policy/grad_norm`, divided by its first                            | factor         | above |

`kl` estimates the KL of the trained policy to the reference. `objective/kl` alone is that of the sampler,
which is far behind the trained policy if the lag is large.

All signals but `rise` are averaged over the last updates with exponential weights, starting from their
first values. The first value beyond its limit gives the warning. `benchmarks/collapse.py` selects the limits
on one half of many runs and measures the rule on the other half (docs/results/collapse.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRIC = "warning/collapse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The constants of the rule; a limit of None ignores the signal.

    Attributes:
        kl: largest average increase of the KL to the reference, in nats per token.
        rise: largest increase of that average per update.
        entropy: smallest average entropy per token, as a share of its first value.
        ess: smallest average effective sample size, as a share of the responses.
        gradient: largest average gradient norm, as a multiple of its first value.
        memory: time constant of the averages, in updates.
    """

    kl: float | None = None
    rise: float | None = None
    entropy: float | None = None
    ess: float | None = None
    gradient: float | None = None
    memory: float = 1.0


LIMITS = Limits(kl=0.6, memory=2.0)  # selected by benchmarks/collapse.py

_MEANING = {
    "kl": "KL to the reference of {value:.2g} nats per token, limit {limit:.2g}",
    "rise": "KL to the reference rises by {value:.2g} nats per token and update, limit {limit:.2g}",
    "entropy": "entropy per token at {value:.2g} of its first value, limit {limit:.2g}",
    "ess": "effective sample size of {value:.2g} of the responses, limit {limit:.2g}",
    "gradient": "gradient norm at {value:.2g} times its first value, limit {limit:.2g}",
}

RISING = ("kl", "rise", "gradient")  # signals that warn above their limit; the others warn below
_RELATIVE = frozenset({"entropy", "gradient"})  # signals that are divided by their first value


def signals(row: Mapping[str, float]) -> dict[str, float]:
    """Return the signals that a row of metrics contains, KL and entropy in nats per token."""
    tokens, found = row.get("objective/response_tokens", 0.0), {}
    if tokens > 0 and "objective/kl" in row:
        found["kl"] = row["objective/kl"] / tokens + row.get("mismatch/kl", 0.0)
    if tokens > 0 and "objective/entropy" in row:
        found["entropy"] = row["objective/entropy"] / tokens
    if "mismatch/ess" in row:
        found["ess"] = row["mismatch/ess"]
    if "policy/grad_norm" in row:
        found["gradient"] = row["policy/grad_norm"]
    return found


def _beyond(limits: Limits, values: Mapping[str, float]) -> str | None:
    """Return the name of the first signal whose value is beyond its limit; None: there is none."""
    for name in _MEANING:
        limit, value = getattr(limits, name), values.get(name)
        if limit is not None and value is not None and (value > limit if name in RISING else value < limit):
            return name
    return None


class CollapseRule:
    """The state of the rule in one run; it warns once.

    Args:
        remedy: the settings that the warning recommends, as text.
        limits: the constants of the rule.
    """

    def __init__(self, remedy: str = "set a lower optim.lr", limits: Limits = LIMITS) -> None:
        self.remedy = remedy
        self.limits = limits
        self.first: dict[str, float] = {}  # value of each signal in the first row that has it
        self.averages: dict[str, float] = {}  # of the signals, with `rise`
        self.update = 0.0  # update of the last row
        self.warned = False

    def observe(self, row: Mapping[str, float]) -> str | None:
        """Update the averages with a row of training metrics, and return the warning when a limit is passed.

        Args:
            row: metrics of the updates since the previous row, with the column `update`.
        """
        found = signals(row)
        self.first = {**found, **self.first}
        if "kl" in found:
            found["kl"] -= self.first["kl"]
        for name in _RELATIVE & found.keys():
            found[name] /= max(self.first[name], 1e-6)
        updates = row["update"] - self.update
        share = 1 - math.exp(-updates / self.limits.memory)
        for name, value in found.items():
            before = self.averages.setdefault(name, value)
            self.averages[name] = before + share * (value - before)
            if name == "kl" and updates > 0:
                self.averages["rise"] = (self.averages["kl"] - before) / updates
        self.update = row["update"]
        passed = _beyond(self.limits, self.averages)
        if self.warned or passed is None:
            return None
        self.warned = True
        what = _MEANING[passed].format(value=self.averages[passed], limit=getattr(self.limits, passed))
        return (
            f"the policy may collapse: {what}, at update {row['update']:.0f}; compare eval/ metrics with "
            f"earlier ones, and if they fall, {self.remedy}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule, for a checkpoint."""
        return {
            "first": self.first,
            "averages": self.averages,
            "update": self.update,
            "warned": self.warned,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.first, self.averages = dict(saved["first"]), dict(saved["averages"])
        self.update, self.warned = saved["update"], saved["warned"]
