"""The table of architectures and checks in docs/models.md, made from the tests themselves.

    make docs      runs the checks, then renders their results into docs/models.md

A cell is a test function's case for an architecture: declared by the function's ``parametrize``
marks, and said to pass only by a run of that very case (pytest's JUnit file).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import test_architectures
import test_formats_gguf
import test_mlx_formats
import test_mlx_models
import test_torch_models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- table: made by `make docs` -->"
END = "<!-- end of the table -->"

Check = Callable[..., None]

#: Column -> the tests of torch and of MLX; a test of both stands alone.
CHECKS: dict[str, tuple[Check, ...]] = {
    "chunks, mixed batches": (
        test_torch_models.test_chunks_and_mixed_batches,
        test_mlx_models.test_chunks_and_mixed_batches,
    ),
    "prefix cached": (
        test_architectures.test_prefix_pages_on_torch,
        test_architectures.test_prefix_pages_on_mlx,
    ),
    "MLX 4 and 8 bit": (
        test_architectures.test_quantised_repositories_on_torch,
        test_architectures.test_quantised_repositories_on_mlx,
    ),
    "GGUF": (
        test_formats_gguf.test_architectures,
        test_mlx_formats.test_gguf_architectures,
    ),
    "torch = MLX": (test_architectures.test_both_backends_agree,),
}

TESTS: tuple[Check, ...] = tuple(itertools.chain.from_iterable(CHECKS.values()))


def cases(test: Check) -> dict[str, list[str]]:
    """Architecture -> ids of the test's cases for it, as its marks declare them."""
    marks: list[Any] = getattr(test, "pytestmark", [])
    axes = [(m.args[0], list(m.args[1])) for m in marks if m.name == "parametrize"]
    found: dict[str, list[str]] = {}
    # The mark nearest to the function comes first here and in pytest's ids.
    for values in itertools.product(*(values for _, values in axes)):
        named = dict(zip((name for name, _ in axes), values, strict=True))
        found.setdefault(named["name"], []).append("-".join(map(str, values)))
    return found


def results(junit: Path) -> dict[tuple[str, str], bool]:
    """(module.function, case id) -> whether it passed."""
    passed = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        function, _, bracket = case.attrib["name"].partition("[")
        module = case.attrib["classname"].rpartition(".")[2]
        bad = any(child.tag in ("failure", "error", "skipped") for child in case)
        passed[f"{module}.{function}", bracket.removesuffix("]")] = not bad
    return passed


def render(passed: Mapping[tuple[str, str], bool] | None = None) -> str:
    """The table. Without results it is what the tests declare, all of it passing."""
    columns = {name: [cases(test) for test in tests] for name, tests in CHECKS.items()}
    names = list(dict.fromkeys(n for parts in columns.values() for part in parts for n in part))
    lines = [
        "| architecture | " + " | ".join(columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name in names:
        cells = []
        for column, parts in columns.items():
            marks = []
            for test, part in zip(CHECKS[column], parts, strict=True):
                ids = part.get(name, [])
                key = f"{test.__module__}.{test.__name__}"
                good = passed is None or all(passed.get((key, case), False) for case in ids)
                marks.append("–" if not ids else "✓" if good else "✗")
            cells.append(" ".join(marks))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The table that a page holds."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main(junit: str) -> int:
    """Put the table of a run into the page; fails where a declared case did not pass."""
    table = render(results(Path(junit)))
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    if table != render():
        print(f"error: checks that did not pass are marked ✗ in {PAGE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
