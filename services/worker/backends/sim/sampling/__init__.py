"""Sampling: from logits to tokens, with parameters, drafts and their acceptance."""
