"""The engine of DeepSpeed: errors of writes do not keep a rank from taking part in later collectives, the
state of the optimizer is on the device that the optimizer needs, copies that sample keep their head, and a
process has one device.
"""

import errno
import pickle
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.run import OptimConfig
from rlhf.core.errors import UserError
from rlhf.engines.deepspeed_engine import (
    DeepSpeedEngine,
    _load_tensors,
    begin_state,
    deepspeed,
    hollow,
    write_errors_last,
)
from rlhf.models.modules import Policy
from rlhf.processes.ranks import Ranks
from tests.tiny_models import tiny_lm


class FullDisk:
    def save(self, state, path):
        raise OSError(errno.ENOSPC, f"no space for {path}")

    def makedirs(self, path, exist_ok=False):
        raise OSError(errno.ENOSPC, f"no space for {path}")


def test_a_write_error_is_raised_after_all_writes_of_a_checkpoint():
    files, reached = FullDisk(), []
    with pytest.raises(OSError, match="no space for first"), write_errors_last(files):
        files.makedirs("first", exist_ok=True)
        reached.append("a barrier")
        files.save({}, "second")
        reached.append("another barrier")
    assert reached == ["a barrier", "another barrier"]
    with pytest.raises(OSError, match="no space for third"):  # outside of the block: at once
        files.save({}, "third")


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_the_fused_adamw_finds_the_step_count_of_a_divided_checkpoint_on_its_device(fused, device):
    flat = torch.zeros(2, device="meta")
    adamw = SimpleNamespace(defaults={"fused": fused}, state=defaultdict(dict))
    begin_state(SimpleNamespace(optimizer=adamw, fp32_partitioned_groups_flat=[flat]), 3, torch.tensor(4.0))
    assert adamw.state[flat]["step"].device.type == device


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", False)])
def test_adamw_is_fused_on_a_gpu(device, fused):
    parts = [{"params": [torch.nn.Parameter(torch.zeros(2))], "scale": 1.0}]
    settings = SimpleNamespace(optim=OptimConfig(lr=1e-4))
    engine = SimpleNamespace(offload=False, ranks=Ranks(torch.device(device)), settings=settings)
    assert DeepSpeedEngine.adamw(engine, parts).defaults["fused"] is fused


@pytest.mark.parametrize("float32_head", [False, True])
def test_the_copy_that_samples_at_stage_3_has_the_head_of_the_trained_model(float32_head):
    model = Policy(tiny_lm(), 0.7, shared_prefix=True, float32_head=float32_head).model
    assert hollow(model).get_output_embeddings().float32 == float32_head


def test_a_second_device_in_one_process_is_refused(monkeypatch):
    accelerator = pytest.importorskip("deepspeed").accelerator.get_accelerator()
    monkeypatch.setattr(type(accelerator), "device_name", lambda self, index=None: "cpu")
    with pytest.raises(UserError, match=r"backend\.device must be cpu .* got cuda; start a new process"):
        deepspeed(Ranks(torch.device("cuda")))


def test_a_stage_that_an_older_python_stored_is_read_and_no_other_attribute(tmp_path):
    stages = pytest.importorskip("deepspeed.runtime.zero.config").ZeroStageEnum

    class Stored:
        """Is stored as Python 3.11.0 to 3.11.3 store the member of an enum."""

        def __init__(self, *given):
            self.given = given

        def __reduce__(self):
            return getattr, self.given

    torch.save({"stage": Stored(stages, "gradients")}, tmp_path / "state.pt")
    assert _load_tensors(tmp_path / "state.pt") == {"stage": stages.gradients}
    torch.save({"stage": Stored(set, "add")}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError, match="only members of ZeroStageEnum are read"):
        _load_tensors(tmp_path / "state.pt")
