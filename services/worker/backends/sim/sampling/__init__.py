"""Sampling: from logits to tokens, with grammar masks, drafts and their acceptance."""
