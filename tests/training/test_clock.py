"""Tests of the virtual clock and the rules without a model: bounds for random settings, and closed forms."""

from collections import Counter
from math import inf, log
from random import Random
from statistics import mean

import pytest

from rlhf.config.run import Order, Stale, VirtualConfig
from rlhf.training import clock as clocks
from rlhf.training.clock import MESSAGE, Clock, Piece, Rules, factors

LENGTH = 20


class Lengths:
    """A sampler of responses of given lengths, in pieces as the clock asks for them.

    The tokens at the places `message` belong to a message, which comes with the token before it.
    """

    def __init__(self, rules, length=lambda start: LENGTH, message=range(0)):
        self.rules, self.length, self.message = rules, length, message
        self.rows, self.again, self.new, self.calls = {}, [], 0, 0

    def begin(self, starts, most):
        self.calls += 1
        return [self._piece(start, 0, limit) for start, limit in zip(starts, most, strict=True)]

    def go_on(self, sequences, most):
        self.calls += 1
        return [
            self._piece(each.key, len(each.ids), limit) for each, limit in zip(sequences, most, strict=True)
        ]

    def _piece(self, start, done, most):
        end, whole = done, self.length(start)
        while end < whole and (most or end in self.message):
            most -= end not in self.message
            end += 1
        assert end > done
        ids = [*range(done, end)]
        logprobs = [float(self.rules.version)] * len(ids)  # the weights that sampled the tokens
        if not self.message:
            return Piece(ids, logprobs, end == whole)
        own = [each not in self.message for each in ids]
        return Piece(ids, logprobs, end == whole, sampled=own, rewards=[0.0] * len(ids))

    def prompt(self, group):
        if group in self.rows:
            return self.rows[group], 10
        if (ahead := group - self.rules.started) >= 0:
            again = len(self.again)
            return self.again[ahead] if ahead < again else self.new + 1 + ahead - again, 10
        self.new += not self.again
        self.rows[group] = self.again.pop(0) if self.again else self.new
        return self.rows[group], 10

    def discarded(self, sequences):
        self.again.append(self.rows.pop(sequences[0].group.number))

    def signal(self, group):
        return Random(f"signal {group[0].group.number}").random() < 0.5

    def replaced(self, group, by):
        del self.rows[group[0].group.number]
        self.new += 1
        self.rows[by] = self.new


def clock(rule="pace", *, lag=1, batch=4, samples=2, slots=8, total=None, length=None, **settings):
    """Return a clock with one of five rules; further settings are those of `Clock` and `VirtualConfig`."""
    own = {name: settings.pop(name) for name in ("in_flight", "whole") if name in settings}
    age = settings.pop("age", lag)
    rules = Rules(
        order=Order.fifo if rule == "fifo" else Order.completed,
        batch=batch,
        samples=samples,
        max_lag=lag,
        max_age=age if rule in ("wait", "drop", "cut") else None,
        stale=Stale(rule) if rule in ("wait", "drop", "cut") else Stale.wait,
        total=total,
        refill=settings.pop("refill", 0),
    )
    given = {"length": length} if length else {}
    sampler = Lengths(rules, **given, message=settings.pop("message", range(0)))
    return Clock(rules, VirtualConfig(slots=slots, **settings), sampler, length=LENGTH, seed=0, **own)


def updates(made, count):
    """Run updates, and return the virtual time of each load."""
    times = []
    for _ in range(count):
        made.next_batch()
        made.loaded()
        times.append(made.now)
    return times


