"""Kernels that Triton compiles for the device. `TRITON_INTERPRET=1` runs them in NumPy, for tests without a device."""
