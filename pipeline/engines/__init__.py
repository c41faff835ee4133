"""Who runs the optimiser step: plain torch, DistributedDataParallel or DeepSpeed."""
