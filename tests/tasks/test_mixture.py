"""Tests of the task `mixture`: which prompts an epoch draws from its parts, and the columns of its rows."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from rlhf.config.algorithms import Data
from rlhf.config.schema import SCHEMAS
from rlhf.config.scorers import MixtureConfig
from rlhf.config.tasks import ArithmeticConfig, LocalConfig
from rlhf.core.batch import Batch
from rlhf.core.errors import UserError
from rlhf.tasks.kinds import (
    MixtureSource,
    interleaved,
    means_of_parts,
)
from rlhf.tasks.task import PromptOrder, Task, mixed_order
from tests.tasks.test_task import make_task
from tests.tiny_models import tiny_rollouts, tiny_tokenizer

PARTS = np.repeat([0, 1], [90, 10])


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LocalConfig(path=str(file))


def texts(tmp_path, name, count):
    rows = [{"prompt": f"{name} {i}", "response": f"{i}"} for i in range(count)]
    return write(tmp_path / f"{name}.jsonl", rows)


@pytest.fixture
def mixture(tmp_path) -> MixtureConfig:
    parts = {"many": texts(tmp_path, "many", 60), "few": texts(tmp_path, "few", 10)}
    return MixtureConfig(parts=parts, weights={"few": 2.0})


def task_of(config, **settings) -> Task:
    return Task(
        MixtureSource(config),
        tiny_tokenizer(),
        **{
            "data": Data.prompts,
            "prompts_per_update": 7,
            "max_prompt_tokens": 64,
            "seed": 3,
            "shares": config.shares,
            **settings,
        },
    )


def test_an_epoch_has_the_share_of_each_part():
    for epoch in range(3):
        order = mixed_order(PARTS, [0.25, 0.75], 0, epoch)
        assert len(order) == 100 and Counter(PARTS[order]) == {0: 25, 1: 75}
        assert np.array_equal(order, mixed_order(PARTS, [0.25, 0.75], 0, epoch))
        for other in (mixed_order(PARTS, [0.25, 0.75], 1, epoch), mixed_order(PARTS, [0.25, 0.75], 0, 9)):
            assert not np.array_equal(order, other)


def test_a_part_is_drawn_without_repetition_until_all_of_it_was_drawn():
    epochs = [mixed_order(PARTS, [0.25, 0.75], 0, epoch) for epoch in range(4)]
    many = np.concatenate([order[PARTS[order] == 0] for order in epochs]).tolist()
    assert len(set(many[:75])) == 75, "the order of a part continues in the next epoch"
    assert len(set(many)) == 90 and max(Counter(many).values()) == 2
    few = Counter(epochs[0][PARTS[epochs[0]] == 1].tolist())
    assert set(few.values()) == {7, 8} and len(few) == 10


def test_a_part_with_a_tiny_weight_is_drawn_at_least_once_per_epoch():
    order = mixed_order(PARTS, [0.9999, 0.0001], 0, 0)
    assert len(order) == 100 and Counter(PARTS[order])[1] == 1


def test_each_prefix_of_the_held_out_rows_has_the_shares_of_the_parts():
    order = interleaved([100, 100], [0.75, 0.25])
    for count in (8, 40, 100):
        assert (order[:count] < 100).mean() == pytest.approx(0.75, abs=0.5 / count)
    assert sorted(order) == list(range(200)), "at the end, all rows remain"


def test_rows_name_their_part_and_their_place(mixture, tmp_path):
    rows = MixtureSource(mixture).prompts("train")
    assert set(rows.column_names) == {"query", "reference_response", "place", "part"}
    assert rows["part"][:] == [0] * 54 + [1] * 9 and str(tmp_path / "few.jsonl") in rows[60]["place"]
    assert all(row["query"].startswith(("many", "few")[row["part"]]) for row in rows)


def test_parts_without_demonstrations_use_their_references(mixture):
    mixture.parts["sums"] = ArithmeticConfig(train_size=16)
    rows = MixtureSource(mixture).prompts("train")
    plain = [row for row in rows if row["part"] < 2]
    assert all(row["demonstration"] == row["reference_response"] for row in plain)
    assert any(row["demonstration"] != row["reference_response"] for row in rows)


def test_a_task_draws_the_shares_and_its_batches_name_the_part(mixture, tmp_path):
    task = task_of(mixture)
    drawn = task.prompts()
    batches = [next(drawn) for _ in range(9)]  # one epoch of 63 examples
    numbers = torch.cat([batch.part for batch in batches])
    assert Counter(numbers.tolist()) == {0: 21, 1: 42}
    names = [text.split()[0] for batch in batches for text in batch.texts]
    assert names == [("many", "few")[number] for number in numbers.tolist()]
    mixture.parts["few"].validation_fraction = 0.5
    assert task_of(mixture).held_out(6).part.tolist().count(1) == 4, "of held-out prompts, too"
    rows = [{"prompt": f"q {i}", "chosen": "a", "rejected": "b"} for i in range(20)]
    parts = {"one": write(tmp_path / "one.jsonl", rows), "two": write(tmp_path / "two.jsonl", rows[:4])}
    batch = next(task_of(MixtureConfig(parts=parts), data=Data.preferences).prompts())
    assert batch.completions[0] == ["a", "b"] and set(batch.part.tolist()) <= {0, 1}


def test_a_resumed_order_draws_the_same_prompts(mixture):
    task = task_of(mixture)
    whole = task.prompts()
    first = [next(whole).texts for _ in range(20)]
    part = task.prompts()
    for _ in range(11):
        next(part)
    resumed = PromptOrder(task_of(mixture))
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert [next(resumed).texts for _ in range(9)] == first[11:]


def test_errors_of_a_part_name_its_keys_and_paths_are_not_changed(mixture, tmp_path):
    text = "task.path must be a file, got data/task.path and my-task.path; set task.path=x task.parts=y"
    expected = text.replace("task.path must", "task.parts.few.path must").replace(
        "set task.path", "set task.parts.few.path"
    )
    assert mixture.own_key("few", text) == expected
    config = MixtureConfig(parts={"x": write(tmp_path / "x.jsonl", [{"prompt": "a"}, {"prompt": None}])})
    with pytest.raises(UserError, match=r"task\.parts\.x\.path must have a text in its column prompt"):
        MixtureSource(config).prompts("train")


def test_parts_with_dialogues_and_parts_with_texts_are_refused(mixture, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    mixture.parts["chat"] = write(tmp_path / "chat.jsonl", [{"messages": turns}] * 3)
    with pytest.raises(UserError, match="got dialogues in chat and texts in many"):
        _ = MixtureSource(mixture).conversational


def test_a_part_without_short_prompts_is_refused(mixture, tmp_path):
    mixture.parts["long"] = write(tmp_path / "long.jsonl", [{"prompt": f"{'a ' * 99}{i}"} for i in range(9)])
    with pytest.raises(UserError, match=r"task\.parts\.long must have training prompts with 1 to 64 tokens"):
        len(task_of(mixture))


def test_metrics_of_a_part_describe_its_responses_only():
    rollouts = tiny_rollouts(4)
    rollouts.part = torch.tensor([0, 1, 1, 1])
    scores = torch.tensor([[1.0, 3.0], [0.0, 0.0], [0.0, 6.0], [0.0, 0.0]])
    order = make_task().prompts()
    order.parts = ["a", "b", "c"]
    figures = order.scored(rollouts.extend(Batch, scores=scores))
    values = {name: stat.value() for name, stat in figures.items()}
    assert (values["part/a/scores"], values["part/b/scores"], values["part/c/scores"]) == (2.0, 1.0, None)
    assert (values["part/a/prompts"], values["part/b/prompts"], values["part/c/prompts"]) == (1, 3, 0)
    assert values["part/a/response_tokens"] == rollouts.response_mask[0].sum() / 2
    rollouts.part = None
    assert order.scored(rollouts.extend(Batch, scores=scores)) == {}, "of stored rollouts"


def test_means_of_parts_leave_out_a_part_without_prompts():
    found = means_of_parts(["a", "b", "c"], torch.tensor([0, 2, 2]), {"score": [1.0, 2.0, 4.0]})
    assert found == {"eval/part/a/score": 1.0, "eval/part/c/score": 3.0}


def test_other_tasks_have_no_parts():
    tasks = [
        cls for key, cls in SCHEMAS.items() if key.startswith("schema/task/") and cls is not MixtureConfig
    ]
    assert tasks and all(cls().shares == {} for cls in tasks)
