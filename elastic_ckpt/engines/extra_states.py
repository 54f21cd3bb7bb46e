"""What live modules keep beside parameters and buffers (``get_extra_state``), and what a load gives them.

torch calls ``set_extra_state`` of a class that has one, with what the state dict has under the module's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from elastic_ckpt.core.extra_states import extra_state_name, is_extra_state
from elastic_ckpt.errors import ElasticCkptError, MismatchError, Remedy

_AS_SAVED = Remedy("build the module with the class and the settings that it was saved with")


class ExtraStateTaker(NamedTuple):
    """A module that takes extra state."""

    module: torch.nn.Module
    keeps_some: bool  # whether ``get_extra_state`` returns anything now


def takers(
    model: torch.nn.Module, fqn_of: Callable[[str], str], state_dict: Mapping[str, Any]
) -> dict[str, ExtraStateTaker]:
    """The modules that take extra state, by its FQN, in the order in which torch gives it to them.

    ``state_dict`` is the model's; a module whose state it does not have may keep some all the same.
    """
    kept = {fqn_of(name): value is not None for name, value in state_dict.items() if is_extra_state(name)}
    found: dict[str, ExtraStateTaker] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            name = fqn_of(extra_state_name(path))
            found[name] = ExtraStateTaker(module, kept.get(name, True))
    return found


def set_extra_states(takers_of: Mapping[str, ExtraStateTaker], values: Mapping[str, Any]) -> None:
    """Give each module its saved value. Runs the modules' own code; :class:`MismatchError` if one refuses it."""
    for name, (module, _) in takers_of.items():
        if name not in values:
            continue
        try:
            module.set_extra_state(values[name])
        except ElasticCkptError:
            raise
        except Exception as error:
            cls = type(module).__name__
            problem = "a module could not take the extra state (get_extra_state) that was saved for it"
            expected = f"a state that set_extra_state of {cls} takes"
            found = f"a {type(values[name]).__name__}; {type(error).__name__}: {error}"[:300]
            raise MismatchError(problem, None, expected, found, parameter=name, remedy=_AS_SAVED) from error
