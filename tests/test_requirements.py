"""Tests that the locks in requirements/ are consistent with the metadata of the installed packages."""

from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"


def pins(name: str) -> dict[str, str]:
    """Return the version of each package of the lock `requirements/<name>.txt`."""
    lines = (FOLDER / f"{name}.txt").read_text().split()
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


def stated(name: str) -> list[Requirement]:
    """Return the requirements in `requirements/<name>.in`."""
    lines = (FOLDER / f"{name}.in").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def unmet(requirement: Requirement, lock: dict[str, str]) -> bool:
    version = lock.get(canonicalize_name(requirement.name))
    return version is None or not requirement.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("name", ["cpu", "gpu", "bench", "bench-ppo"])
def test_a_lock_meets_the_requirements_that_are_stated_by_hand(name):
    assert not [str(requirement) for requirement in stated(name) if unmet(requirement, pins(name))]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_cuda_lock_meets_the_requirements_of_the_installed_packages_that_it_contains(python):
    lock = pins("gpu")
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    environment |= {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
    checked, problems = 0, []
    for package in distributions():
        name = canonicalize_name(package.name)
        if lock.get(name) != package.version.partition("+")[0]:
            continue
        checked += 1
        for requirement in map(Requirement, package.requires or []):
            needed = requirement.marker is None or requirement.marker.evaluate(environment | {"extra": ""})
            if needed and unmet(requirement, lock):
                problems.append(f"{name} needs {requirement}, locked: {lock.get(requirement.name)}")
    assert checked > 100
    assert not problems


def test_the_cuda_lock_has_what_vllm_needs_on_python_3_12_and_the_python_bindings_of_cuda_13():
    lock = pins("gpu")
    assert int(lock["setuptools"].split(".")[0]) < 81
    assert int(lock["cuda-python"].split(".")[0]) >= 13
    assert "six" in lock
