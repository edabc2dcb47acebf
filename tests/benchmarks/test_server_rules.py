"""The rules for stale rollouts on servers: pool, stream and rules over HTTP, with servers that wait."""

import pytest

from benchmarks.rollout_rules import Setting
from benchmarks.server_rules import measure


@pytest.mark.parametrize("rule", ["fifo", "pace", "drop", "cut"])
def test_servers_obey_the_rules(rule):
    setting = Setting(rule, lag=1, age=1, slots=16, batch=4, samples=2)
    found = measure(setting, seconds=0.03, updates=16)
    assert 0 < found["use"] < 1 and found["age"] > 0
    assert found["oldest"] > 1 if rule == "pace" else found["oldest"] <= 1
    assert (found["thrown away"] > 0) == (rule == "drop")
    assert (found["shorter"] > 0) == (rule == "cut")
