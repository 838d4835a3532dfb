"""From logits to the tokens of a step."""
