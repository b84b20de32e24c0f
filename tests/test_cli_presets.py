"""`serve` with presets, and how scheduling options are written and shown."""

from __future__ import annotations

import dataclasses

import pytest
import typer
from jaxinfer_service.cli import app
from test_cli import run, serve_options, words

from jaxinfer.config import EngineConfig
from jaxinfer.presets import PRESETS, preset_values

DEFAULTS = EngineConfig()


def serve_command():
    return typer.main.get_command(app).get_command(None, "serve")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_nothing_else(name, monkeypatch):
    _, source = serve_options(monkeypatch, "--preset", name)
    assert source.engine == dataclasses.replace(DEFAULTS, **PRESETS[name])
    assert source.engine != DEFAULTS and source.preset == name


def test_the_command_line_and_the_file_win_over_a_preset(monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("preset: online\nmax-num-batched-tokens: 77\nprefix-cache: false")
    args = ("--config", file, "--max-queued-requests", "9")
    engine = serve_options(monkeypatch, *args)[1].engine
    assert engine == dataclasses.replace(
        DEFAULTS,
        tpot_target_ms=PRESETS["online"]["tpot_target_ms"],
        max_num_batched_tokens=77,
        max_queued_requests=9,
        prefix_cache=False,
    )
    _, source = serve_options(monkeypatch, *args, "--preset", "batch", "--tpot-target-ms", "5")
    assert source.engine.tpot_target_ms == 5 and source.preset == "batch"
    no_target = serve_options(monkeypatch, "--preset", "online", "--tpot-target-ms", "0")[1].engine
    assert no_target.tpot_target_ms is None
    as_default = serve_options(monkeypatch, "--preset", "batch", "--max-num-seqs", "32")[1].engine
    assert as_default.max_num_seqs == 32  # given, though it is the default


def test_help_says_what_each_preset_and_each_default_is():
    help_text = {p.name: p.help or "" for p in serve_command().params}["preset"]
    shown = {p.name: p.show_default for p in serve_command().params}
    for name, values in PRESETS.items():
        line = help_text.partition(f"{name}: ")[2].partition(";")[0].rstrip(".")
        said = {part.rsplit(" ", 1)[0]: part.rsplit(" ", 1)[1] for part in line.split(", ")}
        for field, value in values.items():
            flag = field.replace("_", "-")
            if value is None:
                assert said["no"] == flag
            else:
                assert float(said[flag]) == value
        assert len(said) == len(values)
    for field in dataclasses.fields(EngineConfig):
        if field.name in shown and isinstance(field.default, int | float):
            value = shown[field.name]
            expected = {"on": True, "off": False}.get(value)
            assert (float(value) if expected is None else expected) == field.default, field.name
    for field in {name for values in PRESETS.values() for name in values}:
        assert field in shown, f"{field} has no option"


def test_the_known_names_of_the_prefix_cache_are_taken(monkeypatch):
    for flag, on in (
        ("--prefix-cache", True),
        ("--enable-prefix-caching", True),
        ("--no-prefix-cache", False),
        ("--no-enable-prefix-caching", False),
    ):
        assert serve_options(monkeypatch, flag)[1].engine.prefix_cache is on


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--preset", "fast"), "preset is 'fast'; choose one of online, batch, mixed"),
        (("--tenant-weight", "a"), "'a' is not NAME=W"),
        (("--tenant-weight", "a=x"), "'a=x' is not NAME=W"),
        (("--tenant-weight", "a=0"), "tenant_weights of 'a' is 0.0; it must be from 0.001 to 1000"),
        (("--tenant-weight", "a=1e-12"), "tenant_weights of 'a' is 1e-12"),
        (("--tenant-weight", "a=nan"), "tenant_weights of 'a' is nan"),
        (("--tenant-weight", "a=1", "--tenant-weight", "a=2"), "names 'a' twice"),
        (("--kv-offload-gib", "inf"), "less than or equal to 1048576"),
        (("--kv-watermark", "1"), "kv_watermark is 1.0; it must be from 0 to 0.9"),
        (("--priority-ageing", "0"), "priority_ageing is 0.0; it must be above 0"),
        (("--tpot-target-ms", "-1"), "greater than or equal to 0"),
        (("--interactive-reserve", "2"), "interactive_reserve is 2.0"),
    ],
)
def test_bad_values_are_refused_by_name(args, error):
    result = run("serve", "m", *args)
    assert result.exit_code == 2 and error in words(result), result.output


def test_presets_are_valid_and_named():
    for name in PRESETS:
        EngineConfig(**preset_values(name))
    preset_values("online")["max_num_seqs"] = 1
    assert "max_num_seqs" not in PRESETS["online"]
    with pytest.raises(ValueError, match="'bulk'; choose one of online, batch, mixed"):
        preset_values("bulk")


def test_an_option_that_repeats_may_be_single_in_a_file(monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    for text in ("tenant-weight: team-a=2", "tenant-weight: [team-a=2]"):
        file.write_text(text)
        engine = serve_options(monkeypatch, "--config", file)[1].engine
        assert engine.tenant_weights == (("team-a", 2.0),)
