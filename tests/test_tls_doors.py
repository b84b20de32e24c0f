"""Certificates that a client must not trust, over both doors: nothing is asked of such a server."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import ssl

import grpc
import httpx2 as httpx
import pytest
import trustme
from fake_engine import ScriptedEngine, echo
from jaxinfer_service.client import AsyncClient
from jaxinfer_service.server import Server, ServerConfig
from jaxinfer_service.tls import Tls
from serving import PATIENCE_S, in_loop, opened, refused, until
from test_cli import in_process

PAST = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


def certificates(folder, host: str, **how):
    """(authority's file, certificate, key) of a server by this name."""
    authority = trustme.CA()
    made = authority.issue_cert(host, **how)
    files = [folder / name for name in ("ca.pem", "server.pem", "server.key")]
    authority.cert_pem.write_to_path(files[0])
    made.cert_chain_pems[0].write_to_path(files[1])
    made.private_key_pem.write_to_path(files[2])
    return files


@pytest.mark.parametrize(
    ("host", "how", "trusted", "said"),
    [
        ("127.0.0.1", {}, "stranger", "self.signed|unable to get local issuer|unknown"),
        ("127.0.0.1", {"not_after": PAST}, "own", "expired"),
        ("elsewhere.example", {}, "own", "mismatch|not valid for"),
    ],
    ids=["wrong authority", "expired", "mismatched name"],
)
def test_a_certificate_that_is_wrong_is_not_trusted(tmp_path, host, how, trusted, said):
    ca, cert, key = certificates(tmp_path, host, **how)
    if trusted == "stranger":
        ca = tmp_path / "other.pem"
        trustme.CA().cert_pem.write_to_path(ca)

    @in_loop
    async def ask():
        engine, context = ScriptedEngine(echo), ssl.create_default_context(cafile=ca)
        async with untrusted(engine, Tls(cert, key)) as server:
            target = f"tls://127.0.0.1:{server.port}"
            async with AsyncClient(target, ca=ca, retries=0) as client:
                error = await refused(client.generate("x", timeout=PATIENCE_S))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert re.search("(?i)ssl|handshake|verification", error.details()), error
            url = f"https://127.0.0.1:{server.http_port}/v1/completions"
            async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as plain:
                with pytest.raises(httpx.ConnectError, match=rf"(?i){said}"):
                    await plain.post(url, json={"prompt": "x"})
            assert engine.counters.received == 0

    ask()


def test_commands_reach_a_server_with_a_certificate_of_its_own_authority(tmp_path):
    ca, cert, key = certificates(tmp_path, "127.0.0.1")
    own = ("--tls-cert", cert, "--tls-key", key)

    @in_loop
    async def ask():
        async with untrusted(ScriptedEngine(echo), Tls(cert, key, ca)) as server:
            look = ("top", "--once", "--server", f"tls://127.0.0.1:{server.port}")
            seen = await asyncio.to_thread(in_process, *look, "--tls-ca", ca, *own)
            assert seen.returncode == 0 and "fake at tls://" in seen.stdout, seen.stderr
            wrong = await asyncio.to_thread(in_process, *look)
            assert wrong.returncode == 1 and "see --tls-ca" in wrong.stderr
            assert len(wrong.stderr.splitlines()) == 1

    ask()


@contextlib.asynccontextmanager
async def untrusted(engine, tls):
    """A server, once its model is served: no client asks it whether it is ready."""
    server = Server(ServerConfig(port=0, http_port=0, tls=tls), lambda: opened(engine))
    task = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server._service.served is not None)
    try:
        yield server
    finally:
        server.shut_down()
        server.shut_down()
        await task
