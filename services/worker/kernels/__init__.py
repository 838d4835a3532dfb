"""Kernels: one interface, a readable reference implementation in torch, and compiled kernels for processors."""
