"""What all tests have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.distributed.launch import close_zygotes

# how long an example takes is no matter of correctness, and a busy machine would make tests fail by it
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def extensions_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where DeepSpeed builds its ops. Private to this run: a killed build leaves a lock that would hang the next run.

    ``ELASTIC_CKPT_TEST_EXTENSIONS`` names a folder to build in once and use again, for work on a few tests.
    """
    yield os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or str(tmp_path_factory.mktemp("extensions"))
    close_zygotes()
