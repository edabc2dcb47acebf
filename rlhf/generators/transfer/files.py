"""Weight transfer through safetensors files in a folder that trainer and servers share.

    store = FileWeights(folder, dtype)                # trainer
    manifest = store.write(engine.weights(), 3)       # folder/step-3.safetensors
    for name, tensor in read_file(path, 3, sums): ... # server
    store.release(manifest)                           # trainer: the file is removed

A file is complete as soon as it has its name. A server rejects a tensor whose checksum differs from the one
that the trainer computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf.core.errors import RunError
from rlhf.generators.transfer.weights import (
    Entry,
    Manifest,
    TransferError,
    WeightStore,
    checksum,
    rounded,
    shown,
)


class FileWeights(WeightStore):
    """A store of one file for each version of the weights.

    Args:
        folder: where the files are written; it is created, and `close` removes it if nothing else is there.
        dtype: dtype of the floating-point tensors in a file; None: the tensors keep their dtypes.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.folder, self.dtype = folder.absolute(), dtype
        self.versions: set[int] = set()
        self.close()  # the files of a run that was killed

    @property
    def kept(self) -> int:
        """The number of files."""
        return len(self.versions)

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Write the weights of a version to a file, and return their manifest.

        Raises:
            RunError: the file cannot be written.
        """
        tensors = {
            name: rounded(tensor, self.dtype).detach().to("cpu", copy=True).contiguous()
            for name, tensor in weights
        }
        path = self.folder / f"step-{version}.safetensors"
        part = path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part)
            part.rename(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise RunError(
                f"the weights of version {version} must fit into {self.folder} (the servers read them "
                f"there), got: {error}; free space, or set generator.folder=<folder that servers can read>"
            ) from error
        self.versions.add(version)
        entries = (
            Entry(name, tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes, checksum(tensor))
            for name, tensor in tensors.items()
        )
        return Manifest(version, str(path), tuple(entries))

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Return the manifest with what a server needs to read the file."""
        given = {"path": manifest.path, "version": manifest.version, "checksums": manifest.checksums()}
        return replace(manifest, update=given)

    def release(self, manifest: Manifest) -> None:
        """Remove the file of a version."""
        Path(manifest.path).unlink(missing_ok=True)
        self.versions.discard(manifest.version)

    def close(self) -> None:
        """Remove all versions."""
        for path in self.folder.glob("step-*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # files of others
            self.folder.rmdir()
        self.versions.clear()


def read_file(path: str, version: int, checksums: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each tensor of a file.

    Raises:
        TransferError: the file cannot be read, its tensors have other names, or a checksum differs.
    """
    try:
        with safe_open(path, "pt") as file:
            if other := set(file.keys()) ^ checksums.keys():
                raise TransferError(
                    f"{path} must have the tensors of version {version} that the trainer wrote, got a "
                    f"difference at {', '.join(sorted(other)[:3])}"
                )
            for name in file.keys():  # noqa: SIM118, it is no dict
                tensor = file.get_tensor(name)
                if (found := checksum(tensor)) != checksums[name]:
                    raise TransferError(
                        f"{name} of version {version} must have the checksum {shown(checksums[name])} in "
                        f"{path}, got {shown(found)}: the tensor differs from what the trainer wrote"
                    )
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise TransferError(
            f"the weights of version {version} cannot be read from {path}: {error}"
        ) from error
