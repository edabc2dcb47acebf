"""The trials of forwards and of sampling before a run uses a model: consequences, and stored results."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.models.modules import Policy
from rlhf.processes.ranks import ALONE
from rlhf.trials import agreement
from rlhf.trials.agreement import compared, samples_with_cache
from rlhf.words.compose import compose
from tests.models.architectures import tiny
from tests.tiny_models import tiny_lm


@pytest.fixture
def cfg(tmp_path):
    return compose(
        [f"cache_dir={tmp_path / 'cache'}", "task.max_prompt_tokens=20", "generator.response_length=6"]
    )


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(agreement, "KNOWN", {})


@pytest.fixture
def measured(monkeypatch):
    """Return the list of modules whose forwards were compared."""
    found, measure = [], agreement.sharing_fault
    monkeypatch.setattr(
        agreement, "sharing_fault", lambda module, batch: found.append(module) or measure(module, batch)
    )
    return found


def files(cfg):
    return sorted((Path(cfg.cache_dir) / "agreement").glob("*"))


def test_a_model_that_cannot_share_a_prompt_runs_without_with_one_warning(cfg, caplog):
    policy, reference = (Policy(tiny("mpt"), 0.7, shared_prefix=True) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        assert compared(policy, cfg, ALONE) is policy and compared(reference, cfg, ALONE) is reference
    assert not policy.shared_prefix and not reference.shared_prefix
    (warning,) = caplog.messages
    assert warning.startswith("model.shared_prefix is turned off for a mpt model (outputs differ by up to")


def test_a_model_that_can_share_a_prompt_gives_no_warning(cfg, caplog):
    policy = compared(Policy(tiny_lm(), 0.7, shared_prefix=True), cfg, ALONE)
    assert policy.shared_prefix and not caplog.messages


def test_nothing_is_said_if_the_shared_prefix_is_off_already(cfg, caplog):
    compared(Policy(tiny("mpt"), 0.7, shared_prefix=False), cfg, ALONE)
    assert not caplog.messages


def test_a_model_with_the_same_config_is_compared_once(cfg, measured, monkeypatch):
    compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    assert len(measured) == 1, "this process knows the result"
    monkeypatch.setattr(agreement, "KNOWN", {})
    compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    assert len(measured) == 1, "the result is in cache_dir"
    compared(Policy(tiny_lm(num_hidden_layers=1), 0.7, True), cfg, ALONE)
    assert len(measured) == 2 and len(files(cfg)) == 2


def test_ranks_exchange_the_result_also_if_one_of_them_knows_it(cfg, measured):
    exchanged = []
    ranks = SimpleNamespace(device=ALONE.device, first=True)
    ranks.from_first = lambda make: exchanged.append(make()) or exchanged[-1]
    for _ in range(2):  # the first rank may have compared the model alone, in a stage before the run
        compared(Policy(tiny_lm(), 0.7, True), cfg, ranks)
    assert exchanged == [None, {"fault": None}, {"fault": None}] and len(measured) == 1


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"padded": n'])
def test_a_damaged_result_is_measured_again(cfg, measured, monkeypatch, content):
    compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    (file,) = files(cfg)
    file.write_text(content)
    monkeypatch.setattr(agreement, "KNOWN", {})
    compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    assert len(measured) == 2


def test_a_cache_folder_that_cannot_be_written_is_no_error(cfg, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE).shared_prefix


def test_a_model_that_reads_later_tokens_is_refused(cfg):
    policy = Policy(tiny_lm("llama"), 0.7, shared_prefix=True)
    for layer in policy.model.model.layers:
        layer.self_attn.forward = bidirectional(layer.self_attn)
    with pytest.raises(UserError, match="earlier tokens of the same sequence only.*choose another model"):
        compared(policy, cfg, ALONE)


def bidirectional(attention):
    forward = attention.forward

    def changed(hidden_states, *args, **kwargs):
        mean = hidden_states.mean(1, keepdim=True)
        return forward(hidden_states + mean, *args, **kwargs)

    return changed


def test_a_sequence_longer_than_the_context_of_a_model_is_refused(cfg):
    with pytest.raises(UserError, match="must be <= 16"):
        compared(Policy(tiny_lm(max_position_embeddings=16), 0.7, True), cfg, ALONE)


def test_a_model_whose_cache_gives_other_samples_is_sampled_without_cache(cfg, caplog):
    def cached(kind):
        model = tiny(kind)
        return samples_with_cache(model, cfg, ALONE)

    assert cached("llama") and not caplog.messages
    assert not cached("bart")
    (warning,) = caplog.messages
    assert warning.startswith("sampling from a bart model uses no cache (outputs differ by up to")


def test_the_weights_and_the_random_state_are_as_before(cfg):
    policy = Policy(tiny_lm(), 0.7, True)
    weights = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    random = torch.get_rng_state()
    compared(policy, cfg, ALONE)
    samples_with_cache(policy.model, cfg, ALONE)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.model.state_dict().items())
