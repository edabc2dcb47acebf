"""Tests of the check of servers that a run did not start: settings, model, and the command in the message."""

import re
import shlex

import pytest

from rlhf.core.errors import UserError
from rlhf.generators.servers.pool import ServerPool
from rlhf.generators.servers.server import Server, check, numbers, ranges
from rlhf.generators.vllm.sampler import FILES, NCCL
from rlhf.generators.weights import SharedWeights
from rlhf.serve import _parser
from tests.generators.fake_server import FakeServer, loop_in_a_thread
from tests.generators.test_server_pool import prompts, sampling, settings, weights
from tests.tiny_models import KINDS, tiny_config

ABSENT = (3, 90, 91, 92)
URL = "http://node7:8000"


def needs(**changes):
    needed = {"model": "my model", "dtype": "bfloat16", "float32_head": True, "max_model_len": 64}
    needed["transfer"] = "shared_memory"
    return settings(**needed | {"absent_ids": ABSENT} | changes)


def status(kind: str = "llama", **changes):
    """Return a status that fits `needs`, as JSON gives it."""
    found = {"model": tiny_config(kind).to_dict(), "dtype": "bfloat16", "head_dtype": "float32"}
    return found | {"max_model_len": 64, "absent_ids": list(ABSENT), "weights": FILES} | changes


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_the_same_settings_or_longer_sequences_is_used(kind):
    ours = tiny_config(kind).to_dict()
    elsewhere = {
        "_name_or_path": "/other",
        "transformers_version": "0",
        "dtype": "float16",
        "use_cache": False,
    }
    theirs = tiny_config(kind).to_dict() | elsewhere
    check(needs(), ours, URL, status(kind, model=theirs, max_model_len=65))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "float32"}, "dtype float32 (the run has bfloat16)"),
        ({"head_dtype": "bfloat16"}, "head_dtype bfloat16 (the run has float32)"),
        ({"max_model_len": 63}, "max_model_len 63 (the run has 64)"),
        ({"weights": NCCL}, "weights rlhf_nccl (the run has rlhf_files)"),
        ({"absent_ids": []}, "absent_ids none (the run has 3,90-92)"),
        ({"absent_ids": [3, 90, 91, 92, 93]}, "absent_ids 3,90-93 (the run has 3,90-92)"),
        ({"model": tiny_config("llama", hidden_size=64).to_dict()}, "hidden_size 64 (the run has 32)"),
        ({"model": tiny_config("qwen2").to_dict()}, "model_type qwen2 (the run has llama)"),
        ({"model": tiny_config("llama", rope_theta=500.0).to_dict()}, "rope_parameters.rope_theta 500.0"),
    ],
)
def test_a_server_with_another_setting_or_model_is_refused_with_the_command_that_helps(changes, told):
    with pytest.raises(UserError) as error:
        check(needs(), tiny_config("llama").to_dict(), URL, status(**changes))
    assert URL in str(error.value) and told in str(error.value)
    options = _parser().parse_args(shlex.split(re.search(r"rlhf\.serve (.*)$", str(error.value))[1]))
    assert (options.model, options.dtype, options.max_model_len) == ("my model", "bfloat16", 64)
    assert options.float32_head and options.absent_ids == ABSENT


@pytest.mark.parametrize(
    ("text", "ids"), [("7", (7,)), ("50277-50280,7", (7, 50277, 50278, 50279, 50280)), ("1-2,2-3", (1, 2, 3))]
)
def test_ranges_of_ids_are_read_and_written(text, ids):
    assert numbers(text) == ids and numbers(ranges(ids)) == ids


@pytest.mark.parametrize("text", ["", "x", "1-", "-3", "1,,2"])
def test_other_texts_are_no_ids(text):
    with pytest.raises(ValueError):
        numbers(text)


def test_a_refused_server_ends_the_run_also_after_somebody_has_started_it_again(tmp_path):
    """The error has exit code 2, and is that of the requests that wait."""
    seen = []

    def accept(about):
        seen.append(about["start"])
        if len(seen) == 2:
            raise UserError("refused")

    with loop_in_a_thread() as loop:
        fake = FakeServer(loop, "key")
        server = Server("anywhere", fake.start(), "key", 10, 10, 10, accept=accept)
        store = SharedWeights(folder=tmp_path / "weights")
        pool = ServerPool([server], store, settings(), vocabulary=97, restarts=3, in_flight=False)
        try:
            pool.load(weights(0), 0)
            assert pool.submit(prompts(), sampling()).result(10).version == 0
            fake.kill()
            fake.start()
            with pytest.raises(UserError, match="^error: refused$"):
                pool.submit(prompts(), sampling(1)).result(10)
            with pytest.raises(UserError):
                pool.raise_failure()
        finally:
            pool.close()
            fake.kill()
            fake.place.close()
    assert len(seen) == 2
