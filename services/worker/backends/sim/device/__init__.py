"""The device: its interface and timeline, the columns that a step copies to it, and rigid shapes."""
