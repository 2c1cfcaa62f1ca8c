"""docs/models.md says what the tests check, no more and no less."""

from __future__ import annotations

from pathlib import Path

import pytest
from models_table import PAGE, TESTS, cases, render, results, written


def test_the_page_has_the_table_of_the_tests() -> None:
    assert written(PAGE.read_text()) == render(), "run `make docs`"


def test_the_declared_cases_are_those_that_pytest_runs(pytestconfig: pytest.Config) -> None:
    class Collect:
        def __init__(self) -> None:
            self.ids: set[str] = set()

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            self.ids = {item.nodeid.rpartition("/")[2] for item in items}

    collected = Collect()
    files = {f"tests/backends/{test.__module__}.py::{test.__name__}" for test in TESTS}
    code = pytest.main(
        ["--collect-only", "-qq", "-p", "no:cacheprovider", *sorted(files)],
        plugins=[collected],
    )
    assert code == 0
    declared = {
        f"{test.__module__}.py::{test.__name__}[{case}]"
        for test in TESTS
        for ids in cases(test).values()
        for case in ids
    }
    assert declared == collected.ids


def test_what_did_not_pass_is_not_said_to(tmp_path: Path) -> None:
    key = "test_architectures.test_both_backends_agree"
    junit = tmp_path / "junit.xml"
    cases_ = [
        '<testcase classname="tests.backends.test_architectures"'
        f' name="test_both_backends_agree[{name}]">{"<failure/>" if name == "qwen2" else ""}'
        "</testcase>"
        for name in ("llama", "qwen2")
    ]
    junit.write_text(f"<testsuites><testsuite>{''.join(cases_)}</testsuite></testsuites>")
    passed = results(junit)
    assert passed == {(key, "llama"): True, (key, "qwen2"): False}
    last = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-1].rstrip(" |")
        for line in render(passed).splitlines()
    }
    # One that failed, and one that was not run.
    assert (last["llama"], last["qwen2"], last["qwen3"]) == ("✓", "✗", "✗")
