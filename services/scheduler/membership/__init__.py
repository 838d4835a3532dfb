"""The worker group: which workers there are, who has which rank, and in which epoch."""

from services.scheduler.membership.actions import Action, Ended, FailRequests, News, Refuse, Send, Started
from services.scheduler.membership.group import GroupStatus, WorkerGroup

__all__ = [
    "Action",
    "Ended",
    "FailRequests",
    "GroupStatus",
    "News",
    "Refuse",
    "Send",
    "Started",
    "WorkerGroup",
]
