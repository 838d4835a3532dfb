"""Kernels for CUDA devices: torch's products (cuBLAS), Triton for everything else, decode steps as CUDA graphs.

Only `kernels.selection` imports this package. Nothing here needs a device when it is imported.
"""
