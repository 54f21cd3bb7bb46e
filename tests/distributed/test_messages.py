"""What ranks send each other reaches all of them, failures too."""

from __future__ import annotations

from types import SimpleNamespace

from elastic_ckpt.errors import ElasticCkptError
from tests.distributed.cells import Cell, cells

#: Around the length up to which a message goes with its head.
SIZES = [0, 1, 200, 250, 256, 300, 4000, 4080, 4090, 4096, 4097, 5000, 100_000]


@cells([Cell(f"{size} bytes", None, "message_jobs.messages", 3, {"size": size}) for size in SIZES])
def test_messages_of_any_length_reach_all_ranks(cell: Cell, facts: list[SimpleNamespace]) -> None:
    size = cell.case["size"]
    own = [bytes([rank]) * size for rank in range(3)]
    for found in facts:
        assert found.own == list(enumerate(own))
        assert found.mixed == [b"", b"x" * size, b""]
        assert found.unpadded == [b"y" * (size * rank * rank) for rank in range(3)]
        assert found.long == [raw * (1 + rank) for rank, raw in enumerate(own)]
        assert found.broadcast == own
    assert len(facts) == cell.ranks


#: Class of the error that all ranks raise, and what it says.
FAILURES = {
    "damaged": ("DamagedError", ["torn", "a.pt", "whole", "half"]),
    "unforeseen": ("ElasticCkptError", ["failed to talk: KeyError: 'nobody thought of it'"]),
    "unpicklable": ("ElasticCkptError", ["failed to talk"]),
}


def failing(verb: str, how: str, ranks: list[int]) -> Cell:
    case = {"verb": verb, "how": how, "ranks": ranks}
    return Cell(f"{verb}, {how} on {ranks}", None, "message_jobs.fail", 3, case, expected=FAILURES[how])


@cells(
    [
        *(failing(verb, how, [2]) for verb in ("gather", "broadcast") for how in FAILURES),
        failing("gather", "damaged", [1, 2]),
    ]
)
def test_failures_reach_all_ranks_and_the_next_round_is_whole(cell: Cell, facts: list[SimpleNamespace]) -> None:
    kind, words = cell.expected
    for found in facts:
        assert isinstance(found.error, ElasticCkptError) and kind in [
            each.__name__ for each in type(found.error).__mro__
        ]
        assert found.error.rank == min(cell.case["ranks"]), "of several, the lowest rank's"
        assert [each for each in words if each not in str(found.error)] == []
        assert found.next_round == [0, 1, 2]
    assert len(facts) == cell.ranks
