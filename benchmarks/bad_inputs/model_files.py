"""Model folders, valid and broken, for the rows."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.data_files import make_pairs

EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


def make_models(folder: Path) -> None:
    """Write the model folders. Each folder has one defect, which its name describes."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        BertConfig,
        BertForMaskedLM,
        GPTNeoXConfig,
        LlamaConfig,
        T5Config,
        T5ForConditionalGeneration,
        logging,
    )

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    tokenizer = make_tokenizer(EOS, START, END)
    words = len(tokenizer)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    common = {**shape, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}

    def llama(vocabulary: int = words, **others: Any) -> LlamaConfig:
        return LlamaConfig(vocab_size=vocabulary, **{**common, **ends, **others})

    def save(name: str, model: Any, own: Any = tokenizer) -> Path:
        model.save_pretrained(folder / name)
        if own is not None:
            own.save_pretrained(folder / name)
        return folder / name

    torch.manual_seed(0)
    smol = AutoModelForCausalLM.from_config(llama())
    save("smol", smol)
    save("untied", AutoModelForCausalLM.from_config(llama(tie_word_embeddings=False)))
    save("short", AutoModelForCausalLM.from_config(llama(max_position_embeddings=16)))
    save("small_embedding", AutoModelForCausalLM.from_config(llama(words - 40)))
    save("reference_7_words", AutoModelForCausalLM.from_config(llama(7, bos_token_id=1, eos_token_id=1)))
    nan = AutoModelForCausalLM.from_config(llama())
    with torch.no_grad():
        nan.model.layers[0].mlp.up_proj.weight.mul_(math.nan)
    save("nan_weights", nan)
    save("half", AutoModelForCausalLM.from_config(llama()).half())
    rewarded = {"pad_token_id": tokenizer.convert_tokens_to_ids(END)}
    save("reward", AutoModelForSequenceClassification.from_config(llama(num_labels=1, **rewarded)))
    save("two_labels", AutoModelForSequenceClassification.from_config(llama(num_labels=2, **rewarded)))
    other = make_tokenizer("</s>", "<s>", "<pad>", seed=2)
    ids = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
    save(
        "reward_other_tokenizer",
        AutoModelForSequenceClassification.from_config(llama(len(other), num_labels=1, **ids)),
        other,
    )
    neox = {key: value for key, value in {**shape, **ends}.items()}
    save(
        "neox",
        AutoModelForCausalLM.from_config(
            GPTNeoXConfig(vocab_size=words, max_position_embeddings=256, **neox)
        ),
    )
    save("bert", BertForMaskedLM(BertConfig(vocab_size=words, max_position_embeddings=256, **shape)))
    t5 = T5Config(
        vocab_size=words, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    save("t5", T5ForConditionalGeneration(t5))
    smol.save_pretrained(folder / "sharded", max_shard_size="60KB")
    tokenizer.save_pretrained(folder / "sharded")
    chat = make_tokenizer(EOS, START, END)
    chat.chat_template = CHATML
    save("chat", smol, chat)
    chat.chat_template = CHATML.replace("{% endif %}", "{% endfor %}", 1)
    save("chat_broken", smol, chat)
    chat.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system turn comes first') }}"
        "{% endif %}" + CHATML
    )
    save("chat_system", smol, chat)
    broken_copies(folder)


