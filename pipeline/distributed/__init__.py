"""Ranks, the collectives they use, and one synchronisation per step."""
