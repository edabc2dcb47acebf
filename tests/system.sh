#!/usr/bin/env bash
# What some tests need that pip does not have: a SLURM and a browser. Root gets them by apt, once. Whatever is in the
# way, this says so and ends well, within minutes: the tests are then skipped.
set -u
cd "$(dirname "$0")/.." || exit 0

want() { # <what> <command that it brings>... -- <command that installs it>...
  local what=$1 missing=()
  shift
  while [ "$1" != -- ]; do
    command -v "$1" >/dev/null || missing+=("$1")
    shift
  done
  shift
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    echo "no $what here (${missing[*]}), and only root can install it: its tests are skipped"
  elif ! command -v apt-get >/dev/null; then
    echo "no $what here (${missing[*]}), and no apt-get to install it: its tests are skipped"
  else
    echo "installing $what by apt (once)"
    "$@" || echo "no $what here: it could not be installed (above), so its tests are skipped"
  fi
}

browser() { # any that tests/end_to_end/browser.py knows will do
  local name
  for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && return
  done
  want "browser" chromium-headless-shell -- launchers/apt_install.sh chromium-headless-shell fonts-dejavu-core
}

want SLURM slurmctld slurmd sbatch munged -- launchers/local_slurm.sh install
browser
exit 0