def make_tokenizer(eos: str, *others: str, seed: int = 1) -> Any:
    """Return a byte-level BPE tokenizer of some hundred tokens, with an end token and no pad token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[eos, *others], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([text for row in make_pairs(200, seed) for text in row.values()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, additional_special_tokens=list(others)
    )


def broken_copies(folder: Path) -> None:
    """Write copies of the model `smol`, and of the sharded model, each with one file broken or missing."""
    weights, config = "model.safetensors", "config.json"

    def copy(name: str, of: str = "smol") -> Path:
        shutil.copytree(folder / of, folder / name)
        return folder / name

    def edited(name: str, file: str, of: str = "smol", **values: Any) -> None:
        path = copy(name, of) / file
        content = json.loads(path.read_text())
        for key, value in values.items():
            content.pop(key, None) if value is None else content.update({key: value})
        path.write_text(json.dumps(content))

    def without(name: str, *files: str, of: str = "smol") -> Path:
        made = copy(name, of)
        for file in files:
            (made / file).unlink()
        return made

    def written(name: str, file: str, content: bytes, of: str = "smol") -> None:
        (copy(name, of) / file).write_bytes(content)

    complete = (folder / "smol" / weights).read_bytes()
    written("truncated", weights, complete[: len(complete) // 2])
    written("zero_bytes", weights, b"")
    written("garbage_header", weights, b"\xff" * 1000)
    written(
        "lfs_pointer", weights, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 265\n"
    )
    without("no_weights", weights)
    written("reward_truncated", weights, (folder / "reward" / weights).read_bytes()[:20_000], of="reward")
    written("bad_tokenizer", "tokenizer.json", b"{}")
    written("broken_tokenizer", "tokenizer.json", b'{"version": "1.0", "mod')
    written("broken_tokenizer_config", "tokenizer_config.json", b"{")
    without("no_tokenizer", "tokenizer.json", "tokenizer_config.json")
    written("broken_config", config, b'{"model_type": "lla')
    written("list_config", config, b"[]")
    without("no_config", config)
    edited("no_type", config, model_type=None, architectures=None)
    edited("unknown_type", config, model_type="llamma", architectures=["LlammaForCausalLM"])
    edited("fewer_layers", config, num_hidden_layers=1)
    edited("more_layers", config, num_hidden_layers=3)
    edited("other_width", config, hidden_size=64)
    edited("quantized", config, quantization_config={"quant_method": "gptq", "bits": 4})
    edited("own_code", config, auto_map={"AutoModelForCausalLM": "modeling_own.Own"}, model_type="own")
    edited("no_eos", "tokenizer_config.json", eos_token=None)
    eos = folder / "no_eos" / config
    eos.write_text(json.dumps({k: v for k, v in json.loads(eos.read_text()).items() if k != "eos_token_id"}))
    more_files(folder)
    pickled = without("pickled", weights)
    (pickled / "pytorch_model.bin").write_bytes(complete)
    gguf = copy("gguf")
    for path in gguf.iterdir():
        path.unlink()
    (gguf / "model-q4.gguf").write_bytes(b"GGUF" + bytes(100))
    (folder / "empty").mkdir()
    shards = sorted(path.name for path in (folder / "sharded").glob("*.safetensors"))
    without("shard_missing", shards[1], of="sharded")
    without("index_missing", f"{weights}.index.json", of="sharded")
    written("index_broken", f"{weights}.index.json", b"{", of="sharded")
    tensor_missing(folder)
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "models/smol"}'
    )
    (adapter / "adapter_model.safetensors").write_bytes(complete)
    (folder / "a_file").write_text("not a folder\n")
    os.symlink(folder / "nowhere", folder / "broken_link")


def more_files(folder: Path) -> None:
    """Write copies of the models `smol` and `chat` with one more defect or unusual file each."""
    from safetensors.torch import load_file, save_file

    def edited(name: str, **values: Any) -> None:
        path = shutil.copytree(folder / "smol", folder / name) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def written(name: str, file: str, content: bytes, of: str = "smol") -> None:
        (shutil.copytree(folder / of, folder / name) / file).write_bytes(content)

    def weights(name: str, change: Callable[[dict[str, Any]], object]) -> None:
        path = shutil.copytree(folder / "smol", folder / name) / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    tokenizer = json.loads((folder / "smol" / "config.json").read_text())
    edited("vocabulary_64", vocab_size=64)
    edited("heads_5", num_attention_heads=5)
    edited("end_list", eos_token_id=[tokenizer["eos_token_id"], 1])
    edited("pad_negative", pad_token_id=-1)
    edited("dtype_unknown", dtype="floaty", torch_dtype="floaty")
    edited("rope_unknown", rope_scaling={"rope_type": "spiral", "factor": 2.0})
    edited("end_too_large", eos_token_id=100_000)
    written("generation_broken", "generation_config.json", b"{")
    written("tokens_map_broken", "special_tokens_map.json", b"{")
    written("template_broken", "chat_template.jinja", b"{% for %}", of="chat")
    written("config_utf16", "config.json", json.dumps(tokenizer).encode("utf-16"))
    written("config_pointer", "config.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    weights("extra_tensor", lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()))
    weights("float64", lambda tensors: tensors.update({k: v.double() for k, v in tensors.items()}))
    weights("int8", lambda tensors: tensors.update({k: v.char() for k, v in tensors.items()}))
    weights("infinite", lambda tensors: tensors["model.norm.weight"].fill_(math.inf))
    tensorflow = shutil.copytree(folder / "smol", folder / "tensorflow")
    (tensorflow / "model.safetensors").rename(tensorflow / "tf_model.h5")
    shutil.copytree(folder / "smol", folder / "run" / "model")
    (folder / "no_files").mkdir()
    (folder / "no_files" / "README.md").write_text("a model\n")
    tokenizer_only = folder / "tokenizer_only"
    shutil.copytree(folder / "smol", tokenizer_only)
    for file in ("config.json", "model.safetensors"):
        (tokenizer_only / file).unlink()


def tensor_missing(folder: Path) -> None:
    """Write a copy of the model `smol` without one of its tensors."""
    from safetensors.torch import load_file, save_file

    made = folder / "tensor_missing"
    shutil.copytree(folder / "smol", made)
    tensors = load_file(made / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
