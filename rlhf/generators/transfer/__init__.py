"""Transfer of policy weights from the trainer to a generator process: shared memory, CUDA IPC or NCCL."""
