"""Pippin: the computers you already own as one fast OpenAI-compatible LLM endpoint."""

from typing import TYPE_CHECKING, Any

from pippin.types.request import SamplingParams

if TYPE_CHECKING:
    from pippin.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # LLM pulls in a backend; SamplingParams and the version must not.
    if name == "LLM":
        from pippin.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
