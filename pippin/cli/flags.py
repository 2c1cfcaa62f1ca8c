"""Flags of commands from ``pippin.options``; flags and ``--config FILE`` to a ``Config``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from pippin import options
from pippin.config import Config
from pippin.errors import ConfigError

#: Options that matter where no server is started.
ENGINE_GROUPS = ("Model", "Memory", "Scheduling", "Parallelism")


def engine_options() -> tuple[options.Option, ...]:
    skipped = ("served_model_name", "max_num_queued_reqs")
    engine = [o for o in options.OPTIONS if o.group in ENGINE_GROUPS and o.name not in skipped]
    return (*engine, options.BY_NAME["log_level"])


def with_options(
    chosen: Iterable[options.Option], *, later: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each option; it receives them as ``**flags``, absent ones None.

    ``later`` adds, hidden, the names that a later release brings, so that they are refused clearly.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [_parameter(option) for option in chosen]
        if later:
            parameters += [_later_parameter(name) for name in options.LATER]
        _set_parameters(command, parameters)
        return command

    return decorate


def with_arguments(kind: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Give a command one flag for each field of the dataclass ``kind``; it receives an instance.

    A field is ``Annotated`` with its help, or with a ``typer.Option`` or ``typer.Argument``.
    """
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for field in dataclasses.fields(kind):
        annotated, info = get_args(hints[field.name])
        if isinstance(info, str):
            info = typer.Option(help=info)
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[annotated, info],
            )
        )

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**values: Any) -> None:
            command(kind(**values))

        _set_parameters(called, parameters)
        return called

    return decorate


def _set_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """What typer reads of a command."""
    vars(command)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def config_from(
    model: str | list[str] | None, flags: Mapping[str, Any], file: Path | None
) -> Config:
    """Flags win over the file. Raises ``ConfigError`` naming the flag, or the file and the key."""
    given = {name: _plain(value) for name, value in flags.items() if value not in (None, [])}
    if model:
        given["model"] = model
    from_file = read_file(file) if file is not None else {}

    def origin(name: str) -> str:
        if name in given:
            return "MODEL" if name == "model" else "--" + name.replace("_", "-")
        return f"{file}: {name}"

    return options.make_config({**from_file, **given}, origin=origin)


def read_file(path: Path) -> dict[str, Any]:
    """Names and values of a YAML file; dashes in names become underscores."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path} is not valid YAML{where}: {problem}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold `name: value` lines, such as `max-model-len: 8192`")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"{path}: {key} is given twice")
        if name != "model" and name not in options.BY_NAME and name not in options.LATER:
            raise options.unknown(name, f"{key} in {path}")
        values[name] = value
    return values


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parameter(option: options.Option) -> inspect.Parameter:
    is_bool = option.type is bool
    names = [f"{option.flag}/--no-{option.flag[2:]}"] if is_bool else [option.flag]
    if option.short:
        names.append(option.short)
    annotation: Any = bool | None if is_bool else (list[str] | None if option.many else str | None)
    shown = _shown_default(option)
    info = typer.Option(
        *names,
        help=option.help + (f" [default: {shown}]" if shown else ""),
        metavar=None if is_bool else _metavar(option),
        rich_help_panel=option.group,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, info],
    )


def _later_parameter(name: str) -> inspect.Parameter:
    info = typer.Option("--" + name.replace("_", "-"), hidden=True)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, info],
    )


def _metavar(option: options.Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    text = str(option.type)
    return "N" if "int" in text else "X" if "float" in text else "TEXT"


def _shown_default(option: options.Option) -> str:
    default = option.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)
