"""A local journal first, MLflow later. Training never waits for a server."""
