"""The size of a model, computed from its config or the headers of its weights, without loading the model."""

import json

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.assembly.parts import make
from rlhf.config.models import LoRAConfig
from rlhf.memory import sizes
from rlhf.memory.sizes import (
    ModelSize,
    adapter_parameters,
    config_size,
    folder_size,
    models,
    module_parameters,
    named_size,
)
from rlhf.models.loading import new_nano, new_reward_model, save
from rlhf.models.modules import adapt
from rlhf.words.compose import compose
from tests.memory.plans import PYTHIA_2_8B
from tests.tiny_models import tiny_config, tiny_lm, tiny_tokenizer

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
SHAPES = {
    "pythia 14m": {**PYTHIA_2_8B, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
                   "intermediate_size": 512},
    "pythia 2.8b": PYTHIA_2_8B,
    "gpt-neox, sequential, without biases": {**PYTHIA_2_8B, "attention_bias": False,
                                             "use_parallel_residual": False},
    "llama 8b": LLAMA_8B,
    "llama 3.2 1b": {**LLAMA_8B, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
                     "head_dim": 64, "tie_word_embeddings": True},
    "llama, with biases": {**LLAMA_8B, "attention_bias": True, "mlp_bias": True},
    "mistral 7b": {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000},
    "qwen2 0.5b": {**LLAMA_8B, "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
                   "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                   "intermediate_size": 4864, "tie_word_embeddings": True},
    "qwen3 4b": {**LLAMA_8B, "model_type": "qwen3", "hidden_size": 2560, "head_dim": 128},
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
             "n_positions": 1024, "n_inner": None},
}  # fmt: skip


def counted(config: dict, auto=AutoModelForCausalLM) -> int:
    settings = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(config["model_type"], **settings))
    return sum(p.numel() for p in model.parameters())


PARAMETERS = {  # as published, or counted in the published weights
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "unsloth/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "microsoft/rho-math-1b-v0.1": 1_100_048_384,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m-deduped": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
}


def test_a_published_model_that_is_not_on_this_machine_has_its_published_number_of_parameters():
    found = {name: size.parameters for name in PARAMETERS if (size := named_size(name)) is not None}
    assert found == PARAMETERS
    assert named_size("someone/another-model") is None and named_size("models/Qwen3-8B-AWQ") is None


def test_every_published_shape_is_compared_with_a_published_number_of_parameters():
    shapes = {name for shapes in sizes.SHAPES.values() for name in shapes}
    known = {sizes.VARIANT.sub("", name.partition("/")[2].lower()) for name in PARAMETERS}
    twins = {"meta-llama-3-70b": "llama-3.3-70b", "llama-3.1-70b": "llama-3.3-70b"}
    twins |= {f"skywork-reward-v2-{name}": name for name in ("llama-3.2-1b", "qwen3-0.6b")}
    assert {twins.get(name, name) for name in shapes} - known <= {"mistral-7b-v0.1"}


@pytest.mark.parametrize("name", ["google/gemma-2-2b", "google/gemma-3-270m", "Qwen/Qwen3-0.6B"])
def test_a_published_shape_has_the_parameters_that_transformers_makes(name):
    assert named_size(name).parameters == counted(sizes.published_config(name))


@pytest.mark.parametrize("name", SHAPES)
def test_computed_parameter_count_matches_transformers(name):
    size = config_size(SHAPES[name])
    assert size is not None and size.parameters == counted(SHAPES[name])


@pytest.mark.parametrize("name", ["pythia 14m", "llama 3.2 1b"])
def test_a_scoring_model_has_the_backbone_and_a_head_with_one_output(name):
    size = config_size(SHAPES[name])
    classifier = counted({**SHAPES[name], "num_labels": 1}, AutoModelForSequenceClassification)
    assert size.scoring().parameters == classifier
    saved = {**SHAPES[name], "architectures": ["XForSequenceClassification"]}
    assert config_size(saved).parameters == classifier


