"""Who may call: API keys from a file, their roles and limits.

The file is YAML; `jaxinfer make-key NAME` prints an entry and, once, the key itself. A key has 256
random bits, so its SHA-256 can be kept as it is and says nothing of it.

    keys:
      - name: team-a
        sha256: 9f86d0…
        roles: [inference]          # default; admin may call Control too
        tenant: team-a              # requests of this key are this tenant's
        max_concurrent: 16          # calls at a time
        requests_per_minute: 600
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from jaxinfer_service.yaml_text import load_yaml

logger = logging.getLogger(__name__)

Role = Literal["inference", "admin"]
PREFIX = "ji-"  # of every key, so that one that leaks is recognised
BUSY_RETRY = 1.0  # seconds after which a key with too many calls at a time may try again

_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")


class UnauthenticatedError(PermissionError):
    """No key, or one that is not known."""


class ForbiddenError(PermissionError):
    """The key may not do this."""


class TooManyError(RuntimeError):
    """The key has as many calls as it may; `retry_after` seconds are worth waiting."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class Key(pydantic.BaseModel):
    """An entry of the file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, pydantic.Field(min_length=1)]
    sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
    roles: Annotated[tuple[Role, ...], pydantic.Field(min_length=1)] = ("inference",)
    tenant: str = ""
    max_concurrent: Annotated[int | None, pydantic.Field(ge=1)] = None
    requests_per_minute: Annotated[int | None, pydantic.Field(ge=1)] = None


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    keys: Annotated[list[Key], pydantic.Field(min_length=1)]


@dataclass(slots=True)
class _Use:
    """What a key is doing: calls that run, and calls it may begin at a moment."""

    running: int = 0
    left: float = 0.0
    since: float | None = None

    def begin(self, key: Key, now: float) -> None:
        """Count a call, or raise TooManyError."""
        if key.max_concurrent is not None and self.running >= key.max_concurrent:
            raise TooManyError(
                f"key {key.name!r} has {self.running} calls running, which is its limit; wait for"
                " one to end",
                BUSY_RETRY,
            )
        if (most := key.requests_per_minute) is not None:
            gained = most if self.since is None else (now - self.since) * most / 60
            self.left, self.since = min(self.left + gained, most), now
            if self.left < 1:
                raise TooManyError(
                    f"key {key.name!r} may begin {most} calls a minute; wait",
                    (1 - self.left) * 60 / most,
                )
            self.left -= 1
        self.running += 1


@dataclass(slots=True)
class Access:
    """The keys of a file, or none: then anybody may call."""

    path: Path | None = None
    clock: Callable[[], float] = time.monotonic
    _keys: dict[str, Key] = field(default_factory=dict)  # by their hashes
    _uses: dict[str, _Use] = field(default_factory=dict)  # by the keys' names

    def __post_init__(self) -> None:
        if self.path is not None:
            self._keys = read_keys(self.path)

    def reload(self) -> None:
        """Read the file again. A bad one is logged, and the keys stay as they were."""
        if self.path is None:
            return
        try:
            self._keys = read_keys(self.path)
            logger.info("read the API keys again", extra={"keys": len(self._keys)})
        except (OSError, ValueError) as error:
            logger.error("the API keys stay as they were: %s", error)

    @contextlib.contextmanager
    def granted(self, token: str | None, role: Role) -> Iterator[None]:
        """A call within, by the holder of a key.

        Raises UnauthenticatedError, ForbiddenError or TooManyError.
        """
        if self.path is None:
            yield
            return
        key = self._key(token)
        if role not in key.roles and "admin" not in key.roles:
            raise ForbiddenError(f"key {key.name!r} has not the role {role}")
        use = self._uses.setdefault(key.name, _Use())
        use.begin(key, self.clock())
        before = _tenant.set(key.tenant)
        try:
            yield
        finally:
            _tenant.reset(before)
            use.running -= 1

    def _key(self, token: str | None) -> Key:
        if not token:
            raise UnauthenticatedError("there is no API key; send one as `authorization: Bearer …`")
        digest = hashlib.sha256(token.encode()).hexdigest()
        found = [key for known, key in self._keys.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise UnauthenticatedError("the API key is not known")
        return found[0]


def tenant_of(asked: str) -> str:
    """Whose a request is that names this tenant, or none. Raises ForbiddenError for another's."""
    own = _tenant.get()
    if own and asked and asked != own:
        raise ForbiddenError(f"the key's requests are tenant {own!r}'s, not {asked!r}'s")
    return own or asked


def bearer(header: str | None) -> str | None:
    """The key in an `authorization` header."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def read_keys(path: Path) -> dict[str, Key]:
    """Keys by their hashes. Raises OSError, or ValueError naming what is wrong in the file."""
    try:
        found = _File.model_validate(load_yaml(path.read_text("utf-8")))
    except pydantic.ValidationError as error:
        raise ValueError(f"{path}: {_fault(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    names = [key.name for key in found.keys]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: {twice[0]!r} names two keys; give each a name of its own")
    return {key.sha256: key for key in found.keys}


def _fault(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


def make_key() -> tuple[str, str]:
    """A new key, and the hash that a file has of it."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


def make_entry(name: str, role: str, tenant: str, **limits: int | None) -> tuple[str, Key]:
    """A new key and its entry of the file; `limits` by their fields' names.

    Raises ValueError for what no entry may have.
    """
    key, digest = make_key()
    try:
        return key, Key.model_validate(
            {"name": name, "sha256": digest, "roles": (role,), "tenant": tenant} | limits
        )
    except pydantic.ValidationError as error:
        raise ValueError(_fault(error)) from error
