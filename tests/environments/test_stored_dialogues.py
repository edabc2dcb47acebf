"""SFT on all replies of stored dialogues: the tokens and masks are those of an episode."""

import json

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algorithms import Data
from rlhf.config.tasks import LocalConfig
from rlhf.core.batch import Rollouts
from rlhf.core.errors import UserError
from rlhf.environments.environment import Turns
from rlhf.tasks.task import Task
from rlhf.text.chat import Dialogues, render, set_format
from rlhf.text.encoding import encode_completions, encode_prompts, pieces
from tests.chat_templates import with_template
from tests.environments.templates import family
from tests.environments.test_turns import AROUND

ASK = {"role": "user", "content": "Is 12 higher?"}
REPLIES = ("the answer is 12", " lower \n", "So it is.")
MESSAGES = ("an answer\n\n", "  'a': [1]")


def talk(role: str) -> list[dict]:
    """Return three replies with the messages between them."""
    said = [{"role": "assistant", "content": text} for text in REPLIES]
    heard = [{"role": role, "content": text} for text in MESSAGES]
    return [said[0], heard[0], said[1], heard[1], said[2]]


def encoded(tokenizer, role: str, length: int | None = None) -> tuple[Rollouts, list[str], Dialogues]:
    dialogues = Dialogues(tokenizer)
    prompt, parts = dialogues.episode([ASK], talk(role))
    prompts = encode_prompts(torch.arange(1), [prompt], [""], tokenizer, formatted=True)
    return encode_completions(prompts, [[parts]], tokenizer, length), parts, dialogues


@pytest.mark.parametrize(("name", "role"), [each for each in AROUND if each[0] != "starts_thinking"])
def test_a_stored_dialogue_has_the_tokens_of_an_episode_and_masks_by_who_wrote_them(name, role):
    tokenizer = family(name)
    turns, end = Turns(tokenizer, role, 512), tokenizer.eos_token_id
    rollouts, parts, dialogues = encoded(tokenizer, role)
    assert rollouts.texts == [render(tokenizer, [ASK])]
    ids, mask = [], []
    for place, reply in enumerate(parts[::2]):
        (own,) = pieces(tokenizer).encode([reply], [rollouts.texts[0]])
        message = turns.tokens(MESSAGES[place]) if place < 2 else []
        ids += [*own, end, *message]
        mask += [True] * (len(own) + 1) + [False] * len(message)
    assert rollouts.response_ids[0, 0].tolist() == ids
    assert rollouts.response_mask[0, 0].tolist() == mask
    assert torch.equal(rollouts.environment_mask, ~rollouts.response_mask) and rollouts.ended.all()
    assert [text.strip() for text in parts[::2]] == [text.strip() for text in REPLIES]
    assert not [*dialogues.warnings()]


def test_a_reply_that_the_template_changes_later_is_trained_as_it_was_and_reported():
    dialogues = Dialogues(family("drops_thoughts"))
    thought = {"role": "assistant", "content": "<think>\nis it\n</think>\n\n12"}
    _, parts = dialogues.episode([ASK], [thought, {"role": "user", "content": "12"}, thought], "line 4")
    assert parts[0] == parts[2] == thought["content"]
    (warning,) = dialogues.warnings()
    assert "changes the content of a message with the role assistant in 1 of 1 dialogues" in warning


@pytest.mark.parametrize("name", ["counts", "chatml", "trims"])
def test_a_message_is_written_as_in_its_place_in_the_dialogue(name):
    dialogues, whole = Dialogues(family(name)), [ASK, *talk("user")]
    start, parts = dialogues.episode(whole[:1], whole[1:])
    end = dialogues.tokenizer.eos_token
    episode = start + "".join(part + end * (i % 2 == 0) for i, part in enumerate(parts))
    assert dialogues.tokenizer.apply_chat_template(whole, tokenize=False).startswith(episode)