def test_size_of_the_embedded_model_matches_the_created_model():
    model = compose(["model.hidden_size=64", "model.layers=3"]).model
    task = compose([]).task
    size = config_size(model.architecture(task.vocabulary_size))
    assert size.parameters == sum(p.numel() for p in new_nano(model, make(task).tokenizer()).parameters())
    arithmetic = compose(["task=arithmetic"]).task
    assert arithmetic.vocabulary_size == len(make(arithmetic).tokenizer())


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj", "query_key_value"]])
@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_adapter_parameter_count_matches_peft(kind, targets):
    model, size = tiny_lm(kind), config_size(tiny_config(kind).to_dict())
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    kept = targets and [name for name in targets if name in there]
    adapt(model, LoRAConfig(rank=3, targets=kept), 0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(size, 3, targets) == trained


WHOLE = {
    "gpt_neox": ["embed_in", "lm_head", "final_layer_norm", "layers.0.input_layernorm"],
    "llama": ["model.embed_tokens", "lm_head", "norm", "1.post_attention_layernorm"],
}


@pytest.mark.parametrize("kind", WHOLE)
def test_modules_that_are_trained_whole_are_counted_as_peft_trains_them(kind, tmp_path):
    with_weights(tmp_path, kind)
    model, size = tiny_lm(kind), folder_size(tmp_path)
    adapt(model, LoRAConfig(rank=3, modules_to_save=WHOLE[kind]), 0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = module_parameters(str(tmp_path), size, WHOLE[kind])
    assert whole > 2 * size.vocabulary * size.hidden
    assert adapter_parameters(size, 3, None) + whole == trained


def test_the_plan_includes_the_modules_that_are_trained_whole():
    def policy(*words: str):
        return next(models(compose(["model.lora.rank=4", *words])))

    embeddings = policy().size.vocabulary * policy().size.hidden
    whole = policy("model.lora.modules_to_save=[embed_in,lm_head]")
    assert whole.trainable == policy().trainable + 2 * embeddings
    assert policy("model.lora.modules_to_save=[embed_in]", "algo=reward").trainable == (
        policy("algo=reward").trainable + embeddings
    )
    assert policy("model.lora.modules_to_save=[score]", "algo=reward").trainable == (
        policy("algo=reward").trainable
    ), "the head of a reward model is trained anyway"


def with_weights(folder, kind="gpt_neox", **settings) -> int:
    model = tiny_lm(kind, **settings)
    save(model, tiny_tokenizer(), folder)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_headers_of_the_weights_take_precedence_over_the_formula(tmp_path, kind, settings):
    count = with_weights(tmp_path, kind, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1}))
    # No model loads this file.
    save_file({"copy": torch.zeros(1000)}, tmp_path / "consolidated.safetensors")
    size = folder_size(tmp_path)
    assert size.parameters == count and (size.head == 0) == bool(settings)


def test_sharded_weights_are_counted_once_and_other_files_are_ignored(tmp_path):
    model = tiny_lm()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    save_file({"copy": torch.zeros(1000)}, tmp_path / "consolidated.safetensors")
    assert folder_size(tmp_path).parameters == sum(p.numel() for p in model.parameters())


def test_buffers_of_old_checkpoints_are_not_counted_as_parameters(tmp_path):
    count = with_weights(tmp_path)
    old = {
        **tiny_lm().state_dict(),
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({name: tensor.contiguous() for name, tensor in old.items()}, tmp_path / "model.safetensors")
    assert folder_size(tmp_path).parameters == count


def test_the_size_of_a_reward_model_includes_its_scoring_head(tmp_path):
    with_weights(tmp_path / "lm")
    model = new_reward_model(str(tmp_path / "lm"), 0)
    save(model, tiny_tokenizer(), tmp_path / "rm")
    size = folder_size(tmp_path / "rm")
    assert size.parameters == sum(p.numel() for p in model.parameters()) and size.head == 32


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_the_formula_is_used_if_the_weights_cannot_be_read(tmp_path, content):
    count = with_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert folder_size(tmp_path).parameters == count


def test_the_size_of_a_mixture_of_experts_is_known_only_from_its_weights(tmp_path):
    count = with_weights(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    assert folder_size(tmp_path).parameters == count
    (tmp_path / "model.safetensors").unlink()
    assert folder_size(tmp_path) is None


def test_a_hub_model_is_looked_up_only_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert named_size("someone/model") is None
    repository = tmp_path / "models--someone--model"
    count = with_weights(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert isinstance(size := named_size("someone/model"), ModelSize) and size.parameters == count


def test_the_size_is_unknown_for_a_config_without_sizes():
    assert config_size({}) is None and config_size({"hidden_size": 8}) is None
    assert config_size({"text_config": tiny_config("llama").to_dict()}) is not None
