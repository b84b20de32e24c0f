"""Requests whose grammar is being read by the process that will follow it. They are before the
queue, so that nobody waits behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.request import Request
from jaxinfer.token_rules import SequenceRules


@dataclass(slots=True)
class Unread:
    """They have no sequence yet. Plain data, on the engine's thread."""

    _waiting: dict[str, tuple[Request, SequenceRules]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return sum(len(request.prompt) for request, _ in self._waiting.values())

    def add(self, request: Request, rules: SequenceRules) -> None:
        self._waiting[request.id] = request, rules

    def remove(self, request_id: str) -> None:
        """Nobody wants it any more."""
        self._waiting.pop(request_id)[1].forget()

    def ids(self) -> list[str]:
        return list(self._waiting)

    def expired(self, now: float) -> list[str]:
        """Those whose deadline has passed."""
        return [
            request_id
            for request_id, (request, _) in self._waiting.items()
            if request.deadline is not None and request.deadline <= now
        ]

    def take_read(self) -> list[tuple[Request, SequenceRules]]:
        """Those whose first token's mask is known now, in the order in which they came."""
        read = [each for each in self._waiting.values() if each[1].are_known]
        for request, _ in read:
            del self._waiting[request.id]
        return read

    def wait(self, seconds: float) -> None:
        """Wait so long for the first of them."""
        for _, rules in self._waiting.values():
            rules.wait(seconds)
            return
