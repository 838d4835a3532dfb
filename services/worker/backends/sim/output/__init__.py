"""Results of a step: tokens, log-probabilities and embeddings."""
