"""Rules for the content of model folders, which read headers and no weights."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rlhf.checks import check
from rlhf.core import machine as hub
from rlhf.models.folder import folder_problem
from rlhf.models.headers import ModelFacts
from rlhf.words.compose import compose
from tests.model_folders import (
    HEAD,
    LLAMA,
    REWARD,
    TENSORS,
    TOKENS,
    write_model,
    write_tokenizer,
    write_weights,
)


@pytest.fixture
def policy(tmp_path) -> Path:
    return Path(write_model(tmp_path / "policy"))


@pytest.fixture
def reward(tmp_path) -> Path:
    return Path(write_model(tmp_path / "reward", REWARD))


def problems(*words: str | None) -> list[str]:
    return check.problems(compose([word for word in words if word is not None]))


def one(*words: str) -> str:
    (found,) = problems(*words)
    return found


def change(folder: Path, name: str, **values: object) -> None:
    """Change keys of a JSON file; None removes the key."""
    stored = {**json.loads((folder / name).read_text()), **values}
    (folder / name).write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))


def test_whole_folders_have_no_problems(policy, reward):
    assert problems(f"model.policy={policy}", f"model.reward={reward}", f"model.reference={policy}") == []
    assert problems("algo=sft", f"model.base={policy}") == []
    assert problems("scorer@gold=reward_model", f"gold.path={reward}") == []


SEQ2SEQ = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
KINDS = [  # changes of a Llama, and the kind of model in words; None: a causal language model
    ({"architectures": ["LlamaForSequenceClassification"]}, "a sequence classifier (LlamaForSequenceCl"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder (BertForMaskedLM)"),
    ({"model_type": "bert", "architectures": ["BertModel"]}, "an encoder (BertModel)"),
    ({**SEQ2SEQ, "is_encoder_decoder": True}, "an encoder-decoder (T5ForConditionalGeneration)"),
    (
        {"model_type": "llava", "vision_config": {}, "architectures": None},
        "a model of vision and language (llava)",
    ),
    ({"model_type": "clip", "architectures": None}, "a model of another kind (clip)"),
    ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}, None),
    ({"model_type": "gemma3", "vision_config": {}}, None),
    ({"model_type": "of_my_own", "auto_map": {}}, None),
    ({}, None),
]


@pytest.mark.parametrize(("changed", "words"), KINDS)
def test_the_kind_of_a_model_is_named_in_words(changed, words):
    config = {key: value for key, value in {**LLAMA, **changed}.items() if value is not None}
    found = ModelFacts(config).not_causal()
    assert found is None if words is None else found is not None and found.startswith(words)


@pytest.mark.parametrize("key", ["model.policy", "model.reference"])
def test_a_policy_must_be_a_causal_language_model(policy, tmp_path, key):
    other = write_model(tmp_path / "other", {**LLAMA, **KINDS[0][0]}, {**TENSORS, **HEAD})
    found = one(f"model.policy={policy}", f"{key}={other}")
    assert found.startswith(f"{key} must name a causal language model") and KINDS[0][1] in found
    decoder = write_model(tmp_path / "bert", {**LLAMA, **KINDS[6][0]})
    assert problems(f"model.policy={decoder}") == []


@pytest.mark.parametrize(
    ("file", "changed", "words", "message"),
    [
        ("config.json", {"vocab_size": 9}, "", "states vocab_size=9, and the weights have 8 embeddings"),
        ("config.json", {"hidden_size": 6}, "", "states hidden_size=6, and the weights have 4 columns"),
        (
            "config.json",
            {"num_hidden_layers": 1},
            "",
            "states num_hidden_layers=1, and the weights have 2 layers",
        ),
        ("config.json", {"quantization_config": {}}, "", "must name a model with float weights"),
        ("", {}, "model.reward={policy}", "a causal language model (LlamaForCausalLM) without score.weight"),
        ("", {}, "model.tokenizer={policy}y", "did you mean model.tokenizer={policy}?"),
        (
            "",
            {},
            "scorer=reward_model scorer.path={reward} scorer.pad_token=d",
            "scorer.pad_token must be in the",
        ),
        ("tokenizer_config.json", {"eos_token": None}, "", "must have a tokenizer with an end token"),
    ],
)
def test_a_defect_of_a_folder_is_refused_before_the_run(policy, reward, file, changed, words, message):
    if file:
        change(policy, file, **changed)
    folders = {"policy": policy, "reward": reward}
    assert message.format(**folders) in one(f"model.policy={policy}", *words.format(**folders).split())


def test_damaged_files_are_refused_before_the_run(policy, reward):
    (reward / "tokenizer.json").write_text("{}")
    found = one(f"model.policy={policy}", f"model.reward={reward}")
    assert found.startswith("model.reward must come with its tokenizer")
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors is truncated" in one(f"model.policy={policy}")


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ("model.policy={policy} model.pad_token=a", "model.pad_token=a is a token of ordinary texts"),
        ("model.policy={policy} model.lora.rank=5", "adapters are larger"),
        ("model.policy={reward} algo=reward", "is replaced by a random head"),
    ],
)
def test_a_doubtful_setting_of_a_model_gives_a_warning(policy, reward, words, warning):
    cfg = compose(words.format(policy=policy, reward=reward).split())
    assert check.problems(cfg) == [] and any(warning in text for text in check.warnings(cfg))
    usual = compose([f"model.policy={policy}", "model.pad_token='<unk>'", "model.lora.rank=4"])
    assert not any(warning in text for text in check.warnings(usual))


def test_an_unknown_model_type_is_refused(policy):
    change(policy, "config.json", model_type="lamma")
    assert "installed transformers knows, got" in one(f"model.policy={policy}")
    assert problems(f"model.policy={policy}", "model.trust_remote_code=true") == []
    change(policy, "config.json", auto_map={"AutoConfig": "configuration.Mine"})
    assert one(f"model.policy={policy}").endswith(
        "set model.trust_remote_code=true to run the code in its folder"
    )


def test_a_model_named_for_another_algorithm_is_the_remedy(policy):
    own = ["task=local", "task.path=x", "scorer=function", "scorer.path=json:loads"]
    found = " ".join(check.problems(compose([*own, "algo=sft", f"model.policy={policy}"])))
    assert f"set model.base={policy}" in found
    found = " ".join(check.problems(compose([*own, "algo=rloo", f"model.base={policy}"])))
    assert f"set model.policy={policy}" in found


@pytest.mark.parametrize(
    ("key", "scorer"), [("model.reward", "scorer=reward_model"), ("gold.path", "scorer@gold=reward_model")]
)
def test_a_reward_model_must_have_one_label(policy, reward, key, scorer):
    words = [f"model.policy={policy}", scorer, f"{key}={reward}"]
    assert problems(*words) == []
    change(reward, "config.json", id2label=None)
    assert f"{key} must name a reward model" in one(*words) and "with 2 labels" in one(*words)
    change(reward, "config.json", id2label={"0": "LABEL_0"})
    write_weights(reward / "model.safetensors", {**TENSORS, "score.weight": (3, 4)})
    assert "a model with 3 labels" in one(*words)
    write_weights(reward / "model.safetensors", {**TENSORS, "classifier.weight": (1, 4)})
    assert "a model without score.weight" in one(*words)


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_policy_must_come_with_a_readable_tokenizer(policy, tmp_path, text):
    (policy / "tokenizer.json").unlink()
    if text is not None:
        (policy / "tokenizer.json").write_text(text)
    found = one(f"model.policy={policy}")
    assert found.startswith("model.policy must come with its tokenizer")
    assert found.endswith("set model.tokenizer=<hub name or folder>")
    write_tokenizer(tmp_path / "tokenizer")
    assert problems(f"model.policy={policy}", f"model.tokenizer={tmp_path}/tokenizer") == []


@pytest.mark.parametrize(
    ("special", "setting", "message"),
    [
        ({"pad_token": None}, None, None),
        ({"pad_token": "<eos>"}, None, None),
        ({}, "<eos>", "got pad token '<eos>' and end token '<eos>'"),
        ({}, "<nowhere>", "must be in the vocabulary of the tokenizer"),
        ({"pad_token": None}, "c", None),
        ({}, None, None),
    ],
)
def test_the_pad_token_must_be_another_token_than_the_end_token(policy, special, setting, message):
    write_tokenizer(policy, **special)
    found = problems(f"model.policy={policy}", setting and f"model.pad_token='{setting}'")
    assert (found == []) if message is None else (len(found) == 1 and message in found[0])


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_tokenizer_without_an_unused_token_needs_a_pad_token(policy, pad):
    write_tokenizer(policy, ("<sep>", *TOKENS[1:]), pad_token=pad)
    found = one(f"model.policy={policy}")
    assert f"got pad token {pad!r} and end token '<eos>'; set model.pad_token to a token" in found
    write_tokenizer(policy, ("<|padding|>", *TOKENS[1:]), pad_token=pad)
    assert problems(f"model.policy={policy}") == []
    (policy / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    assert "model.pad_token must be set" in one(f"model.policy={policy}")


def test_the_end_token_of_dialogues_is_known_only_to_the_chat_template(policy):
    write_tokenizer(policy, ("<sep>", *TOKENS[1:]), pad_token="<eos>", chat_template="{{ messages }}")
    assert "end token '<eos>'" in one(f"model.policy={policy}"), "prompts of texts need no template"
    assert problems(f"model.policy={policy}", "generator=dataset") == [], "pairs may be dialogues"


def test_a_token_without_embedding_is_refused(policy, tmp_path):
    write_tokenizer(policy, (*TOKENS, "d", "e", "f"))
    assert "got ids up to 8 in the tokenizer of" in one(f"model.policy={policy}")
    write_tokenizer(policy)
    small = write_model(
        tmp_path / "small", vocab_size=4, tensors={**TENSORS, **HEAD, "model.embed_tokens.weight": (4, 4)}
    )
    found = one(f"model.policy={policy}", f"model.reference={small}")
    assert found.startswith("model.reference must fit the model")


def test_a_reference_with_other_token_ids_is_refused(policy, tmp_path):
    other = Path(write_model(tmp_path / "other"))
    write_tokenizer(other, (*TOKENS[:3], "c", "b", "a"))
    found = one(f"model.policy={policy}", f"model.reference={other}")
    assert "in which 'a' has another id" in found
    write_tokenizer(other, (*TOKENS[:3], "a", "b", "c", "more"))
    assert problems(f"model.policy={policy}", f"model.reference={other}") == []


def test_a_lora_target_must_be_a_linear_layer(policy):
    words = [f"model.policy={policy}", "model.lora.rank=2"]
    assert problems(*words, "model.lora.targets=[q_proj,mlp.up_proj]") == []
    for target in ("query", "lm_head", "proj"):
        found = one(*words, f"model.lora.targets=[{target}]")
        assert "(down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj)" in found


def test_a_downloaded_model_is_checked_like_a_folder(policy, monkeypatch):
    monkeypatch.setattr(hub, "cached_folder", lambda name: policy)
    assert "without score.weight" in one("model.policy=some/policy", "model.reward=some/policy")
    (policy / "model.safetensors").unlink()
    (policy / "tokenizer.json").unlink()
    assert problems("model.policy=some/policy") == [], "the rest is downloaded by the run"


def test_models_that_cannot_be_downloaded_are_reported_before_the_run(policy, monkeypatch):
    monkeypatch.setattr(hub, "unreachable", lambda: "no connection to the hub")
    cfg = compose([f"model.policy={policy}", "model.reward=some/reward", "model.tokenizer=some/tokenizer"])
    found = list(check.downloads(cfg))
    assert [text.partition(" ")[0] for text in found] == ["model.reward", "model.tokenizer"]
    assert "(no connection to the hub), got 'some/reward'" in found[0] and "HF_HUB_OFFLINE=1" in found[0]
    monkeypatch.setattr(hub, "unreachable", lambda: None)
    assert list(check.downloads(cfg)) == []
    monkeypatch.setattr(hub, "unreachable", lambda: pytest.fail("no model is absent"))
    monkeypatch.setattr(hub, "cached_folder", lambda name: policy)
    assert list(check.downloads(cfg)) == []


def test_a_gguf_file_or_folder_gets_the_command_that_converts_it(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "q8.gguf").touch()
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "config.json").write_text('{"model_type": "llama"}')
    (beside / "q8.GGUF").touch()
    assert "gguf_file" in str(folder_problem("model.policy", str(beside / "q8.GGUF")))
    (beside / "q8.GGUF").rename(beside / "q8.gguf")
    assert "gguf_file" in str(folder_problem("model.policy", str(beside)))
    for path in (folder, folder / "q8.gguf"):
        found = folder_problem("model.policy", str(path))
        assert found is not None
        code = re.search(r"run: (python -c .*), then set (\S.*)$", found)
        assert code is not None
        assert f'M.from_pretrained("{folder}", gguf_file="q8.gguf", dtype=' in shlex.split(code[1])[2]
        assert shlex.split(code[2]) == [f"model.policy={tmp_path}/q8-safetensors"]


def test_a_class_of_tokenizers_may_have_an_end_token_of_its_own(policy):
    write_tokenizer(policy, eos_token=None, tokenizer_class="LlamaTokenizer")
    assert problems(f"model.policy={policy}") == []
