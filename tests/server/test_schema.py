"""Requests made up from the server's own schema: never a 5xx, never an answer out of schema."""

from __future__ import annotations

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from server_fakes import FakeEngine, make_tokenizer

from pippin import config
from pippin.server import openapi
from pippin.server.app import build_app

_app = build_app(
    config.build({"model": {"model": "fake"}, "server": {"request_timeout": 60.0}}),
    FakeEngine(),
    make_tokenizer(),
)
# Not "valid data is accepted": a schema cannot say what fits the context or the vocabulary.
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
schema = schemathesis.openapi.from_dict(openapi.document())
schema.app = _app


@schema.parametrize()
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_no_request_breaks_the_server(case: schemathesis.Case) -> None:
    answer = case.call()
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"]
    case.validate_response(answer, checks=CHECKS)
