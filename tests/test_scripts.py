"""The shell scripts: finding Python, .venv, the installation's stamp, quickstart and test.

What would download or install is replaced: a stand-in for the virtual environment records what it
is asked. The whole of quickstart runs once with the real server and model.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import PATIENCE_S, free_port
from test_cli_serve import listening

ROOT = Path(__file__).resolve().parent.parent
SHELL_SCRIPTS = ("scripts/quickstart", "scripts/test", "scripts/setup-common", ".ci/run")
BASH = "/bin/bash"


def executable(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def common(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines of bash after scripts/setup-common."""
    script = f'set -euo pipefail; ROOT={ROOT}; . "$ROOT/scripts/setup-common"; {body}'
    return subprocess.run(
        [BASH, "-c", script], capture_output=True, text=True, env=os.environ | env, timeout=300
    )


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_scripts_parse_and_are_executable(script):
    subprocess.run([BASH, "-n", ROOT / script], check=True)
    assert os.access(ROOT / script, os.X_OK) or script.endswith("setup-common")


# -- finding Python ------------------------------------------------------------------------------

GOOD, OLD = f'exec {sys.executable} "$@"', "exit 1"


def only_path(folder: Path, **pythons: str) -> dict[str, str]:
    """An environment whose PATH has these commands, a shell's own tools, and no other Python."""
    folder.mkdir()
    for tool in ("ls", "grep", "head", "cat", "cksum"):
        (folder / tool).symlink_to(
            f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}"
        )
    for name, line in pythons.items():
        executable(folder / name.replace("_", "."), f"#!{BASH}", line)
    return {"PATH": str(folder), "PYENV_ROOT": str(folder / "pyenv")}


def test_the_newest_usable_python_of_the_path_is_taken(tmp_path):
    env = only_path(tmp_path / "bin", python3_13=OLD, python3_12=GOOD, python3=GOOD)
    found = common("find_python", **env)
    assert found.stdout.strip() == str(tmp_path / "bin" / "python3.12")


def test_pyenvs_versions_are_searched_when_the_path_has_none(tmp_path):
    env = only_path(tmp_path / "bin", python3=OLD)
    versions = tmp_path / "bin" / "pyenv" / "versions"
    executable(versions / "3.11.7" / "bin" / "python3", f"#!{BASH}", OLD)
    new = executable(versions / "3.12.1" / "bin" / "python3", f"#!{BASH}", GOOD)
    assert common("find_python", **env).stdout.strip() == str(new)


def test_without_python_it_says_what_to_install(tmp_path):
    found = common("find_python", **only_path(tmp_path / "bin", python3=OLD))
    assert found.returncode == 1
    assert "no Python 3.12 or newer" in found.stderr
    assert "apt-get install python3.12" in found.stderr


def test_a_broken_environment_is_made_anew(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/nowhere/python")
    made = common(
        "ensure_venv",
        JAXINFER_VENV=str(venv),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert made.returncode == 0, made.stderr
    assert "making it anew" in made.stderr
    assert subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"]).returncode == 0
    again = common("ensure_venv", JAXINFER_VENV=str(venv))
    assert again.returncode == 0
    assert again.stderr == ""


# -- installing ----------------------------------------------------------------------------------


class Facade:
    """A stand-in for the virtual environment: the real interpreter, but pip and tools are recorded.

    `fails`: a word; a recorded call whose arguments have it fails.
    """

    def __init__(self, folder: Path, fails: str = "none"):
        self.folder, self.log = folder, folder / "calls"
        executable(
            folder / "bin" / "python",
            f"#!{BASH}",
            'if [ "${1:-}" = -m ] && [ "$2 $3" != "pip --version" ]; then',
            f'    echo "$*" >>{self.log}',
            f'    case "$*" in *{fails}*) echo "{fails} says no" >&2; exit 1 ;; esac',
            "    exit 0",
            "fi",
            f'exec {sys.executable} "$@"',
        )
        self.env = {
            "XLA_FLAGS": "",  # one device, as users have
            "JAXINFER_VENV": str(folder),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'service'}:{ROOT / 'tests'}",
        }

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_what_is_installed_is_not_installed_again(tmp_path):
    venv = Facade(tmp_path / "venv")
    first = common("install_project test", **venv.env)
    assert "Installing the project" in first.stderr
    assert venv.calls == [f"-m pip install --disable-pip-version-check --editable {ROOT}[test]"]
    for extras in ("test", "''"):  # the extras bring the base with them
        assert "everything is installed" in common(f"install_project {extras}", **venv.env).stderr
    assert len(venv.calls) == 1
    common("install_project gpu-check", **venv.env)
    assert len(venv.calls) == 2
    common("install_project test; install_project gpu-check", **venv.env)
    assert len(venv.calls) == 2


def test_a_changed_project_file_installs_again(tmp_path):
    venv = Facade(tmp_path / "venv")
    common("install_project ''", **venv.env)
    stamp = tmp_path / "venv" / ".jaxinfer-installed"
    stamp.write_text(stamp.read_text().replace(stamp.read_text().split()[0], "0", 1))
    common("install_project ''", **venv.env)
    assert len(venv.calls) == 2


def test_a_failed_installation_says_so_and_is_tried_again(tmp_path):
    venv = Facade(tmp_path / "venv", fails="install")
    for _ in range(2):
        result = common("install_project ''", **venv.env)
        assert result.returncode == 1
        assert "install says no" in result.stderr
        assert "the installation failed" in result.stderr
    assert len(venv.calls) == 2


# -- scripts/test --------------------------------------------------------------------------------


def run_test_script(venv: Facade) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / ".ci" / "run"], capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=os.environ | venv.env, timeout=300,
    )  # fmt: skip


