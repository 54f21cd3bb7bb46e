"""Errors about tensor-parallel layouts, each with the config lines that settle it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.sharding.book import Saying


def undecided(
    name: str,
    folder: str,
    saved: Sequence[Shape],
    live: Sequence[Shape],
    why: str,
    is_fused: bool,
    widths: Sequence[int] | None = None,
) -> MismatchError:
    """Nobody says how a parameter is cut; ``widths``: of query, key and value, if it is made of these."""
    choices: list[Mapping[str, object]] = [{"pattern": name, "kind": "column"}]
    if is_fused:
        shown = list(widths) if widths else "<relative widths>"
        choices.append({"pattern": name, "kind": "column", "sub_parameters": shown})
        meaning = (
            "the first where nothing is fused, or each head (or group) holds its own q, k and v; the second where each "
            "rank holds its parts one behind the other, each cut on its own: [heads, key-value heads, key-value heads] "
            'for q, k and v, [1, 1] for gate and up; "tp_preset" names a code base instead'
        )
    else:
        choices += [{"pattern": name, "kind": kind} for kind in ("row", "vocabulary", "replicated")]
        meaning = "whichever it is"
    fused = ": it is made of several, whose arrangement its shape does not tell" if is_fused else ""
    return MismatchError(
        f"the tensor-parallel degree changes, and it is not known how this parameter is cut{fused}",
        parameter=name,
        file=folder,
        expected="a rule of yours, of the checkpoint, of the live parameter or of a preset",
        found=f"{why}; {_shards(saved)} in the checkpoint, {_shards(live)} in the live model",
        remedy=f"{' or '.join(map(_config, choices))}: {meaning}",
    )


def contradiction(
    name: str, folder: str, saved: Sequence[Shape], live: Sequence[Shape], chosen: Saying | None, why: str
) -> MismatchError:
    """What is said of a parameter and its shapes do not fit together."""
    said = f"{chosen.rule.kind}, according to {chosen.origin}" if chosen else "a recorded layout"
    rests = {shape[1:] for shape in (*saved, *live)}
    kind = "vocabulary" if len(rests) == 1 and sum(s[0] for s in saved) != sum(s[0] for s in live) else "row"
    return MismatchError(
        "what is said about this parameter's tensor-parallel layout, and the shapes, contradict each other",
        parameter=name,
        file=folder,
        expected=f"{said}: {why}",
        found=f"{_shards(saved)} in the checkpoint, {_shards(live)} in the live model",
        remedy=f"say how it is cut (column, row, vocabulary ...): {_config({'pattern': name, 'kind': kind})}",
    )


def vocabulary_too_small(name: str, folder: str, saved: int, live: int, real: int | None) -> MismatchError:
    """Rows would be dropped that may be no padding."""
    known = f", of which {real} are no padding" if real else ", and nothing says which of them are padding"
    return MismatchError(
        "the live vocabulary has fewer rows than the saved one",
        parameter=name,
        file=folder,
        expected=f"{live} rows",
        found=f"{saved} rows{known}",
        remedy="build the model with a vocabulary that holds all tokens; if it does: "
        + _config({"pattern": name, "kind": "vocabulary", "vocabulary": real or live}),
    )


def wrongly_merged(name: str, folder: str, degree: int, origin: str) -> MismatchError:
    """A universal checkpoint whose converter did not know what a parameter is made of."""
    return MismatchError(
        "DeepSpeed's converter has put the tensor-parallel shards of this parameter side by side, and it is made of "
        "several that each were cut on their own: the universal checkpoint holds them in a wrong order",
        parameter=name,
        file=folder,
        expected=f"its parts one behind the other, according to {origin}",
        found=f"{degree} shards one behind the other, since the run that saved it declared no sub-parameters",
        remedy="load the native checkpoint instead",
    )


def _shards(shapes: Sequence[Shape]) -> str:
    if not shapes:
        return "nothing yet"  # of a job that does not run
    distinct = list(dict.fromkeys(shapes))
    return f"{len(shapes)} x {distinct[0]}" if len(distinct) == 1 else " + ".join(map(str, shapes))


def _config(rule: Mapping[str, object]) -> str:
    escaped = {**rule, "pattern": re.escape(str(rule["pattern"]))}
    return f'"elastic_checkpoint": {{"tp_rules": [{json.dumps(escaped)}]}}'
