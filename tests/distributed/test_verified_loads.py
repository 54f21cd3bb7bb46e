"""Every byte that a load reads is compared with the checksums in the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import damage
from tests.distributed.conftest import Launch
from tests.distributed.facts import Refused
from tests.distributed.model import Setup

RANK0, RANK1 = (damage.OPTIMIZER.format(rank) for rank in (0, 1))
MODEL = "mp_rank_00_model_states.pt"
Z0, Z1, Z2, Z3 = (Setup(stage) for stage in range(4))
BF16 = Setup(2, "bf16")
OFF = (("elastic_checkpoint", {"verify": "off"}),)
MASTERS = "fp32 of "
CHANGED = "bytes of the checkpoint are not those that were saved"

#: What was saved, what happens to a copy of it, and what the error names.
DAMAGED: dict[str, tuple[str, Callable[[Path], Any], list[str]]] = {
    "z1, a bit of the masters": ("z1-fp32-adamw-dp2", damage.flip_bit(RANK1, "fp32", 0.4), [RANK1, MASTERS]),
    "z1, a NaN in a moment": ("z1-fp32-adamw-dp2", damage.write_nan(RANK0, "exp_avg"), [RANK0]),
    "z3, a bit of the masters": ("z3-fp32-adamw-dp2", damage.flip_bit(RANK0, "fp32", 0.0), [RANK0, MASTERS]),
    "z3, the last bit of a moment": ("z3-fp32-adamw-dp2", damage.flip_bit(RANK1, "exp_avg_sq", 1.0), [RANK1]),
    "z2 in bf16": ("z2-bf16-adamw-dp2", damage.flip_bit("bf16_" + RANK1, "fp32", 0.7), ["bf16_" + RANK1, MASTERS]),
    "no ZeRO, a bit of a moment": ("z0-fp32-adamw-dp2", damage.flip_bit(MODEL, "exp_avg", 0.5), [MODEL]),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    launch(2, "save", {"folder": str(folder), "setups": [Z0, Z1, Z3, BF16]})
    return folder


@pytest.fixture(scope="module")
def refusals(launch: Launch, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    cases = []
    for name, (source, change, _) in DAMAGED.items():
        copy = tmp_path_factory.mktemp("changed") / "copy"
        shutil.copytree(saved / source, copy)
        change(copy)
        cases += [{"name": name, "folder": str(copy), "setup": Z2 if "bf16" not in name else BF16}]
    return {refused.case["name"]: refused for refused in launch(3, "refusal_jobs.refuse", cases)}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_changed_bit_is_found_by_the_load_itself(name: str, refusals: dict[str, Refused]) -> None:
    (text,) = refusals[name].texts
    file, *others = DAMAGED[name][2]
    assert file in text
    if others == [MASTERS]:
        assert "PartialLoadError" in refusals[name].kinds, text
        assert CHANGED in text and "partly overwritten" in text and "CRC32" in text and MASTERS in text
    else:  # states of few elements are read beforehand, to learn what they are
        assert "DamagedError" in refusals[name].kinds and "Bad CRC-32" in text, text
        assert refusals[name].changed == set()


def test_what_is_not_verified_is_loaded_without_a_word(launch: Launch, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "z1-fp32-adamw-dp2", tmp_path / "copy")
    damage.flip_bit(RANK1, "fp32", 0.5)(tmp_path / "copy")
    case = {"name": "off", "folder": str(tmp_path / "copy"), "setup": Setup(2, config=OFF)}
    (refused,) = launch(3, "refusal_jobs.refuse", [case])
    assert refused.kinds == (), refused.texts
