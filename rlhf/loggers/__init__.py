"""Loggers of metrics: JSON-lines files, TensorBoard, Weights & Biases, MLflow, trackio, the terminal."""
