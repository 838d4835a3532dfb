"""Settings of the unit tests: Hypothesis sets no time limit."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # an example may take long on a busy machine
settings.load_profile("untimed")
