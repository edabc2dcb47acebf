"""Tests of the sampler: log-probs, batching, CUDA graphs and draws from the distribution of tokens."""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from itertools import combinations
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf.config.generators import HFConfig
from rlhf.core.batch import Prompts, Sampling
from rlhf.core.errors import UserError
from rlhf.core.launched import derive
from rlhf.generators.hf import decoding
from rlhf.generators.hf import generator as sampling
from rlhf.generators.hf.decoding import GROUPED, grouped_attention
from rlhf.generators.hf.generator import HFGenerator, HFSettings, build, choose, respond, sample, uniforms
from rlhf.memory.uses import Tokens
from rlhf.models import folder
from rlhf.models.forward import NoBlocks, attention_of
from rlhf.models.modules import Policy
from tests import needs
from tests.tiny_models import KINDS, VOCABULARY, tiny_lm, tiny_rollouts

LENGTH = 12
STOPS = [3, 4, 5, 6, 7, 8, 9, 10]  # many, so that rows end at different steps


def settings(batch_size: int, noise: float = 0.0) -> HFSettings:
    return HFSettings(stop_ids=STOPS, pad_id=0, batch_size=batch_size, seed=1, noise=noise)


def request(samples=2, purpose="train") -> Sampling:
    return Sampling(samples=samples, temperature=0.7, response_length=LENGTH, purpose=purpose)


def prompts_of(batch) -> Prompts:
    return Prompts(**{f.name: getattr(batch, f.name) for f in fields(Prompts)})


def close(found, expected, atol=1e-5):
    for same, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(same, wanted, rtol=0, atol=atol)


def run(
    model, rows=slice(None), samples=2, temperature=0.7, stops=STOPS, length=LENGTH, numbers=None, **more
):
    batch = tiny_rollouts(prompts=6)
    if numbers is None:
        numbers = uniforms(1, 0, batch.index, samples, length)
    ids, mask = batch.prompt_ids[rows], batch.prompt_mask[rows]
    return sample(model, ids, mask, samples, length, temperature, numbers[rows], stops, pad_id=0, **more)


def rollouts(ids, mask, ended):
    return replace(tiny_rollouts(prompts=6), response_ids=ids, response_mask=mask, ended=ended)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # eager: one row per sample; sdpa: shared rows
@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_logprobs_equal_the_logprobs_of_the_trainer(kind, shared_prefix, attention):
    model = tiny_lm(kind)
    model.set_attn_implementation(attention)
    ids, mask, logprobs, ended = run(model)
    with torch.no_grad():
        trained = Policy(model, 0.7, shared_prefix)(rollouts(ids, mask, ended)).logprobs
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, trained, rtol=0, atol=1e-5)


def test_tokens_do_not_depend_on_other_rows_on_more_samples_or_on_padding():
    model, batch = tiny_lm(), tiny_rollouts(prompts=6)
    ids, mask, logprobs, ended = run(model)
    for rows in ([5, 3, 0, 1, 4, 2], [2], [4, 1]):
        some, some_mask, some_logprobs, some_ended = run(model, rows)
        width = some.shape[-1]
        assert torch.equal(some, ids[rows][..., :width]) and torch.equal(some_mask, mask[rows][..., :width])
        assert torch.equal(some_ended, ended[rows]) and not mask[rows][..., width:].any()
        torch.testing.assert_close(some_logprobs, logprobs[rows][..., :width], rtol=0, atol=1e-5)
    three = run(model, samples=3)[0]
    width = min(ids.shape[-1], three.shape[-1])
    assert torch.equal(ids[..., :width], three[:, :2, :width]) and not torch.equal(ids[:, 0], ids[:, 1])
    filled, numbers = (
        batch.prompt_ids.masked_fill(~batch.prompt_mask, -100),
        uniforms(1, 0, batch.index, 2, LENGTH),
    )
    found = sample(model, filled, batch.prompt_mask, 2, LENGTH, 0.7, numbers, STOPS, pad_id=0)
    close(found, (ids, mask, logprobs, ended), atol=0)


@pytest.mark.parametrize(
    ("samples", "prompt", "response", "group"),
    [(4, 24, 48, 4), (128, 64, 32, 8), (128, 512, 32, 64), (12, 24, 480, 6), (11, 24, 48, 11), (1, 9, 1, 1)],
)
def test_more_samples_share_a_row_if_responses_are_short_relative_to_prompts(
    samples, prompt, response, group
):
    assert folder.in_decoding(samples, prompt, response) == group
    planned = Tokens(prompts=3, samples=samples, prompt=prompt, response=response)
    assert planned.decoded_a_row(eager=False) == group and planned.decoded_a_row(eager=True) == 1


