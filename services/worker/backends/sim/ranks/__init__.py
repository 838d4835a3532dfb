"""The exchange between the ranks of a group in each step."""
