"""Data, templates, config files, models and reward files of a first day, for the rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.data_files import Rows, conversation, csv, lines, make_pairs, parquet
from benchmarks.bad_inputs.model_files import CHATML

GLOBAL = "# @package _global_\n"
LENGTH = "schedule: {total_episodes: 320, prompts_per_update: 8}\n"
BRIEF = "\n\ndef brief(prompt, response, reference):\n    return len(response) / 100\n"
TEMPLATES = {
    "unclosed_tag": CHATML.replace("%}", "", 1),
    "unknown_filter": CHATML.replace("message['content']", "message['content'] | tirm"),
    "raises": "{{ raise_exception('no dialogues today') }}",
    "constant": "Hello",
    "empty": "\n",
    "json": json.dumps({"chat_template": CHATML}),
}
CONFIGS = {
    "conf/algo/mine.yaml": f"{GLOBAL}defaults: [rloo, _self_]\n{LENGTH}",
    "conf/algo/heir.yaml": f"{GLOBAL}defaults: [mine, _self_]\nalgo: {{kl_coef: 0.01}}\n",
    "conf/task/mine.yaml": f"{GLOBAL}defaults: [tldr_mini, _self_]\n{LENGTH}",
    "conf/experiment/no_package.yaml": LENGTH,
    "conf_same/algo/grpo.yaml": f"{GLOBAL}defaults: [/schema/algo@algo: grpo, _self_]\n{LENGTH}",
}
REWARDS = {
    "pkg/__init__.py": "",
    "pkg/helpers.py": "SCALE = 2\n",
    "pkg/relative.py": f"from .helpers import SCALE{BRIEF}",
    "no_pkg/helpers.py": "SCALE = 2\n",
    "no_pkg/beside.py": f"import helpers{BRIEF}",
}
TOOL_CALL = {"type": "function", "function": {"name": "boil", "arguments": {"minutes": 4}}}


def make_first_day(folder: Path) -> None:
    """Write the files of the rows. Each has one property, which its name describes."""
    pairs, held = make_pairs(120, 1), make_pairs(20, 2)
    files = {
        "pairs.jsonl": lines(pairs),
        "pairs.csv": csv(pairs),
        "splits/train.jsonl": lines(pairs),
        "splits/validation.jsonl": lines(held),
        "a,b/train.jsonl": lines(pairs),
        "a,b/validation.jsonl": lines(held),
        **{f"tea{name}.jsonl": lines(pairs) for name in (", milk", "[1]", "=1")},
        **dialogues(pairs),
        **tables(pairs),
        **{f"templates/{name}.jinja": text.encode() for name, text in TEMPLATES.items()},
        **{name: text.encode() for name, text in CONFIGS.items()},
        **{f"gsm8k/{split}.jsonl": sums(count) for split, count in (("train", 96), ("test", 16))},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def dialogues(pairs: Rows) -> dict[str, bytes]:
    """Return files with dialogues in forms of different projects."""
    rows = conversation(pairs)

    def changed(change: Any) -> bytes:
        return lines([{"messages": [change(turn) for turn in row["messages"]]} for row in rows])

    as_texts = [{"messages": json.dumps(row["messages"])} for row in rows]
    share = [[{"from": turn["role"], "value": turn["content"]} for turn in row["messages"]] for row in rows]
    names = {"user": "human", "assistant": "bot"}
    verl = {"data_source": "tea", "reward_model": {"style": "rule", "ground_truth": "4"}}
    called = [
        {
            "messages": [
                asked,
                {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
                {"role": "tool", "content": "boiled"},
                answered,
            ]
        }
        for asked, answered in (row["messages"] for row in rows)
    ]
    return {
        "dialogues.jsonl": lines(rows),
        "text.jsonl": lines(as_texts),
        "text.parquet": parquet(as_texts),
        "printed.csv": csv([{"messages": str(row["messages"])} for row in rows]),
        "text_share.jsonl": lines([{"conversations": json.dumps(turns)} for turns in share]),
        "turns.jsonl": changed(lambda turn: turn["content"]),
        "role_human.jsonl": changed(lambda turn: {**turn, "role": names[turn["role"]]}),
        "parts.jsonl": changed(lambda turn: {**turn, "content": [{"type": "text", "text": turn["content"]}]}),
        "tools.jsonl": lines(called),
        "verl.parquet": parquet([{**verl, "prompt": row["messages"][:1]} for row in rows]),
        "system_only.jsonl": lines([{"messages": [{"role": "system", "content": "Be brief."}]}] * len(rows)),
    }


def tables(pairs: Rows) -> dict[str, bytes]:
    """Return files with texts in forms of different projects, and tables of pandas."""
    texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in pairs]
    columns = {name: {str(i): row[name] for i, row in enumerate(pairs)} for name in pairs[0]}
    human = "\n\nHuman: {}\n\nAssistant:{}"
    return {
        "kto.jsonl": lines(
            [
                {"id": i, "prompt": prompt, "completion": chosen, "label": i % 2 == 0}
                for i, (prompt, chosen, _) in enumerate(texts)
            ]
        ),
        "hh.jsonl": lines(
            [
                {"chosen": human.format(prompt.strip(), good), "rejected": human.format(prompt.strip(), bad)}
                for prompt, good, bad in texts
            ]
        ),
        "answers.jsonl": lines([{"prompt": prompt, "answer": chosen} for prompt, chosen, _ in texts]),
        "numbers.jsonl": lines([{"prompt": row["prompt"], "answer": i} for i, row in enumerate(pairs)]),
        "answer_lists.jsonl": lines([{"prompt": prompt, "answer": both} for prompt, *both in texts]),
        "ranked.jsonl": lines(
            [{"prompt": prompt, "responses": both, "scores": [1, 0]} for prompt, *both in texts]
        ),
        "same.jsonl": lines([{**row, "rejected": row["chosen"]} for row in pairs]),
        "table.json": json.dumps(columns).encode(),
        "index.json": json.dumps({str(i): row for i, row in enumerate(pairs)}).encode(),
        "data_key.json": json.dumps({"version": 1, "data": pairs}).encode(),
    }


def sums(count: int) -> bytes:
    """Return questions of the form of GSM8K."""
    return lines(
        [
            {"question": f"Tom has {i} apples and buys one. How many?", "answer": f"One more.\n#### {i + 1}"}
            for i in range(count)
        ]
    )


def make_day_rewards(folder: Path) -> None:
    """Write reward files: a copy of the functions, a package, and a file that imports the file beside it."""
    shutil.copy(Path(__file__).with_name("first_day_functions.py"), folder / "day_rewards.py")
    for name, text in REWARDS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def make_day_models(folder: Path) -> None:
    """Write models that are no causal language models, and GGUF files without a model in them."""
    configs = {
        "vision": {"model_type": "qwen2_vl", "vision_config": {}},
        "bart": {"model_type": "bart", "is_encoder_decoder": True},
        "gguf_and_config": {"model_type": "llama"},
    }
    for name, config in configs.items():
        shutil.copytree(folder / "chat", folder / name)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "gguf_and_config" / "model.safetensors").unlink()
    for file in ("smol.GGUF", "gguf_and_config/smol.gguf"):
        (folder / file).write_bytes(b"GGUF\x03\x00\x00\x00")
