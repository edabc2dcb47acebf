"""Batches of a task: tokenization, order, resuming, padding, stored completions."""

from dataclasses import dataclass, field
from itertools import islice

import pytest
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk

from rlhf.config.algorithms import Data
from rlhf.core.errors import UserError
from rlhf.tasks.source import word_tokenizer
from rlhf.tasks.task import Task
from rlhf.text.encoding import encode_completions

WORDS = [f" w{i}" for i in range(20)]


@dataclass
class ListSource:
    """A data source with the same rows, from lists, in every split."""

    queries: list[str] = field(default_factory=lambda: [" w0" * (1 + i % 5) for i in range(10)])
    extra: dict[str, list[str]] = field(default_factory=dict)

    def prompts(self, split: str) -> Dataset:
        references = [f" w{i}<|endoftext|>" for i in range(len(self.queries))]
        return Dataset.from_dict({"query": self.queries, "reference_response": references, **self.extra})

    def preferences(self, split: str) -> Dataset:
        return Dataset.from_dict(
            {"prompt": self.queries, "chosen": [" w1 w2"] * 10, "rejected": [" w3"] * 10}
        )


def make_task(source: ListSource | None = None, **changes: object) -> Task:
    settings = {"data": Data.prompts, "prompts_per_update": 4, "max_prompt_tokens": 10, "seed": 3}
    return Task(source or ListSource(), tokenizer(), **(settings | changes))  # type: ignore[arg-type]


def tokenizer():
    return word_tokenizer(WORDS, r" ?\w+")


def test_batches_from_the_middle_equal_the_batches_of_an_uninterrupted_run():
    whole = list(islice(make_task().prompts(0), 9))
    resumed = list(islice(make_task().prompts(5), 4))
    for a, b in zip(whole[5:], resumed, strict=True):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.prompt_ids, b.prompt_ids)


def test_the_fingerprint_depends_only_on_the_content_of_the_examples(tmp_path):
    made = {
        "as it is": make_task(),
        "of another text": make_task(ListSource(queries=[" w1", *ListSource().queries[1:]])),
        "of other rows": make_task(ListSource(queries=ListSource().queries[:9])),
        "in another order": make_task(ListSource(queries=ListSource().queries[::-1])),
        "of another reference": make_task(ListSource(extra={"reference_response": [" w5"] * 10})),
        "of pairs": make_task(data=Data.preferences),
        "of fewer prompts": make_task(max_prompt_tokens=4),
    }
    found = {name: task.fingerprint() for name, task in made.items()}
    assert len(set(found.values())) == len(made)
    assert all(len(each) == 16 for each in found.values())
    assert make_task(seed=9, prompts_per_update=2).fingerprint() == found["as it is"]

    class FromDisk(ListSource):
        def prompts(self, split):
            parts = [ListSource.prompts(self, split).select(rows) for rows in (range(3), range(3, 10))]
            concatenate_datasets(parts).save_to_disk(tmp_path / "data")
            return load_from_disk(tmp_path / "data")

    assert make_task(FromDisk()).fingerprint() == found["as it is"], (
        "location and chunks of the data do not matter"
    )


def test_every_epoch_contains_every_example_once_in_another_order_that_the_seed_determines():
    index = torch.cat([batch.index for batch in islice(make_task().prompts(), 10)]).view(4, 10)
    assert torch.equal(index.sort(dim=1).values, torch.arange(10).repeat(4, 1))
    assert len({tuple(epoch.tolist()) for epoch in index}) == 4
    assert not torch.equal(next(make_task(seed=1).prompts()).index, next(make_task(seed=2).prompts()).index)
    large = next(make_task(prompts_per_update=25).prompts()).index  # a batch may be larger than the data
    assert len(large) == 25 and set(large[:10].tolist()) == set(large[10:20].tolist()) == set(range(10))


def test_prompts_are_padded_on_the_left():
    batch = make_task().held_out(3)
    assert batch.prompt_mask.tolist() == [[False, False, True], [False, True, True], [True, True, True]]
    assert batch.prompt_ids.dtype == torch.int64
    assert (batch.prompt_ids[~batch.prompt_mask] == tokenizer().pad_token_id).all()