def drawn(seed):
    """Return random settings of a clock, with responses of random lengths."""
    draw = Random(seed)
    lag, batch, samples = draw.choice([0, 1, 2, 4]), draw.choice([1, 3, 4]), draw.choice([1, 2, 4])
    slots = draw.choice([1, 2, 2 * lag + 2]) * batch * samples
    lengths = {}
    settings = {
        "lag": lag,
        "age": lag + draw.choice([0, 1, 3]),
        "batch": batch,
        "samples": samples,
        "slots": slots + draw.choice([0, 1]),
        "spread": draw.choice([0.0, 1.0, 2.0]),
        "longest": draw.choice([None, 4.0]),
        "stretch": draw.choice([1.0, 8.0]),
        "step_growth": draw.choice([0.0, 0.1]),
        "prefill": draw.choice([0.0, 0.2]),
        "balance": draw.choice([0.2, 1.0, 3.0]),
        "score_s": draw.choice([0.0, 3.0]),
        "sync_s": draw.choice([0.0, 2.0]),
        "pause_s": draw.choice([0.0, 1.0]),
        "in_flight": draw.choice([False, True]),
        "whole": draw.choice([False, True]),
        "refill": draw.choice([0, 1, 4 * batch]),
        "length": lambda start: lengths.setdefault(start, Random(f"{seed} {start}").randint(1, LENGTH)),
    }
    if draw.random() < 0.5:  # episodes of 12 to 19 tokens, with a message
        settings |= {"message": range(4, 9), "length": lambda start: 12 + (start.group + start.sample) % 8}
    return draw, settings


@pytest.mark.parametrize("rule", ["fifo", "pace", "wait", "drop", "cut"])
def test_bounds_hold_for_random_settings(rule):
    """Age, memory and slots are bounded, slot time is the sum of durations, and nothing deadlocks."""
    for seed in range(25):
        draw, settings = drawn(seed)
        total = settings["batch"] * 25
        bound = {"fifo": settings["lag"], "pace": inf}.get(rule, settings["age"])
        made = clock(rule, total=total, **settings)
        rules, trained, busy, slot_s, now, spent = made.rules, Counter(), 0.0, 0.0, 0.0, False
        for _ in range(25):
            groups = made.next_batch()
            assert made.now >= now, "time never falls"
            now, busy, wasted = made.now, busy + made.usage.busy, made.usage.wasted
            slot_s += wasted
            assert len(groups) == settings["batch"]
            refilled = rules.refilled - rules.before
            assert refilled <= settings["refill"]
            spent |= refilled == settings["refill"]
            assert spent or all(map(made.sampler.signal, groups))
            assert len(made.running) <= settings["slots"]
            alive = len(rules.running) + len(rules.ready) + len(groups)
            assert alive <= settings["batch"] * (settings["lag"] + 2), (seed, settings)
            for sequences in groups:
                assert len(sequences) == settings["samples"]
                trained[sequences[0].group.number] += 1
                assert all(each.versions[-1] != MESSAGE for each in sequences)
                versions = [[v for v in each.versions if v != MESSAGE] for each in sequences]
                oldest = rules.version - sequences[0].group.version
                assert oldest <= bound, (seed, settings)
                assert min(map(min, versions)) >= sequences[0].group.version
                assert all(each == sorted(each) for each in versions)
                tokens = [(v, each.logprobs[i]) for each in sequences for i, v in enumerate(each.versions)]
                assert all(version in (MESSAGE, of_weights) for version, of_weights in tokens)
                assert settings["in_flight"] or all(len(set(each)) == 1 for each in versions)
                slot_s += sum(each.end - each.start for each in sequences)
                whole = [settings["length"](each.key) for each in sequences]
                ids = [[*range(n)] for n in whole]
                if rule != "cut":
                    assert [each.ids for each in sequences] == ids
                    assert not any(each.cut for each in sequences)
                else:
                    for each, n in zip(sequences, whole, strict=True):
                        assert each.ids == [*range(len(each.ids))]
                        assert each.cut == (len(each.ids) < n)
            made.loaded()
        slot_s += made.usage.wasted
        for sequences in made.sequences.values():  # not trained
            slot_s += sum(min(each.end, made.now) - each.start for each in sequences)
        assert busy == pytest.approx(slot_s), (seed, settings)
        assert set(trained.values()) == {1}
        if rule != "drop":
            assert sum(trained.values()) == rules.started == total, "a replacement is trained in its place"
            assert rules.refilled or sorted(trained) == [*range(total)], "what started is trained, once"


