"""The worker group: the registered workers, their ranks, and the epoch."""

from services.scheduler.membership.actions import Action, Ended, FailRequests, News, Refuse, Send, Started
from services.scheduler.membership.group import GroupStatus, WorkerGroup
from services.scheduler.membership.step_watch import StepSize
