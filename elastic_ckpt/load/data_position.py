"""``register``, and what patches of DeepSpeed's engine save and load of the data position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.core.kinds import is_count
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.data import DataPosition
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.data_efficiency import own_schedulers, refuse_strange_state
from elastic_ckpt.engines.data_position import POSITION_KEY, bind_sampler, position_of, registered, take_position
from elastic_ckpt.engines.step_in_progress import is_within_step
from elastic_ckpt.errors import MismatchError, errors_of_file
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.detect import saved_entry
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.load.flow import LoadCall, as_partial_load_error
from elastic_ckpt.load.installation import install
from elastic_ckpt.load.resume_sheet import files_before_save, write_sheet
from elastic_ckpt.storage import exists

logger = logger_of(__name__)


def register(engine: Any, *, sampler: DataPosition) -> None:
    """Let an engine save and load the position in its training data, by the samples that its steps have used.

    Call it on every rank, before or after ``load_checkpoint``, but before ``iter(loader)``. The loader's ``batch_size``
    must be the config's ``train_micro_batch_size_per_gpu``. The position is saved in the client state under its own
    key, which ``engine.load_checkpoint`` does not return. This also installs elastic_ckpt.

    Args:
        engine: what ``deepspeed.initialize`` or Accelerate's ``prepare`` returns.
        sampler: an :class:`~elastic_ckpt.data.ElasticSampler` or :class:`~elastic_ckpt.data.ElasticStream`.
    """
    install()
    bind_sampler(engine, sampler)


def save_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.save_checkpoint``, with rank 0's data position, and the resume sheet once it has ended.

    The files also state how far the optimizer's counts are from the counters, if not as in a new run, and whether the
    optimizer was in the middle of a step. Collective
    before, too, if a sampler is registered. What the script gave as its client state stays as it is.
    """
    arguments = (given := inspect.signature(original).bind(engine, *args, **kwargs)).arguments
    if (sampler := registered(engine)) is not None:
        try:
            position = distributed.broadcast("save the data position", lambda: _position_to_save(engine, sampler))
            arguments["client_state"] = {**(arguments.get("client_state") or {}), POSITION_KEY: position}
        except MismatchError as error:  # a save without it is better than none
            logger.warning("elastic_ckpt saves no data position: %s", error)
    before = files_before_save(engine, arguments)
    with compat.recorded_counts(engine, is_within_step(engine)):
        result = original(*given.args, **given.kwargs)
    write_sheet(engine, arguments, before)
    return result


def _position_to_save(engine: Any, sampler: DataPosition) -> dict[str, Any]:
    """The sampler's position; :class:`MismatchError` if the engine has not counted the steps. Local."""
    if beside := compat.steps_beside(engine):
        problem = f"engine.step has not counted {beside} steps of the optimizer, as in Lightning Fabric"
        remedy = "keep the number of samples in the state that you save, and call the sampler's load_state_dict with it"
        raise MismatchError(problem, remedy=remedy)
    return sampler.state_dict()


def check_position(call: LoadCall, found: CheckpointInfo) -> None:
    """Raise :class:`MismatchError` if what is left to DeepSpeed's own loader was saved in other data. Collective."""
    if (sampler := registered(call.engine)) is None or call.arguments.load_module_only:
        return

    def check() -> None:
        if (position := saved_entry(found, POSITION_KEY, call.config.trust_pickle)) is not None:
            sampler.check(position)
            counted = saved_entry(found, "global_samples", call.config.trust_pickle)
            sampler.refuse_uncounted(position, counted if is_count(counted) else 0)

    distributed.broadcast("compare the data position", check)


def check_own_states(call: LoadCall, found: CheckpointInfo) -> None:
    """Refuse strange states that DeepSpeed's own loader would give to the engine's data schedulers. Collective.

    Raises the same :class:`MismatchError` on every rank.
    """
    own = {} if call.arguments.load_module_only else own_schedulers(call.engine)
    if not own:
        return

    def check() -> None:
        names = sorted({*found.files.model.values(), *found.files.model_zero3.values()})
        has_own_files = call.engine.use_node_local_storage()
        mine = names if has_own_files else names[distributed.rank() :: distributed.world_size()]
        for path in filter(exists, map(found.path, mine)):
            file = open_pickled(path, call.config.trust_pickle)
            for key, scheduler in own.items():
                state = file.tree.get(key)
                if state is not None:
                    with errors_of_file(path):
                        refuse_strange_state(key, scheduler, materialise(file, state))

    distributed.all_gather("compare the states of DeepSpeed's data schedulers", check)


def with_position(engine: Any, load: Callable[[], Any], wanted: bool) -> Any:
    """What a load returns, without the data position, which the engine takes if ``wanted``."""
    before = position_of(engine)
    result = load()
    if isinstance(result, tuple) and isinstance(client_state := result[-1], dict):  # something was loaded
        position = client_state.pop(POSITION_KEY, None)
        if engine.elastic_report is None:  # DeepSpeed's own loader ran; else the commit has taken it
            try:
                take_position(engine, position if wanted else None, before)
            except MismatchError as error:  # in the mode "off", where nothing was looked at before
                raise as_partial_load_error(error) from error
    return result
