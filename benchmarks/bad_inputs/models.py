"""Rows about model and tokenizer folders, adapters and reward models."""

from __future__ import annotations

from benchmarks.bad_inputs.row import RL, SFT, Row, with_chat


def policy(name: str, path: str, *says: str, **others: object) -> Row:
    """Return a row of an RL run with another policy folder."""
    return Row(f"c_{name}", f"model.policy={path}", says, **{"base": RL, **others})  # type: ignore[arg-type]


def scored(name: str, path: str, *says: str, **others: object) -> Row:
    """Return a row of an RL run that a reward model scores."""
    base = RL.replace("scorer=function scorer.path=my_rewards:brief", "scorer=reward_model")
    return Row(f"c_{name}", f"scorer.path={path}", says, **{"base": base, **others})  # type: ignore[arg-type]


def run(name: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row of an RL run with other settings."""
    return Row(f"c_{name}", typed, says, **{"base": RL, **others})  # type: ignore[arg-type]


CHAT = with_chat(SFT) + " task=chat task.path=data/messages task.validation_split=validation"

ROWS = (
    # the rows of the first table
    policy("adapter", "models/adapter", "adapter", "models/smol"),
    policy("unknown_type", "models/unknown_type", "llamma"),
    policy("broken_config", "models/broken_config", "config.json"),
    policy("badtok", "models/bad_tokenizer", "tokenizer.json"),
    policy("bert", "models/bert", "causal"),
    policy("small_embedding", "models/small_embedding", "every token id needs an embedding"),
    Row("c_chat_template", "seed=2", base=CHAT, code=0, keeps=True, never=("<|assistant|>",)),
    run("lora_target", "model.lora.rank=4 'model.lora.targets=[quary]'", "quary"),
    policy("tensor_missing", "models/tensor_missing", "model.layers.0.mlp.up_proj.weight"),
    policy("nanweights", "models/nan_weights", "NaN", code=None),
    policy("no_config", "models/no_config", "config.json"),
    policy("noeos", "models/no_eos", "end token"),
    policy("no_tokenizer", "models/no_tokenizer", "model.tokenizer="),
    policy("no_weights", "models/no_weights", "safetensors"),
    run("pad_is_eos", "'model.pad_token=\"<|endoftext|>\"'", "model.pad_token must", "<|im_end|>"),
    run("pad_unknown", "'model.pad_token=\"<|padd|>\"'", "model.pad_token must"),
    run("pad_null", "model.pad_token=null", "model.pad_token", "<|im_"),
    policy("pickled", "models/pickled", "pytorch_model.bin"),
    policy("reward_as_policy", "models/reward", "reward model"),
    policy("policy_typo", "models/smoll", "models/smol", alone=True),
    run("ref_other", "model.reference=models/reference_7_words", "model.reference", "vocabulary"),
    scored("two_labels", "models/two_labels", "label"),
    scored("causal_as_reward", "models/smol", "reward model"),
    scored("no_reward", "null", "model.reward"),
    scored("rm_othertok", "models/reward_other_tokenizer", code=0, keeps=True),
    policy("shard_missing", "models/shard_missing", "model-00002"),
    policy("truncated", "models/truncated", "models/truncated", "model.safetensors"),
    # further defects and near misses
    policy("vocabulary_64", "models/vocabulary_64", "vocab_size=64"),
    policy("heads_5", "models/heads_5", "not a multiple of the number of attention heads"),
    policy("end_list", "models/end_list", code=0, keeps=True),
    policy("pad_negative", "models/pad_negative", code=0, keeps=True),
    policy("dtype_unknown", "models/dtype_unknown", "floaty", code=None, keeps=True),
    policy("rope_unknown", "models/rope_unknown", "models/rope_unknown"),
    policy("end_too_large", "models/end_too_large", code=None, keeps=True),
    policy("generation_broken", "models/generation_broken", code=0, keeps=True),
    policy("tokens_map_broken", "models/tokens_map_broken", code=None, keeps=True),
    policy("config_utf16", "models/config_utf16", "config.json"),
    policy("config_pointer", "models/config_pointer", "git lfs pull"),
    policy("extra_tensor", "models/extra_tensor", code=0, keeps=True),
    policy("float64", "models/float64", code=0, keeps=True),
    policy("int8", "models/int8", "integers"),
    policy("infinite", "models/infinite", "infinity"),
    policy("tensorflow", "models/tensorflow", "tf_model.h5"),
    policy("run_folder", "models/run", "set model.policy=models/run/model"),
    policy("readme_only", "models/no_files", "config.json"),
    policy("tokenizer_only", "models/tokenizer_only", "config.json"),
    policy("hub_address", "https://huggingface.co/gpt2", "gpt2"),
    policy("twice_slash", "models//smol", code=0, keeps=True),
    scored("reward_adapter", "models/adapter", "adapter"),
    scored("reward_bert", "models/bert", "reward model"),
    run("reference_adapter", "model.reference=models/adapter", "adapter"),
    run("tokenizer_file", "model.tokenizer=models/smol/tokenizer.json", "models/smol"),
    run("tokenizer_no_files", "model.tokenizer=models/no_files", "tokenizer.json"),
    run("pad_blank", "'model.pad_token= '", "model.pad_token must"),
    run("pad_unquoted", "'model.pad_token=<|im_end|>'", code=0, keeps=True),
    run("pad_id", "model.pad_token=0", "warning: model.pad_token=0", code=0, keeps=True),
    run("template_name", "model.chat_template=chatml", "model.chat_template"),
    Row(
        "c_template_broken",
        "model.base=models/template_broken",
        ("template",),
        base=CHAT,
    ),
    policy("zero_bytes", "models/zero_bytes", "model.safetensors"),
    policy("garbage_header", "models/garbage_header", "model.safetensors"),
    policy("lfs_pointer", "models/lfs_pointer", "model.safetensors"),
    policy("broken_tokenizer", "models/broken_tokenizer", "tokenizer.json"),
    policy("broken_tokenizer_config", "models/broken_tokenizer_config", "tokenizer_config.json"),
    policy("list_config", "models/list_config", "config.json"),
    policy("no_type", "models/no_type", "model_type"),
    policy("fewer_layers", "models/fewer_layers", "model.layers.1"),
    policy("more_layers", "models/more_layers", "model.layers.2"),
    policy("other_width", "models/other_width", "64"),
    policy("quantized", "models/quantized", "quanti"),
    policy("own_code", "models/own_code", "own"),
    policy("gguf", "models/gguf", "config.json"),
    policy("empty", "models/empty", "config.json"),
    policy("index_missing", "models/index_missing", "model.safetensors"),
    policy("index_broken", "models/index_broken", "index.json"),
    policy("a_file", "models/a_file", "folder"),
    policy("weights_file", "models/smol/model.safetensors", "folder", "models/smol"),
    policy("parent", "models", "config.json"),
    policy("dangling_link", "models/broken_link", "models/broken_link"),
    policy("short", "models/short", "the context length of the model"),
    policy("t5", "models/t5", "causal"),
    policy("empty_name", "", "model.policy"),
    policy("null", "null", "model.policy"),
    policy("hub_name", "gpt2-mediumm", "network", alone=True),
    policy("dot_typo", "./smol", "models/smol"),
    policy("absolute_typo", "/models/smol", "/models/smol"),
    policy("home_typo", "'~/models/smol'", "~/models/smol"),
    policy("half", "models/half", code=0, keeps=True),
    policy("untied", "models/untied", code=0, keeps=True),
    policy("sharded", "models/sharded", code=0, keeps=True),
    policy("trailing_slash", "models/smol/", code=0, keeps=True),
    policy("neox", "models/neox", code=0, keeps=True),
    run("tokenizer_other", "model.tokenizer=models/reward_other_tokenizer", "model.pad_token"),
    run("tokenizer_typo", "model.tokenizer=models/smoll", "models/smol", alone=True),
    run("reference_typo", "model.reference=models/smoll", "models/smol", alone=True),
    scored("reward_typo", "models/rewardd", "models/reward", alone=True),
    scored("reward_truncated", "models/reward_truncated", "model.safetensors"),
    scored("reward", "models/reward", code=0, keeps=True),
    run("lora_rank_large", "model.lora.rank=1000", "warning: model.lora.rank=1000", code=0, keeps=True),
    run("lora_dropout", "model.lora.rank=4 model.lora.dropout=2", "model.lora.dropout must be"),
    Row("c_chat_broken", "model.base=models/chat_broken", ("template",), base=CHAT),
    Row("c_chat_system", "model.base=models/chat_system", ("a system turn comes first",), base=CHAT),
    Row("c_chat_no_template", "model.base=models/smol", ("template",), base=CHAT, code=None, keeps=True),
    Row(
        "c_sft_policy",
        "model.base=null model.policy=models/smol task=local task.path=data/answers.jsonl",
        ("model.base",),
        base=SFT,
        code=None,
        keeps=True,
    ),
    Row(
        "c_sft_base_typo",
        "model.base=models/smoll task=local task.path=data/answers.jsonl",
        ("models/smol",),
        base=SFT,
        alone=True,
    ),
)
