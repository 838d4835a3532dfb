"""Tiers: homes of KV blocks outside of a worker's cache, in the memory of the host and in a directory."""
