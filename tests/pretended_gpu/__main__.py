"""Run Python with the pretended GPU: python -m tests.pretended_gpu <arguments of python>."""

import os
import sys

from tests.pretended_gpu import environment, unavailable

if reason := unavailable():
    sys.exit(f"error: {reason}")
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
