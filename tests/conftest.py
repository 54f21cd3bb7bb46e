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


#: Files of jobs that ``launch/test.sh`` runs without ``--all``: any degree to any other, mixtures of saves, refusals.
CORE = frozenset({"test_matrix", "test_mixtures", "test_refusals"})
#: Others that take long: with ``--all``, too.
SLOW = frozenset(
    {
        "test_an_environment_is_enabled_until_it_is_disabled",
        "test_bloom_is_exchanged_by_its_384_ranks",
        "test_every_reader_of_metadata_is_measured",
        "test_memory_is_that_of_a_shard_and_bytes_are_read_once",
        "test_without_matplotlib_the_start_says_so_and_the_picture_is_left_out",
    }
)
#: Files and tests that take long and vary what others have shown once: with ``launch/test.sh --nightly`` alone.
NIGHTLY = frozenset(
    {
        "test_controllers",
        "test_elastic_nodes",
        "test_experts_exotic",
        "test_experts_tensor_parallel",
        "test_flows",
        "test_launch_lines",
        "test_sequence_and_tensor_parallel",
        "test_soak",
        "test_a_lost_node_leaves_a_job_of_fewer_ranks_that_resumes_with_the_same_global_batch",
        "test_an_old_folder_loads_at_another_topology",
        "test_others_hear_of_a_holder_that_is_lost_in_a_transfer",
        "test_pictures_show_what_is_printed",
        "test_the_same_topology_resumes_with_elastic_ckpt_as_without",
        "test_trainer_resumes_exactly_at_another_sequence_parallel_degree",
        "test_the_others_raise_an_error_when_a_rank_is_gone[z3-SIGKILL-8.0]",
        "test_the_others_raise_an_error_when_a_rank_is_gone[z3-SIGSTOP-20.0]",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and what nightly."""
    for item in items:
        names = {item.path.stem, item.name, item.name.partition("[")[0]}
        is_job = item.path.parent.name in ("distributed", "integration")
        if not names.isdisjoint(NIGHTLY):
            item.add_marker(pytest.mark.nightly)
        elif not names.isdisjoint(SLOW) or (is_job and item.path.stem not in CORE):
            item.add_marker(pytest.mark.slow)
