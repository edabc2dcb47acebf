#!/usr/bin/env bash
# A server of vLLM for runs with generator=vllm_server; the arguments are those of rlhf.serve:
#
#   KEY_FILE=key launchers/serve.sh outputs/sft/model --host node7 --dtype bfloat16
#
# The key is the content of KEY_FILE, a file that only its owner can read, or of the variable RLHF_KEY. It is never an
# argument, which other users of the host would see. To make a key: (umask 077; openssl rand -hex 32 > key)
set -euo pipefail

if [ -n "${KEY_FILE:-}" ]; then
  mode=$(stat -Lc %a -- "$KEY_FILE")
  if [[ $mode != ?00 ]]; then
    echo "error: KEY_FILE must be a file that only its owner can read (it has the key), got $KEY_FILE with mode $mode;" \
      "run: chmod 600 $KEY_FILE" >&2
    exit 2
  fi
  RLHF_KEY=$(<"$KEY_FILE")
  export RLHF_KEY
fi
exec "${PYTHON:-.venv/bin/python}" -m rlhf.serve "$@"
