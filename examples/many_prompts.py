"""Many prompts at once: python examples/many_prompts.py [HOST:PORT]

Needs no JAX. Where only the client is used, these are enough:

    pip install grpcio-status grpcio-health-checking opentelemetry-api
    pip install --no-deps jaxinfer
"""

import asyncio
import sys

from jaxinfer_service.client import AsyncClient

QUESTIONS = [f"What is {a} times {b}?" for a in (7, 12) for b in (8, 9, 11)]


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.wait_ready()
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = await client.generate_all(
            chats, concurrency=32, timeout=120, temperature=0, max_new_tokens=40
        )
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}  {answer.text.strip()}  ({answer.usage.generated_tokens} tokens)")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"))
