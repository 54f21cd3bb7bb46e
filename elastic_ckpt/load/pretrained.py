"""Pretrained weights into a live engine or module: every rank reads its own bytes of a Hugging Face folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig, read_config
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.modules import ModuleAdapter
from elastic_ckpt.engines.pretrained_names import LiveWeights, live_weights, mark_as_initialized, without_ignored
from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsupportedError, listed
from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.formats.pretrained import read_weights, weights_metadata
from elastic_ckpt.formats.safetensors import WeightsFile
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.load.flow import (
    RankPlan,
    adapter_of,
    agree_on_plans,
    as_partial_load_error,
    describe,
    overwrite,
    told_apart,
)
from elastic_ckpt.load.verify_reads import verify_reads
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.report import size
from elastic_ckpt.storage.local import Medium, pinned


@dataclass(frozen=True)
class PretrainedReport:
    """What :func:`load_pretrained` loaded."""

    folder: str
    missing_keys: tuple[str, ...]  # parameters and buffers that the folder lacks, which keep their values
    unexpected_keys: tuple[str, ...]  # weights of the folder that the module lacks
    nbytes: int  # read by this rank
    seconds: float  # wall-clock


def load_pretrained(model_or_engine: Any, folder: str | os.PathLike[str], *, strict: bool = False) -> PretrainedReport:
    """Load the weights of a Hugging Face folder; every rank reads its own bytes. Collective.

    ``model_or_engine`` is a DeepSpeed engine of any ZeRO stage, whose masters become the weights' values and whose
    optimizer states stay; or a module without engine, built under ``deepspeed.zero.Init`` or whole on every rank.
    Weights get the names and the values that ``from_pretrained`` gives them; what the folder lacks keeps its values.

    Raises the same :class:`ElasticCkptError` on every rank: with ``strict``, :class:`MismatchError` if a name is on one
    side only. The weights are as they were unless it is a :class:`PartialLoadError`.
    """
    engine = model_or_engine if isinstance(model_or_engine, DeepSpeedEngine) else None
    distributed.begin_load()
    with distributed.agree("read the configuration"):
        config = read_config({} if engine is None else compat.ds_config(engine))
    module = model_or_engine if engine is None else engine.module
    return PretrainedLoad(engine, module, os.fspath(folder), config, strict).run()[0]


@dataclass
class PretrainedLoad:
    """One load of pretrained weights."""

    engine: Any  # ``None`` for a module without
    module: Any
    folder: str
    config: ElasticConfig
    strict: bool = False
    paths: Sequence[str] | None = None  # of the folder's files, where known
    rules: Sequence[Any] | None = None  # of Transformers for names, where others than its own are asked for

    def run(self) -> tuple[PretrainedReport, LiveWeights]:
        """Describe, read metadata, plan, agree; then read, broadcast and commit. Collective."""
        started = time.perf_counter()
        with pinned(), collector_off(), distributed.together("load pretrained weights"):
            try:
                adapter, local_state = describe(self._adapter)
                plan, weights, files, medium = self._prepare(local_state)
            except ElasticCkptError as first:
                error = told_apart(first)
                raise error from error.__cause__
            try:
                nbytes = self._overwrite(adapter, plan, weights, medium)
            except Exception as error:
                cause = told_apart(error) if isinstance(error, ElasticCkptError) else error
                raise as_partial_load_error(cause) from cause
        mark_as_initialized(self.module, weights)
        missing, unexpected = (tuple(sorted(names)) for names in self._reported(weights))
        report = PretrainedReport(self.folder, missing, unexpected, nbytes, time.perf_counter() - started)
        if distributed.rank() == 0 and self.config.report:
            whole, place = size(sum(file.nbytes for file in files)), self.folder
            took = f"in {report.seconds:.2f} s, each rank its own part"
            print(f"elastic_ckpt loaded pretrained weights: {whole} of {place} {took}", file=sys.stderr)
        return report, weights

    def _adapter(self) -> EngineAdapter:
        if self.engine is None:
            return ModuleAdapter(self.module)
        if self.engine.has_moe_layers:
            problem = "pretrained weights cannot be loaded into DeepSpeed's layers of experts yet"
            remedy = "load them before deepspeed.initialize, with the module's own load_state_dict"
            raise UnsupportedError(problem, remedy=remedy)
        return adapter_of(self.engine, with_states=False)

    def _prepare(self, local_state: LocalState) -> tuple[LoadPlan, LiveWeights, list[WeightsFile], Medium]:
        """Read the folder's metadata on one rank, plan on all. Collective; changes nothing."""
        arguments = self.folder, self.paths, self.config.trust_pickle
        files = distributed.broadcast("read the folder's metadata", lambda: read_weights(*arguments))
        if self.paths is not None:  # nodes may have caches of their own
            own = map(os.path.abspath, self.paths)
            files = [replace(file, path=path) for file, path in zip(files, own, strict=True)]
        planned: list[tuple[LoadPlan, LiveWeights]] = []

        def make_plan() -> RankPlan:
            weights = self._weights(files, local_state)
            config = self.config.model_copy(update={"rename": []})  # names are those of the module by now
            options = LoadOptions.of(config, optimizer_states=False, strict=False)
            plan = plan_load(weights.metadata, local_state, options)
            planned.append((plan, weights))
            return RankPlan.of(plan, local_state.model.coordinates.mp_rank, self.config, files[0].path)

        _, notes, medium = agree_on_plans(make_plan, self.config)
        plan, weights = planned[0]
        return replace(plan, notes=notes), weights, files, medium

    def _weights(self, files: Sequence[WeightsFile], local_state: LocalState) -> LiveWeights:
        """The folder's weights under live names. Local."""
        model, metadata = local_state.model, rename_saved(weights_metadata(self.folder, files), self.config.rename)
        weights = live_weights(metadata, self.module, self.rules)
        saved = {name for name, _ in weights.metadata.tensors}
        ties = ({name, *others} for name, others in model.ties.items())
        tied = {name for names in ties if names & saved for name in names}
        unexpected = weights.unexpected - model.elsewhere  # on other pipeline stages
        weights = replace(weights, missing=weights.missing - tied, unexpected=unexpected)
        if not saved:
            problem = "no weight of this folder is in the live model"
            expected, found = f"weights such as {listed(weights.missing)}", listed(weights.unexpected)
            raise MismatchError(problem, self.folder, expected, found, remedy="give the folder of this model")
        lacking, foreign = self._reported(weights)
        if self.strict and (lacking or foreign):
            problem = "model and folder do not have the same weights"
            expected = f"in the model but not in the folder: {listed(lacking)}"
            found = f"in the folder but not in the model: {listed(foreign)}"
            remedy = "strict=False loads what matches and reports the rest"
            raise MismatchError(problem, self.folder, expected, found, remedy=remedy)
        return weights

    def _reported(self, weights: LiveWeights) -> tuple[set[str], set[str]]:
        """The names that the folder and the module lack, as ``from_pretrained`` reports them. Local."""
        return without_ignored(self.module, {*weights.missing}, {*weights.unexpected})

    def _overwrite(self, adapter: EngineAdapter, plan: LoadPlan, weights: LiveWeights, medium: Medium) -> int:
        """Read, broadcast, commit and verify. Collective; returns the bytes that this rank read."""
        config = self.config
        if not any(file.records.offsets for file in weights.metadata.files):  # safetensors have no checksums
            config = config.model_copy(update={"verify": "off"})
        options = read_options(config, medium)
        # as deepspeed.initialize, which makes masters of low-precision weights
        read, _, sums = overwrite(adapter, plan, config, options, {}, exact_masters=False)
        if sums is not None:
            mine = sums.sums, sums.nbytes
            everybody = distributed.all_gather("verify what was read", lambda: mine)
            verify_reads(weights.metadata, everybody, plan.reads, options)
        return read.nbytes
