"""The clients' process of `own_server`: a job a line in, what became of it a line out, as JSON.

A job has a `kind`, the `servers` to ask, and:

    wait    until it serves
    load    `plain` requests and `formed` ones, held to the JSON schema `schema`, all at once, of
            `input_len` and `output_len` tokens
    unruly  `how` they are: what `unruly.unruly` takes
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from jaxinfer.bench.serve import Record, send
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer_service.bench.doors import Door, GrpcDoor, door
from jaxinfer_service.bench.unruly import unruly

READY_SECONDS = 60.0


def prompts(job: dict[str, Any]) -> list[WorkItem]:
    """The requests of a job of the kind `load`; no two jobs of different seeds begin alike."""
    lengths = job["input_len"], job["output_len"]
    count = job["plain"] + job["formed"]
    return make_workload("synthetic", count, *lengths, job["vocab_size"], sum(lengths), job["seed"])


async def main() -> None:
    """Do jobs until stdin ends."""
    doors: dict[str, Door] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        for server in job["servers"]:
            if server not in doors:
                doors[server] = door(server)
        print(json.dumps(await _do(job, [doors[s] for s in job["servers"]])), flush=True)
    for way in doors.values():
        await way.close()


async def _do(job: dict[str, Any], ways: list[Door]) -> dict[str, Any]:
    if job["kind"] == "wait":
        await asyncio.gather(*(way.wait_ready(READY_SECONDS) for way in ways))
        return {}
    if job["kind"] == "unruly":
        return await unruly(ways, **job["how"])
    (way,) = ways
    more: list[dict[str, Any]] = [{}] * job["plain"] + [_form(way, job["schema"])] * job["formed"]
    records = await asyncio.gather(*(_send(way, *both) for both in zip(prompts(job), more)))
    return {"records": [_told(record) for record in records]}


def _form(way: Door, schema: str | None) -> dict[str, Any]:
    """Parameters that hold an output to a JSON schema, which it does not end by itself."""
    if isinstance(way, GrpcDoor):
        return {"structured": {"json_schema": schema}, "ignore_eos": False}
    return {"guided_json": schema, "ignore_eos": False}


async def _send(way: Door, item: WorkItem, more: dict[str, Any]) -> Record:
    class Formed:
        def stream(self, item: WorkItem) -> Any:
            return way.stream(item, **more)

    return await send(Formed(), item)


def _told(record: Record) -> dict[str, Any]:
    if not record.ok:
        return {"error": record.error}
    return {
        "ttft": record.ttft,
        "decode": record.e2el - record.ttft,
        "tokens": record.output_tokens,
        "messages": len(record.messages),
    }


if __name__ == "__main__":
    asyncio.run(main())
