"""Tests of tests/system.sh (`make system`): it reports programs that it cannot install, with code 0."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "system.sh"
WANTED = ("SLURM", "browser", "compiler")
TOOLS = ("bash", "env", "dirname", "timeout", "sleep")


def system(folder: Path, **commands: str) -> subprocess.CompletedProcess:
    """Run the script with a PATH that contains only TOOLS and scripts with the lines of `commands`."""
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, lines in commands.items():
        file = folder / name.replace("_", "-")
        file.write_text(f"#!{folder}/bash\n{lines}\n")
        file.chmod(0o755)
    return subprocess.run(
        [SCRIPT],
        env={"PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({"id": "echo 1000", "apt_get": "echo called"}, "installing it needs root; its tests are skipped"),
        ({"id": "echo 0"}, "installing it needs apt-get; its tests are skipped"),
        (
            {"id": "echo 0", "apt_get": "echo no network; exit 100"},
            "the installation failed; its tests are skipped",
        ),
    ],
    ids=["no root", "no apt", "no network"],
)
def test_a_program_that_cannot_be_installed_is_reported_and_the_exit_code_is_0(tmp_path, commands, said):
    done = system(tmp_path, **commands)
    assert done.returncode == 0, done.stderr
    for what in WANTED:
        assert any(f"no {what}" in line and said in line for line in done.stdout.splitlines()), done.stdout
    assert "called" not in done.stdout


def test_an_installed_program_is_not_installed_again(tmp_path):
    names = ("slurmctld", "slurmd", "sbatch", "munged", "chromium", "c++", "g++")
    there = dict.fromkeys(names, "exit 1")
    done = system(tmp_path, id="echo 0", apt_get="echo called", **there)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
