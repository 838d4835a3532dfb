"""Settings of the unit tests: Triton's interpreter stands for CUDA devices, and Hypothesis sets no time limit."""

import os

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

settings.register_profile("untimed", deadline=None)  # an example may take long on a busy machine
settings.load_profile("untimed")
