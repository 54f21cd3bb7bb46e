"""Jobs that load pretrained weights into engines with tensor, pipeline and expert parallelism."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import elastic_ckpt
from tests.distributed import expert_jobs, parallel_models, parallel_truth, truth
from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import attempt
from tests.distributed.model import close
from tests.distributed.parallel_models import Parallel


def load(arguments: dict[str, Any]) -> list[tuple[Any, dict[str, str]]]:
    """Write the weights of an engine of each kind into a folder, load them into another engine, and compare.

    Of each of the ``runs``: the engine that is written, and the one that is loaded into.
    """
    elastic_ckpt.install()
    return [
        (run, (_experts if isinstance(run[0], Experts) else _parallel)(*run, Path(arguments["folder"], str(number))))
        for number, run in enumerate(arguments["runs"])
    ]


def _write(folder: Path, held: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        tensors = {name: each.detach().clone() for kind in ("masters", "buffers") for name, each in held[kind].items()}
        save_file(tensors, folder / "model.safetensors")
    dist.barrier()


def _missing(report: Any) -> dict[str, str]:
    keys = {"missing": report.missing_keys, "unexpected": report.unexpected_keys}
    return {kind: str(names) for kind, names in keys.items() if names}


def _parallel(saved: Parallel, live: Parallel, folder: Path) -> dict[str, str]:
    engine = parallel_models.build(saved, seed=7)
    _write(folder, parallel_truth.gather(engine, saved))
    close(engine)
    engine = parallel_models.build(live, seed=8)
    report = elastic_ckpt.load_pretrained(engine, folder)
    parallel_truth.assert_fresh(engine, live, seed=7)
    close(engine)
    return _missing(report)


def _experts(saved: Experts, live: Experts, folder: Path) -> dict[str, str]:
    parallel_models.forget_groups()
    engine = expert_jobs.build(saved, seed=7)
    expected = expert_jobs.gather(engine, saved, [])
    _write(folder, expected)
    expert_jobs.end(engine)
    engine = expert_jobs.build(live, seed=8)
    if live.autoep:
        refused = attempt(None, engine, partial(elastic_ckpt.load_pretrained, engine, folder))
        expert_jobs.end(engine)
        return {"refused": " ".join(refused.texts), "changed": str(refused.changed)}
    report = elastic_ckpt.load_pretrained(engine, folder)
    found = expert_jobs.gather(engine, live, [])
    expert_jobs.end(engine)
    kinds = ("masters", "buffers")
    return _missing(report) | truth.compare(*({kind: each[kind] for kind in kinds} for each in (found, expected)))
