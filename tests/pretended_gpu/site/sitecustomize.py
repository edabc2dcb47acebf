"""Gives every Python process with this folder on its path the pretended GPU; see tests/pretended_gpu."""

import os

if "RLHF_PRETENDED_GPU" in os.environ:
    from tests.pretended_gpu.install import install

    install(os.environ["RLHF_PRETENDED_GPU"])
