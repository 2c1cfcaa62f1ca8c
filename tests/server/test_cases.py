"""Cases made from peers' public bug reports, against a live server with the real demo model.

The cases and their runner are data here (``cases/``): see ``cases/FORMAT.md``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent / "cases"
CASES: list[dict[str, Any]] = json.loads((HERE / "shared.json").read_text(encoding="utf-8"))

STRUCTURED = "structured output comes with a later issue"
TOOLS = "tool calls come with a later issue"
#: Topics, or single cases, that a later issue covers. Strict: one that passes must leave the list.
LATER = {
    "json-object": STRUCTURED,
    "json-schema": STRUCTURED,
    "structured-json": STRUCTURED,
    "structured-choice": STRUCTURED,
    "structured-regex": STRUCTURED,
    "structured-grammar": STRUCTURED,
    "logprobs-bytes-b": STRUCTURED,
    "unicode-forced-a": STRUCTURED,
    "tools-required": TOOLS,
    "tools-named": TOOLS,
    "anthropic-basic": "/v1/messages comes with a later issue",
    "anthropic-stream": "/v1/messages comes with a later issue",
    "anthropic-stop": "/v1/messages comes with a later issue",
    "anthropic-count": "/v1/messages comes with a later issue",
    "responses-basic": "/v1/responses comes with a later issue",
    "responses-stream": "/v1/responses comes with a later issue",
    "responses-status": "/v1/responses comes with a later issue",
}


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_cases", HERE / "run_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters() -> list[Any]:
    made = []
    for case in CASES:
        reason = LATER.get(case["topic"]) or LATER.get(case["id"])
        marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
        made.append(pytest.param(case, id=case["id"], marks=marks))
    return made


def test_the_list_of_later_topics_is_not_stale() -> None:
    known = {case["topic"] for case in CASES} | {case["id"] for case in CASES}
    assert set(LATER) <= known


#: What the runner says where a machine's speed leaves a case without a verdict.
TOO_SMALL = "case too small for this machine"


@pytest.mark.model
@pytest.mark.parametrize("case", parameters())
def test_case(case: dict[str, Any], live: str) -> None:
    faults = load_runner().run_case(case, live, "demo", 180)
    if "doubtful" in case and any(fault.endswith(TOO_SMALL) for fault in faults):
        pytest.skip(f"the runner says: {faults[0]}")
    assert faults == []
