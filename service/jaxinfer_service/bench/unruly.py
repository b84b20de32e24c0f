"""Clients as a server meets them: they leave early, read slowly, ask for what they may not have."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxinfer.bench.workload import WorkItem
from jaxinfer_service.bench.doors import Door

Conduct = Callable[["_Client"], Awaitable[None]]
_SLOW_READ_SECONDS = 0.2  # between two messages of a slow reader


class _Client:
    """One of them; what it draws follows from its seed."""

    def __init__(self, way: Door, vocab_size: int, seed: int):
        self.way, self.rng, self.vocab_size = way, random.Random(seed), vocab_size

    def item(self, least: int, most: int) -> WorkItem:
        """A short prompt, to be answered with so many tokens."""
        prompt = self.rng.choices(range(self.vocab_size), k=self.rng.randint(1, 64))
        return WorkItem(tuple(prompt), self.rng.randint(least, most))

    async def reads_all(self) -> None:
        async for _ in self.way.stream(self.item(1, 64)):
            pass

    async def leaves(self) -> None:
        """After some messages, of a request that would go on for long."""
        most = self.rng.randint(0, 20)
        messages = self.way.stream(self.item(200, 400))
        async with asyncio.timeout(self.rng.uniform(0.0, 2.0)):
            async for _ in messages:
                most -= 1
                if most < 0:
                    break
        await messages.aclose()  # type: ignore[attr-defined]

    async def reads_slowly(self) -> None:
        """With logprobs, so that much waits for it."""
        async for _ in self.way.stream(self.item(100, 400), logprobs=5):
            await asyncio.sleep(_SLOW_READ_SECONDS)

    async def asks_badly(self) -> None:
        """For more than any sequence may have."""
        item = WorkItem(self.item(1, 1).prompt, 1 << 40)
        async for _ in self.way.stream(item):
            pass


_CONDUCTS: dict[str, Conduct] = {
    "reads_all": _Client.reads_all,
    "leaves": _Client.leaves,
    "reads_slowly": _Client.reads_slowly,
    "asks_badly": _Client.asks_badly,
}
_SHARES = (5, 4, 1, 1)


async def unruly(
    ways: Sequence[Door], seconds: float, clients: int, vocab_size: int, seed: int
) -> dict[str, Any]:
    """`clients` at each door send requests for so long; returns how many, by conduct."""
    end, done = time.monotonic() + seconds, Counter[str]()

    async def one(client: _Client) -> None:
        while time.monotonic() < end:
            (conduct,) = client.rng.choices([*_CONDUCTS], _SHARES)
            try:
                await _CONDUCTS[conduct](client)
            except Exception as error:  # a refusal, or its own patience
                conduct += f": {type(error).__name__}"
            done[conduct] += 1

    all_of_them = [way for way in ways for _ in range(clients)]
    await asyncio.gather(
        *(one(_Client(w, vocab_size, seed + n)) for n, w in enumerate(all_of_them))
    )
    return {"requests": done}
