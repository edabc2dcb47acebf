"""A pretended GPU: torch calls it "cuda", its memory is RAM, and the CPU's kernels compute its results.

With it, code for GPUs runs on a machine without one: where tensors are, what waits for the device, CUDA
graphs, too little memory, DeepSpeed on CUDA, and the tests of `make test-gpu` themselves. As on a GPU, an
operation refuses tensors of two devices. The device shows nothing about kernels, numbers in 16 bits, speed,
streams or the caching allocator: operations run one after another, and memory is counted without rounding.

It shows that

- every tensor of an operation is on one device, and runs of eight algorithms have the metrics of the CPU;
- decoding steps are recorded as CUDA graphs and replayed;
- plain torch and ZeRO 0 to 3 on two ranks equal one rank of the CPU (with Gloo in place of NCCL);
- training needs at most the memory of the plan, and too little memory is handled;
- an optimizer step waits for the GPU once, and at the beginning of each forward pass (`waits.py`). An
  operation that waits, such as `.item()`, `.cpu()`, indexing by a mask or a blocking copy to the GPU, empties
  the GPU's queue, and the GPU is idle until the CPU has launched new work;
- stages 1 and 2 of `make test-gpu` pass. CUDA IPC, vLLM and the other stages are not shown.

A process has the device if it is started with `environment()`. Torch must have been built without CUDA.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from rlhf.core.machine import torch_has_cuda
from tests import needs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIBRARY = "RLHF_PRETENDED_GPU"  # environment variable with the path of the library; unset: no device
NAME = "pretended GPU"


def unavailable() -> str | None:
    """Return why the device cannot be used here, or None."""
    if shutil.which("g++") is None:
        return needs.COMPILER
    return needs.TORCH_CPU if torch_has_cuda() else None


def environment() -> dict[str, str]:
    """Return the environment of a process that has the device."""
    paths = [str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        LIBRARY: str(library()),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cuda",  # a run on the CPU in this process has set the device of DeepSpeed
    }


def library() -> Path:
    """Return the compiled device.cpp; it is compiled (10 seconds) if it has changed, or torch has."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    source = HERE / "device.cpp"
    key = hashlib.sha256(source.read_bytes() + (torch / "version.py").read_bytes() + bytes(torch)).hexdigest()
    file = ROOT / "build" / "pretended_gpu" / f"{key[:16]}.so"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    headers = [f"-isystem{torch / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(["g++", str(source), "-o", str(new), *headers, *flags, "-lc10", "-ltorch_cpu"], check=True)
    new.replace(file)
    return file
