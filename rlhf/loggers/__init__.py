"""Loggers of metrics: JSON-lines files, TensorBoard, Weights & Biases, the terminal."""
