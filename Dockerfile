# Images with the locked packages, for the CPU and for NVIDIA GPUs; docs/hardware.md describes their use:
#
#   docker build --target cpu --build-arg PIP_ARGS="--extra-index-url <index with CPU wheels>" --tag rlhf:cpu .
#   docker build --target gpu --tag rlhf:gpu .

# -- wheel: git gives the version of the wheel ------------------------------------------------------

FROM python:3.11-bookworm AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# -- cpu --------------------------------------------------------------------------------------------

FROM python:3.11-slim-bookworm AS cpu
# g++: DeepSpeed and torch.compile compile kernels at first use; libnuma1: vLLM
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
# More arguments for pip: an index with CPU wheels of torch, if the default index has torch as a CUDA build only.
ARG PIP_ARGS=""
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN --mount=type=bind,source=requirements/cpu.txt,target=/tmp/cpu.txt \
    pip install --no-cache-dir $PIP_ARGS --no-deps --requirement /tmp/cpu.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
# The owner of mounted folders should have the same number: --build-arg USER_ID=$(id -u)
ARG USER_ID=1000
RUN useradd --uid $USER_ID --create-home rlhf && install --directory --owner rlhf /cache /work
USER rlhf
ENV HF_HOME=/cache/huggingface
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["rlhf"]
CMD ["--help"]

# -- gpu --------------------------------------------------------------------------------------------

# CUDA of the lock (nvidia-cuda-runtime). The image with the compiler nvcc: DeepSpeed compiles kernels at first use.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_ARGS=""
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN --mount=type=bind,source=requirements/gpu.txt,target=/tmp/gpu.txt \
    pip install --no-cache-dir $PIP_ARGS --no-deps --requirement /tmp/gpu.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
ARG USER_ID=1000
# Ubuntu's image has a user with the number 1000.
RUN userdel --remove ubuntu \
    && useradd --uid $USER_ID --create-home rlhf && install --directory --owner rlhf /cache /work
USER rlhf
ENV HF_HOME=/cache/huggingface
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["rlhf"]
CMD ["--help"]
