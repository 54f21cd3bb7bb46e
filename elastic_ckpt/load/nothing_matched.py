"""The error for a checkpoint of which no weight is in the live model, with the renames that settle it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic_ckpt import distributed
from elastic_ckpt.core.fqn import RenameRules, rename_saved
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata
from elastic_ckpt.core.read_plan import RestoredShare
from elastic_ckpt.errors import MismatchError, Remedy, listed, shortened
from elastic_ckpt.planning.matching import from_these_weights, of_another_model
from elastic_ckpt.planning.near_names import Renames, fits_any, live_shapes, propose_renames, saved_shapes


def refuse_nothing(
    metadata: CheckpointMetadata, local_state: LocalState, share: RestoredShare, rules: RenameRules, with_states: bool
) -> None:
    """Raise :class:`MismatchError` on every rank, with the names that nearly match as rank 0 sees them. Collective.

    Args:
        metadata: under the names in the files.
        share: of all ranks.
        rules: the user's own renames, which settle nothing.
        with_states: whether optimizer states were asked for.
    """

    def compare() -> None:
        raise _nothing_matched(metadata, local_state, share, rules, with_states)

    distributed.broadcast("compare the checkpoint's names with the live model's", compare)


def _nothing_matched(
    metadata: CheckpointMetadata, local_state: LocalState, share: RestoredShare, rules: RenameRules, with_states: bool
) -> MismatchError:
    saved = saved_shapes(metadata)
    live = live_shapes(local_state)
    renames = propose_renames(saved, live)
    after = rename_saved(metadata, rules) if rules else metadata
    saved_now = saved_shapes(after)
    lost = saved_now.keys() - live.keys()
    lacking = live.keys() - saved_now.keys()
    frozen = {whole.name for whole in local_state.wholes if whole.key == FROZEN and not whole.trains}
    trains = {name for flat in local_state.flats for name in flat.members}
    trains |= {whole.name for whole in local_state.wholes if whole.trains}
    # of an adapter's model, the frozen names are often thousands, and not what is missing
    asked = (lacking & trains if share.trained_numel else lacking) or lacking
    nearly = [f"{old} -> {new}" for old, new in renames.pairs if new in asked]
    nearly = nearly or [f"{old} -> {new}" for old, new in renames.pairs]
    problem = "no parameter of the live engine is restored from this checkpoint"
    expected = "parameters of the live model: "
    if share.trained_numel:
        problem = "no parameter that the live engine trains is restored from this checkpoint"
        expected = "parameters that the live engine trains: "
    found: str = "in the checkpoint: " + listed(lost)
    if not lost:
        found = "all that the checkpoint has is frozen here, or not a parameter"
    if nearly:
        found += "; nearly the same: " + shortened(nearly)
    remedy = _remedy(renames, frozen, share, with_states)
    if remedy is None:
        pairs = {name: saved_now[name] for name in lost}, {name: live[name] for name in lacking}
        remedy = of_another_model(fits_any(*pairs))
    return metadata.error(MismatchError, problem, asked or live, expected + listed(asked), found, remedy)


def _remedy(
    renames: Renames, frozen: Collection[str], share: RestoredShare, with_states: bool
) -> Sequence[Remedy] | None:
    """The ways out that are known; ``None`` if none is. ``frozen``: live names that do not train."""
    if renames.rules:
        if with_states and all(new in frozen for _, new in renames.pairs):
            return (from_these_weights(renames, {}),)
        config = {"rename": [list(rule) for rule in renames.rules]}
        return (Remedy(f"restores {len(renames.pairs)} of them", config=config),)
    if share.placed_numel and with_states:
        return (from_these_weights(renames, {}),)
    return None
