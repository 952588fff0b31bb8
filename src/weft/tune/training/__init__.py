"""One attempt at one trial: training, checkpoints, memory limit."""
