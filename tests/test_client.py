"""The clients by themselves."""

from __future__ import annotations

import inspect

import pytest
from jaxinfer_service.client import AsyncClient, Client


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_waiting_lasts_longer_than_a_first_start(client):
    assert inspect.signature(client.wait_ready).parameters["timeout"].default >= 600


def test_waiting_in_vain_ends_in_time_and_says_what_was_heard():
    with Client("127.0.0.1:1") as client, pytest.raises(TimeoutError, match="UNAVAILABLE"):
        client.wait_ready(0.3)
