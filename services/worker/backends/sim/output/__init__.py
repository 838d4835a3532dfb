"""Results of a step: tokens, log-probabilities, embeddings and the stage trace."""
