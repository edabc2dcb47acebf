"""The heap settings of glibc, which keep freed memory for later tensors."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from rlhf.core.machine import keep_freed

torch.set_num_threads(1)
keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tensors = [torch.zeros(20 * 2**18) for _ in range(5)]  # 20 MiB each
storages = [tensor.untyped_storage() for tensor in tensors]
for _ in range(12):  # in the first rounds aligned chunks leave holes, and the heap grows
    before = faults()
    for tensor, storage in zip(tensors, storages):
        storage.resize_(20 * 2**20)
        tensor.zero_()
    for storage in storages:
        storage.resize_(0)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap setting exists only in glibc")
@pytest.mark.process
def test_freed_tensor_memory_is_reused_unless_the_environment_configures_malloc():
    pages = {}
    for said in ("", "MALLOC_TRIM_THRESHOLD_"):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        done = subprocess.run(
            [sys.executable, "-c", FAULTS],
            env={**environment, said: str(2**17)} if said else environment,
            capture_output=True,
            text=True,
            check=True,
        )
        pages[said] = int(done.stdout)
    # a tensor has 5120 pages: at most one of five gets new memory, without reuse four or five do
    assert pages[""] < 6000 < 20000 < pages["MALLOC_TRIM_THRESHOLD_"]
