"""Structured output: what a request's output must match, compiled off the loop, and its mask per step.

The scheduler knows a grammar by `Grammar` alone, the engine a compiler by `Compiler`.
"""

from services.scheduler.grammar.base import Compiler, Grammar

__all__ = ["Compiler", "Grammar"]
