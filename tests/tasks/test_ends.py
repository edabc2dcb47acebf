"""End tokens at the end of stored responses: each response has one end, and its text has none."""

import json

import pytest
from datasets import Dataset

from rlhf.assembly.tokenizer import build_tokenizer, declared_tokens
from rlhf.config.algo import Data
from rlhf.config.compose import compose
from rlhf.core.chat_format import set_format
from rlhf.core.encoding import encode_completions
from rlhf.tasks.task import Task
from tests.chat_templates import with_template

STORED = {  # a stored text and the text of its tokens; the end token is </s>, and the model declares <|end|>
    "So.": "So.</s>",
    "So.</s>": "So.</s>",
    "So.<|end|>": "So.<|end|>",
    "So.<|end|>\n": "So.<|end|>",
    "So.<|end|></s>": "So.<|end|>",
    "So.</s>\n": "So.</s>",
    "So.<|endoftext|>": "So.</s>",
    "So. \n": "So. \n</s>",
    "So.<|call_end|>": "So.<|call_end|></s>",  # no end that is declared
    "<|end|>": "<|end|>",
    "": "</s>",
}


class Stored:
    """A data source with one prompt and one stored text."""

    conversational = True

    def __init__(self, stored, query="Why?", **columns):
        self.rows = {"query": [query], "reference_response": [stored], **columns}
        if isinstance(query, list):
            self.rows["messages"] = self.rows.pop("query")
        self.pairs = {"prompt": [query], "chosen": [stored], "rejected": [stored]}

    def prompts(self, split):
        return Dataset.from_dict(self.rows)

    def preferences(self, split):
        return Dataset.from_dict(self.pairs)


def task(source, data, dialogues=False):
    tokenizer = with_template("chatml")
    set_format(tokenizer, None, dialogues)
    ends = ("</s>",) if dialogues else ("<|end|>",)
    sizes = {"prompts_per_update": 1, "max_prompt_tokens": 99, "seed": 1}
    return Task(source, tokenizer, data=data, ends=ends, **sizes)


def trained(made):
    batch = made.held_out(1)
    rollouts = encode_completions(batch, batch.completions, made.tokenizer, None)
    assert rollouts.ended.all()
    rows = zip(rollouts.response_ids[0], rollouts.response_mask[0], strict=True)
    return [made.tokenizer.decode(ids[mask]) for ids, mask in rows]


@pytest.mark.parametrize(("stored", "read"), STORED.items())
def test_a_stored_text_has_one_end_that_the_model_declares(stored, read):
    assert trained(task(Stored(stored), Data.references)) == [read]
    assert trained(task(Stored("No.", demonstration=[stored]), Data.references)) == [read]
    pairs = Stored(stored)
    pairs.pairs["rejected"] = ["No."]
    assert trained(task(pairs, Data.preferences)) == [read, "No.</s>"]


@pytest.mark.parametrize(("stored", "read"), STORED.items())
def test_the_text_of_a_reference_has_no_end_token(stored, read):
    reference = task(Stored(stored), Data.prompts).held_out(1).references
    assert reference == [read.removesuffix("</s>").removesuffix("<|end|>")]


@pytest.mark.parametrize("end", ["", "<|end|>", "</s>", "</s>\n", "<|endoftext|>", "</s><|end|>"])
def test_an_answer_of_a_dialogue_has_the_end_of_its_turn_alone(end):
    user = {"role": "user", "content": "Why?"}
    answer = [{"role": "assistant", "content": f"So.{end}"}]
    made = task(Stored(answer, [user]), Data.references, dialogues=True)
    assert trained(made) == ["So.<|end|>"]
    assert made.held_out(1).references == ["So."]


@pytest.mark.parametrize("end", ["<|end|>", "</s>", "</s>\n"])
def test_an_earlier_answer_of_a_dialogue_has_the_end_of_its_turn_alone(end):
    user, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"So.{end}"}
    made = task(Stored([answer], [user, answer, user]), Data.references, dialogues=True)
    assert made.held_out(1).texts[0].count("<|assistant|>\nSo.<|end|>\n<|user|>") == 1
    quoting = task(Stored([answer], [{**user, "content": f"Say {end}"}]), Data.references, dialogues=True)
    assert f"Say {end}<|end|>" in quoting.held_out(1).texts[0], "a question is not changed"


def test_the_ends_of_stored_texts_are_those_that_the_model_declares(tmp_path):
    model = tmp_path / "model"
    with_template("chatml").save_pretrained(model)
    end = with_template("chatml").convert_tokens_to_ids("<|end|>")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    data = tmp_path / "texts.jsonl"
    data.write_text('{"prompt": "Why?"}\n')
    cfg = compose([f"model.policy={model}", "task=local", f"task.path={data}", "algo=rloo"])
    tokenizer = build_tokenizer(cfg)
    assert "<|end|>" in declared_tokens(cfg, tokenizer)
    tokenizer.name_or_path = "judge"
    assert declared_tokens(cfg, tokenizer) == []
