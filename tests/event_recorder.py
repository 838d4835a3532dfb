"""An observer of the core that keeps every event."""

from services.scheduler.core.observer import Event


class EventRecorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)
