"""Clients as a server meets them: they leave early, read slowly, ask for what they may not have."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from jaxinfer.bench.workload import WorkItem
from jaxinfer_service.bench.doors import Door

Conduct = Callable[["_Client"], Awaitable[None]]
_PAUSE_SECONDS = 1.0  # at most, between two requests of a client
_LONGEST_PAUSE_SECONDS = 10.0  # of a slow reader


class _Client:
    """One of them; what it draws follows from its seed."""

    def __init__(self, way: Door, vocab_size: int, max_tokens: int, seed: int, end: float):
        self.way, self.rng = way, random.Random(seed)
        self._vocab_size, self._max_tokens, self._end = vocab_size, max_tokens, end

    def item(self, least: int, most: int) -> WorkItem:
        """A short prompt, to be answered with so many tokens."""
        length = self.rng.randint(1, min(64, self._max_tokens // 2))
        prompt = self.rng.choices(range(self._vocab_size), k=length)
        return WorkItem(
            tuple(prompt), min(self.rng.randint(least, most), self._max_tokens - length)
        )

    async def reads_all(self) -> None:
        async for _ in self.way.stream(self.item(1, 64)):
            pass

    async def leaves(self) -> None:
        """After some time or messages, of a request that would go on for long."""
        most = self.rng.randint(0, 20)
        async with contextlib.aclosing(self.way.stream(self.item(200, 400))) as messages:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(0.0, 2.0)):
                    async for _ in messages:
                        most -= 1
                        if most < 0:
                            break

    async def reads_slowly(self) -> None:
        """Nothing for a while, with logprobs, so that much waits for it: it may be set aside."""
        left = max(0.0, self._end - time.monotonic())
        pause = self.rng.uniform(0.0, min(left, _LONGEST_PAUSE_SECONDS))
        async for _ in self.way.stream(self.item(500, 2000), logprobs=20):
            await asyncio.sleep(pause)
            pause = 0.0

    async def asks_badly(self) -> None:
        """For more than any sequence may have. Raises RuntimeError if that is not refused."""
        item = WorkItem(self.item(1, 1).prompt, 1 << 40)
        try:
            async for _ in self.way.stream(item):
                pass
        except (grpc.RpcError, ConnectionError):
            return
        raise RuntimeError("what no sequence may have was not refused")


_CONDUCTS: dict[str, Conduct] = {
    "reads_all": _Client.reads_all,
    "leaves": _Client.leaves,
    "reads_slowly": _Client.reads_slowly,
    "asks_badly": _Client.asks_badly,
}
_SHARES = (5, 4, 1, 1)


async def unruly(
    ways: Sequence[Door], seconds: float, clients: int, seed: int, vocab_size: int, max_tokens: int
) -> dict[str, Any]:
    """`clients` at each door send requests for so long; returns how many there were by conduct, and
    how many failed by what was said."""
    end, done, failed = time.monotonic() + seconds, Counter[str](), Counter[str]()

    async def one(client: _Client) -> None:
        while time.monotonic() < end:
            (conduct,) = client.rng.choices([*_CONDUCTS], _SHARES)
            try:
                await _CONDUCTS[conduct](client)
                done[conduct] += 1
            except Exception as error:
                failed[f"{conduct}: {type(error).__name__}: {error}"] += 1
            await asyncio.sleep(client.rng.uniform(0.0, _PAUSE_SECONDS))

    everyone = [way for way in ways for _ in range(clients)]
    await asyncio.gather(
        *(
            one(_Client(way, vocab_size, max_tokens, seed + n, end))
            for n, way in enumerate(everyone)
        )
    )
    return {"requests": done, "failed": failed}