def history(made, count):
    """Return what happened in updates: times to a millionth, and groups as they were trained."""

    def whole(value):
        return round(value, 6)

    found = []
    for _ in range(count):
        groups = made.next_batch()
        rows = [(own[0].group.number, made.sampler.rows[own[0].group.number]) for own in groups]
        times = [[(whole(each.start), whole(each.end), each.cut) for each in own] for own in groups]
        found.append((whole(made.now), rows, times, [[each.versions for each in own] for own in groups]))
        made.loaded()
    return found


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rule", ["fifo", "pace", "wait", "drop", "cut"])
def test_how_far_is_sampled_ahead_changes_nothing(rule, in_flight, monkeypatch):
    """Starts, loads, versions and prompts depend on events alone, with any look ahead."""
    for seed in range(12):
        settings = drawn(seed)[1] | {"in_flight": in_flight}
        found = []
        for share in (0.05, 3.0):
            monkeypatch.setattr(clocks, "_LOOKAHEAD", share)
            found.append(history(clock(rule, total=settings["batch"] * 15, **settings), 15))
        assert found[0] == found[1], (seed, settings)


@pytest.mark.parametrize("rule", ["fifo", "pace", "wait", "drop", "cut"])
def test_the_unit_of_time_changes_nothing(rule):
    """Many events are at the same time here, and their order does not depend on rounding."""
    for seed in range(12):
        settings = drawn(seed)[1] | {"spread": 0.0, "stretch": 1.0}
        found = []
        for unit in (1.0, 1 / 7):
            times = {name: settings[name] * unit for name in ("score_s", "sync_s", "pause_s")}
            made = clock(rule, total=settings["batch"] * 12, **settings | times, step_s=unit)
            found.append([(rows, versions) for _, rows, _, versions in history(made, 12)])
        assert found[0] == found[1], (seed, settings)


