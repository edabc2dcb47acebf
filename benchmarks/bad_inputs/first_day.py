"""Rows about the first day of new users: what they typed, and further inputs of the same kinds."""

from __future__ import annotations

from benchmarks.bad_inputs.folders import finished
from benchmarks.bad_inputs.row import RL, SFT, TINY, Row, with_chat

REWARD = "scorer=function scorer.path=my_rewards:brief"
LOCAL = RL.replace("task=preferences task.path=data/pairs", "task=local task.path=day/pairs.jsonl")
CHAT = with_chat(LOCAL).replace("day/pairs.jsonl", "day/dialogues.jsonl")
PAIRS = LOCAL.replace(REWARD, "generator=dataset").replace("algo=rloo", "algo=dpo")
GSM8K = with_chat(LOCAL).replace(REWARD, "scorer=answer").replace("task=local", "task=gsm8k")
SHORT = "schedule.total_episodes=32 eval.prompts=4 generator.response_length=8"
BATCHED = "scorer.batched=true"


def row(name: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row of an RL run with own pairs and an own reward function."""
    return Row(f"g_{name}", typed, says, **{"base": LOCAL, **others})  # type: ignore[arg-type]


def runs(name: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row whose command trains one update."""
    return row(name, f"{typed} {SHORT}", *says, **{"code": 0, "keeps": True, "shown": f"`{typed}`", **others})


def reads(name: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row of `rlhf.inspect`, which shows what a run reads and trains nothing."""
    return row(name, typed, *says, **{"module": "rlhf.inspect", "code": 0, **others})


def refuses(name: str, typed: str, *says: str, **others: object) -> Row:
    """Return a row of `rlhf.inspect` that must report a problem."""
    return reads(name, typed, *says, code=2, **others)


def function(name: str) -> str:
    """Return the setting of a reward function of the first day."""
    return f"scorer.path=day_rewards.py:{name}"


def data(name: str) -> str:
    """Return the setting of a data file of the first day."""
    return f"task=local task.path=day/{name}"


def template(name: str, *says: str) -> Row:
    """Return a row of SFT with a chat template that cannot be used."""
    typed = f"model.chat_template=day/templates/{name}.jinja"
    base = f"{with_chat(SFT)} {data('dialogues.jsonl')}"
    return refuses(f"template_{name}", typed, *says, base=base)


ROWS = (
    # reward functions that start processes, with time limits
    runs("pool", function("pool")),
    runs("terminated", function("terminated")),
    runs("forked_by_hand", function("forked_by_hand")),
    runs("program_time_limit", f"{function('program_time_limit')} schedule.prompts_per_update=4"),
    runs("alarm", function("alarm")),
    runs("executor", f"{function('executor')} {BATCHED}"),
    runs("pool_lag", f"{function('pool_lists')} {BATCHED} schedule.max_lag=1"),
    # a saved config in place of settings, and own option files
    row("config_dir_run", "--config-dir RUN --config-name config", "to run its config:", prepare=finished),
    row("config_of_run", "RUN/config.yaml", "to run its config:", prepare=finished),
    row("config_flag", "--config RUN/config.yaml", "to run its config:", prepare=finished),
    row("config_dir_outputs", "--config-dir outputs", "without a folder of options", prepare=finished),
    refuses("own_name", "--config-dir day/conf_same algo=grpo", "rename the file to my_grpo.yaml", base=""),
    row(
        "own_lengths",
        "--config-dir day/conf algo=heir task=local --cfg job",
        "total_episodes: 320",
        code=0,
        base="",
    ),
    reads("own_task", "--config-dir day/conf task=mine", "schedule.total_episodes is 320", base=""),
    refuses("own_package", "--config-dir day/conf experiment=no_package", "# @package _global_", base=""),
    # what a reward function receives
    reads("messages", function("sees_messages"), base=CHAT),
    reads("trl_dialogue", f"{function('trl_dialogue')} {BATCHED}", base=CHAT),
    refuses("messages_of_texts", function("sees_messages"), "these prompts have none"),
    # the row of an error
    row("place_lines", function("fails_later"), "of day/pairs.jsonl, response", code=1, keeps=True),
    row(
        "place_csv", f"{function('fails_later')} {data('pairs.csv')}", "of day/pairs.csv", code=1, keeps=True
    ),
    row("place_folder", f"{function('fails_later')} {data('splits')}", "train.jsonl", code=1, keeps=True),
    # rewards that return no score are refused before a model is loaded
    refuses("none", function("none"), "returned None for line 1 of day/pairs.jsonl"),
    row("none_train", function("none"), "returned None for line 1 of day/pairs.jsonl"),
    row("none_by_branch", function("none_by_branch"), "This is an example of a response."),
    row("infinite", function("infinite"), "returned -inf"),
    row("mapping", function("mapping"), "returned {'score': 0.5}"),
    row("text", function("text"), "returned '8/10'"),
    row("one_more", f"{function('one_more')} {BATCHED}", "returned 4 scores for 3 responses"),
    row("judge_none", "scorer@gold=function gold.path=day_rewards.py:none", "gold.path=day_rewards.py:none"),
    reads("series", f"{function('series')} {BATCHED}"),
    reads("decimal", function("decimal")),
    # several functions, and names of other projects
    reads("list", "'scorer.path=[day_rewards.py:alarm,my_rewards:brief]'"),
    refuses(
        "comma",
        "scorer.path=day_rewards.py:alarm,my_rewards:brief",
        "write 'scorer.path=[day_rewards.py:alarm,my_rewards:brief]'",
    ),
    refuses("weight_alone", "scorer.weights=[0.5]", "leave it out"),
    row("trl_flags", "--num_generations 4 --beta 0.04", "write algo.samples_per_prompt=4 algo.kl_coef=0.04"),
    row("accumulation", "--per_device_train_batch_size 8 --gradient_accumulation_steps 4", "micro_batch=8;"),
    row("estimator", "--advantage_estimator group_norm", "write algo=grpo", base=""),
    row("verl_plus", "+trainer.n_gpus_per_node=1", "(trainer.n_gpus_per_node in verl", base=TINY),
    row("grpo_beta", "algo=grpo algo.beta=0.1", "set algo.kl_coef=0.1", base=TINY),
    row("max_tokens", "generator.max_tokens=64", "set generator.response_length=64", base=TINY),
    row("batch_size", "batch_size=8", "set schedule.prompts_per_update=<value>", base=TINY),
    row("temperature", "temperature=1", "set generator.temperature=1", base=TINY),
    row("stop", "generator.stop=x", "the end tokens that the model declares", base=TINY),
    row("wandb", "wandb=true", "set logger=wandb", base=TINY),
    row("backend_vllm", "generator.backend=vllm", "set generator=vllm", base=TINY),
    row(
        "reward_key", "reward=my_rewards:brief", "set scorer=function scorer.path=my_rewards:brief", base=TINY
    ),
    # rewards that change settings of the process
    runs("default_dtype", function("default_dtype"), "finished"),
    runs("inference_mode", function("inference_mode"), "finished"),
    runs("environment", function("environment"), "finished"),
    runs("output", function("output_to_nowhere"), "finished"),
    runs("recursion", function("recursion"), "finished"),
    # gsm8k with a chat model
    runs("gsm8k_chat", "task.chat=true task.path=day/gsm8k task.validation_size=16", base=GSM8K),
    refuses("chat_local", "task.chat=true", "model.chat_template must be set for dialogues"),
    # messages as text
    reads("json_text", data("text.jsonl"), base=CHAT),
    reads("json_text_parquet", data("text.parquet"), base=CHAT),
    reads("python_text", data("printed.csv"), base=CHAT),
    refuses("share_text", data("text_share.jsonl"), "user in place of human", base=CHAT),
    refuses("turns", data("turns.jsonl"), 'write {"role": ..., "content": ...}', base=CHAT),
    # other forms of data
    reads("tools", data("tools.jsonl"), "the chat template leaves out or changes the tool_calls", base=CHAT),
    refuses("role_human", data("role_human.jsonl"), "write user in place of human", base=CHAT),
    refuses("parts", data("parts.jsonl"), "write the text of its parts as one text", base=CHAT),
    reads("verl", data("verl.parquet"), base=CHAT),
    refuses("kto", data("kto.jsonl"), "keep the rows whose label is true", base=SFT),
    refuses("kto_pairs", data("kto.jsonl"), "train on the good ones alone", base=PAIRS),
    reads("hh", data("hh.jsonl"), base=PAIRS),
    reads("numbers", data("numbers.jsonl"), "read as text"),
    refuses("answer_lists", data("answer_lists.jsonl"), "or one text in place of the list"),
    reads("table", data("table.json")),
    reads("table_index", data("index.json")),
    refuses("data_key", data("data_key.json"), "an object whose data is an array"),
    refuses("ranked", data("ranked.jsonl"), "task.columns.chosen=<column>", base=PAIRS),
    refuses("same_pairs", data("same.jsonl"), "equal ones teach nothing", base=PAIRS),
    refuses("system_only", data("system_only.jsonl"), "with a system message only", base=CHAT),
    # models
    refuses("gguf", "model.policy=models/smol.GGUF", "gguf_file="),
    refuses("gguf_beside_config", "model.policy=models/gguf_and_config", "gguf_file="),
    refuses("vision", "model.policy=models/vision", "a model of vision and language"),
    refuses("encoder_decoder", "model.policy=models/bart", "an encoder-decoder"),
    # imports and signatures of reward functions
    refuses("relative", "scorer.path=pkg/relative.py:brief", "scorer.path=pkg.relative:brief"),
    reads("package", "scorer.path=pkg.relative:brief"),
    reads("beside", "scorer.path=no_pkg/beside.py:brief"),
    refuses("trl_lists", function("trl_lists"), "set scorer.batched=true"),
    reads("trl_answer", f"{function('trl_answer')} {BATCHED} {data('answers.jsonl')}"),
    refuses(
        "by_position",
        f"{function('compute_score')} {data('verl.parquet')}",
        "data_source would be the prompt",
        base=CHAT,
    ),
    # paths
    reads("comma_path", "'task.path=day/tea, milk.jsonl'"),
    reads("comma_folder", "task.path=day/a,b"),
    reads("bracket_path", "'task.path=day/tea[1].jsonl'"),
    reads("equals_path", "task.path=day/tea=1.jsonl"),
    # chat templates
    template("unclosed_tag", "line 1", "got day/templates/unclosed_tag.jinja"),
    template("unknown_filter", "unknown_filter.jinja with an error in line 2"),
    template("raises", "raises.jinja with an error"),
    template("constant", "constant.jinja, which writes the same for different answers"),
    template("empty", "empty.jinja, an empty file"),
    template("json", "json.jinja, a JSON file"),
)