@pytest.mark.parametrize("group", [1, 2, 3])
def test_tokens_do_not_depend_on_how_many_samples_share_a_row(monkeypatch, group):
    model, sizes = tiny_lm(), []
    expected = run(model, samples=6)
    monkeypatch.setattr(folder, "in_decoding", lambda *_: group)
    model.base_model.register_forward_hook(lambda *call: sizes.append(call[2].last_hidden_state.shape[:2]))
    close(run(model, samples=6), expected)
    assert sizes[1][1] == group


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tokens_do_not_depend_on_how_many_prompts_are_encoded_at_once(monkeypatch, attention):
    encoded, model = [], tiny_lm()
    model.set_attn_implementation(attention)
    expected = run(model, samples=3)
    order = tiny_rollouts(prompts=6).prompt_mask.sum(1).argsort(descending=True)
    monkeypatch.setitem(decoding.TOKENS, "cpu", 18)  # two prompts of the greatest length
    model.base_model.register_forward_hook(lambda *call: encoded.append(call[2].last_hidden_state.shape[:2]))
    for found, wanted in zip(run(model, rows=order, samples=3), expected, strict=True):
        torch.testing.assert_close(found, wanted[order], rtol=0, atol=1e-5)
    lengths = tiny_rollouts(prompts=6).prompt_mask.sum(1)[order].tolist()
    assert encoded[:3] == [(2, lengths[0]), (2, lengths[2]), (2, lengths[4])] and lengths[4] < lengths[0]


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_an_answer_keeps_the_order_of_prompts_for_all_lengths_and_batch_sizes(noise):
    batch, model, versions = tiny_rollouts(prompts=6, seed=1), tiny_lm(), iter(range(99))
    prompts = prompts_of(batch)
    asked = request()
    whole, parts = (respond(model, prompts, asked, settings(size, noise)) for size in (256, 4))
    assert len({tuple(row) for row in whole.response_ids.flatten(1).tolist()}) == 6
    for name in ("response_ids", "response_mask", "ended"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))
    torch.testing.assert_close(parts.behaviour_logprobs, whole.behaviour_logprobs, rtol=0, atol=1e-5)
    for i in range(6):
        alone = respond(model, prompts.select(torch.tensor([i])), asked, settings(256, noise))
        assert torch.equal(alone.response_ids[0], whole.response_ids[i])
    followed = respond(model, prompts, asked, settings(4, noise), update=lambda: next(versions))
    order = prompts.prompt_mask.sum(1).argsort(descending=True, stable=True)
    begun = followed.token_versions[order, :, 0]  # prompts are decoded in batches of two
    assert torch.equal(begun[::2], begun[1::2]) and (begun[::2].diff(dim=0) > 0).all()


def test_grouped_query_attention_does_not_repeat_the_cache(monkeypatch):
    keys, model = [], tiny_lm("llama")

    def attend(module, query, key, value, mask, **settings):
        keys.append(key.shape[1])
        return grouped_attention(module, query, key, value, mask, **settings)

    decoding.AttentionInterface.register(GROUPED, attend)
    try:
        *_, ended = run(model, stops=[])
    finally:
        decoding.AttentionInterface.register(GROUPED, grouped_attention)
    assert not ended.any() and keys == [2] * 2 * (LENGTH - 1)  # 2 key heads for 4 query heads, 2 layers
    assert model.config._attn_implementation == "sdpa"
    module = model.base_model.layers[0].self_attn
    query, key, value = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    mask = torch.rand(3, 1, 5, 11) > 0.3
    expected = sdpa_attention_forward(module, query, key, value, mask, scaling=0.2)[0]
    found = grouped_attention(module, query, key, value, mask, scaling=0.2)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batch_size", [256, 4])
def test_sampled_rollouts_can_be_trained_on(batch_size):
    batch, model, versions = tiny_rollouts(prompts=6), tiny_lm(), iter(range(99))
    prompts = prompts_of(batch)
    asked = request()
    sampled = respond(model, prompts, asked, settings(batch_size), update=lambda: next(versions))
    tensors = [value for f in fields(sampled) if isinstance(value := getattr(sampled, f.name), torch.Tensor)]
    assert len(tensors) == 8 and not any(x.is_inference() for x in tensors)
    Policy(model, 0.7, True)(sampled).logprobs.sum().backward()
    assert all(p.grad is not None for p in model.base_model.parameters())


