"""Ranks: which one this process is, what they exchange, and one agreement per step."""
