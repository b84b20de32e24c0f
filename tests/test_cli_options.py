"""Options that come from the environment and from files, and what shells are told of them."""

from __future__ import annotations

import pytest
import typer
from jaxinfer_service.cli import app
from test_cli import run, words


def test_options_come_from_the_environment_below_the_command_line(monkeypatch):
    monkeypatch.setenv("JAXINFER_MAKE_KEY_TENANT", "from-environment")
    assert "from-environment" in run("make-key", "a").stdout
    assert "given" in run("make-key", "a", "--tenant", "given").stdout
    assert "JAXINFER_MAKE_KEY_REQUESTS_PER_MINUTE" in run("make-key", "--help").stdout
    monkeypatch.setenv("JAXINFER_MAKE_KEY_TENNANT", "x")
    wrong = run("make-key", "a")
    assert wrong.exit_code == 2
    assert "JAXINFER_MAKE_KEY_TENNANT names no option" in words(wrong)
    assert "did you mean JAXINFER_MAKE_KEY_TENANT" in words(wrong)


def test_a_variable_has_the_name_of_its_option(monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max-modle-len: 8k\n")
    monkeypatch.setenv("JAXINFER_SERVE_CONFIG", str(file))
    assert "max-modle-len: no such option" in words(run("serve", "/nowhere"))
    monkeypatch.delenv("JAXINFER_SERVE_CONFIG")
    monkeypatch.setenv("JAXINFER_SERVE_MODEL", "/nowhere")
    assert "/nowhere does not exist" in words(run("serve"))


@pytest.mark.parametrize(
    "content, said",
    [
        (b"# \xe9\nport: 1\n", "cannot be read: 'utf-8' codec"),
        (b"port: 1\nport: 2\n", "port is there twice"),
        (b"port: yes\n", "port is True; give it a value"),
        (b"? [a]\n: 1\n", "cannot be read"),
    ],
)
def test_a_file_of_options_that_says_nothing_clear_is_refused(tmp_path, content, said):
    file = tmp_path / "serve.yaml"
    file.write_bytes(content)
    result = run("serve", "/nowhere", "--config", file)
    assert result.exit_code == 2 and said in words(result)


def test_the_environment_is_above_the_file(monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: nonsense\n")
    monkeypatch.setenv("JAXINFER_SERVE_MAX_MODEL_LEN", "other")
    result = run("serve", "/nowhere", "--config", str(file))
    assert "'other' is not a number" in words(result)


def commands(group, ctx, *path):
    """Every command below, as it is typed, and the names of its options."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        below = typer.Context(command, parent=ctx, info_name=name)
        if hasattr(command, "list_commands"):
            yield from commands(command, below, *path, name)
        else:
            yield (*path, name), [o for p in command.params for o in (*p.opts, *p.secondary_opts)]


def test_help_shows_the_names_of_options_whole(monkeypatch):
    """Also in a window of 80 columns, which is what files and pipes get."""
    monkeypatch.setenv("COLUMNS", "80")
    root = typer.main.get_command(app)
    found = list(commands(root, typer.Context(root, info_name="jaxinfer")))
    assert {("serve",), ("bench", "serve")} <= {path for path, _ in found}
    for path, names in found:
        shown = run(*path, "--help").output
        cut = [n for n in names if n.startswith("--") and f"{n} " not in shown.replace(",", " ")]
        assert not cut, path


@pytest.mark.parametrize(
    "typed, completed",
    [("jaxinfer ru", "run-batch"), ("jaxinfer serve --max-m", "--max-model-len")],
)
def test_shells_complete_commands_and_options(typed, completed):
    """As a shell asks, whichever runs the tests: none may."""
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    env = {"_JAXINFER_COMPLETE": "complete_bash"} | asked
    assert run(env=env, prog_name="jaxinfer").stdout == f"{completed}\n"
