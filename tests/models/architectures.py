"""Tiny models of every causal LM of transformers, with random weights.

A config is the default config of its model type with small sizes (`SMALL`), a few layers that have every kind
of layer of the default, and windows that a sequence of ten tokens exceeds.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCABULARY = 97

# Sizes by the names that configs use for them.
SMALL: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab shape_vocab_size "
    "pronunciation_vocab_size audio_vocab_size ngram_vocab_size_base",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
    "model_max_length relative_max_distance position_bias_max_distance",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff dff ffn_hidden_size d_inner "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size feed_forward_size "
    "intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size prompt_mid_dim "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size",
    32: "index_n_heads hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size "
    "output_embedding_size word_embed_proj_dim lru_width backbone_hidden_size hidden_size_global "
    "adapter_in_dim adapter_out_dim adapter_input_size pronunciation_embed_dim shape_embed_dim patch_size "
    "query_pre_attn_scalar num_centroids ple_embed_dim",
    16: "kv_channels o_lora_rank q_lora_rank kv_lora_rank time_step_rank hidden_size_per_layer_input "
    "laurel_rank adapter_rank router_hidden_size gated_norm_rank hc_lowrank position_bias_num_buckets "
    "num_buckets image_size conv_kernel_size mamba_dt_rank index_head_dim",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state state_size ssm_state_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim "
    "attention_head_size dim_head d_head rotary_dim mamba_chunk_size chunk_size block_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads num_encoder_attention_heads num_decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts sliding_window window_size attention_window_size "
    "sliding_window_size attention_chunk_size index_topk keep_window_size local_attention "
    "linear_num_value_heads swa_num_attention_heads linear_num_heads centroid_intermediate_top_k "
    "mamba_num_heads mamba_n_heads n_mamba_heads num_query_groups index_block_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
    "num_encoder_layers num_decoder_layers num_key_value_heads num_kv_heads swa_num_key_value_heads "
    "num_experts_per_tok moe_topk moe_k num_experts_per_token linear_num_key_heads "
    "n_shared_experts num_shared_experts moe_num_shared_experts kv_n_heads moe_top_k max_window_layers "
    "o_groups index_topk_blocks prompt_length prompt_types segment_types",
    1: "n_group topk_group n_groups first_k_dense_replace num_dense_layers mamba_n_groups mamba_ngroups "
    "num_kv_shared_layers moe_layer_start_index num_random_blocks",
    0: "num_nextn_predict_layers",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

ENCODERS = (  # types that predict the next token only with is_decoder
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
EQUAL_HEADS = (  # types in which all heads have keys of their own
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite",
    "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "youtu",
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in ENCODERS},
    **{kind: {"num_key_value_heads": 4} for kind in EQUAL_HEADS},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dory": {  # the layers between input and output run twice
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(["sliding_attention", "full_attention"], ROPE),
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"attn_type": "uni"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
CANNOT_BE_BUILT = {
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "predicts tokens from the states of another model",
    "gemma4_unified_assistant": "predicts tokens from the states of another model",
    "musicgen": "needs the config of a text encoder, and predicts several codebooks",
    "musicgen_melody": "needs the config of a text encoder, and predicts several codebooks",
}


def small(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config that make the config small; sections of the config are included."""
    changed: dict[str, Any] = {}
    layers = next((settings[name] for name in LAYERS if isinstance(settings.get(name), int)), 0)
    per_layer = {
        name: value
        for name, value in settings.items()
        if isinstance(value, list) and layers > 1 and len(value) == layers
    }
    kinds = list(zip(*(value for value in per_layer.values() if isinstance(value[0], str)), strict=True))
    chosen = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values()) or [0]
    chosen = [chosen[0]] * (2 - len(chosen)) + chosen
    for name, value in settings.items():
        if isinstance(value, dict) and "model_type" in value:
            changed[name] = small(value)
        elif name in per_layer:
            changed[name] = [value[i] for i in chosen]
        elif name in LAYERS:
            changed[name] = len(chosen)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and name in SIZES:
            changed[name] = SIZES[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            changed[name] = min(value, VOCABULARY - 1)
    return changed


def tiny_config(kind: str) -> PreTrainedConfig:
    """Return the tiny config of the model type `kind`."""
    made = CONFIG_MAPPING[kind]
    settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **small(made().to_dict())}
    for name, value in SPECIAL.get(kind, {}).items():
        before = settings.get(name)
        settings[name] = {**before, **value} if isinstance(before, dict) else value
    return made(**settings)


def tiny(kind: str) -> PreTrainedModel:
    """Return a tiny model of the type `kind`, with weights large enough that every layer matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding | Conv1D):
                module.weight.normal_(0, 0.2, generator=draw)
    return model
