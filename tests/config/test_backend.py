"""Tests of the DeepSpeed settings: rejected keys, known keys, merged settings, and a missing package."""

import subprocess
import sys

import pytest

from rlhf.checks import check
from rlhf.config.backends import KNOWN, OWNED
from rlhf.config.models import Dtype
from rlhf.words.catalogue import options
from rlhf.words.compose import compose

ZERO = [name for name in options("backend") if name.startswith("zero")]

MISTAKES = {  # value of backend.deepspeed: texts that the message must contain
    "{zero_optimisation: {}}": [
        "backend.deepspeed.zero_optimisation must be a key of DeepSpeed's configuration",
        "did you mean zero_optimization?",
    ],
    "{xyz: 1}": ["backend.deepspeed.xyz must be a key", "got 1; see DeepSpeed's documentation"],
    "{amp: {enabled: true}}": ["backend.deepspeed.amp must be a key"],
    "{gradient_clipping: 0.5}": [
        "backend.deepspeed.gradient_clipping must not be set",
        "got 0.5; set optim.max_grad_norm",
    ],
    "{train_batch_size: 8}": ["got 8; set schedule.prompts_per_update"],
    "{gradient_accumulation_steps: 0}": ["got 0; set backend.micro_batch"],
    "{optimizer: {type: Adam}}": ["got {'type': 'Adam'}; set optim.lr"],
    "{scheduler: {}}": ["got {}; set optim.schedule"],
    "{fp16: {enabled: true}}": ["set model.dtype"],
    "{bf16: {enabled: true}}": ["set model.dtype"],
    "{torch_autocast: {enabled: false}}": [
        "backend.deepspeed.torch_autocast.enabled",
        "got false; set model.dtype",
    ],
    "{zero_optimization: {stage: 3}}": ["got 3; set backend=zero0, zero1, zero2 or zero3"],
    "{zero_optimization: {offload_optimizer: {device: nvme}}}": ["got nvme; set backend=zero2_offload"],
    "{gradient_allreduce_op: sum}": ["got sum; leave it out"],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_deepspeed_key_gives_one_line_with_a_remedy(mistake):
    (problem,) = check.problems(compose(["backend=zero2", f"+backend.deepspeed={mistake}"]))
    for part in MISTAKES[mistake]:
        assert part in problem
    assert "\n" not in problem


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
