"""Results of a step: tokens and log-probabilities."""
