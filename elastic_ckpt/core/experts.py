"""FQNs of experts in DeepSpeed's ``MoE`` layers. Pure.

Each expert-parallel rank holds some experts of a layer, and its module numbers them from 0. The FQN of an expert's
parameter has the expert's number among all: expert-parallel rank x experts of a rank + its number there, as in the
files of experts (``_save_moe_checkpoint``, engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Path of the experts in an ``MoE`` layer; the number of an expert follows.
EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
_EXPERT = re.compile(rf"(?P<layer>(?:.*\.)?){re.escape(EXPERTS)}(?P<number>\d+)\.(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class ExpertName:
    """The name of an expert's tensor: path of its ``MoE`` layer, number of the expert, name within the expert."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}{EXPERTS}{self.number}.{self.rest}"

    def on(self, ep_rank: int, local: int) -> ExpertName:
        """The FQN, given the expert-parallel rank that calls it by this name and the number of its experts."""
        return ExpertName(self.layer, ep_rank * local + self.number, self.rest)


def expert_name(name: str) -> ExpertName | None:
    """The parts of a name; ``None``: it is not of an expert's tensor."""
    match = _EXPERT.fullmatch(name)
    return ExpertName(match["layer"], int(match["number"]), match["rest"]) if match else None


def numbers_of_experts(names: Iterable[str]) -> dict[str, frozenset[int]]:
    """Path of each ``MoE`` layer -> the numbers of the experts with tensors among some."""
    found: dict[str, set[int]] = {}
    for each in filter(None, map(expert_name, names)):
        found.setdefault(each.layer, set()).add(each.number)
    return {layer: frozenset(numbers) for layer, numbers in found.items()}