def test_the_start_of_a_reply_that_stored_replies_lack_is_in_no_message():
    tokenizer = with_template("starts_thinking")
    set_format(tokenizer, None, conversational=True)
    _, parts, dialogues = encoded(tokenizer, "user")
    assert parts[1] == "\n<|user|>\nan answer\n\n<|end|>\n<|assistant|>\n"
    assert parts[2] == REPLIES[1]
    (warning,) = dialogues.warnings()
    assert "begins a reply in another way than the stored answers in 1 of 1 dialogues" in warning


def test_a_template_without_an_end_of_replies_is_refused():
    tokenizer = with_template("no_end")
    set_format(tokenizer, None, conversational=True)
    with pytest.raises(
        UserError, match="task.all_replies must be false for a chat template that ends no reply"
    ):
        encoded(tokenizer, "user")


@pytest.mark.parametrize("length", [1, 9, 15, 30])
def test_a_dialogue_that_is_cut_keeps_its_masks_and_has_not_ended(length):
    whole, cut = (encoded(family("chatml"), "user", each)[0] for each in (None, length))
    for name in ("response_ids", "response_mask", "environment_mask"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[..., :length])
    assert not cut.ended.any()


def write(folder, *dialogues):
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in dialogues))
    return str(folder / "data.jsonl")


LONG = [{"role": "system", "content": "Be brief."}, ASK, *talk("user")]
SHORT = [ASK, talk("user")[0]]


def local(tmp_path, data=Data.references, dialogues=(LONG, SHORT), **changes) -> Task:
    config = LocalConfig(path=write(tmp_path, *dialogues), validation_fraction=0.5, **changes)
    tokenizer = with_template("chatml")
    set_format(tokenizer, None, conversational=True)
    return Task(make(config), tokenizer, data=data, prompts_per_update=1, max_prompt_tokens=500, seed=1)


def both(task: Task) -> list:
    """Return the batches with the long and the short dialogue."""
    found = [task.held_out(1, split) for split in ("train", "validation")]
    return sorted(found, key=lambda batch: -len(batch.texts[0]))


def test_local_data_train_on_all_replies_on_request(tmp_path):
    task = local(tmp_path, all_replies=True)
    long, short = both(task)
    assert long.dialogues == [LONG[:2]] and short.dialogues == [[ASK]]
    assert long.texts == [render(task.tokenizer, LONG[:2])]
    assert long.completions[0][0][::2] == [*REPLIES] and short.completions == [[[REPLIES[0]]]]
    assert (long.references, short.references) == ([REPLIES[2]], [REPLIES[0]])
    rollouts = encode_completions(long, long.completions, task.tokenizer, None)
    ids, mask = rollouts.response_ids[0, 0], rollouts.response_mask[0, 0]
    assert task.tokenizer.decode(ids[mask]) == "".join(text + "<|end|>" for text in REPLIES)
    whole = render(task.tokenizer, LONG).removesuffix("\n<|assistant|>\n")
    assert long.texts[0] + task.tokenizer.decode(ids) == whole


def test_prompts_of_rl_and_evaluation_end_before_the_last_reply_in_any_case(tmp_path):
    last, every = (local(tmp_path, Data.prompts, all_replies=each) for each in (False, True))
    for one, other in zip(both(last), both(every), strict=True):
        assert one.texts == other.texts and one.references == other.references
    assert both(last)[0].dialogues == [LONG[:-1]]


def test_without_the_key_only_the_last_reply_is_trained(tmp_path):
    long, short = both(local(tmp_path))
    assert (long.dialogues, long.completions) == ([LONG[:-1]], [[REPLIES[2]]])
    assert (
        encode_completions(long, long.completions, local(tmp_path).tokenizer, None).environment_mask is None
    )


def test_a_dialogue_that_begins_with_a_reply_has_no_prompt(tmp_path):
    said = "must have a message before the first reply for task.all_replies=true.*, got line 1 of"
    with pytest.raises(UserError, match=said):
        both(local(tmp_path, dialogues=(talk("user"), SHORT), all_replies=True))
    both(local(tmp_path, dialogues=(talk("user"), SHORT)))