def test_everything_is_checked_in_order(tmp_path):
    venv = Facade(tmp_path / "venv")
    assert run_test_script(venv).returncode == 0
    tools = [re.sub(r"^-m (\S+( check| format|)).*", r"\1", call) for call in venv.calls]
    assert tools == ["pip", "ruff check", "ruff format", "mypy", "pytest"]
    assert venv.calls[4].endswith("-m pytest -n 2 --dist loadfile --no-loadscope-reorder"), (
        "all tests"
    )
    assert "[test" in venv.calls[0]
    scripts = venv.calls[1].split()
    assert "scripts/compare_peers" in scripts
    assert "scripts/quickstart" not in scripts


@pytest.mark.parametrize("tool", ["ruff check", "ruff format", "mypy", "pytest"])
def test_a_failing_check_ends_it(tmp_path, tool):
    venv = Facade(tmp_path / "venv", fails=tool.replace(" ", "\\ "))
    assert run_test_script(venv).returncode != 0
    assert tool in venv.calls[-1]


# -- scripts/quickstart --------------------------------------------------------------------------

# `jaxinfer serve` over a scripted engine; anything else is the real command.
FAKE_JAXINFER = """
import asyncio, sys
if sys.argv[1] == "serve":
    import logging
    from fake_engine import ScriptedEngine, limits, says
    from jaxinfer_service.server import Server, ServerConfig
    from serving import opened
    logging.basicConfig(level="INFO")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    engine = ScriptedEngine(says("It is Tokyo."), limits(max_model_len=4096, kv_tokens=4096))
    asyncio.run(Server(ServerConfig(port=port), lambda: opened(engine)).run())
else:
    from jaxinfer_service.cli import main
    main()
"""


@pytest.fixture
def served(tmp_path) -> Facade:
    """A facade that is installed, with a scripted server."""
    venv = Facade(tmp_path / "venv")
    body = tmp_path / "fake_jaxinfer.py"
    body.write_text(FAKE_JAXINFER)
    executable(
        tmp_path / "venv" / "bin" / "jaxinfer", f"#!{BASH}", f'exec {sys.executable} {body} "$@"'
    )
    common("install_project ''", **venv.env)
    return venv


def quickstart(venv: Facade, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "quickstart", *arguments], capture_output=True, text=True,
        stdin=subprocess.DEVNULL, env=os.environ | venv.env, timeout=300,
    )  # fmt: skip


def test_once_asks_and_leaves_nothing_running(served):
    port = free_port()
    result = quickstart(served, "--once", "--port", str(port))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "It is Tokyo.\n"
    assert "everything is installed" in result.stderr
    assert f"serve demo --port {port}" in result.stderr
    assert not listening(port)


def test_it_serves_until_it_is_interrupted(served):
    port = free_port()
    process = subprocess.Popen(
        [ROOT / "scripts" / "quickstart", f"--port={port}"], stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL, env=os.environ | served.env, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        assert any("until Ctrl-C" in line for line in process.stderr)
        assert listening(port)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.stderr.read()
        assert process.wait(PATIENCE_S) == 0
        assert not listening(port)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_taken_port_is_refused_when_asked_for(served):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = quickstart(served, "--once", "--port", str(port))
    assert result.returncode == 1
    assert f"port {port} cannot be used" in result.stderr


def test_a_free_port_is_taken_when_the_usual_one_is_not(served):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # then it is taken already
            taken.bind(("127.0.0.1", 50051))
            taken.listen()
        result = quickstart(served, "--once")
    assert result.returncode == 0, result.stderr
    assert "port 50051 is taken: using" in result.stderr
    assert result.stdout == "It is Tokyo.\n"


@pytest.mark.parametrize("arguments", [("--twice",), ("--port", "http"), ("--port", "70000")])
def test_bad_arguments_are_refused(served, arguments):
    result = quickstart(served, "--once", *arguments)
    assert result.returncode == 1
    assert arguments[-1] in result.stderr


def test_a_server_that_does_not_start_is_reported(served):
    executable(served.folder / "bin" / "jaxinfer", f"#!{BASH}", "echo no memory left >&2; exit 1")
    result = quickstart(served, "--once")
    assert result.returncode == 1
    assert "the server ended before it served: no memory left" in result.stderr


def test_quickstart_with_the_real_model(served):
    """The demo model answers; a second run neither downloads nor converts."""
    line = f'exec {sys.executable} -m jaxinfer_service "$@"'
    executable(served.folder / "bin" / "jaxinfer", f"#!{BASH}", line)
    result = quickstart(served, "--once", "--port", str(free_port()))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of Japan is Tokyo.\n"
    again = quickstart(served, "--once", "--port", str(free_port()))
    assert again.stdout == result.stdout, again.stderr
    assert not re.search("download|convert|loading tensors", again.stderr.split("later ones")[1])
