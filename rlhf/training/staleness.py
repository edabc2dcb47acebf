"""Which groups of rollouts may start, which are trained next, and which are given up.

A group is a prompt with its K samples; B groups are a batch. The version counts finished updates. The age of
a group is the version that trains on it minus the version of the weights at its start. `Rules` knows no
clock, no model and no process: a virtual clock and a pool of servers call the same methods.

    room() -> n          groups that may start now; start() -> group for each that gets slots (`startable`)
    complete(group)      the last sample of the group has ended
    replace(group)       instead, if its scores tie: returns the group that starts in its place, if any
    expired() -> groups  (drop) complete groups that are too old, after a load
    due() -> groups      (wait, cut) running groups that the next batch needs
    take() -> groups     the next batch of the idle trainer, or None if it must wait
    loaded() -> groups   the generators have the weights of one more update; (drop) running groups to stop

| order, stale    | trained next                                                       | age       |
|-----------------|--------------------------------------------------------------------|-----------|
| fifo            | the next B groups in the order of starts                           | <= L      |
| completed       | complete groups, oldest version first                              | no bound  |
| completed, wait | the same; the trainer waits for running groups that are due        | <= A      |
| completed, cut  | the same; running groups that are due end with the tokens they have | <= A     |
| completed, drop | complete groups in the order of completion; older ones are given up | <= A     |

L is `max_lag`, A is `max_age`. Admission: at most B (version + L + 1) groups have started (AReaL, Fu et al.,
arXiv 2505.24298); with `drop`, at most B (L + 1) groups exist that neither the trainer has taken nor were
discarded, and without a lag none starts while the trainer works. So at most B (L + 2) groups are in memory.
L bounds admission, not age: only A bounds the age of a long response.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlhf.config.schedule import Order, Stale


@dataclass(slots=True, eq=False)
class Group:
    """A prompt with its samples."""

    number: int  # in the order of starts, from 0; -1, -2, ... for groups that replace others
    version: int  # version of the weights when its first sample started
    left: int  # samples that have not ended
    place: int  # place in the order of all starts


@dataclass(slots=True, kw_only=True)
class Rules:
    """The state of admission and choice."""

    order: Order  # which groups are trained next
    batch: int  # B, groups of a batch
    samples: int  # K, samples of a group
    max_lag: int  # L, batches that generation may be ahead of training
    max_age: int | None = None  # A, at least L; None: ages have no bound. It needs `Order.completed`
    stale: Stale = Stale.wait  # what happens at `max_age`
    total: int | None = None  # groups that the run trains; None: no end
    refill: int = 0  # groups without signal that are replaced between two loads, at most
    version: int = 0  # finished updates
    started: int = 0  # groups that have started, without those that replace others
    refilled: int = 0  # groups that were replaced
    before: int = 0  # `refilled` at the last load
    trains: bool = False  # whether a batch was taken since the last load
    # Groups with samples that have not ended, by number, in the order of their starts
    running: dict[int, Group] = field(default_factory=dict)
    # Complete groups that wait for the trainer, in the order of completion
    ready: list[Group] = field(default_factory=list)

    def room(self) -> int:
        """Return how many groups may start now.

        A group that is discarded makes room for another, so with `drop` more groups start than are trained.
        """
        if self.drops:
            most = 0 if self.trains and not self.max_lag else self.batch * (self.max_lag + 1)
            return most - len(self.running) - len(self.ready)
        most = self.batch * (self.version + self.max_lag + 1)
        return (most if self.total is None else min(most, self.total)) - self.started

    def startable(self, slots: int, begun: Callable[[int], int], whole: bool) -> list[tuple[int, int]]:
        """Return group and sample of the sequences that start next in free slots, in their order.

        Args:
            slots: the free slots.
            begun: returns the number of samples of a running group that have started.
            whole: the samples of a group start together.
        """
        k = self.samples
        usable = slots - slots % k if whole else slots
        if not usable:
            return []
        starts: list[tuple[int, int]] = []
        for number in reversed(self.running):
            if (first := begun(number)) == k:
                break  # groups start in this order, so all samples of earlier groups have started
            starts[:0] = ((number, sample) for sample in range(first, k))
        groups = min(-(-(usable - len(starts)) // k), self.room())
        new = range(self.started, self.started + groups)
        starts += ((number, sample) for number in new for sample in range(k))
        return starts[:usable]

    def start(self) -> Group:
        """Return the next group, which starts now."""
        self.started += 1
        return self._add(self.started - 1)

    def replace(self, group: Group) -> Group | None:
        """Remove a running group without signal, and return the group that starts in its place.

        If `refill` groups were replaced since the last load, nothing changes, and None is returned. The new
        group is the last one in the order of starts. So no batch waits for it longer than for other new
        groups, and ages have the same bounds.
        """
        if self.refilled - self.before >= self.refill:
            return None
        del self.running[group.number]
        self.refilled += 1
        return self._add(-self.refilled)

    def complete(self, group: Group) -> None:
        """Note that the last sample of a running group has ended."""
        self.ready.append(self.running.pop(group.number))

    def expired(self) -> list[Group]:
        """Remove and return the complete groups that are too old to be trained."""
        old = self._too_old(self.ready)
        self.ready = [group for group in self.ready if group not in old]
        return old

    def due(self) -> list[Group]:
        """Return the running groups without which a later batch would exceed the age A, oldest first.

        A group of version s must be trained at version s + A or before. For each j from 0 to A - 1, let c be
        the number of groups with s + A <= version + j. The j batches after the next one take at most B j of
        them, so the next one needs c - B j. It is not enough to look at j = 0: with more slots than a batch
        has sequences, too many groups of one version would be left for one batch.
        """
        if self.max_age is None or self.stale is Stale.drop:
            return []
        running = [group.version for group in self.running.values()]  # ascending: in the order of starts
        ready = sorted(group.version for group in self.ready)
        most = 0
        for j in range(self.max_age):
            newest = self.version + j - self.max_age  # newest version that is due within j further batches
            complete = bisect_right(ready, newest)
            due = complete + bisect_right(running, newest)
            most = max(most, min(due - self.batch * j, self.batch) - min(complete, self.batch))
        return list(islice(self.running.values(), most))

    def to_cut(self, begun: Callable[[int], int]) -> list[Group]:
        """Return the groups with running samples that must end now, so that the idle trainer gets a batch.

        There are none before all samples of these groups have started; `begun` as in `startable`.
        """
        due = self.due() if self.stale is Stale.cut else []
        found = [group for group in due if group.left] if len(self.ready) + len(due) >= self.batch else []
        return found if all(begun(group.number) == self.samples for group in found) else []

    def take(self) -> list[Group] | None:
        """Return the groups of the next batch, or None if the trainer must wait."""
        if len(self.ready) < self.batch or self.due():
            return None
        if not self.drops:
            self.ready.sort(key=lambda group: group.place)  # oldest version first
        oldest = next(iter(self.running.values()), None)
        if self.order is Order.fifo and oldest and oldest.place < self.ready[self.batch - 1].place:
            return None
        taken, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        self.trains = True
        return taken

    def loaded(self) -> list[Group]:
        """Note that the generators have the weights of one more update.

        Returns:
            The running groups that can no longer be trained; they are removed.
        """
        self.version += 1
        self.before, self.trains = self.refilled, False
        old = self._too_old(self.running.values())
        for group in old:
            del self.running[group.number]
        return old

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the groups, as JSON values."""
        groups = [*self.running.values(), *self.ready]
        return {
            "counters": [self.version, self.started, self.refilled, self.before],
            "groups": [[group.number, group.version, group.left, group.place] for group in groups],
            "running": len(self.running),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> dict[int, Group]:
        """Continue from a saved state, and return its groups by number."""
        self.version, self.started, self.refilled, self.before = saved["counters"]
        groups = {values[0]: Group(*values) for values in saved["groups"]}
        self.running = dict(islice(groups.items(), saved["running"]))
        self.ready = [*groups.values()][saved["running"] :]
        return groups

    @property
    def drops(self) -> bool:
        """Whether groups that are too old are given up."""
        return self.max_age is not None and self.stale is Stale.drop

    def _add(self, number: int) -> Group:
        place = self.started + self.refilled - 1
        group = self.running[number] = Group(number, self.version, self.samples, place)
        return group

    def _too_old(self, groups: Iterable[Group]) -> list[Group]:
        if self.max_age is None or self.stale is not Stale.drop:
            return []
        return [group for group in groups if self.version - group.version > self.max_age]
