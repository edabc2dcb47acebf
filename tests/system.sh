#!/usr/bin/env bash
# Install what some tests need beyond pip: SLURM, a browser and a C++ compiler, by apt as root. If a program cannot be
# installed, print why and exit with code 0: the tests that need it are skipped. An unreachable network ends the attempt
# after minutes.
set -u
cd "$(dirname "$0")/.." || exit 0

install() { # <name> <command that must exist>... -- <command that installs them>...
  local name=$1 missing=()
  shift
  while [ "$1" != -- ]; do
    command -v "$1" >/dev/null || missing+=("$1")
    shift
  done
  shift
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    echo "no $name (${missing[*]}): installing it needs root; its tests are skipped"
  elif ! command -v apt-get >/dev/null; then
    echo "no $name (${missing[*]}): installing it needs apt-get; its tests are skipped"
  else
    echo "installing $name by apt"
    "$@" || echo "no $name: the installation failed; its tests are skipped"
  fi
}

browser() { # any browser that tests/end_to_end/browser.py can use
  local name
  for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && return
  done
  install "browser" chromium-headless-shell -- launchers/apt_install.sh chromium-headless-shell fonts-dejavu-core
}

install SLURM slurmctld slurmd sbatch munged -- launchers/local_slurm.sh install
browser
install compiler c++ g++ -- launchers/apt_install.sh g++
exit 0
