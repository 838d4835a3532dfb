"""The error of the tables of states: requests, workers, and the group of workers."""


class IllegalTransition(Exception):
    """A state change that is not in the table: a bug in the scheduler, never the peer's fault."""
