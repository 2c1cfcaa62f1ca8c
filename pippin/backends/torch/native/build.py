"""Compiles the C++ beside this file, once on a machine; later starts load the library from disk.

Needs g++ and Linux. Without them everything runs on torch's own operations, which give the same
results more slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("attention.cpp", "kernels.cpp", "packed.cpp", "reduce.cpp")
_HEADERS = ("multiply.h", "pool.h", "vectors.h")
_FLAGS = (
    "-O3", "-march=native", "-std=c++20", "-fPIC", "-pthread", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_TIMEOUT = 120


class NoKernels(Exception):
    """Why there are no kernels on this machine, for people."""


def load_library(cache: Path) -> ctypes.CDLL:
    """The compiled kernels, from ``cache`` or made now (about 3 seconds of one core).

    Raises ``NoKernels``.
    """
    if platform.system() != "Linux":
        raise NoKernels(f"not on {platform.system()}")
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoKernels("no g++ on the PATH")
    path = cache / f"kernels-{_key(compiler)}.so"
    if not path.is_file():
        _compile_once(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"{path} does not load: {error}") from error


def _key(compiler: str) -> str:
    """Of all that the library depends on."""
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"{compiler} does not run: {error}") from error
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    texts = [(_FOLDER / name).read_text() for name in (*_SOURCES, *_HEADERS)]
    parts = (*texts, version, cpu, *_FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile_once(compiler: str, path: Path) -> None:
    """Ranks that start together wait for the one that compiles."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=2 * _TIMEOUT):
            if not path.is_file():
                _compile(compiler, path)
    except Timeout as error:
        raise NoKernels(f"another process has compiled for {2 * _TIMEOUT} s") from error
    except OSError as error:
        raise NoKernels(f"{path.parent} is not writable: {error}") from error


def _compile(compiler: str, path: Path) -> None:
    logger.info("compiling CPU kernels (once on this machine)")
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            objects = [str(Path(folder) / name) + ".o" for name in _SOURCES]
            compiles = [
                [compiler, *_FLAGS, "-c", str(_FOLDER / name), "-o", made_object]
                for name, made_object in zip(_SOURCES, objects, strict=True)
            ]
            with ThreadPoolExecutor() as pool:
                list(pool.map(_run, compiles))
            _run([compiler, "-shared", "-pthread", *objects, "-o", str(made)])
            # Renamed, so that no other process sees half a file.
            os.replace(made, path)
    except OSError as error:
        raise NoKernels(f"{path.parent} is not writable: {error}") from error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        first = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise NoKernels(f"g++ failed: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"g++ took longer than {_TIMEOUT} s") from error
