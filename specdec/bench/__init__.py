"""Measurements of the engine: acceptance against latency, for any model, drafter and prompts."""
