"""Tests of the files of a release: changelog, citation, container images and workflow fit the rest."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from tests.test_requirements import pins

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CHANGES = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_every_tag_has_a_section_in_the_changelog_and_changes_of_the_next_version_come_first():
    tags = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True).stdout
    assert CHANGES[0] == "Unreleased"
    assert {tag.removeprefix("v") for tag in tags.split()} <= set(CHANGES)


def test_the_citation_has_the_licence_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]


def test_the_gpu_image_has_the_cuda_version_that_torch_was_built_for():
    (image,) = re.findall(r"nvidia/cuda:(\d+\.\d+)", DOCKERFILE)
    runtime = pins("gpu")["nvidia-cuda-runtime"]
    assert runtime.startswith(f"{image}.")


def test_the_images_are_built_from_locks_that_exist():
    locks = re.findall(r"source=(requirements/[\w.]+)", DOCKERFILE)
    assert len(locks) == 2 and all((ROOT / lock).is_file() for lock in locks)


def test_the_workflow_runs_the_script_of_continuous_integration():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run") for step in workflow["jobs"]["tests"]["steps"]]
    assert ".ci/run" in steps


def test_a_weekly_job_and_no_other_job_runs_with_the_newest_versions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    _, weekly = (each["cron"] for each in workflow[True]["schedule"])  # YAML reads the key `on` as true
    assert weekly.split()[2:4] == ["*", "*"] and weekly.split()[4].isdigit()
    for name, job in workflow["jobs"].items():
        newest = "make test-newest" in [step.get("run") for step in job["steps"]]
        assert newest == (name == "newest")
        assert job["if"] == f"github.event.schedule {'==' if newest else '!='} '{weekly}'"
