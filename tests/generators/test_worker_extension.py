"""Tests of the engine that loads weights in a worker of vLLM, with replaced parts of vLLM."""

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Generic, TypeVar

import pytest
import torch

from rlhf.generators.weights import SharedWeights, TransferError, checksum, confirm

One, Two = TypeVar("One"), TypeVar("Two")
WEIGHTS = {"a": torch.randn(3, 2), "b": torch.arange(5.0).to(torch.bfloat16), "c": torch.tensor(2.0)}


class Engine(Generic[One, Two]):
    """In place of vLLM's base class of engines."""


class Model(torch.nn.Module):
    """A model that keeps what it loads; `during` is called in the middle of a load."""

    def __init__(self):
        super().__init__()
        self.held, self.during = {}, lambda: None
        for name in WEIGHTS:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))

    def load_weights(self, weights):
        self.during()
        self.held = {name: tensor.clone() for name, tensor in weights}
        return set(self.held)


@pytest.fixture
def engine_module(monkeypatch):
    """Return the module of the engine, imported with replaced parts of vLLM."""
    nothing = SimpleNamespace(register_engine=lambda *given: None)
    for name, contents in {
        "vllm": {},
        "vllm.device_allocator": {"get_mem_allocator_instance": None},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngine": Engine,
            "WeightTransferEngineFactory": nothing,
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.ipc_engine": {"IPCWeightTransferEngine": type("Ipc", (), {})},
        "vllm.distributed.weight_transfer.nccl_engine": {"NCCLWeightTransferEngine": type("Nccl", (), {})},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "finalize_layerwise_reload": lambda *given: None,
            "initialize_layerwise_reload": lambda *given: None,
            "__name__": "reload",
        },
        "vllm.v1": {},
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": {"LogitsProcessor": type("One", (), {})},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.sample": {},
        "vllm.v1.worker.gpu.sample.logits_processor": {},
        "vllm.v1.worker.gpu.sample.logits_processor.interface": {"LogitsProcessor": type("Two", (), {})},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    name = "rlhf.generators.vllm.worker_extension"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)  # other tests get the module with vLLM


@pytest.fixture(params=["shared memory", "file"])
def sent(request, engine_module, tmp_path):
    """Return an engine with a model, the manifest of weights, and the data of an update."""
    store = SharedWeights(folder=tmp_path if request.param == "file" else None)
    manifest = store.offer(store.write(WEIGHTS.items(), 3), lambda: None)
    data = json.loads(json.dumps(manifest.update_info()))
    engine, update = engine_module.FileEngine(), engine_module.FileUpdateInfo(**data)
    engine.model, engine.model_config = Model(), None
    engine.start_weight_update()
    yield engine, manifest, update
    store.close()


def test_a_worker_confirms_the_checksums_of_the_tensors_that_it_loaded(sent):
    engine, manifest, update = sent
    engine.receive_weights(update)
    engine.finish_weight_update()
    assert engine.taken == {name: checksum(tensor) for name, tensor in engine.model.held.items()}
    confirm(manifest, 3, engine.taken)


def test_weights_that_change_while_they_are_loaded_are_not_confirmed(sent):
    engine, manifest, update = sent

    def change():
        with open(manifest.path, "r+b") as file:
            file.seek(-4, 2)
            file.write(b"\x01\x02\x03\x04")

    engine.model.during = change
    engine.receive_weights(update)
    with pytest.raises(TransferError, match="of version 3 with the checksum"):
        confirm(manifest, 3, engine.taken)


def test_a_parameter_without_a_tensor_and_an_update_without_tensors_are_errors(sent):
    engine, _, update = sent
    with pytest.raises(TransferError, match="must load tensors"):
        engine.finish_weight_update()
    engine.model.register_parameter("d", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(TransferError, match="got none for d"):
        engine.receive_weights(update)
