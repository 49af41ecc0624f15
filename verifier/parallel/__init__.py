"""A model over several devices: how it is cut, and how its parts come together again."""
