"""What wrappers of modules add to FQNs and mean nothing by. Pure.

torch's ``checkpoint_wrapper`` and FSDP put a part into the names of ``named_parameters``, which their hooks take out of
the state dict again (``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``, ``torch.distributed.fsdp``). So
DeepSpeed saves a parameter under two names. Here, it has the one of the state dict.

``torch.compile``, ``DistributedDataParallel``, ``AveragedModel``, a wrapper of the user's own and PEFT add parts that
the state dict keeps, and a run may add or remove them from one save to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

#: Parts of names that the state dict of a module does not have.
HIDDEN = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module")
#: Parts that it has, wherever they are.
_INSIDE = ("_orig_mod",)
#: Parts that it has, at the beginning.
_AROUND = (("module",), ("base_model", "model"))


def without_hidden(name: str) -> str:
    """A name as the state dict of the module has it, given that of ``named_parameters`` or ``named_buffers``."""
    if not any(part in name for part in HIDDEN):  # of most names, a cheaper answer
        return name
    return ".".join(part for part in name.split(".") if part not in HIDDEN)


def pattern_without_hidden(pattern: str) -> str:
    """The same of a regular expression that matches a name, of which DeepSpeed escapes the dots."""
    for part in HIDDEN:
        pattern = pattern.replace(f"{part}\\.", "")
    return pattern


def unwrapped(name: str) -> str:
    """A name without any part that a wrapper adds."""
    parts = [part for part in name.split(".") if part not in HIDDEN and part not in _INSIDE]
    return ".".join(parts[number_around(parts) :])


def number_around(parts: Sequence[str]) -> int:
    """How many parts at the beginning of a name are those of wrappers; never all of them."""
    number = 0
    while (width := _width_of_wrapper(parts, number)) and number + width < len(parts):
        number += width
    return number


def _width_of_wrapper(parts: Sequence[str], begin: int) -> int:
    """Of how many parts a wrapper's is that begins there; 0 if there is none."""
    for around in _AROUND:
        if tuple(parts[begin : begin + len(around)]) == around:
            return len(around)
    return 0


def wrapped_otherwise(saved: Iterable[str], live: Collection[str]) -> dict[str, str]:
    """Saved name -> live name, of those that differ in wrappers alone.

    Names of both sides stay as they are, and so do names that several of one side come to without wrappers.
    """
    saved = dict.fromkeys(saved)
    known = frozenset(live)
    rest = [name for name in saved if name not in known]
    by_saved = _by_unwrapped(rest)
    by_live = _by_unwrapped(name for name in known if name not in saved) if rest else {}
    pairs = ((by_saved[bare], by_live[bare]) for bare in by_saved if bare in by_live)
    return {old[0]: new[0] for old, new in pairs if len(old) == len(new) == 1}


def _by_unwrapped(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(unwrapped(name), []).append(name)
    return found
