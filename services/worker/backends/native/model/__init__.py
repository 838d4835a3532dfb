"""The transformer of one rank: its configuration, its share of the weights, and its forward pass."""
