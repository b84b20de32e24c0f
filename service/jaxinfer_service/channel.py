"""How a client reaches a server: the address, TLS, and its API key."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

KEY_VARIABLE = "JAXINFER_API_KEY"
TLS_SCHEME = "tls://"
File = str | os.PathLike[str]
_KEY = re.compile("[!-~]+")  # what a header carries
_SCHEMES = ("tls", "dns", "unix", "xds")  # the first is ours, the others gRPC's own

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", -1),  # logprobs of a long output are large
    ("grpc.keepalive_time_ms", 30_000),  # notice a server that vanished during a silent prefill
    ("grpc.keepalive_timeout_ms", 10_000),
)
MOST_RETRIES = 4  # gRPC itself makes no more than five tries
_KEPT_BYTES = 17 << 20  # of a call, to try it again: as much as a server takes, and its metadata

# Tried again by gRPC itself, with growing waits of random length, or after the time that a full
# queue names. Both codes say that nobody works on the call; one whose answer has begun is not tried
# again. A server that refuses most calls is left in peace (retryThrottling).
_RETRY = {
    "initialBackoff": "0.2s",
    "maxBackoff": "10s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
}
_THROTTLE = {"maxTokens": 100, "tokenRatio": 0.5}


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a server is and how it is spoken to.

    Attributes:
        target: HOST:PORT, or tls://HOST:PORT for TLS.
        api_key: sent with every call; None takes the environment's JAXINFER_API_KEY, if any.
        ca: file of the certificates to trust, PEM, instead of the system's.
        cert, key: files of the client's own certificate, for servers that ask for one; both.
        retries: further tries of an inference call that ended with UNAVAILABLE or
            RESOURCE_EXHAUSTED before its answer began; the call's timeout bounds all of them.
    """

    target: str
    api_key: str | None = None
    ca: File | None = None
    cert: File | None = None
    key: File | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.retries <= MOST_RETRIES:
            raise ValueError(f"retries is {self.retries}; gRPC makes 0 to {MOST_RETRIES}")
        scheme, separator, _ = self.target.partition("://")
        if separator and scheme not in _SCHEMES:
            raise ValueError(
                f"{self.target!r} is no address of gRPC; give HOST:PORT, such as localhost:50051, "
                f"or {TLS_SCHEME}HOST:PORT"
            )
        if not _KEY.fullmatch(self._key() or "-"):
            where = "api_key" if self.api_key else KEY_VARIABLE
            raise ValueError(f"{where} is no API key: a key is of printable ASCII, without spaces")
        if (self.ca or self.cert or self.key) and scheme != TLS_SCHEME.partition("://")[0]:
            raise ValueError(f"certificates are given, but {self.target!r} has no {TLS_SCHEME}")
        if bool(self.cert) != bool(self.key):
            raise ValueError("a client's certificate needs both cert and key")

    def channel(self) -> grpc.Channel:
        """A channel for blocking calls."""
        address, credentials = self._parts()
        if credentials is None:
            channel = grpc.insecure_channel(address, options=self._options())
        else:
            channel = grpc.secure_channel(address, credentials, options=self._options())
        key = self._key()
        return grpc.intercept_channel(channel, _KeySender(key)) if key else channel

    def aio_channel(self) -> grpc.aio.Channel:
        """A channel for asyncio."""
        address, credentials = self._parts()
        key = self._key()
        senders = [_UnarySender(key), _StreamSender(key)] if key else []
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options(), interceptors=senders)
        return grpc.aio.secure_channel(
            address, credentials, options=self._options(), interceptors=senders
        )

    def _options(self) -> tuple[tuple[str, Any], ...]:
        if not self.retries:
            return (*_OPTIONS, ("grpc.enable_retries", 0))
        policy = {
            "name": [{"service": "jaxinfer.v1.Inference"}],
            "retryPolicy": _RETRY | {"maxAttempts": self.retries + 1},
        }
        config = {"methodConfig": [policy], "retryThrottling": _THROTTLE}
        return (
            *_OPTIONS,
            ("grpc.service_config", json.dumps(config)),
            ("grpc.per_rpc_retry_buffer_size", _KEPT_BYTES),
        )

    def _key(self) -> str | None:
        return self.api_key or own_key()

    def _parts(self) -> tuple[str, grpc.ChannelCredentials | None]:
        if not self.target.startswith(TLS_SCHEME):
            return self.target, None
        files = (self.ca, self.key, self.cert)
        read = [Path(file).read_bytes() if file else None for file in files]
        return self.target.removeprefix(TLS_SCHEME), grpc.ssl_channel_credentials(*read)


def own_key() -> str | None:
    """The environment's API key, if any."""
    return os.environ.get(KEY_VARIABLE)


def _with_key(details: Any, key: str) -> Any:
    metadata = [*(details.metadata or ()), ("authorization", f"Bearer {key}")]
    return details._replace(metadata=metadata)


class _KeySender(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, key: str):
        self._key = key

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with_key(details, self._key), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with_key(details, self._key), request)


class _UnarySender(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str):
        self._key = key

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_key(details, self._key), request)


class _StreamSender(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str):
        self._key = key

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_key(details, self._key), request)
