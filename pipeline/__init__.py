"""Shards become a trained model, a comparison, and a list of labels that are probably wrong."""
