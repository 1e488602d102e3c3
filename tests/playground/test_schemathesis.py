"""Schemathesis reads the OpenAPI document and tries to break the API: it may refuse, never fail."""

import warnings

import pytest

pytest.importorskip("schemathesis", reason="needs Schemathesis: pip install schemathesis")
pytest.importorskip("starlette", reason='needs the server: pip install "regard[serve]"')

import schemathesis
from hypothesis import HealthCheck, Phase, settings

from playground.fakes import Reverser
from regard.playground.requests import Limits
from regard.playground.server import Playground

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Smaller than the real ones, so that they are reached; few widths, so that little is compiled.
LIMITS = Limits(body=2048, sentences=4, characters=200, points=5, width=2)
schema = schemathesis.openapi.from_asgi("/openapi.json", Playground(Reverser(), LIMITS).app())


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_it_refuses_but_never_fails(case):
    case.call_and_validate(checks=CHECKS, timeout=60)  # a first request compiles
