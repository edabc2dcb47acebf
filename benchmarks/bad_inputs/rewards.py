"""Rows about reward functions and services that score."""

from __future__ import annotations

from benchmarks.bad_inputs.row import RL, Row


def function(name: str, path: str, *says: str, **others: object) -> Row:
    """Return a row of an RL run with another reward function."""
    return Row(f"d_{name}", f"scorer.path={path}", says, **{"base": RL, **others})  # type: ignore[arg-type]


def stops(name: str, path: str, *says: str, **others: object) -> Row:
    """Return a row whose reward function fails later than on the examples that are tried before the run."""
    return function(name, path, *says, code=1, keeps=True, **others)


def runs(name: str, path: str, *says: str, **others: object) -> Row:
    """Return a row whose command trains, with these warnings."""
    return function(name, path, *says, code=0, keeps=True, **others)


def service(name: str, url: str, *says: str, code: int = 1, **others: object) -> Row:
    """Return a row of an RL run with a service that scores."""
    base = RL.replace("scorer=function scorer.path=my_rewards:brief", "scorer=http")
    typed = f"scorer.url={url}"
    return Row(f"d_http_{name}", typed, says, base=base, code=code, keeps=code != 2, **others)  # type: ignore[arg-type]


BATCHED = "scorer.batched=true"

