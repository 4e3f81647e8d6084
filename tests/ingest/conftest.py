from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ingest.server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
