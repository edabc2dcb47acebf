"""Dialogues in the chat template of the model: SFT, RL from the trained model, a base without template."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from rlhf.models.loading import save
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.chat_tokenizers import llama_3, neox, qwen
from tests.tiny_models import tiny_lm

SHORT = [
    *("progress=off", "task.max_prompt_tokens=300", "generator.response_length=16"),
    *("schedule.prompts_per_update=4", "schedule.eval_every=0.5", "eval.prompts=4"),
    *("backend.micro_batch=4", "optim.lr=1e-3"),
]


def write_dialogues(folder: Path) -> Path:
    """Write 12 dialogues as messages."""
    file = folder / "dialogues.jsonl"
    dialogues = (
        [{"role": "user", "content": f"Count to {i}."}, {"role": "assistant", "content": f"{i}."}]
        for i in range(12)
    )
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in dialogues))
    return file


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a tiny Llama whose config ends with the end token of `tokenizer`."""
    end = tokenizer.eos_token_id
    model = tiny_lm("llama", vocab_size=512, max_position_embeddings=512, eos_token_id=end)
    save(model, tokenizer, folder)
    return folder


def train(folder: Path, *words: str) -> RunFolder:
    run(compose(["task=local", *SHORT, *words]), RunFolder(folder))
    return RunFolder(folder)


def completions(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.completions.read_text().splitlines()]


def test_sft_and_rl_use_the_chat_template_and_the_end_of_a_turn(tmp_path):
    data, base = write_dialogues(tmp_path), write_model(tmp_path / "base", qwen())
    assert GenerationConfig.from_pretrained(base).eos_token_id == qwen().eos_token_id
    sft = train(
        tmp_path / "sft", "algo=sft", f"task.path={data}", f"model.base={base}", "schedule.total_epochs=1"
    )
    tokenizer = AutoTokenizer.from_pretrained(sft.model)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.eos_token_id in GenerationConfig.from_pretrained(sft.model).eos_token_id
    shown = completions(sft)[0]
    question = shown["prompt"].partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    messages = [{"role": "user", "content": question}]
    assert shown["prompt"] == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )

    rewards = tmp_path / "rewards.py"
    rewards.write_text("def short(prompt, response, reference):\n    return -len(response)\n")
    rloo = train(
        tmp_path / "rloo",
        "algo=rloo",
        f"task.path={data}",
        f"model.policy={sft.model}",
        "scorer=function",
        f"scorer.path={rewards}:short",
        "scorer@gold=none",
        "schedule.total_episodes=16",
    )
    assert completions(rloo)[0]["prompt"].endswith("<|im_start|>assistant\n")
    assert AutoTokenizer.from_pretrained(rloo.model).eos_token == "<|im_end|>"


def test_a_base_model_without_template_is_trained_with_the_template_of_the_config(tmp_path):
    tokenizer = neox()
    tokenizer.pad_token = "<|padding|>"
    data, base = write_dialogues(tmp_path), write_model(tmp_path / "base", tokenizer)
    words = ["algo=sft", f"task.path={data}", f"model.base={base}", "schedule.total_epochs=1"]
    with pytest.raises(ValueError, match="model.chat_template must be set for dialogues"):
        train(tmp_path / "refused", *words)
    sft = train(tmp_path / "sft", *words, "model.chat_template=plain")
    assert completions(sft)[0]["prompt"].endswith(".\n<|assistant|>\n")
    assert AutoTokenizer.from_pretrained(sft.model).chat_template is not None


def test_a_base_model_of_llama_3_learns_the_end_of_a_turn(tmp_path):
    data, base = write_dialogues(tmp_path), write_model(tmp_path / "base", llama_3("<|end_of_text|>"))
    sft = train(
        tmp_path / "sft", "algo=sft", f"task.path={data}", f"model.base={base}", "schedule.total_epochs=1"
    )
    assert AutoTokenizer.from_pretrained(sft.model).eos_token == "<|eot_id|>"
    assert completions(sft)[0]["prompt"].count("<|begin_of_text|>") == 1
