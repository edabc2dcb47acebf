"""Headers of weights and tokenizers: what the files of a model folder show without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from rlhf.core.errors import UserError
from rlhf.models.folder import folder_problem, is_local
from rlhf.models.headers import INDEX, opened
from rlhf.models.loading import load_causal_lm
from tests.model_folders import (
    HEAD,
    LLAMA,
    TENSORS,
    TOKENS,
    write_model,
    write_tokenizer,
    write_weights,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(write_model(tmp_path / "model"))


def problem(folder: Path) -> str:
    found = folder_problem("model.policy", str(folder))
    assert found is not None and found.startswith("model.policy must name ")
    return found


def shard(folder: Path) -> list[Path]:
    """Replace the weights of a folder by two files with an index, and return the files."""
    (folder / "model.safetensors").unlink()
    shapes = {**TENSORS, **HEAD}
    names = sorted(shapes)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in parts.items():
        write_weights(folder / file, {name: shapes[name] for name in part})
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}})
    )
    return [folder / file for file in parts]


def test_headers_state_names_shapes_and_dtypes(folder):
    found = opened(folder).tensors
    assert {name: tensor.shape for name, tensor in found.items()} == {**TENSORS, **HEAD}
    assert {tensor.dtype for tensor in found.values()} == {"F32"}
    shard(folder)
    assert opened(folder).tensors == found


def test_tensors_are_compared_only_for_models_whose_blocks_are_alike(tmp_path):
    shapes = {**TENSORS, **HEAD}
    del shapes["model.layers.1.mlp.up_proj.weight"]
    other = write_model(tmp_path / "other", tensors=shapes, model_type="jamba")
    assert folder_problem("model.policy", other) is None
    more = Path(write_model(tmp_path / "more", num_hidden_layers=3))
    assert "the weights lack model.layers.2.input_layernorm.weight" in problem(more)


def written(name: str, content: bytes):
    """Return a function that writes a file of a folder."""
    return lambda folder: (folder / name).write_bytes(content)


def truncated(keep: int):
    def cut(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return cut


def without(name: str):
    """Return a function that writes weights that lack a tensor."""
    shapes = {key: shape for key, shape in {**TENSORS, **HEAD}.items() if key != name}
    return lambda folder: write_weights(folder / "model.safetensors", shapes)


def renamed(name: str):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def as_integers(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b'"F32"', b'"I32"'))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"
NO_TYPE = json.dumps({key: value for key, value in LLAMA.items() if key != "model_type"}).encode()
DEFECTS = {
    "empty": (truncated(0), "model.safetensors is truncated or no safetensors file: 0 bytes"),
    "header": (truncated(100), "model.safetensors is truncated or no safetensors file: 100 bytes"),
    "last byte": (truncated(-1), "model.safetensors is truncated"),
    "other": (written("model.safetensors", b"\x02" + bytes(7) + b"[]"), "no safetensors file"),
    "shard": (lambda folder: shard(folder)[1].unlink(), "no model-2.safetensors"),
    "index": (
        lambda folder: write_weights(shard(folder)[0], {"model.norm.weight": (4,)}),
        "model-1.safetensors lacks the tensor lm_head.weight",
    ),
    "no map": (lambda folder: (shard(folder), (folder / INDEX).write_text("{}")), "has no weight_map"),
    "no index": (renamed("consolidated.safetensors"), f"neither model.safetensors nor {INDEX}"),
    "pickle": (renamed("pytorch_model.bin"), "only pytorch_model.bin; reading other formats can execute"),
    "block": (without("model.layers.1.mlp.up_proj.weight"), "the weights lack model.layers.1.mlp.up_proj"),
    "head": (without("lm_head.weight"), "the weights lack lm_head.weight"),
    "integers": (as_integers, "the weights are integers (I32)"),
    "no JSON": (written("config.json", b"nonsense"), "config.json is not a JSON object"),
    "list": (written("config.json", b"[]"), "config.json is not a JSON object"),
    "no type": (written("config.json", NO_TYPE), "config.json has no model_type"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "weights of LFS": (written("model.safetensors", LFS), "is a pointer of Git LFS, not the weights"),
    "config of LFS": (written("config.json", LFS), "config.json is a pointer of Git LFS; run: git lfs pull"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_damaged_or_incomplete_folder_is_refused_and_the_defect_is_named(folder, defect):
    change, said = DEFECTS[defect]
    change(folder)
    assert said in problem(folder)


def test_a_model_of_any_type_lacks_a_head_that_config_json_states(tmp_path):
    own = {"model_type": "other", "text_config": {"tie_word_embeddings": False}}
    stated = {**own, "tie_word_embeddings": None}
    assert folder_problem("model.policy", write_model(tmp_path / "whole", **stated)) is None
    headless = write_model(tmp_path / "headless", tensors=TENSORS, **stated)
    assert "the weights lack lm_head.weight" in problem(Path(headless))
    silent = write_model(tmp_path / "silent", tensors=TENSORS, **{**stated, "text_config": {}})
    assert folder_problem("model.policy", silent) is None, "nothing is stated"


def test_linear_layers_are_the_matrices_of_the_blocks(folder):
    layers = opened(folder).linear_layers()
    assert "model.layers.0.self_attn.q_proj" in layers
    assert not any("norm" in name or "lm_head" in name or "embed" in name for name in layers)


def test_the_remedy_names_the_model_that_is_meant(folder, tmp_path):
    assert f"did you mean model.policy={folder}?" in problem(folder / "model.safetensors")
    other = folder.rename(tmp_path / "mine")
    assert f"did you mean model.policy={other}?" in problem(tmp_path)
    assert "did you mean key=org/name?" in str(folder_problem("key", "https://huggingface.co/org/name"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is a link to" in problem(tmp_path / "link")
    write_model(tmp_path / "run" / "model")
    assert problem(tmp_path / "run").endswith(f"set model.policy={tmp_path}/run/model")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "mine-q4.gguf").write_bytes(b"GGUF")
    assert "mine-q4-safetensors" in problem(tmp_path / "gguf"), "the command that makes a folder of the file"


def test_an_adapter_folder_is_recognised_and_the_merge_is_proposed(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    found = problem(adapter)
    assert "a PEFT adapter of models/base" in found and "AutoPeftModelForCausalLM" in found
    assert found.endswith(f"then set model.policy={adapter}-merged")
    write_model(tmp_path / "model")
    assert problem(adapter).endswith(f"set model.policy={tmp_path}/model, the merged model of the same run")


def test_a_path_is_local_if_its_parent_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smol").mkdir(parents=True)
    assert is_local("models/smoll") and not is_local("owner/smoll") and not is_local("gpt2")
    assert "did you mean model.policy=models/smol?" in problem(Path("models/smoll"))
    assert folder_problem("model.policy", "./smol").endswith("did you mean model.policy=models/smol?")


def test_the_vocabulary_and_the_special_tokens_of_a_tokenizer_are_read(folder):
    found = opened(folder).tokenizer
    assert list(found.ids) == list(TOKENS) and found.largest_id == 5
    assert found.special == {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": None}
    assert found.template is None
    write_tokenizer(folder, chat_template="{{ messages }}", eos_token={"content": "c"})
    found = opened(folder).tokenizer
    assert found.template is not None and found.special["eos_token"] == "c"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "tokenizer.json is not a tokenizer (it lacks 'model')"),
        ('{"model": {"vocab": {}}, "added_tokens": []}', "tokenizer.json is not a tokenizer (no tokens)"),
        ('{"model": {"vocab": 3}, "added_tokens": []}', "tokenizer.json is not a tokenizer (no tokens)"),
        ('{"model": {"vocab": {"a": "b"}}, "added_tokens": []}', "a token id is not a number"),
        ('{"model":', "tokenizer.json is not a JSON object"),
        (None, "no tokenizer.json"),
    ],
)
def test_a_broken_or_missing_tokenizer_is_reported(folder, content, message):
    file = folder / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    found = opened(folder)
    assert found.tokenizer is None and message in str(found.tokenizer_defect)


def test_what_the_files_of_a_tokenizer_do_not_state_is_unknown(folder):
    write_tokenizer(folder, tokenizer_class="LlamaTokenizer", eos_token=None)
    assert "eos_token" not in opened(folder).tokenizer.special, "the class may add it"
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert opened(folder).tokenizer is None


def test_a_changed_tokenizer_is_read_again(folder):
    assert "new" not in opened(folder).tokenizer.ids
    write_tokenizer(folder, (*TOKENS, "new"))
    assert opened(folder).tokenizer.ids["new"] == 6


@pytest.mark.parametrize("ties", [True, None], ids=["stated", "by default"])
def test_a_head_with_other_values_than_the_embeddings_that_it_is_tied_to_is_not_loaded(tmp_path, ties):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "vocab_size": 16}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated.pop("tie_word_embeddings") is False
    load_causal_lm(str(tmp_path))
    if ties is not None:
        stated["tie_word_embeddings"] = ties
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(UserError, match="tie_word_embeddings=true and another head"):
        load_causal_lm(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    same = weights | {"lm_head.weight": weights["transformer.wte.weight"].clone()}
    save_file(same, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_causal_lm(str(tmp_path))
