"""The rules for stale rollouts: a cluster estimated from the groups of a run, and servers that wait."""

import json
from statistics import mean

import pytest

from benchmarks.recorded_cluster import read
from benchmarks.rollout_rules import TOKENS, Responses, Setting, main, on_cluster, run
from benchmarks.server_rules import measure
from rlhf.config.run import Order, Stale, VirtualConfig
from rlhf.core.errors import UserError
from rlhf.training.clock import Clock, Rules

RULES = {
    "fifo": {"order": Order.fifo, "max_lag": 2},
    "pace": {"order": Order.completed, "max_lag": 3},
    "wait": {"order": Order.completed, "max_lag": 3, "max_age": 6},
    "cut": {"order": Order.completed, "max_lag": 3, "max_age": 6, "stale": Stale.cut},
    "drop": {"order": Order.completed, "max_lag": 3, "max_age": 6, "stale": Stale.drop},
}
ERROR = {"fifo": 0.1, "pace": 0.03, "wait": 0.16, "cut": 0.03, "drop": 0.07}  # use of runs: two sd


class Noted(Responses):
    """Responses whose discarded groups are noted."""

    def __init__(self):
        super().__init__()
        self.dropped = []

    def discarded(self, sequences):
        self.dropped.append((self.rows[sequences[0].group.number], sequences))
        super().discarded(sequences)


def lines(rule, updates, seed=5):
    """Return the groups of a run with 32 slots, B = 8, K = 4, log-sd 1, 0.8 of it shared."""
    sampler, found = Noted(), []
    costs = VirtualConfig(slots=32, step_s=0.2, spread=1.0, balance=1.2, score_s=0.5)
    made = Clock(Rules(batch=8, samples=4, **RULES[rule]), costs, sampler, length=TOKENS, seed=seed)
    for update in range(1, updates + 1):
        for own in made.next_batch():
            times = {"ready": max(each.end for each in own) + 0.5, "loaded": made.now}
            times["taken"] = made.now - made.update_s
            fate = "cut" if any(each.cut for each in own) else "trained"
            row = sampler.rows[own[0].group.number]
            found.append({"update": update, **line(own), "row": row, **times, "fate": fate})
        for row, own in sampler.dropped:
            found.append({"update": update, **line(own), "row": row, "fate": "dropped"})
        sampler.dropped.clear()
        made.loaded()
    return found


def line(own):
    return {
        "group": own[0].group.number,
        "version": own[0].group.version,
        "lengths": [len(each.ids) for each in own],
        "starts": [each.start for each in own],
        "ends": [each.end for each in own],
    }


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("rule", [*RULES])
def test_the_groups_of_a_run_show_its_cluster_and_predict_what_the_run_had(rule, tmp_path):
    settings = RULES[rule]
    file = written(tmp_path / "groups.jsonl", lines(rule, 80))
    if rule == "wait":  # only the config tells wait from pace
        config = "schedule: {order: completed, max_lag: 3, max_age: 6, stale: wait}"
        (tmp_path / "config.yaml").write_text(config)
    found = read(tmp_path if rule == "wait" else file)
    assert (found.slots, found.batch, found.samples, found.whole) == (32, 8, 4, True)
    assert (found.rule, found.lag, found.age) == (rule, settings["max_lag"], settings.get("max_age"))
    assert found.tail() == (pytest.approx(1.0, abs=0.08), pytest.approx(0.8, abs=0.04))
    assert (found.balance, found.score_s) == (pytest.approx(1.2, rel=0.01), pytest.approx(0.5))
    assert (found.early > 0) == (rule in ("cut", "drop"))
    (own, _, _), *_ = on_cluster(found)
    made = [run(own, seed, 80, 16) for seed in range(2)]
    errors = {"use": ERROR[rule], "age": 0.3, "thrown away": 0.06, "longest tenth": 0.03}
    for name, error in errors.items():
        assert mean(each[name] for each in made) == pytest.approx(found.figures[name], abs=error), name


def test_prompts_that_start_again_are_counted_once(tmp_path, monkeypatch):
    """At lag 1 a third of the groups are discarded, most of them long prompts for the second time."""
    monkeypatch.setitem(RULES, "drop", {**RULES["drop"], "max_lag": 1, "max_age": 1})
    found = read(written(tmp_path / "groups.jsonl", lines("drop", 80)))
    assert found.early > 100
    assert found.tail() == (pytest.approx(0.95, abs=0.05), pytest.approx(0.78, abs=0.03))


def test_batches_that_are_sampled_as_a_whole_show_the_longest_response_only(tmp_path):
    """Two slots decode 10 and 40 tokens at 20 tokens/s; training takes 3 s, and the trainer waits."""
    rows = []
    for group in range(36):
        update, start = group // 6 + 1, 6.0 * (group // 6)
        times = {"starts": [start] * 2, "ends": [start + 2.0] * 2, "taken": start + 2.5, "waited": 3.0}
        lengths = {"lengths": [10, 40], "version": update - 1, "fate": "trained"}
        rows.append({"update": update, "group": group, "row": group, **times, **lengths})
    times = {"starts": [2.5] * 2, "ends": [4.5] * 2}
    rows.append({**rows[0], **times, "group": -1, "fate": "replaced"})
    del rows[-1]["taken"], rows[-1]["waited"]
    found = read(written(tmp_path / "groups.jsonl", rows))
    assert (found.rule, found.lag, found.updates, found.slots) == ("fifo", 0, 5, 12)
    assert found.durations == [[0.5, 2.0]] * 31  # not those of the last update, whose end is not known
    assert found.tokens_s == pytest.approx(20)
    assert found.figures["use"] == pytest.approx(3 / 6)


def test_a_table_has_what_the_run_had_beside_its_own_rule(tmp_path, monkeypatch, capsys):
    written(tmp_path / "groups.jsonl", lines("pace", 10))
    monkeypatch.setattr("benchmarks.rollout_rules.run", lambda *_: {"use": 0.5, "age": 1.25})
    main(["cluster", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("80 groups of 4 samples, 10 updates")
    table = [line for line in printed if line.startswith("| ")]
    assert table[1].startswith("| pace | 3 |  | 32 | 8 | run | 0.")
    assert table[2] == "| pace | 3 |  | 32 | 8 | 3 | 0.500 (0.000) | 1.2 (0.0) |  |  |  |  |"
    assert len(table) == 2 + 3 * (2 + 3 * 2)


def test_a_file_without_enough_groups_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="must be a run folder with groups.jsonl"):
        read(tmp_path / "none")
    few = written(tmp_path / "groups.jsonl", lines("pace", 4))
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", str(few)])
    assert "groups of 5 complete updates" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["fifo", "pace", "drop", "cut"])
def test_servers_obey_the_rules(rule):
    found = measure(Setting(rule, lag=1, age=1, slots=16, batch=4, samples=2), seconds=0.03, updates=16)
    assert 0 < found["use"] < 1 and found["age"] > 0
    assert found["oldest"] > 1 if rule == "pace" else found["oldest"] <= 1
    assert (found["thrown away"] > 0) == (rule == "drop")
    assert (found["shorter"] > 0) == (rule == "cut")
