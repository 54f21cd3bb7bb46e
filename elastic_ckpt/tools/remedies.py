"""Remedies of errors as ways out of a command, where there is no call of ``load_checkpoint`` to be changed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic_ckpt.errors import Remedy

#: What exports only the weights, where a load would have an argument for it.
EXPORT = "elastic-ckpt export, without --optimizer, exports only the weights"
_OTHER_TAG = "use another tag"
#: Arguments of a load that leave the optimizer states out.
_WITHOUT_STATES: Mapping[str, Any] = {"load_optimizer_states": False, "load_module_only": True}


def of_command(remedies: Iterable[Remedy], instead: str = EXPORT) -> tuple[Remedy, ...]:
    """Remedies without those that only a script can follow.

    ``instead``: what the command has in place of those that leave the optimizer states out; empty if nothing.
    """
    ways: list[Remedy] = []
    leaves_states_out = False
    for remedy in remedies:
        if remedy.arguments.items() & _WITHOUT_STATES.items():
            leaves_states_out = True
        elif remedy.arguments.keys() == {"load_dir", "tag"}:
            ways.append(_with_folder(remedy))
        elif not remedy.arguments and not remedy.code:
            ways.append(_with_flags(remedy))
    if leaves_states_out and instead:
        ways.append(Remedy(instead))
    return tuple(ways) or (Remedy(_OTHER_TAG),)


def _with_folder(remedy: Remedy) -> Remedy:
    """A remedy whose call names another tag, as the folder of that tag, which every command takes."""
    folder = os.path.join(remedy.arguments["load_dir"], remedy.arguments["tag"])
    return Remedy(f"give the folder of a tag, which needs no --tag: {shlex.quote(folder)}")


def _with_flags(remedy: Remedy) -> Remedy:
    """A remedy whose config is a flag of the commands."""
    if remedy.config == {"trust_pickle": True}:
        return replace(remedy, config={}, text=f"--trust-pickle {remedy.text}".rstrip())
    if remedy.config.keys() == {"tp_preset"}:
        return replace(remedy, config={}, text=f"--preset {remedy.config['tp_preset']} {remedy.text}".rstrip())
    return remedy
