"""Errors about tensor-parallel layouts, each with the config lines that settle it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.sharding.book import RuleSource, Sharded


def undecided(sharded: Sharded, chosen: RuleSource | None, widths: Sequence[int] | None) -> MismatchError:
    """A parameter's layout is unknown; ``widths``: of query, key and value, if it fuses these."""
    name = sharded.name
    choices: list[Mapping[str, object]] = [{"pattern": name, "kind": "column"}]
    if sharded.is_fused:
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
    fused = ": it is made of several, whose arrangement its shape does not tell" if sharded.is_fused else ""
    why = f"{chosen.origin}: {chosen.rule.ambiguous}" if chosen and chosen.is_ambiguous else "nothing says so"
    return sharded.mismatch(
        f"the tensor-parallel degree changes, and it is not known how this parameter is cut{fused}",
        expected="a rule of yours, of the checkpoint, of the live parameter or of a preset",
        found=f"{why}; {_both(sharded)}",
        remedy=f"{' or '.join(map(_config, choices))}: {meaning}",
    )


def contradiction(sharded: Sharded, chosen: RuleSource | None, why: str) -> MismatchError:
    """A rule, or the recorded layout if ``chosen`` is ``None``, does not fit a parameter's shapes."""
    layout = f"{chosen.rule.kind}, according to {chosen.origin}" if chosen else "a recorded layout"
    saved, live = sharded.shapes, sharded.live.shapes
    rests = {shape[1:] for shape in (*saved, *live)}
    rows = [sum((*shape, 1)[0] for shape in side) for side in (saved, live)]
    kind = "vocabulary" if len(rests) == 1 and rows[0] != rows[1] else "row"
    return sharded.mismatch(
        "what is said about this parameter's tensor-parallel layout, and the shapes, contradict each other",
        expected=f"{layout}: {why}",
        found=_both(sharded),
        remedy=f"say how it is cut (column, row, vocabulary ...): {_config({'pattern': sharded.name, 'kind': kind})}",
    )


def vocabulary_too_small(sharded: Sharded, saved: int, live: int, real: int | None) -> MismatchError:
    """Rows that may not be padding would be dropped; ``real``: rows that are not, if known."""
    known = f", of which {real} are no padding" if real else ", and nothing says which of them are padding"
    return sharded.mismatch(
        "the live vocabulary has fewer rows than the saved one",
        expected=f"{live} rows",
        found=f"{saved} rows{known}",
        remedy="build the model with a vocabulary that holds all tokens; if it does: "
        + _config({"pattern": sharded.name, "kind": "vocabulary", "vocabulary": real or live}),
    )


def wrongly_merged(sharded: Sharded, origin: str) -> MismatchError:
    """A fused parameter of a universal checkpoint whose converter did not know its sub-parameters."""
    return sharded.mismatch(
        "DeepSpeed's converter has put the tensor-parallel shards of this parameter side by side, and it is made of "
        "several that each were cut on their own: the universal checkpoint holds them in a wrong order",
        expected=f"its parts one behind the other, according to {origin}",
        found=(
            f"{sharded.metadata.source.merged_from} shards one behind the other, since the run that saved it declared "
            "no sub-parameters"
        ),
        remedy="load the native checkpoint instead",
    )


def _both(sharded: Sharded) -> str:
    return f"{_shards(sharded.shapes)} in the checkpoint, {_shards(sharded.live.shapes)} in the live model"


def _shards(shapes: Sequence[Shape]) -> str:
    if not shapes:
        return "nothing yet"  # without a live model
    distinct = list(dict.fromkeys(shapes))
    return f"{len(shapes)} x {distinct[0]}" if len(distinct) == 1 else " + ".join(map(str, shapes))


def _config(rule: Mapping[str, object]) -> str:
    escaped = {**rule, "pattern": re.escape(str(rule["pattern"]))}
    return f'"elastic_checkpoint": {{"tp_rules": [{json.dumps(escaped)}]}}'
