"""Tests of the stream in virtual time with a tiny model: equality with `Stream`, tokens, checkpoints."""

import copy
import io
from contextlib import contextmanager

import pytest
import torch

from rlhf.config.run import Order, Stale, Unit, Update, VirtualConfig
from rlhf.core.batch import Batch, Prompts, Sampling
from rlhf.core.metrics import Timer
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.training import clock
from rlhf.training.events import VirtualStream
from rlhf.training.stream import Refill, Stream
from tests.tiny_models import VOCABULARY, tiny_lm
from tests.training.streams import context

B, K, T, UPDATES = 4, 2, 10, 7
RULES = {
    "fifo": {"order": Order.fifo},
    "pace": {"order": Order.completed},
    "wait": {"order": Order.completed, "max_age": 2},
    "drop": {"order": Order.completed, "max_age": 2, "stale": Stale.drop},
    "cut": {"order": Order.completed, "max_age": 2, "stale": Stale.cut},
}


class Recorder:
    def __init__(self):
        self.timer, self.rows, self.lines = Timer(), [], []

    def add(self, metrics):
        self.rows.append({name: stat.value() for name, stat in metrics.items()})

    def groups(self, lines):
        self.lines += lines


class Trainer:
    """A model whose weights change a little at each update, and a generator that samples with it."""

    def __init__(self, version=0, noise=0.0, model=None, **settings):
        self.model = copy.deepcopy(model) if model else tiny_lm()
        given = {"stop_ids": [1], "pad_id": 0, "batch_size": 256, "seed": 3, "noise": noise}
        self.generator = HFGenerator(self.borrow, HFSettings(**given | settings))
        self.version, self.models = 0, {0: copy.deepcopy(self.model)}
        for _ in range(version):
            self.train()

    @contextmanager
    def borrow(self):
        yield self.model

    def train(self):
        self.version += 1
        draw = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(0.03 * torch.randn(weight.shape, generator=draw))
        self.models[self.version] = copy.deepcopy(self.model)
        self.generator.load((), self.version)


def prompts(first=0):
    """Yield batches of B prompts without end, of 3 to 7 tokens."""
    while True:
        rows = range(first, first + B)
        draw = [torch.Generator().manual_seed(row) for row in rows]
        real = torch.tensor([[place >= 4 - row % 5 for place in range(7)] for row in rows])
        ids = torch.stack([torch.randint(2, VOCABULARY, (7,), generator=each) for each in draw])
        texts = [str(row) for row in rows]
        yield Prompts(
            index=torch.tensor([*rows]),
            texts=texts,
            references=texts,
            prompt_ids=ids.masked_fill(~real, 0),
            prompt_mask=real,
        )
        first += B


def sampling(**settings):
    return Sampling(samples=K, temperature=1.3, response_length=T, purpose="train", **settings)


def stream(
    trainer,
    rule="fifo",
    *,
    lag=2,
    slots=None,
    in_flight=False,
    whole=True,
    batches=None,
    asked=None,
    pad_id=0,
    refill=None,
    update=0,
    saved=None,
    **costs,
):
    schedule = {**RULES[rule], "update": Update.in_flight if in_flight else Update.between}
    made = context(
        trainer.generator,
        batches or prompts(),
        asked or sampling(),
        lag,
        UPDATES,
        update=update,
        batch=B,
        pad_id=pad_id,
        schedule=schedule | {"unit": Unit.group if whole else Unit.sequence},
        recorder=Recorder(),
        phases=trainer.generator.phases,
        refill=refill,
        saved=saved,
    )
    return VirtualStream(VirtualConfig(slots=slots, **costs), made)


def train(made, trainer, most=UPDATES):
    """Train on at most `most` batches; yield each as it was when it was yielded."""
    for _, rollouts in zip(range(most), made, strict=False):
        yield rollouts
        trainer.train()


def stored(made):
    """Return the state of a stream, written and read as a checkpoint does it."""
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(one, other):
    for name, value in one.as_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(other, name)), name
        elif isinstance(value, dict):
            assert all(torch.equal(part, getattr(other, name)[key]) for key, part in value.items()), name
        elif name != "generate_s":
            assert value == getattr(other, name), name


