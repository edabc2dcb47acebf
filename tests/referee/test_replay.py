"""Replays: same bits without data and cache, the first quantity that a change of the code changes, and files
of others, from which nothing is executed or fetched."""

import json
import os
import socket
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf.core.batch import Batch
from rlhf.core.errors import UserError
from rlhf.engines import engine as engines
from rlhf.engines.engine import TorchEngine
from rlhf.models.modules import Policy
from rlhf.objectives import grpo, policy_gradient
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.policy_gradient import PolicyGradient
from rlhf.referee.replay import differences, load, replay
from rlhf.scorers.scorer import Scorer

pytestmark = pytest.mark.run


def found(file, **options):
    """Return the names of the quantities in which a replay differs."""
    given = load(file)
    prompt = options.get("prompt")
    return [each.term for each in differences(given, replay(given, **options), prompt, whole=False)]


# -- same bits


def test_a_replay_in_another_folder_has_the_same_bits(recorded, tmp_path, monkeypatch):
    file = recorded()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    again = replay(load(file))
    assert again.header["after"] == load(file).header["after"]
    assert differences(load(file), again, whole=False) == []
    rewards = replay(load(file), only="rewards", prompt=3)
    assert rewards.tensors.keys() == {"batch/scores"}
    assert torch.equal(rewards.tensors["batch/scores"], load(file).tensors["batch/scores"][3:4])
    assert not [*tmp_path.iterdir()]


ALGORITHMS = [
    *(
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
        "ppo",
        "dpo",
        "bok",
        "distill",
        "m2po",
        "topr",
        "dppo",
    ),
    *("scalerl", "vespo", "sapo", "gpg", "reinforce_pp", "oapl"),
]
OTHERS = {
    "a judge asked ahead": ["scorer=judge", "scorer.model=m", "schedule.max_lag=1"],
    "a judge in a sum": [
        *("scorer=weighted", "+scorer@scorer.parts.facts=facts"),
        *("+scorer@scorer.parts.judge=judge", "scorer.parts.judge.model=m"),
    ],
    "lag": ["algo=dpo", "schedule.max_lag=1"],
    "replay buffer": ["algo=grpo", "schedule.replay=2"],
    "correction": ["algo=grpo", "schedule.max_lag=1", "correction=truncate"],
    "epochs": ["algo=ppo", "schedule.epochs=2"],
    "ipo": ["algo=dpo", "algo.loss_type=ipo"],
    "environment": ["algo=grpo", "task=calculator", "scorer=environment", "scorer@gold=none"],
    "adapters": ["algo=grpo", "model.lora.rank=4"],
    "moving": ["algo=grpo", "model.moving.every=1", "model.moving.decay=0.5"],
    "teacher": ["algo=distill", "algo.divergence=k1"],
    "reward model": ["algo=ppo", "scorer=reward_model"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("words", [*([f"algo={name}"] for name in ALGORITHMS), *OTHERS.values()], ids=str)
def test_the_bundle_of_every_algorithm_and_schedule_replays_with_the_same_bits(trained, recorded, words):
    teacher = [f"model.reference={trained().model}"] if "algo=distill" in words else []
    assert found(recorded(*words, *teacher)) == []


def test_the_answers_of_a_judge_are_in_the_bundle_and_no_judge_is_asked(recorded, monkeypatch):
    file = recorded("scorer=judge", "scorer.model=m")
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr("rlhf.scorers.judge.JudgeScorer.post", None)
    assert found(file, only="rewards") == []
    assert load(file).tensors["file/answers.jsonl"].numel()


# -- changes of the code


@contextmanager
def changed(owner, name, change):
    """Replace a function of the code during the block."""
    old = getattr(owner, name)
    setattr(owner, name, change(old))
    try:
        yield
    finally:
        setattr(owner, name, old)


def times(factor):
    """Return a change that multiplies the result of a function, or the first of its results."""

    def change(function):
        def scaled(*given, **named):
            result = function(*given, **named)
            return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

        return scaled

    return change


def one_more(function):
    """Return a change that raises counts by 1."""
    return lambda *given: {name: count + 1 for name, count in function(*given).items()}


def other_scores(function):
    """Return a change that adds to scores."""

    def scored(self, rollouts):
        batch = function(self, rollouts)
        batch.scores.add_(0.5)
        return batch

    return scored


def shifted(function):
    """Return a change of the positions of log-probs."""
    return lambda *given, **named: (lambda out: out._replace(logprobs=out.logprobs.roll(1, -1)))(
        function(*given, **named)
    )


def other_seed(function):
    """Return a change of the order of minibatches."""
    return lambda self, parts, epochs, seed, update: function(self, parts, epochs, seed + 1, update)


def masked(function):
    """Return a change that leaves out the last position."""
    return lambda losses, mask: function(losses[..., :-1], mask[..., :-1])


def higher(function):
    """Return a change of the learning rate of an optimizer step."""
    return lambda self, lr: function(self, lr * 1.001)


def no_bound(function):
    """Return a change that takes the smaller loss."""
    return lambda self, log_ratio, logprobs, batch: function(self, -log_ratio, logprobs, batch)


CHANGES = {  # owner, function, change, the first quantity that differs
    "rewards": (Scorer, "__call__", other_scores, "rewards"),
    "advantages": (grpo, "centred", times(1.0001), "advantages"),
    "surrogate": (PolicyGradient, "surrogate", times(1.001), "step 1: logprob_grads"),
    "KL": (policy_gradient, "kl_estimate", times(1.01), "step 1: logprob_grads"),
    "reduction": (GRPO, "reduce", times(1.01), "step 1: logprob_grads"),
    "count": (GRPO, "count", one_more, "step 1: logprob_grads"),
    "learning rate": (engines, "learning_rate", times(1.01), "step 1: lr"),
    "optimizer": (TorchEngine, "update", higher, "step 2: logprobs"),
    "clipping of gradients": (TorchEngine, "clip_gradients", times(1.001), "step 1: policy/grad_norm"),
    "order of minibatches": (Batch, "minibatches", other_seed, "step 1: rows"),
    "log-probs": (TorchEngine, "forward", shifted, "step 1: logprobs"),
    "inference": (Policy, "forward", shifted, "log-probs before the update"),
    "scale": (grpo, "scaled", times(0.5), "advantages"),
    "mask": (policy_gradient, "selected", lambda f: lambda x, m: f(x, m) * 1.5, "advantages"),
    "baseline": (GRPO, "advantages", lambda f: lambda self, r: r - r, "advantages"),
    "sign": (GRPO, "response_advantages", times(-1.0), "advantages"),
    "ratio": (PolicyGradient, "log_ratio", times(1.1), "step 1: logprob_grads"),
    "reversed ratio": (PolicyGradient, "surrogate", no_bound, "step 1: logprob_grads"),
    "counted tokens": (
        grpo,
        "trained",
        lambda f: lambda b: f(b) & (b.scores[..., None] > 99),
        "step 1: logprob_grads",
    ),
    "gradient": (
        TorchEngine,
        "backward",
        lambda f: lambda self, loss, last: f(self, loss * 0.5, last),
        "step 1: logprob_grads",
    ),
}
FAST = ("rewards", "advantages", "optimizer", "count")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.nightly) for each in CHANGES]
)
def test_a_replay_names_the_quantity_that_a_change_of_the_code_changes_first(recorded, name):
    owner, function, change, first = CHANGES[name]
    file = recorded()
    with changed(owner, function, change):
        assert found(file)[0] == first


