"""The model: prefix hashes in a KV cache, and logits and hidden states that are functions of a hash."""