@pytest.mark.parametrize(("lag", "noise"), [(0, 0.0), (1, 0.5), (4, 0.0)])
def test_fifo_with_slots_for_all_equals_the_stream_of_this_process(lag, noise):
    trainer, other = Trainer(noise=noise), Trainer(noise=noise)
    plain = Stream(context(other.generator, prompts(), sampling(), lag, UPDATES))
    for mine, theirs in zip(train(stream(trainer, lag=lag), trainer), train(plain, other), strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("rule", ["pace", "wait", "drop", "cut"])
def test_without_lag_every_rule_is_synchronous(rule, monkeypatch):
    monkeypatch.setitem(RULES, rule, {**RULES[rule], "max_age": None})
    trainer, other = Trainer(), Trainer()
    plain = Stream(context(other.generator, prompts(), sampling(), 0, UPDATES))
    for mine, theirs in zip(train(stream(trainer, rule, lag=0), trainer), train(plain, other), strict=True):
        equal(mine, theirs)


def log_probs(model, rollouts):
    """Return the log-probs [N, K, T] of a plain forward pass without a cache."""
    ids = torch.cat([rollouts.prompt_ids.repeat_interleave(K, 0), rollouts.response_ids.flatten(0, 1)], 1)
    mask = torch.cat([rollouts.prompt_mask.repeat_interleave(K, 0), rollouts.response_mask.flatten(0, 1)], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask.long(), position_ids=places).logits[:, -T - 1 : -1] / 1.3
    return logits.log_softmax(-1).gather(-1, ids[:, -T:, None])[..., 0].view(B, K, T)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rule", [*RULES])
def test_every_token_has_the_log_prob_of_the_version_that_it_names(rule, in_flight, whole):
    trainer, mixed, count = Trainer(), 0, 0
    made = stream(trainer, rule, slots=10, in_flight=in_flight, whole=whole, spread=1.0)
    for rollouts in train(made, trainer):
        versions = rollouts.token_versions
        if versions is None:
            versions = torch.full_like(rollouts.response_ids, rollouts.version)
        real = rollouts.response_mask
        assert rollouts.version == versions[real].min() and rollouts.trainer_version == trainer.version
        for version in versions[real].unique().tolist():
            error = (log_probs(trainer.models[version], rollouts) - rollouts.behaviour_logprobs).abs()
            assert error[real & (versions == version)].max() < 2e-5
        later = versions.masked_fill(~real, 10**6)
        assert (later.diff(dim=-1) >= 0).all(), "versions never fall within a response"
        mixed += int((versions.masked_fill(~real, 0).amax(-1) > versions[..., 0]).sum())
        count += 1
    assert count == UPDATES
    assert (mixed > 0) == in_flight


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rule", [*RULES])
def test_a_resumed_stream_continues_to_the_bit(rule, in_flight):
    settings = {"slots": 10, "in_flight": in_flight, "spread": 1.0, "stretch": 4.0, "sync_s": 2.0}
    settings["score_s"] = 1.0
    trainer = Trainer(noise=0.5)
    made = stream(trainer, rule, **settings)
    expected = list(train(made, trainer))
    for stop in (1, 5):
        first = Trainer(noise=0.5)
        drawn = []
        before = stream(first, rule, batches=counted(drawn), **settings)
        iterator = iter(before)
        for _ in range(stop):
            next(iterator)
            first.train()
        second = Trainer(stop, noise=0.5)
        saved = {"update": stop, "saved": stored(before)}
        after = stream(second, rule, batches=prompts(len(drawn) * B), **saved, **settings)
        assert after.taken == stop
        for mine, theirs in zip(train(after, second), expected[stop:], strict=True):
            equal(mine, theirs)
        assert after.context.recorder.rows == made.context.recorder.rows[stop:]
        assert after.context.recorder.lines == [
            line for line in made.context.recorder.lines if line["update"] > stop
        ]


def counted(drawn):
    """Yield batches of prompts, which are added to a list."""
    for batch in prompts():
        drawn.append(batch)
        yield batch


def test_the_progress_display_counts_responses_and_tokens_of_a_call():
    trainer, seen = Trainer(), set()
    phases = trainer.generator.phases
    with phases("update", between=lambda: seen.add(phases.text())):
        next(iter(stream(trainer)))
    assert f"update, waiting for rollouts, sampling {B * K}/{B * K}" in seen
    assert f"update, waiting for rollouts, sampling 0/{B * K}, token 1/{T}" in seen


@pytest.mark.parametrize("rule", [*RULES])
def test_each_group_has_a_line_that_agrees_with_the_metrics(rule):
    trainer = Trainer()
    made = stream(trainer, rule, slots=10, in_flight=True, spread=1.0, sync_s=2.0, score_s=1.0)
    for update, rollouts in enumerate(train(made, trainer), 1):
        lines = [line for line in made.context.recorder.lines if line["update"] == update]
        trained = [line for line in lines if line["fate"] != "dropped"]
        row = made.context.recorder.rows[-1]
        assert [line["row"] for line in trained] == rollouts.index.tolist()
        assert [line["lengths"] for line in trained] == rollouts.response_mask.sum(-1).tolist()
        assert max(update - 1 - line["version"] for line in trained) == row["rollouts/oldest"]
        assert len(lines) - len(trained) == row["rollouts/dropped"]
        assert {line["loaded"] for line in trained} == {row["rollouts/time_s"]}
        for line in trained:
            assert line["ready"] == max(line["ends"]) + 1
            assert line["ready"] <= line["taken"] + 1e-9 and line["taken"] + 2 < line["loaded"] + 1e-9
            assert line["version"] <= line["versions"][0] <= line["versions"][1] <= update - 1
    groups = [line["group"] for line in made.context.recorder.lines]
    assert len(groups) == len(set(groups)), "each group has one line"
    assert sum(line["fate"] == "cut" for line in made.context.recorder.lines) <= sum(
        row["rollouts/cut"] for row in made.context.recorder.rows
    )
    for row in made.context.recorder.rows:
        assert row["rollouts/dropped"] or row["rollouts/length_ratio"] == pytest.approx(1)


@pytest.mark.parametrize(("rule", "refills"), [("drop", False), ("pace", True)])
def test_the_prompts_of_groups_do_not_depend_on_how_far_is_sampled_ahead(rule, refills, monkeypatch):
    """Discarded prompts start again before new ones, and those that replace others are drawn at events."""
    found = []
    for share in (0.05, 3.0):
        monkeypatch.setattr(clock, "_LOOKAHEAD", share)
        trainer = Trainer()
        note = {"note": lambda batch: None, "scorer": lambda each: each.extend(Batch, scores=_odd(each))}
        refill = Refill(most=2, **note) if refills else None
        settings = {"slots": 10, "in_flight": True, "whole": False, "spread": 2.0, "balance": 0.5}
        made = stream(trainer, rule, refill=refill, step_growth=0.5, **settings)
        list(train(made, trainer))
        names = "update", "group", "row", "version", "versions", "lengths", "fate"
        found.append([[line[name] for name in names] for line in made.context.recorder.lines])
    assert found[0] == found[1]


def _odd(rollouts):
    """Return scores [N, K] that tie in about half of the groups."""
    return (rollouts.response_ids.sum(-1) % 2).float()