# -- files of others


def altered(file, to, tensors=None, config=(), **header):
    """Write a bundle with other tensors (None: without), another config text and another header."""
    with safe_open(file, "pt") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        head = json.loads(opened.metadata()["rlhf"])
    for old, new in config:
        assert old in head["config"]
        head["config"] = head["config"].replace(old, new)
    kept = {name: x for name, x in {**kept, **(tensors or {})}.items() if x is not None}
    save_file(kept, to, {"rlhf": json.dumps({**head, **header})})
    return to


BYTES = torch.zeros(4, dtype=torch.uint8)
HARM = {
    "missing tensor": {"tensors": {"batch/response_ids": None}},
    "other dimensions": {"tensors": {"batch/scores": torch.zeros(3)}},
    "token that no vocabulary has": {"tensors": {"batch/response_ids": torch.full((8, 4, 16), 10**6)}},
    "text in place of a batch": {"batch": "text"},
    "other schema": {"schema": 2},
    "no counters": {"counters": None},
    "path that leaves the folder": {"tensors": {"file/../../out.json": BYTES}},
    "absolute path": {"tensors": {"file//tmp/out.json": BYTES}},
    "code": {"tensors": {"file/model/modeling_x.py": BYTES}},
    "pickle": {"tensors": {"file/model/pytorch_model.bin": BYTES}},
    "damaged optimizer": {"tensors": {"file/optimizer.pt": BYTES}},
    "interpolation": {"config": [("seed: 1", "seed: ${oc.env:HOME}")]},
    "remote code": {"config": [("trust_remote_code: false", "trust_remote_code: true")]},
    "kernel of a hub": {"config": [("attention: sdpa", "attention: someone/kernel")]},
    "loop": {"config": [("loop: null", "loop: tests.referee.test_replay:harm")]},
    "function": {
        "config": [
            ("schema/scorer@scorer: facts", "schema/scorer@scorer: function"),
            ("scorer:\n  name: facts", "scorer:\n  name: function\n  path: tests.referee.test_replay:harm"),
        ]
    },
    "number out of its bounds": {"config": [("minibatches: 2", "minibatches: 0")]},
}


def harm(*given, **named):
    """Leave a mark that the code of a file was executed."""
    os.environ["HARMED"] = "1"


@pytest.mark.parametrize("name", HARM)
def test_a_bundle_of_others_is_refused_before_anything_is_executed(recorded, tmp_path, monkeypatch, name):
    file = altered(recorded(), tmp_path / "bundle.safetensors", **HARM[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(UserError):
        replay(load(file))
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.safetensors"]
    assert "HARMED" not in os.environ


@pytest.mark.parametrize(
    "content", [b"text", b"\xff" * 8 + b"{}", (10**10).to_bytes(8, "little") + b"{}", b""]
)
def test_a_file_that_is_no_bundle_is_a_mistake_of_the_user(tmp_path, content):
    file = tmp_path / "bundle.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError):
        load(file)


def test_data_and_hooks_that_a_bundle_names_are_never_read(recorded, tmp_path):
    config = [
        ("hooks: []", "hooks: ['tests.referee.test_replay:harm']"),
        ("  path: null", "  path: /etc/passwd"),
    ]
    assert found(altered(recorded(), tmp_path / "bundle.safetensors", config=config)) == []
    assert "HARMED" not in os.environ
