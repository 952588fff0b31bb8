"""Training runs: configuration, one device, several stages, checkpoints, evaluation."""
