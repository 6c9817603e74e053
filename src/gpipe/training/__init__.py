"""Train a pipeline: optimisers, learning rates, losses, metrics, averages, checkpoints, tracking and the loop."""
