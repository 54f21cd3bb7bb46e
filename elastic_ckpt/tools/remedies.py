"""Remedies of errors in words of the command line, where there is no call of ``load_checkpoint`` to be changed."""

from __future__ import annotations

import re

#: What takes the weights alone, where a load would have an argument for it.
EXPORT = "elastic-ckpt export, without --optimizer, takes the weights alone"
_OTHER_TAG = "take another tag"
#: Between the ways of a remedy.
_BETWEEN = re.compile(r"(; (?:or )?|, or )")
_OF_A_LOAD = re.compile(r"\bload_(?:optimizer_states|module_only)=|\badd_safe_globals\(")
_WITHOUT_STATES = re.compile(r"\bload_(?:optimizer_states|module_only)=")
#: The config line for an option that commands have.
_PRESET = re.compile(r'"elastic_checkpoint": \{"tp_preset": "([^"]+)"\}')
_TRUST = re.compile(
    r"torch\.serialization\.add_safe_globals\(\[TheClass\]\) before loading, or "
    r'"elastic_checkpoint": \{"trust_pickle": true\}'
)


def of_command(remedy: str, instead: str = EXPORT) -> str:
    """A remedy without ways that only a script has; ``instead``: what is one for those without optimizer states."""
    remedy = _TRUST.sub("--trust-pickle", _PRESET.sub(r"--preset \1", remedy))
    if not _OF_A_LOAD.search(remedy):
        return remedy
    words = _BETWEEN.split(remedy)
    ways, betweens = words[::2], ["", *words[1::2]]
    kept = [(between, way) for between, way in zip(betweens, ways, strict=True) if not _OF_A_LOAD.search(way)]
    if instead and _WITHOUT_STATES.search(remedy):
        kept.append(("; ", instead))
    return "".join(between * (number > 0) + way for number, (between, way) in enumerate(kept)) or _OTHER_TAG
