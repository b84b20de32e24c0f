"""API keys, roles, limits and TLS, over both doors."""

from __future__ import annotations

import contextlib
import hashlib
import ssl

import grpc
import httpx2 as httpx
import pytest
import trustme
from fake_engine import ScriptedEngine, echo
from jaxinfer_service.access import (
    Access,
    ForbiddenError,
    TooManyError,
    UnauthenticatedError,
    bearer,
    make_key,
    read_keys,
)
from jaxinfer_service.channel import KEY_VARIABLE
from jaxinfer_service.client import AsyncClient
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2
from jaxinfer_service.tls import Tls
from serving import PATIENCE_S, in_loop, refused, serving
from test_cli import run

Code = grpc.StatusCode
KEYS = {"alice": "ji-alice", "bob": "ji-bob", "root": "ji-root"}


def key_file(path, **more):
    """alice may ask, bob is of a tenant, root may do all; `more` are fields of alice's."""

    def entry(name, **fields):
        digest = hashlib.sha256(KEYS[name].encode()).hexdigest()
        said = {"name": name, "sha256": digest} | fields
        lines = [f"{k}: {v}" for k, v in said.items()]
        return "  - " + "\n    ".join(lines)

    entries = [
        entry("alice", **more),
        entry("bob", tenant="b"),
        entry("root", roles="[admin]"),
    ]
    path.write_text("keys:\n" + "\n".join(entries) + "\n")
    return path


# -- the file ----------------------------------------------------------------------------------


def test_a_made_key_is_read_again(tmp_path):
    key, digest = make_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: x, sha256: {digest}}}]")
    with Access(file).granted(key, "inference"):
        pass
    assert key.startswith("ji-") and make_key()[0] != key


