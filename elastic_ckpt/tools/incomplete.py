"""What is left of a checkpoint that lacks files, so that its metadata cannot be put together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata, SourceFile
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.naming import plain_name
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.saved_config import complete_batch, saved_config
from elastic_ckpt.storage import file_names
from elastic_ckpt.storage.local import version_of
from elastic_ckpt.tools.expected_files import UNREADABLE, expected_files

#: The role of a parameter that an optimizer owns.
TRAINED = "trained"


@dataclass(frozen=True)
class Remains:
    """What is known without the missing files."""

    metadata: CheckpointMetadata  # its source and files, without any tensor
    state: TrainingState
    missing: tuple[str, ...]  # paths of files that should be there
    is_topology_known: bool
    #: Role -> names and logical shapes in the first model-states file that can be read.
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def contents(self) -> list[dict[str, Any]]:
        """Parameters by role, as an inspection has them."""
        return [
            {
                "key": f"{role} parameters",
                "kind": "shapes",
                "dtype": "",
                "tensors": len(shapes),
                "numel": sum(map(math.prod, shapes.values())),
                "nbytes": 0,
                "values": [],
            }
            for role, shapes in self.shapes.items()
            if shapes
        ]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """Each parameter, as an inspection has it."""
        return [
            {
                "name": name,
                "role": role,
                "shards": (shape,),
                "dtype": "",
                "group": None,
                "states": [],
                "numel": math.prod(shape),
                "nbytes": 0,
                "copies": 1,
                "shape": shape,
                "tied": [],
            }
            for role, shapes in self.shapes.items()
            for name, shape in shapes.items()
        ]


def missing_paths(found: CheckpointInfo, trust_pickle: bool) -> tuple[str, ...]:
    """Paths of the files that a folder should have and has not."""
    present = set(map(plain_name, file_names(found.folder)))
    return tuple(found.path(name) for name in expected_files(found, trust_pickle) if name not in present)


def remains_of(found: CheckpointInfo, trust_pickle: bool) -> Remains:
    """Read what one model-states file says, if there is one that can be read."""
    files = tuple(_present(found.path(name)) for name in sorted(found.files.names))
    missing = missing_paths(found, trust_pickle)
    for name in (*found.files.model.values(), *found.files.model_zero3.values()):
        with suppress(*UNREADABLE):
            file = open_pickled(found.path(name), trust_pickle)
            return _remains_by(found, file, index_model_states(file), files, missing)
    metadata = _without_tensors(found, files, 0, 1)
    return Remains(metadata, TrainingState({}), missing, is_topology_known=False)


def _remains_by(
    found: CheckpointInfo,
    file: PickledFile,
    model: ModelShard,
    files: tuple[SourceFile, ...],
    missing: tuple[str, ...],
) -> Remains:
    dp = model.counters["dp_world_size"]
    tp, pp, sequence = model.stated.borne_out(len(found.files.mp_ranks))
    degrees = {"tp": tp or 1, "pp": pp or 1, "sequence": sequence}
    metadata = _without_tensors(found, files, int(model.zero.get("stage") or 0), dp, model.ds_version, **degrees)
    state = TrainingState(model.counters, complete_batch(saved_config(file) or {}, dp))
    shapes = {TRAINED: dict(chain.from_iterable(model.param_shapes)), FROZEN: dict(model.frozen_shapes)}
    return Remains(metadata, state, missing, True, shapes)


def _without_tensors(
    found: CheckpointInfo, files: tuple[SourceFile, ...], zero_stage: int, dp: int, ds_version: str = "", **more: Any
) -> CheckpointMetadata:
    source = found.source(zero_stage, dp, ds_version, **more)
    return CheckpointMetadata(source=source, files=files, parameters={}, groups=(), tensors={})


def _present(path: str) -> SourceFile:
    try:
        return SourceFile(path, version_of(path).nbytes)
    except (OSError, ElasticCkptError):  # which reading the whole checkpoint reports
        return SourceFile(path, 0)
