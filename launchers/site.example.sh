# What is particular to a cluster. Copy it to launchers/site.sh, which git leaves alone, and fill it in:
#
#   cp launchers/site.example.sh launchers/site.sh
#   source launchers/site.sh          # in the shell that submits
#
# sbatch and hydra/launcher=slurm take these where the command line does not say otherwise.
export SBATCH_PARTITION=gpu
export SBATCH_ACCOUNT=my-project
# export SBATCH_QOS=normal

# Jobs inherit this environment, so what they need can be set here too.
# module load cuda/12.8
# export HF_HOME=/shared/huggingface
