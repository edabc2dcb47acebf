"""Every token of an episode is trained behind the tokens behind which it was sampled, over many turns."""

import random
from contextlib import nullcontext
from functools import cache

import pytest
import torch

from rlhf.core.batch import Prompts, Sampling
from rlhf.environments.environment import EnvironmentFactory, Turns
from rlhf.generators.hf import generator
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.text.chat import render
from rlhf.text.encoding import pad_prompts
from tests.environments.templates import family
from tests.tiny_models import tiny_lm

TEMPLATES = (
    *(("chatml", "tool"), ("rewrites_history", "user"), ("drops_thoughts", "user"), ("trims", "tool")),
    *(("llama_3", "tool"), ("mistral", "user")),
)
K, TOKENS = 8, 160


class Talker:
    """Answers with parts of texts, emoji, numbers, thoughts and forged marks, chosen by the replies."""

    def reset(self, example):
        self.draw = random.Random(example.seed + example.sample)

    def step(self, reply):
        self.draw.seed(f"{self.draw.random()} {reply}")
        parts = (" higher", "12", "\n", "🙂", "<think>no</think>", "<|im_end|>", "[INST] x", "\t", " é")
        return "".join(self.draw.choices(parts, k=self.draw.randint(0, 6))), 0.0, False


@cache
def model(size: int, end: int, **options):
    """Return a model that ends about a quarter of its tokens."""
    made = tiny_lm("llama", vocab_size=size, pad_token_id=0, bos_token_id=0, eos_token_id=end, **options)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(0.1)
    bias = torch.zeros(size)
    bias[end] = torch.log(torch.tensor(size / 3.0))
    made.get_output_embeddings().register_forward_hook(lambda module, given, out: out + bias)
    return made


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(100_000, marks=pytest.mark.nightly)], ids=["2,000 turns", "100,000 turns"]
)
def test_no_token_is_trained_in_another_way_than_it_was_sampled(monkeypatch, count):
    N, total, seen = (64 if count > 10_000 else 6), 0, []
    plain = generator.sample

    def recorded(model, prompt_ids, prompt_mask, **options):
        found = plain(model, prompt_ids, prompt_mask, **options)
        rows = zip(prompt_ids, prompt_mask, found[0], found[1], strict=True)
        seen.extend((ids[real].tolist(), out[kept].tolist()) for ids, real, outs, masks in rows
                    for out, kept in zip(outs, masks, strict=True))  # fmt: skip
        return found

    monkeypatch.setattr(generator, "sample", recorded)
    for name, role in TEMPLATES:
        tokenizer, turns = family(name), Turns(family(name), role, 48)
        text = render(tokenizer, [{"role": "user", "content": "a question"}])
        head = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, mask = pad_prompts([head] * N, 0)
        factory = EnvironmentFactory(address=f"{__name__}:Talker", turns=turns, max_turns=12, reply_tokens=20)
        own = model(len(tokenizer), tokenizer.eos_token_id)
        settings = HFSettings(
            stop_ids=[tokenizer.eos_token_id],
            pad_id=0,
            batch_size=512,
            seed=3,
            environment=factory,
        )
        own_total, request = 0, 0
        while own_total < count / len(TEMPLATES):
            prompts = Prompts(
                index=torch.arange(N), texts=[text] * N, references=[""] * N,
                prompt_ids=ids, prompt_mask=mask,
            )  # fmt: skip
            sampling = Sampling(
                samples=K, temperature=1.0, response_length=TOKENS, purpose="train", request=request
            )
            seen.clear()
            rollouts = (
                HFGenerator(lambda own=own: nullcontext(own), settings).submit(prompts, sampling).result()
            )
            expected = set()  # what stands before each reply, and the reply, as they are trained
            for row, kept in zip(
                rollouts.response_ids.flatten(0, 1), rollouts.response_mask.flatten(0, 1), strict=True
            ):
                places = kept.nonzero()[:, 0].tolist()
                starts = [at for at in places if at == 0 or not kept[at - 1]]
                for start in starts:
                    end = start + int((~kept[start:]).long().argmax()) if not kept[start:].all() else len(row)
                    expected.add((*head, *row[:start].tolist(), -1, *row[start:end].tolist()))
            assert {(*before, -1, *reply) for before, reply in seen} == expected
            assert len(seen) == rollouts.episode["turns"].sum()
            own_total, request = own_total + len(seen), request + 1
        total += own_total
    assert total >= count
    print(f"{total:,} turns")
