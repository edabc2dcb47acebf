# Settings of a cluster. Copy this file to launchers/site.sh, which git ignores, and edit the copy:
#
#   cp launchers/site.example.sh launchers/site.sh
#   source launchers/site.sh          # in the shell that submits
#
# sbatch and hydra/launcher=slurm use these values unless the command line sets others.
export SBATCH_PARTITION=gpu
export SBATCH_ACCOUNT=my-project
# export SBATCH_QOS=normal

# Jobs inherit this environment, so it can also load modules and set variables.
# module load cuda/12.8
# export HF_HOME=/shared/huggingface
# Network interface of the ranks, if it is not that of the route to the first host:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
