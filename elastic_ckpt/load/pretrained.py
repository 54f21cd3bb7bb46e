"""Pretrained weights into a live engine or module: every rank reads its own bytes of a Hugging Face folder."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig, read_config
from elastic_ckpt.core.adopted_names import adopt_names
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import FROZEN
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.core.text import printable
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.coordinates import LiveFQNs, stacked_experts
from elastic_ckpt.engines.modules import ModuleAdapter
from elastic_ckpt.engines.pretrained_names import (
    LiveWeights,
    live_weights,
    mark_as_initialized,
    without_ignored,
    without_other_shapes,
)
from elastic_ckpt.errors import ElasticCkptError, MismatchError, Remedy, UnsupportedError, listed, printable_errors
from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.formats.pretrained import check_names, no_folder, read_weights, weights_metadata
from elastic_ckpt.formats.safetensors import WeightsFile
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.load import flow
from elastic_ckpt.load.live_engine import adapter_of, describe
from elastic_ckpt.load.nodes import Nodes
from elastic_ckpt.load.pretrained_remedies import with_ways_for_weights
from elastic_ckpt.load.rank_plans import RankPlan, agree_on_plans
from elastic_ckpt.load.verify_reads import verify_reads
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.report import size
from elastic_ckpt.storage import absolute, is_url
from elastic_ckpt.storage.digest import content_digest
from elastic_ckpt.storage.local import open_ranges, pinned, version_of
from elastic_ckpt.storage.media import Medium

#: Pages of models on the Hugging Face hub, which no object store has.
_HUB = re.compile(r"hf://|https?://(www\.)?(huggingface\.co|hf\.co)(/|$)")


@dataclass(frozen=True)
class PretrainedReport:
    """What :func:`load_pretrained` loaded."""

    folder: str
    missing_keys: tuple[str, ...]  # parameters and buffers that the folder lacks, which keep their values
    unexpected_keys: tuple[str, ...]  # weights of the folder that the module lacks
    nbytes: int  # read by this rank
    seconds: float  # wall-clock


def load_pretrained(
    model_or_engine: Any,
    folder: str | os.PathLike[str],
    *,
    strict: bool = False,
    ds_config: Mapping[str, Any] | None = None,
) -> PretrainedReport:
    """Load the weights of a Hugging Face folder, or of a URL. Every rank reads its own bytes. Collective.

    ``model_or_engine`` is a DeepSpeed engine of any ZeRO stage, or a module without an engine. An engine's masters take
    the weights' values, and its optimizer states stay. A module is built under ``deepspeed.zero.Init``, complete on
    every rank, or on the meta device, where ``ds_config`` gives ZeRO-3's partitioning. Weights get the names and values
    that ``from_pretrained`` gives them. What the folder lacks keeps its values.

    Raises the same :class:`ElasticCkptError` on every rank. With ``strict``, a name on one side only is a
    :class:`MismatchError`. Weights are unchanged after every error but a :class:`PartialLoadError`.
    """
    engine = model_or_engine if isinstance(model_or_engine, DeepSpeedEngine) else None
    distributed.begin_load()
    with distributed.agree("read the configuration"):
        config = read_config(ds_config or {} if engine is None else compat.ds_config(engine))
        if _HUB.match(os.fspath(folder)):
            raise no_folder(os.fspath(folder))
    module = model_or_engine if engine is None else engine.module
    return PretrainedLoad(engine, module, os.fspath(folder), config, strict, ds_config=ds_config).run()[0]


@dataclass
class PretrainedLoad:
    """One load of pretrained weights."""

    engine: Any  # ``None`` for a module without
    module: Any
    folder: str
    config: ElasticConfig
    strict: bool = False
    paths: Sequence[str] | None = None  # of the folder's files, where known
    index: Mapping[str, str] | None = None  # which of ``paths`` has which tensor, if an index says so
    rules: Sequence[Any] | None = None  # of Transformers for names, where others than its own are asked for
    ignores_shapes: bool = False  # what has another shape in the module is not loaded
    ds_config: Mapping[str, Any] | None = None  # of a module on the meta device

    @printable_errors()
    def run(self) -> tuple[PretrainedReport, LiveWeights]:
        """Describe, read metadata, plan, agree; then read, broadcast and commit. Collective."""
        started = time.perf_counter()
        nodes = Nodes([self.folder], None, every_tag=True, options=self.config.storage_options)
        with closing(nodes), pinned(), collector_off(), distributed.together("load pretrained weights"):
            try:
                if is_url(self.folder):
                    nodes.look("list the folder", lambda: None)
                with ExitStack() as undo:
                    adapter, local_state = describe(partial(self._adapter, undo))
                    plan, weights, files, medium = self._prepare(local_state)
                    undo.pop_all()
            except ElasticCkptError as first:
                error = with_ways_for_weights(flow.told_apart(first))
                raise error from error.__cause__
            try:
                nbytes = self._overwrite(adapter, plan, weights, medium)
            except Exception as error:
                cause = error
                if isinstance(error, ElasticCkptError):
                    cause = with_ways_for_weights(flow.told_apart(error))
                raise flow.as_partial_load_error(cause) from cause
        mark_as_initialized(self.module, weights)
        missing, unexpected = (tuple(sorted(names)) for names in self._reported(weights))
        report = PretrainedReport(self.folder, missing, unexpected, nbytes, time.perf_counter() - started)
        if distributed.rank() == 0 and self.config.report:
            whole = size(sum(file.nbytes for file in files))
            place = self.folder
            took = f"in {report.seconds:.2f} s, each rank its own part"
            print(f"elastic_ckpt loaded pretrained weights: {whole} of {printable(place)} {took}", file=sys.stderr)
        return report, weights

    def _adapter(self, undo: ExitStack) -> EngineAdapter:
        if self.engine is None:
            return ModuleAdapter(self.module, self.ds_config, undo)
        if stacked_experts(self.engine):
            problem = "pretrained weights cannot be loaded into the layers of experts that AutoEP has made"
            remedy = "load them into the module before deepspeed.initialize, which makes these layers of its own"
            raise UnsupportedError(problem, remedy=remedy)
        return adapter_of(self.engine, with_states=False)

    def _prepare(self, local_state: LocalState) -> tuple[LoadPlan, LiveWeights, list[WeightsFile], Medium]:
        """Read the folder's metadata on one rank, plan on all. Collective; changes nothing."""
        tied = {name for names in local_state.model.ties.items() for name in (names[0], *names[1])}

        def read() -> tuple[list[WeightsFile], str, list[bytes]]:
            files = read_weights(self.folder, self.paths, self.config.trust_pickle, tied, self.index)
            return files, self.folder, self._digests([file.path for file in files])

        files, folder, digests = distributed.broadcast("read the folder's metadata", read)
        own: list[WeightsFile] = []
        planned: list[tuple[LoadPlan, LiveWeights]] = []

        def make_plan() -> RankPlan:
            own.extend(self._own(files, folder, digests))
            weights = self._weights(own, local_state)
            config = self.config.model_copy(update={"rename": []})  # names are those of the module by now
            options = LoadOptions.of(config, optimizer_states=False, strict=False)
            plan = plan_load(weights.metadata, local_state, options)
            planned.append((plan, weights))
            return RankPlan.of(plan, local_state.model.coordinates.mp_rank, self.config, own[0].path)

        _, notes, medium = agree_on_plans(make_plan, lambda: planned[0][0], self.config)
        plan, weights = planned[0]
        return replace(plan, notes=notes), weights, own, medium

    def _own(self, files: Sequence[WeightsFile], folder: str, digests: Sequence[bytes]) -> list[WeightsFile]:
        """Rank 0's files where this rank has them: nodes may have caches of their own. Local."""
        check_names(self.folder, self.index or {})
        paths = self.paths or [os.path.join(self.folder, os.path.basename(file.path)) for file in files]
        paths = [file.path for file in files] if is_url(self.folder) else [os.path.abspath(path) for path in paths]
        if distributed.rank() and self._digests(paths) != digests:
            problem = "ranks have different files"
            remedy = "give every rank the same folder, or copies of it"
            both = f"files as in {folder} on rank 0", f"others in {self.folder} on rank {distributed.rank()}"
            raise MismatchError(problem, folder, *both, remedy=remedy)
        return [replace(file, path=path) for file, path in zip(files, paths, strict=True)]

    def _digests(self, paths: Sequence[str]) -> list[bytes]:
        """What tells these files from others: contents, or the URL of their folder. Local."""
        if is_url(self.folder):
            return [absolute(self.folder).encode()]
        return [content_digest(open_ranges(path), version_of(path).nbytes) for path in paths]

    def _weights(self, files: Sequence[WeightsFile], local_state: LocalState) -> LiveWeights:
        """The folder's weights under live names. Local."""
        model = local_state.model
        metadata = rename_saved(weights_metadata(self.folder, files), self.config.rename)
        if self.paths is None:  # from_pretrained knows no wrappers
            metadata = adopt_names(metadata, self.module.state_dict(keep_vars=True).keys())
        fqns = {} if self.engine is None else LiveFQNs(self.engine).experts
        weights = live_weights(metadata, self.module, self.rules, fqns)
        if self.paths is not None:
            weights = self._of_live_shapes(weights)
        saved = {name for name, _ in weights.metadata.tensors}
        ties = ({name, *others} for name, others in model.ties.items())
        tied = {name for names in ties if names & saved for name in names}
        unexpected = weights.unexpected - model.elsewhere  # on other pipeline stages
        weights = replace(weights, missing=weights.missing - tied, unexpected=unexpected)
        if not saved and self.paths is None:  # from_pretrained initializes all, and warns
            problem = "no weight of this folder is in the live model"
            expected = "weights such as " + listed(weights.missing)
            found = listed(weights.unexpected)
            raise MismatchError(problem, self.folder, expected, found, remedy="give the folder of this model")
        if self.ds_config is not None and (without := weights.missing & dict(self.module.named_parameters()).keys()):
            problem = "this folder lacks weights of a module that was on the meta device"
            remedy = "give a folder that has all of them, or build the module under deepspeed.zero.Init"
            raise MismatchError(problem, self.folder, "all parameters", parameter=without, remedy=remedy)
        lacking, foreign = self._reported(weights) if self.strict else ((), ())
        if lacking or foreign:
            problem = "model and folder do not have the same weights"
            expected = "in the model but not in the folder: " + listed(lacking)
            found = "in the folder but not in the model: " + listed(foreign)
            ways = Remedy(
                "loads what matches and reports the rest", arguments={"strict": False}, function="load_pretrained"
            )
            raise MismatchError(problem, self.folder, expected, found, remedy=ways)
        return weights

    def _of_live_shapes(self, weights: LiveWeights) -> LiveWeights:
        """Without weights of other shapes, if ``from_pretrained`` is to ignore them; else they are an error. Local."""
        kept = without_other_shapes(weights, self.module)
        if kept.mismatched and not self.ignores_shapes:
            saved, live = ({name: shapes[side] for name, *shapes in kept.mismatched} for side in (0, 1))
            first = min(saved)
            problem = "weights have other shapes in the files than in the model"
            expected = f"{first} of {live[first]}"
            found = f"{first} of {saved[first]}"
            anew = "initializes these again, as for another number of labels"
            remedy = (
                Remedy("give the folder of this model, or build the model with the sizes it was saved with"),
                Remedy(anew, arguments={"ignore_mismatched_sizes": True}, function="from_pretrained"),
            )
            paths = (
                weights.metadata.files[chunk.file].path for chunk in weights.metadata.tensors[first, FROZEN].chunks
            )
            file = next(paths, self.folder)
            raise MismatchError(problem, file, expected, found, parameter=saved, remedy=remedy)
        return kept

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
        read, _, sums = flow.overwrite(adapter, plan, config, options, {}, exact_masters=False)
        if sums is not None:
            mine = sums.sums, sums.nbytes
            everybody = distributed.all_gather("verify what was read", lambda: mine)
            verify_reads(weights.metadata, everybody, plan.reads, options)
        return read.nbytes
