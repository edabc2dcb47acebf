"""The memory of a machine: RAM within cgroup limits, and visible GPUs."""

import os

import psutil
import pytest
import torch

from rlhf.core import machine

GIB = 2**30


def written(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cgroup_v2_limits_of_containers_and_jobs_are_read(tmp_path):
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("0::/slurm/job_7/step_0\n")
    written(root / "slurm/job_7/step_0/memory.max", "max\n")
    written(root / "slurm/job_7/memory.max", f"{4 * GIB}\n")
    written(root / "memory.max", f"{9 * GIB}\n")
    assert sorted(machine.cgroup_limits(membership, root)) == [4 * GIB, 9 * GIB]


def test_cgroup_v1_limits_are_read(tmp_path):
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    written(root / "memory/docker/abc/memory.limit_in_bytes", f"{2 * GIB}\n")
    written(root / "memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert min(machine.cgroup_limits(membership, root)) == 2 * GIB
    assert machine.cgroup_limits(tmp_path / "nothing", root) == []


def test_ram_is_at_most_the_installed_memory_and_the_cgroup_limit(monkeypatch):
    machine.this_machine.cache_clear()
    assert 0 < machine.this_machine().ram <= psutil.virtual_memory().total
    machine.this_machine.cache_clear()
    monkeypatch.setattr(machine, "cgroup_limits", lambda *_: [GIB])
    assert machine.this_machine().ram == GIB
    machine.this_machine.cache_clear()


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that installs a fake nvidia-smi with the given shell script as its body."""

    def install(body: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


TWO = "printf '0, GPU-aa1, 81920\\n1, GPU-bb2, 40960\\n'"


@pytest.mark.parametrize(
    ("visible", "gib"),
    [(None, (80, 40)), ("1,0", (40, 80)), ("1", (40,)), ("", ()), ("GPU-bb", (40,)), ("0,7,1", (80,))],
)
def test_gpus_are_listed_in_the_order_of_the_visible_devices(nvidia_smi, visible, gib):
    nvidia_smi(TWO)
    assert machine.gpus(visible) == tuple(size * GIB for size in gib)


@pytest.mark.parametrize("body", ["exit 9", "echo nonsense", "printf '0, GPU-a, [N/A]\\n'", "sleep 9"])
def test_no_gpus_are_listed_if_nvidia_smi_fails_or_hangs(nvidia_smi, monkeypatch, body):
    monkeypatch.setattr(machine, "_TIMEOUT_S", 0.2)
    nvidia_smi(body)
    assert machine.gpus(None) == ()


def test_a_cuda_build_of_torch_is_detected_from_its_version_file(tmp_path, monkeypatch):
    assert machine.torch_has_cuda() == (torch.version.cuda is not None)
    for text, told in (("cuda: Optional[str] = '12.8'", True), ("cuda: Optional[str] = None", False)):
        (tmp_path / "version.py").write_text(f"__version__ = '2'\n{text}\n")
        spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _, spec=spec: spec)
        assert machine.torch_has_cuda() == told
