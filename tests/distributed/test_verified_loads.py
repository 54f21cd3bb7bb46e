"""Every byte that a load reads is compared with the checksums in the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded, Refused
from tests.distributed.model import Setup

RANK0, RANK1 = (damage.OPTIMIZER.format(rank) for rank in (0, 1))
MODEL = "mp_rank_00_model_states.pt"
Z0, Z1, Z3 = (Save(Setup(stage)) for stage in (0, 1, 3))
BF16 = Save(Setup(2, "bf16"))
MASTERS = "fp32 of "
CHANGED = "bytes of the checkpoint are not those that were saved"

#: What was saved, what happens to a copy of it, and what the error names.
DAMAGED: dict[str, tuple[Save, Callable[[Path], Any], list[str]]] = {
    "z1, a bit of the masters": (Z1, damage.flip_bit(RANK1, "fp32", 0.4), [RANK1, MASTERS]),
    "z1, a NaN in a moment": (Z1, damage.write_nan(RANK0, "exp_avg"), [RANK0]),
    "z3, a bit of the masters": (Z3, damage.flip_bit(RANK0, "fp32", 0.0), [RANK0, MASTERS]),
    "z3, the last bit of a moment": (Z3, damage.flip_bit(RANK1, "exp_avg_sq", 1.0), [RANK1]),
    "z2 in bf16": (BF16, damage.flip_bit("bf16_" + RANK1, "fp32", 0.7), ["bf16_" + RANK1, MASTERS]),
    "no ZeRO, a bit of a moment": (Z0, damage.flip_bit(MODEL, "exp_avg", 0.5), [MODEL]),
}


def damaged(name: str, save: Save, change: Callable[[Path], Any], words: list[str]) -> Cell:
    setup = Setup(2, save.setup.precision)
    return Cell(name, save, "refusal_jobs.refuse", 3, {"setup": setup}, change, expected=words)


@cells([damaged(name, *of) for name, of in DAMAGED.items()])
def test_a_changed_bit_is_found_by_the_load_itself(cell: Cell, facts: list[Refused]) -> None:
    (refused,) = facts
    (text,) = refused.texts
    file, *others = cell.expected
    assert file in text
    if others == [MASTERS]:
        assert "PartialLoadError" in refused.kinds, text
        assert CHANGED in text and "partly overwritten" in text and "CRC32" in text and MASTERS in text
    else:  # states of few elements are read beforehand, to learn what they are
        assert "DamagedError" in refused.kinds and "Bad CRC-32" in text, text
        assert refused.changed == set()


OFF = Setup(2, config=(("elastic_checkpoint", {"verify": "off"}),))


@cells(
    [
        Cell(
            "a bit of the masters",
            Z1,
            "resume",
            3,
            {"setup": OFF, "continue": False},
            damage.flip_bit(RANK1, "fp32", 0.5),
        )
    ]
)
def test_what_is_not_verified_is_loaded_without_a_word(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences.keys() == {"masters back.weight", "weights back.weight"}, load.differences