ROWS = (
    # the rows of the first table
    function("class", "my_rewards:Cls", "class"),
    function("raises_at_import", "raising_rewards:brief", "no licence found"),
    runs("batched_generator", f"my_rewards:batched_generator {BATCHED}"),
    function("batched_raises", f"my_rewards:batched_raises {BATCHED}", "ZeroDivisionError", "my_rewards.py"),
    function("batched_one_number", f"my_rewards:batched_one_number {BATCHED}", "batched_one_number"),
    function("batched_one_too_few", f"my_rewards:batched_one_too_few {BATCHED}", "batched_one_too_few"),
    function("list_not_batched", "my_rewards:batched", "scorer.batched=true"),
    runs("boolean", "my_rewards:boolean"),
    runs("constant", "my_rewards:constant", "warning"),
    function("dot", "my_rewards.brief", "my_rewards:brief"),
    function("exits", "my_rewards:exits", "error:", "exits"),
    service("with_path", "SERVICE/fine scorer.path=my_rewards:brief", "scorer.path", code=2),
    service(
        "down", "http://127.0.0.1:9/score", "scorer.url", code=2, never=("urllib3", "HTTPConnectionPool")
    ),
    service("no_url", "null", "scorer.url", code=2),
    function("huge", "my_rewards:huge", "float32"),
    function("missing_import", "missing_import_rewards:brief", "a_library_that_is_missing"),
    function("infinite", "my_rewards:infinite", "finite"),
    runs("instance", "my_rewards:instance"),
    function("interrupts", "my_rewards:interrupts", code=None, keeps=True),
    runs("keyword_only", "my_rewards:keyword_only"),
    function("raises_lag", "my_rewards:key_error schedule.max_lag=1", "KeyError"),
    stops("raises_later", "my_rewards:raises_later", "no more scores", "my_rewards.py"),
    function("one_in_a_list", "my_rewards:one_in_a_list", "[0.5]"),
    function("not_a_number", "my_rewards:not_a_number", "nan"),
    function("no_colon", "my_rewards", "my_rewards:"),
    function("no_file", "somewhere/rewards.py:brief", "somewhere/rewards.py"),
    function("nothing", "my_rewards:nothing", "None"),
    function("null", "null", "scorer.path"),
    function("no_function", "my_rewards:breif", "brief"),
    function("number", "my_rewards:NUMBER", "NUMBER"),
    runs("numpy", "my_rewards:numpy_number"),
    function("os_exits", "my_rewards:os_exits", code=7, keeps=True),
    runs("prints", "my_rewards:prints"),
    function("key_error", "my_rewards:key_error", "KeyError", "my_rewards.py"),
    runs("slow", "my_rewards:slow schedule.prompts_per_update=4 schedule.total_episodes=16", "scor"),
    function("text", "my_rewards:text", "'0.5'"),
    function("syntax", "syntax_rewards:brief", "syntax_rewards.py", "line 3"),
    runs("tensor", "my_rewards:tensor"),
    runs("two_arguments", "my_rewards:two_arguments"),
    # further functions and near misses
    function("four_arguments", "my_rewards:four_arguments", "four_arguments"),
    runs("any_arguments", "my_rewards:any_arguments"),
    runs("with_default", "my_rewards:with_default"),
    runs("lambda", "my_rewards:anonymous"),
    function("generator_function", "my_rewards:yields", code=None, keeps=True),
    runs("async", "my_rewards:waits"),
    function("pair", "my_rewards:pair", "(0.5, 1.0)"),
    function("complex", "my_rewards:complex_number", "1j"),
    function("big_tensor", "my_rewards:big_tensor", "tensor"),
    function("without_message", "my_rewards:without_message", "ValueError", "my_rewards.py"),
    function("stop_iteration", "my_rewards:stop_iteration", "StopIteration"),
    function("recursive", "my_rewards:recursive", "RecursionError"),
    function("exits_with_text", "my_rewards:exits_with_text", "error:", "my own message"),
    runs("changes_folder", "my_rewards:changes_folder"),
    function("batched_dictionary", f"my_rewards:batched_dictionary {BATCHED}", "batched_dictionary"),
    function("row_function_batched", f"my_rewards:brief {BATCHED}", "set scorer.batched=false"),
    function("file_form", "my_rewards.py:brief", code=0, keeps=True),
    function("file_no_function", "my_rewards.py", "my_rewards.py:"),
    function("two_colons", "my_rewards:brief:x", "scorer.path"),
    function("call", "'my_rewards:brief()'", "brief"),
    function("folder", "data:brief", "data"),
    function("standard_library", "json:brief", "json"),
    function("no_module", "my_reward:brief", "my_rewards"),
    function("notebook", "my_rewards.ipynb:brief", "my_rewards.ipynb"),
    function("indented", "indented_rewards:brief", "indented_rewards.py", "line 2"),
    function("missing_name", "missing_name_rewards:brief", "a_name_that_is_missing"),
    function("exits_at_import", "exiting_rewards:brief", "exiting_rewards"),
    function("empty_module", "empty_rewards:brief", "brief"),
    function("undefined", "undefined_rewards:brief", "a_function_that_is_missing"),
    runs("latin", "latin_rewards:brief"),  # Python imports a file with Latin-1 in a comment
    service("fine", "SERVICE/fine", code=0),
    service("html", "SERVICE/html", "hello"),
    service("broken", "SERVICE/broken scorer.retries=1", "500"),
    service("forbidden", "SERVICE/forbidden", "401", "scorer.token_variable", code=2),
    service("not_found", "SERVICE/scores", "404"),
    service("short", "SERVICE/short", "scores for"),
    service("nan", "SERVICE/nan", "finite"),
    service("texts", "SERVICE/texts", "'good'"),
    service("list", "SERVICE/list", "scores"),
    service("other_key", "SERVICE/other_key", "scores"),
    service("slow", "SERVICE/slow scorer.timeout_s=1 scorer.retries=1", "scorer.timeout_s"),
    service("no_scheme", "127.0.0.1:9/score", "http://", code=2),
    service("no_host", "http://", "scorer.url", code=2),
    service(
        "unknown_host",
        "http://a-host-that-is-missing.invalid/score",
        "a-host-that-is-missing.invalid",
        code=2,
    ),
    service("port", "http://127.0.0.1:99999/score", "99999", code=2),
    service("no_token", "SERVICE/fine scorer.token_variable=A_TOKEN", "A_TOKEN", code=2),
)