class Simulated:
    """The rules in whole seconds, written a second time; a second has its load, then its ends one by one."""

    def __init__(self, rule, *, lag, age, batch, samples, slots, length, train_s, whole):
        self.rule, self.lag, self.size, self.samples = rule, lag, batch, samples
        self.age = age if rule in ("wait", "cut", "drop") else None
        self.free, self.length, self.train_s, self.whole = slots, length, train_s, whole
        self.now = self.version = self.count = 0
        self.alive, self.ready = {}, []  # group -> [version, {sample: [start, end, cut]}]; complete groups
        self.batch, self.load, self.loads, self.trained = None, None, [], []

    def run(self, updates):
        self.settle()
        while len(self.trained) < updates:
            self.now += 1
            if self.load == self.now:
                self.loads.append(self.now)
                self.trained.append([(group, *self.alive.pop(group)) for group in self.batch])
                self.version, self.batch = self.version + 1, None
                if self.rule == "drop":
                    for group in [g for g, (v, _) in self.alive.items() if self.version - v > self.age]:
                        self.free += sum(end is None for _, end, _ in self.alive.pop(group)[1].values())
                    self.ready = [group for group in self.ready if group in self.alive]
                self.settle()
            ends = [
                (group, sample)
                for group, (_, own) in self.alive.items()
                for sample, (start, end, _) in own.items()
                if end is None and start + self.length((group, sample)) == self.now
            ]
            for group, sample in ends:
                if group in self.alive and self.alive[group][1][sample][1] is None:
                    self.end(group, sample)
                    self.settle()

    def end(self, group, sample):
        own = self.alive[group][1]
        own[sample][1:] = self.now, self.now < own[sample][0] + self.length((group, sample))
        self.free += 1
        if len(own) == self.samples and all(end is not None for _, end, _ in own.values()):
            self.ready.append(group)

    def settle(self):
        while self.fill() or (self.batch is None and self.choose()):
            pass

    def fill(self):
        unfinished = [group for group, (_, own) in self.alive.items() if len(own) < self.samples]
        if not self.free or (self.whole and self.free < self.samples):
            return False
        if not unfinished:
            waiting = len(self.alive) - len(self.batch or ())
            if self.rule == "drop":
                if waiting >= self.size * (self.lag + 1) or (self.batch and not self.lag):
                    return False
            elif self.count >= self.size * (self.version + self.lag + 1):
                return False
            self.alive[self.count] = [self.version, {}]
            unfinished, self.count = [self.count], self.count + 1
        own = self.alive[unfinished[0]][1]
        for _ in range(self.samples if self.whole else 1):
            own[len(own)] = [self.now, None, False]
            self.free -= 1
        return True

    def choose(self):
        running = [group for group in self.alive if group not in self.ready]
        due = next(n for n in range(len(running) + 1) if self.feasible(running, n))
        if self.rule == "cut" and due and len(self.ready) + due >= self.size:
            if any(len(self.alive[group][1]) < self.samples for group in running[:due]):
                return False
            for group in running[:due]:
                for sample, (_, end, _) in self.alive[group][1].items():
                    if end is None:
                        self.end(group, sample)
            return True
        if len(self.ready) < self.size or due:
            return False
        order = self.ready if self.rule == "drop" else sorted(self.ready)
        if self.rule == "fifo" and running and running[0] < order[self.size - 1]:
            return False
        self.batch = order[: self.size]
        self.ready = [group for group in self.ready if group not in self.batch]
        self.load = self.now + self.train_s
        return True

    def feasible(self, running, due):
        """Return whether no group is too old later if the next batch has the first `due` running groups.

        Groups of the present version are left to later choices: admission leaves batches for them.
        """
        if self.age is None or self.rule == "drop":
            return True
        taken = {*running[:due], *sorted(self.ready)[: max(0, self.size - due)]}
        old = {group: version for group, (version, _) in self.alive.items() if version < self.version}
        later = [version for group, version in old.items() if group not in {*taken, *(self.batch or ())}]
        return all(self.version + 1 + i // self.size <= v + self.age for i, v in enumerate(later))


@pytest.mark.parametrize("rule", ["fifo", "pace", "wait", "drop", "cut"])
def test_a_clock_equals_a_second_simulation(rule):
    """Groups, starts, ends, loads, and the version of each token, in settings with many events at a time."""
    for seed in range(25):
        draw = Random(f"second {seed}")
        batch, samples, lag = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([0, 1, 2])
        lengths = {}
        settings = {
            "batch": batch,
            "samples": samples,
            "lag": lag,
            "age": lag + draw.choice([0, 0, 1, 2]),
            "slots": batch * samples * draw.choice([1, 2, 4]) + draw.choice([0, 1]),
            "train_s": draw.choice([1, 4, 9]),
            "whole": draw.choice([False, True]),
            "length": lambda start, seed=seed, lengths=lengths: lengths.setdefault(
                tuple(start), Random(f"{seed} {tuple(start)}").choice([1, 2, 3, 4, LENGTH])
            ),
        }
        second = Simulated(rule, **settings)
        second.run(12)
        made = clock(rule, **settings, in_flight=True)
        for expected in second.trained:
            trained = made.next_batch()
            assert [own[0].group.number for own in trained] == [group for group, *_ in expected]
            assert [own[0].group.version for own in trained] == [version for _, version, _ in expected]
            for mine, (*_, theirs) in zip(trained, expected, strict=True):
                assert [[each.start, each.end, each.cut] for each in mine] == [*theirs.values()], seed
                for each in mine:
                    ends = [each.start + place + 1 for place in range(len(each.ids))]
                    assert each.versions == [sum(load < end for load in second.loads) for end in ends]
            made.loaded()
            assert made.now == second.loads[made.rules.version - 1]


@pytest.mark.parametrize("slots", [64, 160, 320])
@pytest.mark.parametrize("rule", ["wait", "cut", "drop"])
def test_age_is_bounded_with_more_slots_than_a_batch_has_sequences(rule, slots):
    """To wait for groups of age A only is not enough: too many groups would be due for one batch."""
    made = clock(rule, lag=4, batch=16, samples=4, slots=slots, spread=1.0)
    for _ in range(60):
        groups = made.next_batch()
        assert max(made.rules.version - own[0].group.version for own in groups) <= 4
        made.loaded()


def test_updates_of_equal_responses_take_the_longer_of_training_and_generation():
    """Closed form, with slots for one batch: L = 0 takes the sum, a larger L the maximum."""
    for train_s in (5.0, 20.0, 50.0):
        for lag, expected in ((0, LENGTH + train_s), (1, max(LENGTH, train_s)), (3, max(LENGTH, train_s))):
            for rule in ("fifo", "pace", "wait", "drop"):
                times = updates(clock(rule, lag=lag, train_s=train_s), 8)
                assert times[-1] - times[-2] == pytest.approx(expected), (rule, lag, train_s)


def test_time_of_a_step_grows_with_the_running_sequences():
    """Eight sequences of 20 tokens, a step of 1 + 0.1 * 8 seconds, then 5 seconds of training."""
    made = clock(lag=0, step_growth=0.1, train_s=5.0)
    assert updates(made, 2) == pytest.approx([20 * 1.8 + 5, 2 * (20 * 1.8 + 5)])


def test_prefill_delays_the_first_token_and_every_load_in_flight():
    """A prompt of 10 tokens takes 5 steps. At the load at 30 (5 tokens since 25) all 15 take 7.5 steps."""
    first = clock(lag=0, prefill=0.5, train_s=5.0)
    assert updates(first, 1) == pytest.approx([5 + 20 + 5])
    made = clock(lag=1, prefill=0.5, train_s=10.0, in_flight=True, batch=4, samples=2, slots=8)
    assert updates(made, 1) == pytest.approx([5 + 20 + 10])  # the next groups began at 25 and have 5 tokens
    assert [each.kept for each in made.running.values()] == [5] * 8
    made.next_batch()
    assert made.now == pytest.approx(25 + 5 + 20 + 0.5 * (10 + 5) + 10)


def test_a_second_load_during_the_encoding_of_the_first_keeps_the_tokens_of_before():
    """At the load at 20.5, a response has 10 tokens and encodes 20; half a step later is the next load."""
    settings = {"lag": 2, "batch": 1, "samples": 1, "slots": 3, "train_s": 0.5, "prefill": 1.0}
    made = clock(in_flight=True, length=lambda start: 20 if start.group == 1 else 10, **settings)
    assert updates(made, 2) == [10 + 10 + 0.5, 10 + 10 + 1.0]
    long = made.running[1, 0]
    assert (long.kept, long.begin, set(long.versions[:10]), set(long.versions[10:])) == (10, 50, {0}, {2})


def test_a_message_takes_the_steps_of_its_encoding():
    """The prompt takes 5 steps, 12 tokens of the model 12, a message of 8 tokens 4; training takes 5."""
    message = {"prefill": 0.5, "message": range(4, 12), "train_s": 5.0}
    assert updates(clock(lag=0, **message), 1) == pytest.approx([5 + 12 + 4 + 5])
    made = clock(lag=1, in_flight=True, batch=4, samples=2, slots=8, **message | {"train_s": 11.0})
    assert updates(made, 1) == pytest.approx([21 + 11])  # the next ones have 4 tokens and half a message
    assert [each.kept for each in made.running.values()] == [8] * 8
    assert [each.versions for each in made.running.values()] == [[0] * 4 + [MESSAGE] * 8 + [1] * 4] * 8
    made.next_batch()
    assert made.now == pytest.approx(21 + 21 + 0.5 * (10 + 8) + 11)


@pytest.mark.parametrize(("train_s", "kept"), [(9.5, 4), (11.0, 4), (13.5, 4), (14.5, 13)])
def test_an_episode_that_is_cut_ends_with_a_token_of_the_model(train_s, kept):
    """Groups that began at 21 have `train_s` - 5 steps of tokens when the trainer is idle again."""
    message = {"prefill": 0.5, "message": range(4, 12), "train_s": train_s}
    made = clock("cut", lag=1, age=1, batch=4, samples=2, slots=8, **message)
    updates(made, 1)
    (first, *_) = made.next_batch()
    assert [len(each.ids) for each in first] == [kept] * 2 and all(each.cut for each in first)


def test_stretched_responses_take_a_power_of_their_length():
    """With stretch 2, n of at most 20 tokens take n^2 / 20 steps: 5 for 10 tokens, 20 for 20 tokens."""
    settings = {"batch": 1, "samples": 1, "slots": 1, "stretch": 2.0}
    settings["length"] = lambda start: 10 if start[0] == 0 else 20
    assert updates(clock(lag=0, balance=2.0, **settings), 2) == pytest.approx([5 + 10, 15 + 20 + 40])
    for prefill, loads, old in (0.0, [12, 32], 11), (0.5, [17, 15 + 0.5 * (10 + 6) + 20 + 7], 6):
        made = clock(lag=1, train_s=7.0, prefill=prefill, in_flight=True, **settings)
        times = updates(made, 1)
        (own,) = made.next_batch()  # 7 or 2 steps until the first load: 7 > 11^2 / 20, 2 > 6^2 / 20
        assert [*times, made.now] == pytest.approx(loads)
        assert own[0].versions == [0] * old + [1] * (20 - old)


def test_scores_and_loads_take_time():
    """Groups wait for their scores, and the trainer for the load of its weights; slots pause after it."""
    assert updates(clock(lag=0, train_s=5.0, score_s=3.0), 1) == pytest.approx([20 + 3 + 5])
    assert updates(clock(lag=0, train_s=5.0, sync_s=2.0), 2) == pytest.approx([27, 54])
    assert updates(clock(lag=0, train_s=5.0, pause_s=4.0), 2) == pytest.approx([25, 25 + 4 + 25])


def test_training_takes_as_long_as_the_ideal_generation_or_as_configured():
    """`balance` counts the tokens of the batch in all slots; `train_s` and `train_token_s` are seconds."""
    assert updates(clock(lag=0, slots=16, balance=2.0), 1) == pytest.approx([20 + 2 * 8 * 20 / 16])
    assert updates(clock(lag=0, train_s=1.0, train_token_s=0.1), 1) == pytest.approx([20 + 1 + 0.1 * 160])


def test_the_most_groups_that_are_replaced_are_counted_from_load_to_load():
    rules = clock(refill=1).rules
    for number in range(3):
        rules.start(), rules.start()
        first, second = [*rules.running.values()][:2]
        assert rules.replace(first).number == -1 - number
        assert rules.replace(second) is None
        rules.loaded()


def test_dropped_prompts_start_again_and_are_as_long_as_before():
    """The factor of a prompt does not depend on its group, so a discarded prompt stays long."""
    made = clock("drop", lag=1, batch=4, samples=2, slots=8, spread=1.0)
    updates(made, 30)
    sampler = made.sampler
    assert sum(sampler.rows.values()) and made.rules.started > 4 * made.rules.version + 8
    assert len(set(sampler.rows.values())) == len(sampler.rows)
    of_group = factors(VirtualConfig(slots=8, spread=1.0, shared=1.0), 2, seed=0)
    assert of_group(1, 7) == of_group(2, 7) != of_group(2, 8)


def test_factors_have_the_spread_and_the_shared_part():
    """The log has the standard deviation `spread`, and a correlation of `shared` squared in a group."""
    found = factors(VirtualConfig(slots=9000, spread=1.5), 2, seed=3)
    logs = [[log(factor) for factor in found(group, group)] for group in range(3000)]
    square = mean(x * x for pair in logs for x in pair)
    assert square == pytest.approx(1.5**2, rel=0.1)
    assert mean(a * b for a, b in logs) / square == pytest.approx(0.64, abs=0.05)
    capped = factors(VirtualConfig(slots=9000, spread=1.5, longest=2.0), 2, seed=3)
    assert capped(5, 5) == [min(2.0, factor) for factor in found(5, 5)]


def test_sequences_are_sampled_in_large_calls():
    """The look ahead: a call has many sequences, although slots become free one by one."""
    made = clock(lag=4, batch=16, samples=4, slots=64, spread=1.0)
    updates(made, 40)
    assert made.rules.started * 4 / made.sampler.calls > 20


@pytest.mark.parametrize("settings", [{"slots": 1}, {"total": 3}])
def test_a_clock_in_which_nothing_can_happen_stops(settings):
    """A group that starts as a whole needs a slot for each sample; a batch needs B groups."""
    with pytest.raises(RuntimeError, match="cannot start"):
        updates(clock("fifo", **settings), 1)


def test_pace_uses_the_trainer_and_bounds_no_age():
    """Mean use and ages of 12 seeds of the same cluster (64 slots, B = 16, K = 4, L = 4, log-sd 1)."""
    made = clock("pace", lag=4, batch=16, samples=4, slots=64, spread=1.0)
    updates(made, 20)
    span = trained = 0.0
    ages = []
    for _ in range(60):
        groups = made.next_batch()
        span, trained = span + made.usage.span, trained + made.usage.trained
        ages += [made.rules.version - own[0].group.version for own in groups]
        made.loaded()
    assert trained / span > 0.9
    assert 2.8 < mean(ages) < 3.7
    assert max(ages) > 8
