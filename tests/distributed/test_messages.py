"""What ranks tell each other reaches all of them, failures too."""

from __future__ import annotations

from tests.distributed.conftest import Launch


def test_messages_of_any_length_and_failures_reach_all_ranks(launch: Launch) -> None:
    launch(3, "message_jobs.messages", {})
