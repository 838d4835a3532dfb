"""Runahead's own backend. Nothing is imported here, so that sizes of models are known without torch."""
