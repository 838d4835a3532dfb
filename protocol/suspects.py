"""Numbers of the rule about suspects (docs/invariants.md).

The scheduler counts lost groups of workers, and each frontend lost schedulers.
"""

SUSPECT_AFTER = 2
"""Losses in a row without progress of a request after which it is a suspect."""
PROGRESS = 16
"""Tokens since the last loss that clear a request: another loss then has another cause, or comes from another token."""
