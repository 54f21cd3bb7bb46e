"""What modules keep beside parameters and buffers: ``torch.nn.Module.get_extra_state``. Pure.

torch puts what it returns into the state dict, as ``<module>._extra_state``, and gives it to ``set_extra_state`` in a
load. It may be of any kind: numbers, dictionaries, bytes, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The role of these in a report.
EXTRA_STATE = "extra state"
_ENTRY = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is that of what ``get_extra_state`` returned, which need not be a tensor."""
    return name.rpartition(".")[2] == _ENTRY


def extra_state_name(module: str) -> str:
    """The name in a state dict, given the path of the module; empty: of the model itself."""
    return f"{module}.{_ENTRY}" if module else _ENTRY


@dataclass(frozen=True, slots=True)
class SavedExtraState:
    """What a module kept, as one rank saved it."""

    path: str  # of the file that has it
    entry: str  # its name there
    is_none: bool  # whether the module kept nothing
    #: File of another rank that saved another value, where no file is this rank's own.
    other: str | None = None