def test_a_response_ends_with_its_first_stop_token_and_is_padded_after_it():
    ids, mask, logprobs, ended = run(tiny_lm())
    stops = torch.isin(ids, torch.tensor(STOPS))
    assert ended.any() and not ended.all()
    lengths = mask.sum(-1)
    assert torch.equal(mask, torch.arange(ids.shape[-1]) < lengths[..., None])
    assert torch.equal((stops & mask).sum(-1), ended.long())
    last = ids.gather(-1, lengths[..., None] - 1)[..., 0]
    assert torch.equal(torch.isin(last, torch.tensor(STOPS)), ended)
    assert (lengths[~ended] == LENGTH).all() and len(set(lengths[ended].tolist())) > 2
    assert not ids[~mask].any() and not logprobs[~mask].any()


def test_finished_rows_are_removed_and_decoding_ends_with_the_longest_response():
    sizes, model = [], tiny_lm()
    model.base_model.register_forward_hook(lambda *call: sizes.append(len(call[2].last_hidden_state)))
    _, mask, _, _ = run(model, stops=range(2, 25))
    needed = mask.any(1).sum(0).tolist()  # number of prompts with an unfinished response, per step
    assert needed[0] == sizes[0] == 6 and sizes[-1] < 6
    assert sizes == [6, *needed[1:]]
    sizes.clear()
    ids, mask, _, ended = run(model, stops=range(2, 80))
    assert ended.all() and ids.shape[-1] == int(mask.sum(-1).max()) == len(sizes) < LENGTH


@pytest.fixture
def graphs(monkeypatch):
    """Replace recorded CUDA graphs by plain calls, with 4 steps per graph; return a list of recordings."""
    recorded = []
    monkeypatch.setattr(sampling, "can_record", lambda device: True)
    monkeypatch.setattr(decoding, "record", lambda run: recorded.append(1) or run)
    monkeypatch.setattr(decoding, "STEPS", 4)
    return recorded


