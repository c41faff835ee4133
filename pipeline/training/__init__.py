"""The loop: stages, epochs, passes, checkpoints. It knows no method by name."""
