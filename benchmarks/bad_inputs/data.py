"""Rows about data files: RL, reward modelling, SFT and offline DPO with own data."""

from __future__ import annotations

from benchmarks.bad_inputs.row import OFFLINE_DPO, RL, SFT, SUPERVISED, Row, with_chat

REWARD = f"algo=reward model.policy=models/smol {SUPERVISED}"


def folder(name: str, path: str, *says: str, **others: object) -> Row:
    """Return a row of an RL run with task=preferences and a data folder."""
    return Row(f"b_{name}", f"task.path={path}", says, **{"base": RL, **others})  # type: ignore[arg-type]


def local(name: str, path: str, *says: str, base: str = RL, **others: object) -> Row:
    """Return a row of a run with task=local."""
    return Row(f"b_{name}", f"task=local task.path={path}", says, **{"base": base, **others})  # type: ignore[arg-type]


def runs(make: object, *words: str, **others: object) -> Row:
    """Return a row whose command trains, with these warnings."""
    return make(*words, code=0, keeps=True, **others)  # type: ignore[operator, no-any-return]


ROWS = (
    # the rows of the first table
    runs(folder, "pairs", "data/pairs"),
    runs(folder, "empty_chosen", "data/empty_chosen", "warning"),
    folder("integers", "data/integers", "prompt", "text"),
    folder("badval", "data/badval", "validation.jsonl", "line 40"),
    runs(folder, "bom", "data/bom"),
    folder("two_formats", "data/two_formats", "train.csv", "train.jsonl"),
    folder("broken500", "data/broken500", "train.jsonl", "line 501"),
    folder("semicolons", "data/semicolons", "prompt;chosen;rejected"),
    folder("empty_train", "data/empty_train", "train.jsonl", "empty"),
    folder("empty_validation", "data/empty_validation", "validation.jsonl", "empty"),
    folder("empty_folder", "data/empty_folder", "train"),
    runs(folder, "one_empty_prompt", "data/one_empty_prompt", "warning"),
    runs(folder, "gz", "data/gz"),
    folder("hub_name", "Anthropic/hh-rlhf", "task.preferences_name=Anthropic/hh-rlhf"),
    runs(folder, "long_prompt", "data/long_prompt"),
    folder("latecols", "data/latecols", "train.jsonl", "501"),
    folder("latin1", "data/latin1", "train.jsonl", "UTF-8", "line"),
    folder("utf16", "data/utf16", "train.jsonl", "UTF-8"),
    runs(folder, "trl_pairs", "data/trl_pairs", base=with_chat(RL)),
    folder("one_number", "data/one_number", "train.jsonl", "301"),
    folder("one_null", "data/one_null", "train.jsonl", "301"),
    folder("one_nan", "data/one_nan", "train.jsonl", "301"),
    folder("no_validation", "data/no_validation", "task=local"),
    folder("not_parquet", "data/not_parquet", "train.parquet", "Parquet"),
    runs(folder, "same_pairs", "data/same_pairs", "warning"),
    runs(folder, "blank_umlaut", "'\"data/my dätä\"'", shown="path with a blank and an umlaut"),
    folder("blank_path", "'data/my pairs'", "did you mean", shown="path with a blank that does not exist"),
    folder("all_long", "data/all_long", "max_prompt_tokens"),
    runs(folder, "capitals", "data/capitals"),
    folder("alpaca", "data/alpaca", "prompt", "instruction"),
    # further formats and near misses
    runs(folder, "parquet", "data/pairs_parquet"),
    runs(folder, "csv", "data/pairs_csv"),
    runs(folder, "array", "data/array"),
    runs(folder, "crlf", "data/crlf"),
    runs(folder, "blank_lines", "data/blank_lines"),
    runs(folder, "extra_late", "data/extra_late"),
    folder("list_line", "data/list_line", "train.jsonl", "line 561"),
    folder("text_line", "data/text_line", "train.jsonl", "line 1"),
    folder("two_objects", "data/two_objects", "train.jsonl", "line 1"),
    folder("nul_bytes", "data/nul_bytes", "train.jsonl", "line"),
    folder("tabs", "data/tabs", "train.csv"),
    folder("ragged_csv", "data/ragged_csv", "train.csv"),
    folder("same_header", "data/same_header", "train.csv", "chosen"),
    folder("header_only", "data/header_only", "train.csv", "empty"),
    folder("not_gz", "data/not_gz", "train.jsonl.gz"),
    folder("gz_cut", "data/gz_cut", "train.jsonl.gz"),
    folder("train_is_folder", "data/train_is_folder", "train"),
    folder("parquet_cut", "data/parquet_cut", "train.parquet"),
    folder("parquet_empty", "data/parquet_empty", "train.parquet"),
    folder("parquet_ints", "data/parquet_ints", "prompt", "text"),
    folder("txt", "data/txt", "train.txt"),
    folder("only_test", "data/only_test", "train"),
    folder("swapped_names", "data/swapped_names", "Prompt"),
    folder("broken_link", "data/broken_link", "train.jsonl"),
    folder("typo", "data/pairz", "data/pairs"),
    folder("file_for_folder", "data/pairs/train.jsonl", code=None, keeps=True),
    folder("null", "null", "task.path"),
    runs(folder, "three_rows", "data/three_rows", "warning"),
    runs(folder, "tilde_slash", "data/pairs/"),
    # task=local
    runs(local, "local_jsonl", "data/all.jsonl"),
    runs(local, "local_csv", "data/all.csv"),
    runs(local, "local_parquet", "data/all.parquet"),
    runs(local, "local_gz", "data/all.jsonl.gz"),
    runs(local, "local_folder", "data/pairs"),
    runs(local, "local_prompts", "data/prompts_only"),
    runs(local, "local_alpaca", "data/alpaca"),
    runs(local, "local_messages", "data/messages.jsonl", base=with_chat(RL)),
    runs(local, "local_sft", "data/answers.jsonl", base=SFT),
    runs(
        local,
        "local_sft_chat",
        "data/messages.jsonl",
        "<|im_start|>",
        base=with_chat(SFT),
    ),
    runs(local, "local_reward", "data/all.jsonl", base=REWARD),
    runs(local, "local_dpo", "data/all.jsonl", base=OFFLINE_DPO),
    local("local_no_template", "data/messages.jsonl", "template", base=SFT, code=None, keeps=True),
    local("local_ambiguous", "data/ambiguous.jsonl", "task.columns.prompt", "question"),
    local("local_broken500", "data/broken500.jsonl", "broken500.jsonl", "501"),
    local("local_one_row", "data/one_row.jsonl", "one_row.jsonl"),
    local("local_empty", "data/empty.jsonl", "empty.jsonl", "empty"),
    local("local_blank", "data/blank.jsonl", "blank.jsonl", "empty"),
    local("local_txt", "data/notes.txt", "notes.txt", ".jsonl"),
    local("local_no_suffix", "data/no_suffix", "no_suffix", ".jsonl"),
    local("local_csv_in_jsonl", "data/csv_in.jsonl", "csv_in.jsonl"),
    runs(local, "local_array_in_jsonl", "data/array_in.jsonl"),
    local("local_object", "data/object.json", "object.json"),
    local("local_picture", "data/picture.parquet", "picture.parquet"),
    local("local_foreign", "data/foreign_columns.jsonl", "frage", "task.columns.prompt"),
    runs(local, "local_mapped", "data/foreign_columns.jsonl task.columns.prompt=frage"),
    local("local_mapped_wrong", "data/foreign_columns.jsonl task.columns.prompt=frge", "frage"),
    local("local_typo", "data/al.jsonl", "data/all.jsonl"),
    local("local_hub", "Anthropic/hh-rlhf", "Anthropic/hh-rlhf"),
    local("local_no_path", "null", "task.path"),
    local("local_reward_no_pairs", "data/answers.jsonl", "chosen", base=REWARD),
    local("local_dpo_no_pairs", "data/prompts_only", "chosen", base=OFFLINE_DPO),
    local("local_sft_no_response", "data/prompts_only", "response", base=SFT),
    local(
        "local_fraction_0",
        "data/all.jsonl task.validation_fraction=0",
        "task.validation_fraction must be > 0",
    ),
    local(
        "local_fraction_1", "data/all.jsonl task.validation_fraction=1", "task.validation_fraction must be"
    ),
    local(
        "local_fraction_2", "data/all.jsonl task.validation_fraction=20", "task.validation_fraction must be"
    ),
    local(
        "messages_user_last",
        "data/messages_user_last",
        "assistant",
        base=with_chat(SFT),
    ),
    local("messages_empty", "data/messages_empty", "301", base=with_chat(SFT)),
    local("messages_role", "data/messages_role", "301", base=with_chat(SFT)),
    local(
        "messages_no_content",
        "data/messages_no_content",
        "301",
        base=with_chat(SFT),
    ),
    local("messages_text", "data/messages_text", "301", base=with_chat(SFT)),
    folder("only_validation", "data/only_validation", "train"),
    folder("nested", "data/nested", "line 301", "an object"),
    folder("booleans", "data/booleans", "rejected", "true or false"),
    folder("no_rejected", "data/no_rejected", "rejected", base=OFFLINE_DPO),
    folder("parent", "data", "one file per split"),
    folder("hub_pairs", "null task.preferences_name=Anthropic/hh-rlhf", "network", alone=True),
    folder("hub_column_key", "data/pairs task.columns.prompt=prompt", "task.columns"),
    local("local_lines_json", "data/lines.json", "lines.json", "[{...}, {...}]"),
    runs(local, "local_indented", "data/indented.json"),
    local("local_tsv", "data/all.tsv", "all.tsv", ".csv"),
    local("local_zip", "data/all.jsonl.zip", "all.jsonl.zip", ".gz"),
    local("local_xlsx", "data/all.xlsx", "all.xlsx", ".csv"),
    runs(local, "local_bom_csv", "data/bom.csv"),
    runs(local, "local_one_column", "data/one_column.csv"),
    runs(local, "local_csv_gz", "data/all.csv.gz"),
    local("local_semicolons", "data/semicolons.csv", "save the file with commas"),
    local("local_utf16", "data/utf16.jsonl", "UTF-8", "utf-16"),
    runs(local, "local_capitals", "data/capitals.jsonl"),
    runs(local, "local_capitals_reward", "data/capitals.jsonl", base=REWARD),
    runs(local, "local_no_answers", "data/no_answers.jsonl", "warning", base=SFT),
    local("local_null_answer", "data/one_null_answer.jsonl", "line 301", "null", base=SFT),
    runs(local, "local_long_answer", "data/long_answer.jsonl", base=SFT),
    local("local_one_prompt", "data/one_prompt.jsonl", "one prompt"),
    local(
        "local_sharegpt",
        "data/sharegpt.jsonl",
        "line 1",
        "in place of role and content",
        never=("pad_token",),
        base=with_chat(SFT),
    ),
    local("local_content_parts", "data/parts.jsonl", "line 1", "content", base=with_chat(SFT)),
    local("local_labels", "data/labels.jsonl", "chosen", base=OFFLINE_DPO),
    runs(local, "local_trl_pairs", "data/trl_pairs.jsonl", base=with_chat(OFFLINE_DPO)),
    local("local_pattern", "'data/*.jsonl'", "data/*.jsonl"),
    local("local_validation_only", "data/only_validation", "train"),
    local("local_parent", "data", "one file per split"),
    Row("b_dpo_pairs", "seed=2", base=OFFLINE_DPO, code=0, keeps=True),
    Row("b_tldr_columns", "task=tldr task.path=data/pairs scorer@gold=none", ("query",), base=RL),
    Row("b_gsm8k_columns", "task=gsm8k task.path=data/pairs", ("question",), base=RL),
    Row("b_chat_columns", "task=chat task.path=data/pairs", ("messages",), base=RL),
)
