"""From shards to batches: sampling, decoding, crops, augmentation. The same on any number of ranks."""
