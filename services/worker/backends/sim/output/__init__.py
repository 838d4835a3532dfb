"""Results of a step: tokens, log-probabilities, embeddings and the step trace."""
