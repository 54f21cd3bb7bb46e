"""What all tests have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.distributed.launch import close_zygotes, zygote_of

# how long an example takes is no matter of correctness, and a busy machine would make tests fail by it
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
if os.environ.get("ELASTIC_CKPT_TEST_VERSIONS") == "1" and "ELASTIC_CKPT_TEST_EXTENSIONS" in os.environ:
    zygote_of(os.environ["ELASTIC_CKPT_TEST_EXTENSIONS"])  # imports what ranks need while this process does


@pytest.fixture(scope="session")
def extensions_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where DeepSpeed builds its ops. Private to this run: a killed build leaves a lock that would hang the next run.

    ``ELASTIC_CKPT_TEST_EXTENSIONS`` names a folder to build in once and use again, for work on a few tests.
    """
    yield os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or str(tmp_path_factory.mktemp("extensions"))
    close_zygotes()


#: Files that take long and vary what others have shown once: left out of ``launch/test.sh`` without ``--all``.
SLOW = frozenset(
    {
        "test_docs",
        "test_exotic",
        "test_faults",
        "test_flows",
        "test_foreign",
        "test_launch_folder",
        "test_launchers",
        "test_low_precision",
        "test_nodes_isolated",
        "test_optimizers",
    }
    | {"test_parallel", "test_pipe_partition", "test_ready_configs", "test_soak", "test_unchanged_topology"}
    | {"test_sequence_and_tensor_parallel"}
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow by its file; frameworks are all slow."""
    for item in items:
        folder = item.path.parent.name
        if (folder == "distributed" and item.path.stem in SLOW) or folder == "integration":
            item.add_marker(pytest.mark.slow)