def test_too_long_prompts_are_skipped_and_counted(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        task = make_task(max_prompt_tokens=3, prompts_per_update=6)
        assert len(task) == 6
    assert "skipped 4 of 10" in caplog.text
    batch = next(task.prompts())
    assert batch.prompt_mask.sum(1).max() <= 3
    assert set(batch.index.tolist()) == {0, 1, 2, 5, 6, 7}, "the numbers of rows in the data set"
    assert batch.references == [f" w{i}" for i in batch.index.tolist()], "without end tokens"
    with pytest.raises(UserError, match=r"task\.max_prompt_tokens must be .* some of the 10 prompts"):
        len(make_task(max_prompt_tokens=0))


def test_a_tokenizer_without_pad_token_is_refused():
    bare = tokenizer()
    bare.pad_token = None
    with pytest.raises(ValueError, match=r"model\.pad_token must be set"):
        Task(ListSource(), bare, data=Data.prompts, prompts_per_update=1, max_prompt_tokens=9, seed=1)


def test_reference_data_has_one_completion_per_prompt():
    batch = make_task(data=Data.references).held_out(2)
    assert batch.completions == [[" w0"], [" w1"]]
    assert batch.labels is None


def test_demonstrations_are_the_completions_and_references_do_not_change():
    source = ListSource(extra={"demonstration": [" w9<|endoftext|>"] * 10})
    batch = make_task(source, data=Data.references).held_out(2)
    assert batch.completions == [[" w9"], [" w9"]]
    assert batch.references == [" w0", " w1"]


def test_pairs_are_chosen_then_rejected_with_labels():
    task = make_task(data=Data.preferences)
    batch = task.held_out(2)
    assert batch.completions == [[" w1 w2", " w3"]] * 2
    assert torch.equal(batch.labels, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert task.held_out(2, data=Data.prompts).completions is None


def test_pairs_that_repeat_their_prompt_are_cut_to_the_responses():
    class Repeating(ListSource):
        def preferences(self, split: str) -> Dataset:
            return (
                super()
                .preferences(split)
                .map(lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")})
            )

    batch = make_task(Repeating(), data=Data.preferences).held_out(2)
    assert batch.completions == [[" w1 w2", " w3"]] * 2
    assert batch.references == [" w1 w2"] * 2


def test_a_split_smaller_than_requested_is_returned_completely_and_gives_a_warning_on_request(
    caplog: pytest.LogCaptureFixture,
):
    assert len(make_task().held_out(50)) == 10 and not caplog.text
    make_task().held_out(50, warn=True)
    assert "10 examples, fewer than the requested 50" in caplog.text


def encode(texts: list[list[str]], length: int | None):
    return encode_completions(make_task().held_out(len(texts)), texts, tokenizer(), length)


def test_completions_end_with_eos_which_is_part_of_the_response():
    rollouts = encode([[" w1 w2", " w3"], ["", " w4 w5 w6"]], 10)
    eos, pad = tokenizer().eos_token_id, tokenizer().pad_token_id
    assert rollouts.response_ids.shape == (2, 2, 4)
    assert rollouts.response_mask.sum(-1).tolist() == [[3, 2], [1, 4]]
    assert rollouts.response_ids[0, 1].tolist() == [tokenizer().convert_tokens_to_ids(" w3"), eos, pad, pad]
    assert rollouts.ended.all()
    assert rollouts.behaviour_logprobs is None
    assert rollouts.version == 0


def test_a_cut_completion_has_no_eos_and_has_not_ended():
    rollouts = encode([[" w1 w2 w3", " w1 w2"]], 3)
    assert rollouts.ended.tolist() == [[False, True]]
    assert rollouts.response_mask.all()
    assert rollouts.response_ids[0, 0, -1] == tokenizer().convert_tokens_to_ids(" w3")
    assert rollouts.response_ids[0, 1, -1] == tokenizer().eos_token_id


@pytest.mark.parametrize("others", [0, 1, 9])
def test_a_prompt_is_cut_off_responses_only_if_the_data_set_repeats_prompts(others, caplog):
    class Greeting(ListSource):
        def preferences(self, split: str) -> Dataset:
            accident = {"prompt": " w1", "chosen": " w1 w2", "rejected": " w1"}
            rows = [accident] + [{"prompt": " w3", "chosen": " w4", "rejected": " w5"}] * others
            return Dataset.from_list(rows if split == "train" else [accident])

    task = make_task(Greeting(), data=Data.preferences)
    cut = others == 0
    expected = [[" w2", ""]] if cut else [[" w1 w2", " w1"]]
    for split in ("train", "validation"):  # the training split decides for all splits
        found = [row for row in task.held_out(20, split).completions if row != [" w4", " w5"]]
        assert found == expected
    assert ("begin with the prompt" in caplog.text) == cut


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "repeats"),
    [
        ("Hi", "History is long.", "Hip.", False),
        ("It", "It depends", "No.", False),
        ("It", "It depends", "It is.", True),
        ("Q:", "Q: a", "Q: b", True),
        ("", "a", "b", False),
    ],
)
def test_a_response_that_continues_the_last_word_of_the_prompt_does_not_repeat_it(
    prompt, chosen, rejected, repeats
):
    from rlhf.tasks.task import repeats as found

    assert found(prompt, [chosen, rejected]) is repeats
