"""Metrics of a training, passed on to TensorBoard, Weights & Biases and MLflow."""
