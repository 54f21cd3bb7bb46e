"""The engine's memory: emptied before a load, judged after it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from benchmarks import privates
from benchmarks.cases import MODELS, RESUME, Case
from benchmarks.model import LIVE, SAVED, STATES, build_model, build_optimizer, fill, is_filled
from benchmarks.privates import Piece

#: (name of the parameter, key, first element, flat tensor): what a rank holds of one tensor.
Part = tuple[str, str, int, torch.Tensor]
_SCRAMBLED = -1.0
#: The same at every degree, as far as it divides.
_GLOBAL_BATCH = 24


def build_engine(case: Case, saved: bool) -> Any:
    """A live engine on all ranks: bf16 with fp32 masters, and AdamW with two param groups."""
    model = build_model(MODELS[case.params], saved)
    config = {
        "train_batch_size": _GLOBAL_BATCH if _GLOBAL_BATCH % dist.get_world_size() == 0 else dist.get_world_size(),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage},
        "elastic_checkpoint": {"report": False},
    }
    optimizer = build_optimizer(model, SAVED if saved else LIVE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Held:
    """What one rank's engine holds."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.base = privates.base_optimizer(engine)
        self.masters = privates.masters(engine)
        self.pieces = privates.pieces(engine)

    @property
    def owned_nbytes(self) -> int:
        """Masters and states of this rank, without padding."""
        return 12 * sum(piece.numel for piece in self.pieces)

    def states_nbytes(self) -> int:
        """Memory of the states that are there."""
        states = (state.get(key) for state in self.base.state.values() for key in STATES)
        return sum(tensor.nbytes for tensor in states if tensor is not None)

    def fill_as_saved(self) -> None:
        """Masters and states as they are saved."""
        for master in self.masters:
            zeros = {key: torch.zeros_like(master.data) for key in STATES}
            self.base.state[master] = {"step": torch.tensor(float(SAVED.step)), **zeros}
        for name, key, start, tensor in self.parts():
            fill(tensor, name, key, start)
        privates.set_saved_counters(self.engine, SAVED.step)

    def parts(self) -> Iterator[Part]:
        """Masters and states, parameter by parameter; states that are not there are left out."""
        for piece in self.pieces:
            master = self.masters[piece.flat]
            yield piece.name, "fp32", piece.start, _cut(master.data, piece)
            for key in STATES:
                state = self.base.state.get(master, {}).get(key)
                if state is not None:
                    yield piece.name, key, piece.start, _cut(state, piece)

    def everything(self) -> Iterator[Part]:
        """Masters, states and low-precision weights."""
        yield from self.parts()
        for name, start, tensor in privates.low_precision(self.engine):
            yield name, "low precision", start, tensor

    def scramble(self, kind: str) -> None:
        """Make everything wrong that a load has to set right; drop the states where they are not to be there."""
        if kind == RESUME:
            privates.drop_states(self.engine)
        for tensor in self.masters:
            tensor.data.fill_(_SCRAMBLED)
        for state in self.base.state.values():
            for key in STATES:
                state[key].fill_(_SCRAMBLED)
        for _, _, tensor in privates.low_precision(self.engine):
            tensor.fill_(_SCRAMBLED)
        for group, decay in zip(self.base.param_groups, LIVE.weight_decays, strict=True):
            group.update(lr=LIVE.lr, betas=LIVE.betas, weight_decay=decay)
        privates.set_saved_counters(self.engine, LIVE.step)

    def judge(self) -> dict[str, bool]:
        """What is as it was saved: masters, states, weights, hyperparameters and steps of this rank."""
        verdict = judge_parts(self.parts())
        low = privates.low_precision(self.engine)
        verdict["bf16 weights"] = all(is_filled(tensor, name, "fp32", start) for name, start, tensor in low)
        groups = zip(self.base.param_groups, SAVED.weight_decays, strict=True)
        verdict["hyperparameters"] = all(
            group["weight_decay"] == decay and group["lr"] == SAVED.lr and tuple(group["betas"]) == SAVED.betas
            for group, decay in groups
        )
        steps = [state.get("step") for state in self.base.state.values()]
        shared = len({id(step) for step in steps if isinstance(step, torch.Tensor)}) < len(steps)
        verdict["steps"] = all(step is not None and float(step) == SAVED.step for step in steps) and not shared
        verdict["counters"] = self.engine.global_steps == SAVED.step
        return verdict


def _cut(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    return flat.view(-1)[piece.offset : piece.offset + piece.numel]


def judge_parts(parts: Iterable[Part]) -> dict[str, bool]:
    """Which of masters and states are there and bit for bit as they were saved."""
    verdict = dict.fromkeys(("fp32", *STATES), True)
    seen: dict[str, int] = dict.fromkeys(verdict, 0)
    for name, key, start, tensor in parts:
        seen[key] += 1
        verdict[key] = verdict[key] and is_filled(tensor, name, key, start)
    return {key: right and seen[key] == max(seen.values()) for key, right in verdict.items()}


def checksum(parts: Iterable[Part]) -> int:
    """A number that changes with any bit of them: cheap, for the rounds after one that was judged."""
    total = 0
    for name, key, start, tensor in parts:
        place = zlib.crc32(f"{name}/{key}/{start}".encode())
        total += place * zlib.crc32(tensor.view(torch.uint8).numpy().data)  # a sum: blind to elements that swap
    return total % (1 << 61)


def agreed(verdict: dict[str, bool]) -> dict[str, bool]:
    """True where it is on all ranks. Collective."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, verdict)
    return {key: all(other[key] for other in everybody) for key in verdict}
