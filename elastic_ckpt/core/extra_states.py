"""What modules keep beside parameters and buffers: ``torch.nn.Module.get_extra_state``. Pure.

torch puts what it returns into the state dict, as ``<module>._extra_state``, and gives it to ``set_extra_state`` in a
load. It may be of any kind: numbers, dictionaries, bytes, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ckpt.errors import listed

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
    digest: bytes  # of the value; empty: the module kept nothing
    #: File of another rank that saved another value, where no file is this rank's own.
    other: str | None = None

    @property
    def is_none(self) -> bool:
        """Whether the module kept nothing."""
        return not self.digest


def kept_in(saved: Mapping[str, SavedExtraState]) -> list[str]:
    """Names of the extra states that are something."""
    return sorted(name for name, state in saved.items() if not state.is_none)


def left_out_note(saved: Mapping[str, SavedExtraState]) -> tuple[str, ...]:
    """The note of a file format that has no place for extra states; none if the checkpoint has none."""
    names = kept_in(saved)
    return (f"extra states of modules (get_extra_state) are left out: {listed(names)}",) if names else ()
