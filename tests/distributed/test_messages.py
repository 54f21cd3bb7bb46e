"""What ranks send each other reaches all of them, failures too."""

from __future__ import annotations

from elastic_ckpt.errors import DamagedError
from tests.distributed.conftest import Launch

#: Around the length up to which a message goes with its head.
SIZES = [0, 1, 200, 250, 256, 300, 4000, 4080, 4090, 4096, 4097, 5000, 100_000]


def test_messages_of_any_length_reach_all_ranks(launch: Launch) -> None:
    facts = launch(3, "message_jobs.messages", SIZES)
    for found in facts:
        own = [bytes([rank]) * found.size for rank in range(3)]
        assert found.own == list(enumerate(own)), found.size
        assert found.mixed == [b"", b"x" * found.size, b""], found.size
        assert found.unpadded == [b"y" * (found.size * rank * rank) for rank in range(3)], found.size
        assert found.long == [raw * (1 + rank) for rank, raw in enumerate(own)], found.size
        assert found.broadcast == own, found.size
    assert len(facts) == 3 * len(SIZES)


def test_failures_reach_all_ranks_and_the_next_round_is_whole(launch: Launch) -> None:
    for rank_facts in _by_rank(launch(3, "message_jobs.failures", None)):
        *of_rank_2, several = rank_facts
        for known, unforeseen, unpicklable in (of_rank_2[:3], of_rank_2[3:]):
            assert isinstance(known.error, DamagedError)
            assert (known.error.rank, known.error.file, known.error.found) == (2, "a.pt", "half")
            assert "failed to talk: KeyError: 'nobody thought of it'" in str(unforeseen.error)
            assert "failed to talk" in str(unpicklable.error)
            assert unforeseen.error.rank == unpicklable.error.rank == 2
        assert several.error.rank == 1, "of several, the lowest rank's"
        assert several.next_round == [0, 1, 2]


def _by_rank(facts: list) -> list[list]:
    return [facts[start : start + len(facts) // 3] for start in range(0, len(facts), len(facts) // 3)]
