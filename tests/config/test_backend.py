"""Tests of the DeepSpeed settings: rejected keys, known keys, merged settings, and a missing package."""

import subprocess
import sys

import pytest

from rlhf.checks import check
from rlhf.config.models import KNOWN, OWNED, Dtype
from rlhf.words.compose import compose


def test_every_wrong_deepspeed_key_is_reported():
    found = check.problems(compose(["backend=zero2", "+backend.deepspeed={xyz: 1, fp16: {}, optimizer: {}}"]))
    assert len(found) == 3


def test_native_deepspeed_settings_are_merged_into_the_generated_settings():
    native = "{zero_optimization: {reduce_bucket_size: 7}, wall_clock_breakdown: true}"
    made = compose(["backend=zero3_offload", f"+backend.deepspeed={native}"]).backend.settings(
        Dtype.bfloat16, 0.3
    )
    assert made["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 7,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert made["wall_clock_breakdown"] is True and made["gradient_clipping"] == 0.3
    assert made["torch_autocast"]["enabled"] is True
    plain = compose(["backend=zero1"]).backend.settings(Dtype.float32, None)
    assert plain["zero_optimization"]["stage"] == 1 and plain["gradient_clipping"] == 0.0
    assert plain["torch_autocast"]["enabled"] is False


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, True), (2, True), (3, True)])
def test_ranks_reduce_gradients_during_the_backward_pass_from_stage_1_on(stage, overlaps):
    made = compose([f"backend=zero{stage}"]).backend.settings(Dtype.bfloat16)
    assert made["zero_optimization"]["overlap_comm"] is overlaps


def test_native_deepspeed_setting_needs_a_plus_on_the_command_line(command):
    answer = command("backend=zero2", "+backend.deepspeed.wall_clock_breakdown=true")
    (run,) = answer.runs
    assert run[0].backend.deepspeed == {"wall_clock_breakdown": True}
    answer = command("backend=zero2", "backend.deepspeed.wall_clock_breakdown=true")
    assert "got backend.deepspeed.wall_clock_breakdown=true; write '+backend.deepspeed" in answer.err
    answer = command("backend=zero2", "+backend.deepspeed.zero_optimization.stage=1")
    assert answer.code == 2 and "zero_optimization.stage must not be set" in answer.err and not answer.runs


@pytest.mark.process
def test_composing_imports_neither_deepspeed_nor_torch():
    program = (
        "import sys; from rlhf.words.compose import compose; from rlhf.checks import check;"
        "assert not check.problems(compose(['backend=zero3']));"
        "assert not {'deepspeed', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# A program that prints the keys that DeepSpeed looks up in its configuration.
READ = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.runtime import config

class Spy(dict):
    asked = set()

    def get(self, key, default=None):
        Spy.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        Spy.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self

config.DeepSpeedConfig(Spy(train_micro_batch_size_per_gpu=1))
print(*(Spy.asked - config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()))
"""


@pytest.mark.process
def test_known_keys_are_the_keys_that_deepspeed_reads():
    said = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True).stdout
    assert set(said.split()) == KNOWN
    assert {key.partition(".")[0] for key in OWNED} <= KNOWN