def test_the_command_prints_an_entry_and_the_key(tmp_path):
    limits = ("--max-concurrent", "2", "--requests-per-minute", "60")
    result = run("make-key", "team", "--role", "admin", "--tenant", "t", *limits)
    file = tmp_path / "keys.yaml"
    file.write_text(result.stdout)
    (found,) = read_keys(file).values()
    assert (found.name, found.roles, found.tenant) == ("team", ("admin",), "t")
    assert (found.max_concurrent, found.requests_per_minute) == (2, 60)
    with Access(file).granted(result.stderr.split()[-1], "inference"):
        pass
    assert "max_concurrent" not in run("make-key", "team").stdout
    none = run("make-key", "team", "--max-concurrent", "0")
    assert none.exit_code == 1 and "max_concurrent" in none.stderr
    wrong = run("make-key", "team", "--role", "king")
    assert wrong.exit_code == 1 and len(wrong.stderr.splitlines()) == 1 and "admin" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: [", "no YAML: line 1: "),
        ("keys:\n- name: a\nkeys:\n- name: b\n", "no YAML: line 3: keys is there twice"),
        ("a: \x00", "no YAML: .* special characters"),
        ("[" * 100_000, "nested too deeply"),
        ("- a", "the file"),
        ("keys: []", "keys"),
        ("keys: [{name: a, sha256: abc}]", "sha256"),
        ("keys: [{name: a, sha256: " + "a" * 64 + ", roles: [king]}]", "roles"),
        ("keys: [{name: a, sha256: " + "a" * 64 + ", colour: red}]", "colour"),
        (f"keys: [{{name: a, sha256: {'a' * 64}}}, {{name: a, sha256: {'b' * 64}}}]", "two keys"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, said):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        Access(file)
    assert "\n" not in str(caught.value)


def test_a_key_begins_so_many_calls_a_minute(tmp_path):
    now = [100.0]
    access = Access(key_file(tmp_path / "k", requests_per_minute=2), clock=lambda: now[0])

    def call():
        with access.granted("ji-alice", "inference"):
            pass

    call()
    call()
    with pytest.raises(TooManyError, match="2 calls a minute") as caught:
        call()
    assert caught.value.retry_after == pytest.approx(30.0)
    now[0] += 30.0
    call()
    with pytest.raises(TooManyError):
        call()
    now[0] += 3600.0  # what was not used is not saved up beyond a minute
    call()
    call()
    with pytest.raises(TooManyError):
        call()


def test_a_key_has_so_many_calls_at_a_time(tmp_path):
    access = Access(key_file(tmp_path / "k", max_concurrent=1))
    with access.granted("ji-alice", "inference"):
        with (
            pytest.raises(TooManyError, match="its limit"),
            access.granted("ji-alice", "inference"),
        ):
            pass
        with access.granted("ji-bob", "inference"):
            pass
    with contextlib.suppress(KeyError), access.granted("ji-alice", "inference"):
        raise KeyError("a call that fails")
    with access.granted("ji-alice", "inference"):
        pass


def test_roles_and_unknown_keys(tmp_path):
    access = Access(key_file(tmp_path / "k"))
    for token in (None, "", "ji-eve"):
        with pytest.raises(UnauthenticatedError), access.granted(token, "inference"):
            pass
    with pytest.raises(ForbiddenError, match="role admin"), access.granted("ji-alice", "admin"):
        pass
    for role in ("inference", "admin"):
        with access.granted("ji-root", role):
            pass
    assert bearer("Bearer x") == bearer("bearer  x") == "x"
    assert bearer("Basic x") is bearer(None) is None


# -- the server --------------------------------------------------------------------------------


@in_loop
async def test_calls_need_a_key_over_both_doors(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    access = Access(key_file(tmp_path / "k"))
    async with serving(ScriptedEngine(echo), access=access, http_port=0) as (server, nobody):
        error = await refused(nobody.generate("x"))
        assert error.code() is Code.UNAUTHENTICATED and "Bearer" in error.details()
        target = f"127.0.0.1:{server.port}"
        async with AsyncClient(target, api_key="ji-alice") as alice:
            assert (await alice.generate("hi")).text == "hi"
            assert "".join([c.text async for c in alice.stream("hi")]) == "hi"
            error = await refused(alice.control.Load(control_pb2.LoadRequest()))
            assert error.code() is Code.PERMISSION_DENIED
        monkeypatch.setenv(KEY_VARIABLE, "ji-root")
        async with AsyncClient(target) as root:
            await root.control.Load(control_pb2.LoadRequest())
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as plain:
            for path in ("/health", "/metrics", "/version"):
                assert (await plain.get(path)).status_code == 200
            body = {"prompt": "hi"}
            for headers, code in (({}, 401), ({"authorization": "Bearer ji-eve"}, 401)):
                answer = await plain.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == code and answer.headers["www-authenticate"]
                assert answer.json()["error"]["code"] == "invalid_api_key"
            headers = {"authorization": "Bearer ji-alice"}
            answer = await plain.post("/v1/completions", json=body, headers=headers)
            assert answer.json()["choices"][0]["text"] == "hi"


@in_loop
async def test_a_keys_tenant_is_that_of_its_requests(tmp_path):
    asked = []

    def script(request):
        asked.append(request.scheduling.tenant)
        return echo(request)

    access = Access(key_file(tmp_path / "k"))
    async with serving(ScriptedEngine(script), access=access, http_port=0) as (server, _):
        async with AsyncClient(f"127.0.0.1:{server.port}", api_key="ji-bob", retries=0) as bob:
            await bob.generate("x")
            await bob.generate("x", tenant="b")
            error = await refused(bob.generate("x", tenant="c"))
            assert error.code() is Code.PERMISSION_DENIED and "tenant 'b'" in error.details()
        url = f"http://127.0.0.1:{server.http_port}/v1/completions"
        async with httpx.AsyncClient(
            headers={"authorization": "Bearer ji-bob"}, timeout=PATIENCE_S
        ) as plain:
            assert (await plain.post(url, json={"prompt": "x"})).status_code == 200
            other = await plain.post(url, json={"prompt": "x", "tenant": "c"})
            assert other.status_code == 403 and "tenant 'b'" in other.json()["error"]["message"]
    assert asked == ["b", "b", "b"]


@in_loop
async def test_a_limit_says_when_to_come_again(tmp_path):
    access = Access(key_file(tmp_path / "k", requests_per_minute=1), clock=lambda: 0.0)
    async with serving(ScriptedEngine(echo), access=access, http_port=0) as (server, _):
        async with AsyncClient(f"127.0.0.1:{server.port}", api_key="ji-alice", retries=0) as alice:
            await alice.generate("x")
            error = await refused(alice.generate("x"))
            assert error.code() is Code.RESOURCE_EXHAUSTED
            trailers = dict(error.trailing_metadata())
            assert trailers["grpc-retry-pushback-ms"] == "60000"
        url = f"http://127.0.0.1:{server.http_port}/v1/models"
        async with httpx.AsyncClient(
            headers={"authorization": "Bearer ji-alice"}, timeout=PATIENCE_S
        ) as plain:
            answer = await plain.get(url)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "60"


def test_keys_are_read_again_and_a_bad_file_changes_nothing(tmp_path, caplog):
    file = key_file(tmp_path / "k")
    access = Access(file)
    file.write_text("keys: [")
    access.reload()
    with access.granted("ji-alice", "inference"):
        pass
    assert "stay as they were" in caplog.text
    file.write_text(f"keys: [{{name: new, sha256: {hashlib.sha256(b'n').hexdigest()}}}]")
    access.reload()
    with access.granted("n", "inference"):
        pass
    with pytest.raises(UnauthenticatedError), access.granted("ji-alice", "inference"):
        pass


# -- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def certificates(tmp_path):
    """(authority, the server's files, a client's files)"""
    authority = trustme.CA()
    files = {}
    for name, cert in (
        ("server", authority.issue_cert("127.0.0.1")),
        ("client", authority.issue_cert("someone")),
    ):
        files[name] = (tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        cert.cert_chain_pems[0].write_to_path(files[name][0])
        cert.private_key_pem.write_to_path(files[name][1])
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem", files["server"], files["client"]


def test_both_doors_speak_tls_and_ask_for_certificates(certificates):
    ca, (cert, key), (client_cert, client_key) = certificates

    @in_loop
    async def ask():
        stranger = trustme.CA()
        other = ca.parent / "other.pem"
        stranger.cert_pem.write_to_path(other)
        how = {"ca": ca, "cert": client_cert, "key": client_key}
        async with serving(
            ScriptedEngine(echo), client=how, tls=Tls(cert, key, ca), http_port=0
        ) as (server, client):
            assert (await client.generate("hi")).text == "hi"
            target = f"tls://127.0.0.1:{server.port}"
            for wrong in ({"ca": ca}, how | {"ca": other}):
                async with AsyncClient(target, **wrong) as stranger_client:
                    error = await refused(stranger_client.generate("hi", timeout=PATIENCE_S))
                    assert error.code() is Code.UNAVAILABLE
            context = ssl.create_default_context(cafile=ca)
            url = f"https://127.0.0.1:{server.http_port}/health"
            with pytest.raises(httpx.TransportError):
                async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as plain:
                    await plain.get(url)
            context.load_cert_chain(client_cert, client_key)
            async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as plain:
                assert (await plain.get(url)).status_code == 200

    ask()


def test_files_that_are_no_certificates_are_named(certificates, tmp_path):
    _, (cert, key), _ = certificates
    with pytest.raises(ValueError, match="--tls-cert"):
        Tls(key, cert)
    with pytest.raises(ValueError, match="--tls-client-ca"):
        Tls(cert, key, tmp_path / "none.pem")
    result = run("serve", "m", "--tls-cert", str(cert))
    assert result.exit_code != 0 and "--tls-key" in result.output


def test_certificates_without_tls_are_refused(certificates):
    with pytest.raises(ValueError, match="tls://"):
        AsyncClient("localhost:1", ca=certificates[0])
