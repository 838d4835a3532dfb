"""The device: its interface and timeline, and rigid shapes."""
