"""What is settled before JAX starts: its platform where no driver is, and the GPU's memory."""

from __future__ import annotations

import os

import pytest

from jaxinfer import platform


@pytest.fixture
def settled(monkeypatch):
    """The environment after `prepare`, by what was set before and what the machine has."""

    def run(plugin: bool, driver: bool, **before: str) -> dict[str, str]:
        for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in before.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: plugin or None)
        monkeypatch.setattr(platform, "_has_driver", lambda: driver)
        platform.prepare()
        return dict(os.environ)

    return run


def test_a_plugin_without_a_driver_means_the_cpu(settled):
    assert settled(plugin=True, driver=False)["JAX_PLATFORMS"] == "cpu"
    for plugin, driver in ((True, True), (False, True), (False, False)):
        assert "JAX_PLATFORMS" not in settled(plugin, driver)


def test_what_the_user_set_wins(settled):
    mine = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert settled(plugin=True, driver=False, **mine).items() >= mine.items()
    assert platform.allocator_fraction() == 0.5


def test_the_allocator_may_take_more_than_jax_gives_it(settled):
    settled(plugin=False, driver=False)
    assert platform.allocator_fraction() == 0.95
