"""Optimizer states that a live engine keeps apart from its optimizer's, and that DeepSpeed's own loader leaves out.

DeepSpeed saves the state dict of one optimizer and loads it back. A second one, a copy that only the step reads, or
memory that ``offload_states`` has moved is not in it, and DeepSpeed goes on with what was there before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from elastic_ckpt.errors import UnsupportedError

MOMENTUM = "momentum_buffer"


class KeptApart(NamedTuple):
    """What a live engine keeps beside its optimizer's states, and how to do without it."""

    what: str
    remedy: str


def kept_apart(engine: Any) -> KeptApart | None:
    """What neither elastic_ckpt nor DeepSpeed's own loader restores in this engine as it is; ``None`` if nothing."""
    optimizer = engine.optimizer
    if getattr(engine, "zenflow", False):
        what = "ZenFlow, whose selective optimizer's states DeepSpeed neither saves nor loads"
        return KeptApart(what, 'leave "zenflow" out of "zero_optimization"')
    if type(optimizer).__name__ == "SuperOffloadOptimizer_Stage3":  # since 0.18, only for CUDA
        what = "SuperOffload, whose optimizer is a process of its own, the states of which DeepSpeed neither saves nor "
        return KeptApart(what + "loads", 'leave "super_offload" out of "offload_optimizer"')
    if steps_on_accelerator(optimizer):
        what = "partly offloaded optimizer states (offload_optimizer.ratio < 1): a second optimizer updates some "
        what += "sub-groups on the accelerator, whose states DeepSpeed neither saves nor loads"
        return KeptApart(what, '"offload_optimizer": {"ratio": 1.0}')
    if getattr(optimizer, "offloaded_states", None):
        what = "engine.offload_states() in effect, which has moved what a load writes to"
        return KeptApart(what, "call engine.reload_states() before engine.load_checkpoint(...)")
    return None


def refuse_kept_apart(engine: Any) -> None:
    """Raise :class:`UnsupportedError` for :func:`kept_apart`."""
    found = kept_apart(engine)
    if found is not None:
        raise UnsupportedError(f"the live engine uses {found.what}", remedy=found.remedy)


def steps_on_accelerator(optimizer: Any) -> bool:
    """Whether the second optimizer of ``offload_optimizer.ratio`` < 1 (Twin-Flow) updates any sub-group.

    Where the accelerator is a CPU it updates none: all sub-groups are on the same device.
    """
    is_split = getattr(optimizer, "offload_optimizer", False) and getattr(optimizer, "partial_offload", 1.0) < 1
    return is_split and any(device != "cpu" for device in optimizer.subgroup_to_device.values())


def has_own_momenta(optimizer: Any) -> bool:
    """Whether Muon's momenta are in buffers of ZeRO-3's own (``save_muon_momentum_buffer_in_memory``), since 0.18.9."""
    return bool(getattr(optimizer, "use_muon", False) and optimizer.save_muon_momentum_buffer_in_memory)


def give_momenta(optimizer: Any) -> None:
    """Let ZeRO-3's own buffers be the momenta in the optimizer's state, which a load has replaced."""
    if not has_own_momenta(optimizer):
        return
    own = optimizer.muon_momentum_buffer_partitioned_groups_flat
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        momentum = optimizer.optimizer.state.get(master, {}).get(MOMENTUM)
        if momentum is not None and number in own and own[number] is not momentum:
            momentum.swappable = own[number].swappable
            momentum.ds_id = own[number].ds_id
            own[number] = momentum
