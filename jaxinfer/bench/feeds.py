"""When the requests of a load are sent: all at once, in waves, as conversations, as memory allows.

A feed is asked at the start, and again whenever requests ended. Requests are numbered in the order
in which feeds give them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxinfer.bench.workload import WorkItem

Ended = Sequence[tuple[int, Sequence[int]]]  # number of a request and its output tokens


class Feed(Protocol):
    """Where the requests come from while an engine is driven."""

    @property
    def total(self) -> int:
        """How many requests there will be."""

    def due(self, ended: Ended) -> Sequence[WorkItem]:
        """What to send now, given the requests that ended since the last call."""


class Waves:
    """`size` items at a time, the next ones when all of these ended."""

    def __init__(self, items: Sequence[WorkItem], size: int):
        self.total, self._size = len(items), size
        self._left = deque(items)
        self._running = 0

    def due(self, ended: Ended) -> Sequence[WorkItem]:
        self._running -= len(ended)
        if self._running:
            return []
        wave = [self._left.popleft() for _ in range(min(self._size, len(self._left)))]
        self._running = len(wave)
        return wave


class Chats:
    """Conversations that go on side by side, each turn sent when the answer before it is there.

    A turn is what the user adds and how long the answer will be; its prompt is all that was said
    before, and that.
    """

    def __init__(self, chats: Sequence[Sequence[WorkItem]]):
        self.total = sum(map(len, chats))
        self._left = [deque(chat) for chat in chats]
        self._said: list[tuple[int, ...]] = [() for _ in chats]
        self._chat_of: list[int] = []  # by number of the request
        self._waiting = list(range(len(chats)))  # whose first turn is to be sent

    def due(self, ended: Ended) -> Sequence[WorkItem]:
        for number, output in ended:
            chat = self._chat_of[number]
            self._said[chat] += tuple(output)
            self._waiting.append(chat)
        turns = [self._turn(chat) for chat in self._waiting if self._left[chat]]
        self._waiting = []
        return turns

    def _turn(self, chat: int) -> WorkItem:
        turn = self._left[chat].popleft()
        self._said[chat] += turn.prompt
        self._chat_of.append(chat)
        return WorkItem(self._said[chat], turn.output_len)


class Reserving:
    """In order, as long as what all that run reserve is within `capacity`.

    This is how contiguous memory admits: a request is given all it may ever need when it starts.
    """

    def __init__(
        self, items: Sequence[WorkItem], capacity: int, reserve: Callable[[WorkItem], int]
    ):
        self.total, self._items = len(items), items
        self._reserve, self._left = reserve, capacity
        self._sent = 0

    def due(self, ended: Ended) -> Sequence[WorkItem]:
        self._left += sum(self._reserve(self._items[number]) for number, _ in ended)
        first = self._sent
        while self._sent < self.total:
            wanted = self._reserve(self._items[self._sent])
            if wanted > self._left:
                break
            self._left -= wanted
            self._sent += 1
        return self._items[first : self._sent]
