"""Which backend runs the model, and loading a stage with it."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from typing import Any

from pippin.backends.base import GroupSpec, StageRunner
from pippin.config import Config
from pippin.errors import ConfigError
from pippin.models.files import ModelFiles

#: Packages that a backend needs and an installation may lack.
_LIBRARIES = {"torch": ("torch",), "mlx": ("mlx", "mlx_lm", "mlx.core", "mlx.nn")}


def choose_backend(config: Config) -> tuple[str, str]:
    """The backend's name and why it was chosen."""
    asked = config.model.backend
    if asked != "auto":
        return asked, f"asked for by --backend {asked}"
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return "mlx", "the fastest on Apple Silicon"
    return "torch", f"MLX is chosen on Apple Silicon only, this is {sys.platform}"


def load_runner(
    backend: str,
    config: Config,
    files: ModelFiles,
    layers: tuple[int, int] | None = None,
    group: GroupSpec | None = None,
) -> StageRunner:
    """Load layers [first, last) of a model, or all of it, as one rank of ``group``.

    Raises ``ConfigError`` for a library that is missing, ``ModelError``, ``OutOfMemory``.
    """
    # Loaded by name: only the chosen backend's array library is imported.
    try:
        module = import_module(f"pippin.backends.{backend}.runner")
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES[backend]:
            raise
        raise ConfigError(
            f"the {backend} backend needs {error.name}, which is not installed",
            hint=f"pip install 'pippin[{backend}]'",
        ) from error
    options: dict[str, Any] = {}
    if layers is not None:
        options = {"first_layer": layers[0], "last_layer": layers[1]}
    if group is not None:
        options["group"] = group
    runner: StageRunner = module.load(config, files, **options)
    return runner
