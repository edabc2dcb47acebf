"""Tests of modules without values, which ranks receive that load no checkpoint."""

import pickle

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.models.forward import build_on_first, checkpoint_blocks, is_placeholder, without_values
from rlhf.models.modules import ActorCritic, Policy, ValueModel
from rlhf.processes.ranks import Ranks
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_rollouts


def module(kind="gpt_neox", **settings):
    policy = Policy(tiny_lm(kind, **settings), 0.7, shared_prefix=True)
    checkpoint_blocks(policy.model)
    return ActorCritic(policy, ValueModel(tiny_classifier(kind), shared_prefix=True))


def received(original):
    """Return the copy without values that another rank receives."""
    return pickle.loads(pickle.dumps(without_values(original)))


def test_placeholders_have_names_shapes_and_dtypes_and_need_no_memory():
    original = module()
    original.critic.bfloat16().requires_grad_(False)
    copy = received(original)
    for (name, one), (other, two) in zip(original.named_parameters(), copy.named_parameters(), strict=True):
        assert (name, one.shape, one.dtype, one.requires_grad) == (
            other,
            two.shape,
            two.dtype,
            two.requires_grad,
        )
        assert is_placeholder(two) and two.untyped_storage().nbytes() <= 4
        assert not is_placeholder(one)


@pytest.mark.parametrize(("kind", "tied"), [("gpt_neox", False), ("llama", True)])
def test_a_copy_computes_the_same_outputs_after_it_has_received_the_values(kind, tied):
    original = module(kind, tie_word_embeddings=tied)
    copy = received(original)
    for parameter, value in zip(copy.parameters(), original.parameters(), strict=True):
        parameter.data = value.data.clone()
    rollouts = tiny_rollouts(3, 2)
    for one, two in zip(original(rollouts), copy(rollouts), strict=True):
        assert one is two is None or torch.equal(one, two)
    model = copy.actor.model
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


class Other(Ranks):
    """The second of two ranks, which receives what the first rank made."""

    made = None

    def from_first(self, make):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def test_only_the_first_rank_builds_a_module(monkeypatch):
    built = []

    def build():
        built.append(module())
        return built[-1]

    assert build_on_first(build, Ranks()) is built[0]
    monkeypatch.setattr(Other, "made", without_values(built[0]))
    assert build_on_first(build, Other(rank=1, size=2)) is Other.made
    assert len(built) == 1


def test_an_error_of_the_first_rank_is_raised_on_the_others(monkeypatch):
    monkeypatch.setattr(Other, "made", UserError("model.policy must name a model"))
    with pytest.raises(UserError, match=r"model\.policy"):
        build_on_first(module, Other(rank=1, size=2))
