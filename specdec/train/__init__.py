"""Training of drafters: ``specdec train-draft``."""
