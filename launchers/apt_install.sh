#!/usr/bin/env bash
# Install packages of Debian or Ubuntu as root, without starting their services: launchers/apt_install.sh <package> ...
# Time limits: two minutes for the package lists, five minutes for the downloads.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
options=(-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=60)
install=(apt-get install -y --no-install-recommends "${options[@]}" "$@")
timeout 120 apt-get update "${options[@]}" </dev/null >&2
timeout 300 "${install[@]}" --download-only </dev/null >&2

# Installing a package must not start its service.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
"${install[@]}" </dev/null >/dev/null # from the downloaded files; without a time limit, which could leave a package half installed
