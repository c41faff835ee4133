"""State on disk: checkpoints of a run, their file format, and one job per output folder."""
