"""Mathematics that methods share: losses, mixup, prototypes, cleaning, per-sample state."""
