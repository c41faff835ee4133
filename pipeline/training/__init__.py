"""The training loop: stages, epochs, passes, checkpoints, for any method."""
