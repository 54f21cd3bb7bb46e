"""``zero/optimizer_state.pt`` of a universal checkpoint, from an optimizer-states file of a native one.

Source of its layout: ``_save_optimizer_state`` and ``_save_optimizer_state_stage3`` (ds_to_universal.py). What lies
there of rank 0's partitions is left out: no loader reads it.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.formats.pickled import PickledFile, TensorRef, materialise

#: Entries that are one rank's partition.
_PARTITIONS = frozenset(
    {
        "base_optimizer_state",
        "param_slice_mappings",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "fp32_groups_flat_partition",
        "optimizer_state_dict",
    }
)
#: Says that each parameter's data is really its own, whatever DeepSpeed's converter would have made of such a run.
TRUE_ORDER = "elastic_ckpt_true_order"


def common_optimizer_state(file: PickledFile) -> dict[str, Any]:
    """What of an optimizer's state belongs to no parameter.

    Args:
        file: ``*zero_pp_rank_0_mp_rank_00*_optim_states.pt``.

    Returns:
        A tree to be saved; small tensors (a step, a capturable ``lr``) are read from the file.

    Raises:
        DamagedError: the file holds no optimizer state.
    """
    state = file.section("optimizer_state_dict")
    kept = {key: value for key, value in state.items() if key not in _PARTITIONS}
    is_stage3 = "fp32_flat_groups" in state
    base = file.section("optimizer_state_dict", "optimizer_state_dict" if is_stage3 else "base_optimizer_state")
    groups = base["param_groups"] if isinstance(base, dict) else []
    kept["param_groups"] = groups
    kept[TRUE_ORDER] = True
    if is_stage3:
        scalars = {
            flat: {key: value for key, value in values.items() if not isinstance(value, TensorRef) or not value.shape}
            for flat, values in base["state"].items()
        }
        kept["optimizer_state_dict"] = {"state": scalars, "param_groups": groups}
    return dict(materialise(file, kept))