@pytest.mark.parametrize("stops", [[], STOPS, range(2, 25), range(2, 80)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_fixed_memory_give_the_same_samples(kind, stops, graphs, monkeypatch):
    model = tiny_lm(kind)
    found = run(model, samples=3, stops=stops)
    assert graphs
    monkeypatch.setattr(sampling, "can_record", lambda device: False)
    close(found, run(model, samples=3, stops=stops))


@pytest.mark.process  # the compiler tests the instructions of the processor in a process
def test_compiled_steps_give_the_same_samples_and_are_compiled_once(graphs):
    model, count = tiny_lm("gpt_neox"), torch._dynamo.utils.counters["stats"]
    expected, before = run(model, samples=3), count["unique_graphs"]
    for _ in range(2):
        close(run(model, samples=3, compiled=True), expected)
    assert count["unique_graphs"] == before + 1, "one graph for all blocks and all lengths of the cache"


@pytest.mark.parametrize("compiling", [True, False])
def test_the_setting_compiles_the_steps_and_their_weights_are_converted_once(graphs, monkeypatch, compiling):
    batch, model, dtypes = tiny_rollouts(prompts=6), tiny_lm("llama"), []
    linear = model.base_model.layers[0].mlp.up_proj

    @contextmanager
    def noted(model):
        dtypes.append(linear.weight.dtype)
        yield

    monkeypatch.setattr(decoding, "compiled", noted)
    prompts = prompts_of(batch)
    asked = request()
    chosen = replace(settings(256), compile=compiling)
    with torch.autocast("cpu", torch.bfloat16):
        respond(model, prompts, asked, chosen)
        assert set(dtypes) == ({torch.bfloat16} if compiling else set())
        dtypes.clear()
        # Weights that change in flight are not converted.
        respond(model, prompts, asked, chosen, update=lambda: dtypes.append(linear.weight.dtype) or 1)
    assert set(dtypes) == {torch.float32} and linear.weight.dtype == torch.float32


def test_a_model_without_blocks_is_refused_before_it_samples():
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="odd")
    with pytest.raises(UserError, match=r"generator.compile must be false \(the code of odd models"):
        build(HFConfig(compile=True), SimpleNamespace(policy=model))


def test_steps_whose_compilation_fails_run_as_usual(graphs, monkeypatch, caplog):
    @contextmanager
    def broken(model):
        raise NoBlocks("no compiler")
        yield

    model, expected = tiny_lm(), run(tiny_lm())
    monkeypatch.setattr(decoding, "compiled", broken)
    close(run(model, compiled=True), expected)
    assert "no compiler" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_attention_of_compiled_steps_calls_the_kernel_with_the_keys_of_the_cache(
    kind, graphs, monkeypatch
):
    model, calls = tiny_lm(kind), []
    expected = run(model, samples=3)

    def attend(query, key, value, mask, scale):
        calls.append(query.dtype == key.dtype)
        sharing = query.shape[1] // key.shape[1]
        keys, values = (x.double().repeat_interleave(sharing, 1) for x in (key, value))
        weights = ((query.double() @ keys.mT) * scale + mask.double()).softmax(-1)
        return (weights @ values).transpose(1, 2).to(query.dtype)

    kernel = ModuleType("kernel")
    kernel.attend, kernel.fits = attend, lambda query, key, value: True
    monkeypatch.setitem(sys.modules, "rlhf.generators.hf.kernel", kernel)
    monkeypatch.setattr(decoding, "compiled", lambda model: attention_of(model, decoding.KERNEL))
    close(run(model, samples=3, compiled=True), expected)
    assert len(calls) > 2 * 2 and all(calls), "two layers, several steps"
    assert model.config._attn_implementation == "sdpa"


def test_rows_and_cache_length_change_only_between_graphs(graphs, monkeypatch):
    sizes, model = [], tiny_lm("llama")
    attend = decoding.grouped_attention

    def seen(module, query, key, *rest, **settings):
        sizes.append((len(key), key.shape[2]))
        return attend(module, query, key, *rest, **settings)

    decoding.AttentionInterface.register(GROUPED, seen)
    try:
        _, mask, *_ = run(model, stops=range(2, 25))
    finally:
        decoding.AttentionInterface.register(GROUPED, attend)
    going, steps = mask.any(1).sum(0).tolist(), sizes[::2]  # one of the two layers
    ends = [min(LENGTH - 1, t + 4) for t in range(0, LENGTH - 1, 4)]
    assert [rows for rows, _ in steps] == [going[1 + t // 4 * 4] for t in range(len(steps))]
    longest = int(tiny_rollouts(prompts=6).prompt_mask.sum(1).max())
    assert len(set(steps)) == len(ends) > 2
    assert [length % decoding.forward.ALIGNED for _, length in steps] == [0] * len(steps)
    assert all(length >= longest + 2 * ends[t // 4] for t, (_, length) in enumerate(steps))


def test_too_little_memory_for_a_graph_affects_only_the_batch(graphs, monkeypatch, caplog):
    model, expected = tiny_lm(), run(tiny_lm())
    graphs.clear()

    def full(step):
        graphs.append(0)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    for number, record in enumerate((full, lambda step: graphs.append(1) or step)):
        monkeypatch.setattr(decoding, "record", record)
        close(run(model), expected)
        assert set(graphs) == {number}
        graphs.clear()
    assert caplog.text.count("too little memory for a CUDA graph of") == 1


def test_a_model_that_reads_the_cache_length_is_sampled_without_graphs(graphs, caplog):
    model, asked = tiny_lm(), []
    expected = run(model)
    assert graphs and not caplog.records
    graphs.clear()

    def ask(module, args, kwargs):
        asked.append((kwargs.get("cache") or kwargs["past_key_values"]).get_seq_length())

    model.base_model.register_forward_pre_hook(ask, with_kwargs=True)
    for _ in range(2):
        close(run(model), expected)
    steps = asked[1 : len(asked) // 2]
    assert not graphs and steps == sorted(set(steps))
    assert caplog.text.count("not recorded as a CUDA graph") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_gives_the_same_samples_as_single_steps(kind, dtype, monkeypatch, caplog):
    recorded, record = [], decoding.record
    monkeypatch.setattr(decoding, "record", lambda run: recorded.append(1) or record(run))
    monkeypatch.setattr(decoding, "STEPS", 4)
    model, batch = tiny_lm(kind).cuda(), tiny_rollouts(prompts=6).to("cuda")
    numbers = uniforms(1, 0, batch.index.cpu(), 3, LENGTH)
    found = []
    for graphs in (True, False):
        monkeypatch.setattr(sampling, "can_record", lambda device, graphs=graphs: graphs)
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            words = (model, batch.prompt_ids, batch.prompt_mask, 3, LENGTH, 0.7, numbers, range(2, 25))
            found.append(sample(*words, pad_id=0))
    assert len(recorded) > 1 and not caplog.records
    close(*found, atol=1e-4)


class Casts(TorchDispatchMode):
    """A dispatch mode that counts casts of weights and of cached keys or values to bfloat16."""

    weights = caches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is torch.ops.aten._to_copy and kwargs.get("dtype") is torch.bfloat16:
            self.weights += isinstance(args[0], torch.nn.Parameter)
            self.caches += args[0].dim() == 4 and args[0].shape[2] > LENGTH
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_weights_once_and_the_cache_never(kind):
    model = tiny_lm(kind)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        run(model, samples=3, stops=[])
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert casts.weights == sum(1 + (layer.bias is not None) for layer in layers)
    assert casts.caches == 0


def test_tokens_follow_the_distribution():
    draws, words = 20_000, 20
    logits = torch.randn(1, words, generator=torch.Generator().manual_seed(0)).expand(draws, -1)
    numbers = uniforms(1, 0, torch.arange(draws), 1, 1)[:, 0, 0]
    tokens, logprobs = choose(logits, 0.7, numbers)
    expected = (logits[0] / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=words)
    chi_square = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi_square < 43.8  # the 99.9 % point with 19 degrees of freedom
    torch.testing.assert_close(logprobs, expected[tokens].log())


def test_noise_gives_log_probs_of_the_distribution_that_the_token_was_drawn_from():
    draws, words = 40_000, 20
    logits = torch.randn(words, generator=torch.Generator().manual_seed(0))
    clean = (logits / 0.7).log_softmax(-1)
    numbers = uniforms(1, 0, torch.arange(draws), 1, 1)[:, 0, 0]
    tokens, logprobs = choose(logits.expand(draws, -1), 0.7, numbers, noise=0.1)
    # Var[noise of the token - mean noise] / 0.7^2, where both are weighted with the probabilities
    variance = (0.1 / 0.7) ** 2 * (1 - clean.exp().square().sum())
    torch.testing.assert_close((logprobs - clean[tokens]).var(), variance, rtol=0.03, atol=0)

    tokens, logprobs = choose(logits.expand(draws, -1), 0.7, numbers, noise=0.7)
    weights = (clean[tokens] - logprobs).exp()  # they turn the noisy distributions into the clean one
    for weight, follows in ((weights, True), (torch.ones(draws), False)):
        counted = torch.zeros(words).index_add_(0, tokens, weight)
        deviation = torch.zeros(words).index_add_(0, tokens, weight**2).sqrt()
        chi_square = (((counted - draws * clean.exp()) / deviation) ** 2).sum()
        assert (chi_square < 45.3) == follows  # the 99.9 % point with 20 degrees of freedom


def test_parts_of_responses_have_the_noise_of_whole_responses():
    batch, model = tiny_rollouts(prompts=6), tiny_lm()
    prompts = prompts_of(batch)
    asked = request(1)
    whole = respond(model, prompts, asked, settings(256, 0.5))
    generator = HFGenerator(lambda: nullcontext(model), settings(4, 0.5))
    numbers = uniforms(derive(1, "sample", "train"), 0, batch.index, 1, LENGTH)
    first = whole.response_mask.sum(-1) // 2
    for i in range(6):
        cut, length = int(first[i]), int(whole.response_mask[i].sum())
        before = whole.response_ids[i, :, :cut]
        ids = torch.cat([batch.prompt_ids[i][batch.prompt_mask[i]], before[0]])[None]
        rows = replace(prompts.select(torch.tensor([i])), prompt_ids=ids, prompt_mask=ids >= 0)
        own = {"numbers": numbers[i : i + 1, :, cut:], "most": torch.tensor([[LENGTH - cut]])}
        rest = generator.submit(rows, replace(asked, response_length=LENGTH - cut, **own)).result()
        tokens, logprobs = (
            x[0, 0, : length - cut].tolist() for x in (rest.response_ids, rest.behaviour_logprobs)
        )
        assert tokens == whole.response_ids[i, 0, cut:length].tolist()
        expected = whole.behaviour_logprobs[i, 0, cut:length]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("words", [300, 1024, 5000, 50_304])
def test_a_token_of_a_large_vocabulary_is_the_quantile_of_its_uniform_number(words, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(40, words, generator=draw)
    logits[:, words // 3 : words // 2] = -torch.inf
    logits[::2, : words - 2] -= 30  # in every second row, the last two tokens have nearly all the probability
    numbers = uniforms(1, 0, torch.arange(40), 1, 1)[:, 0, 0]
    numbers[:4] = torch.tensor([0.0, 0.0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    expected = logits.double().div(0.7).log_softmax(-1)
    after = expected.exp().cumsum(-1)
    for chunk in (sampling.CPU_CHUNK, 7 * words):
        monkeypatch.setattr(sampling, "CPU_CHUNK", chunk)
        tokens, logprobs = choose(logits, 0.7, numbers)
        own = expected.gather(-1, tokens[:, None])[:, 0]
        until = after.gather(-1, tokens[:, None])[:, 0]
        assert own.isfinite().all() and (numbers < until + 1e-6).all()
        assert (numbers > until - own.exp() - 1e-6).all()
        torch.testing.assert_close(logprobs, own.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("words", [20, 5000])
def test_nan_logits_give_a_valid_token_and_a_nan_logprob(words):
    tokens, logprobs = choose(torch.full((3, words), torch.nan), 1.0, torch.rand(3, dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < words)).all() and logprobs.isnan().all()


def test_near_greedy_sampling_takes_the_most_likely_token_without_nan():
    model = tiny_lm()
    ids, mask, logprobs, ended = run(model, temperature=0.01)
    assert logprobs.isfinite().all() and (logprobs <= 0).all()
    batch = rollouts(ids, mask, ended)
    prompt = batch.prompt_ids[1][batch.prompt_mask[1]]
    for token in ids[1, 0][mask[1, 0]]:
        logits = model(prompt[None]).logits[0, -1]
        assert logits[token] > logits.max() - 0.15  # 15 nats at this temperature
        prompt = torch.cat([prompt, token[None]])
    huge = torch.tensor([[1e4, -1e4, 0.0]])
    token, logprob = choose(huge, 0.01, torch.tensor([0.5], dtype=torch.float64))
    assert token.item() == 0 and logprob.item() == 0


def test_sampled_logprobs_of_a_sliding_window_model_equal_the_logprobs_of_the_trainer():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(sliding_window=8, initializer_range=0.2, **sizes, **heads)
    model = MistralForCausalLM(config).eval()
    ids, mask, logprobs, ended = run(model)
    assert mask.sum(-1).max() > 8
    with torch.no_grad():
        trained = Policy(model, 0.7, shared_prefix=False)(rollouts(ids, mask, ended)).logprobs
    torch.testing.assert_close(logprobs, trained, rtol=0, atol=1e-5)


def test_uniform_numbers_depend_on_seed_request_and_example():
    index = torch.tensor([7, 3, 10**9])
    numbers = uniforms(1, 5, index, 2, 4)
    assert numbers.shape == (3, 2, 4) and numbers.dtype == torch.float64
    assert torch.equal(numbers[1:], uniforms(1, 5, index[1:], 2, 4))
    assert torch.equal(numbers, uniforms(1, 5, index, 3, 4)[:, :2])
    for other in (uniforms(2, 5, index, 2, 4), uniforms(1, 6, index, 2, 4), uniforms(1, 5, index + 1, 2, 4)):
        assert not (numbers == other).any()
    many = uniforms(1, 0, torch.arange(500), 2, 50)
    assert many.unique().numel() == many.numel() and (many >= 0).all() and (many < 1).all()
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.01
    probabilities = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25]]).expand(7, -1)
    numbers = torch.tensor([0.0, 0.2, 0.26, 0.74, 0.76, 0.99, 1 - 2**-53], dtype=torch.float64)
    assert choose(probabilities.log(), 1.0, numbers)[0].tolist() == [1, 1, 2, 2, 4, 4, 4], "the quantiles"


def test_purposes_draw_different_random_numbers_and_only_training_samples_have_noise():
    prompts, model = prompts_of(tiny_rollouts(prompts=6)), tiny_lm()
    drawn = []
    for purpose in ("train", "eval", "eval-kl"):
        asked = request(purpose=purpose)
        first, again, noisy = (respond(model, prompts, asked, settings(16, x)) for x in (0.0, 0.0, 0.5))
        assert torch.equal(first.response_ids, again.response_ids)
        assert torch.equal(first.behaviour_logprobs, noisy.behaviour_logprobs) == (purpose != "train")
        drawn.append(first.response_ids)
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_the_attention_implementation(kind):
    model = tiny_lm(kind)
    expected = run(model, samples=3, stops=range(2, 25))
    model.set_attn_implementation("eager")
    for found, wanted in zip(run(model, samples=3, stops=range(2, 25)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
