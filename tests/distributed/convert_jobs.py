"""Jobs that load converted checkpoints with DeepSpeed's own loader, elastic_ckpt out of the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import elastic_ckpt
from tests.distributed import parallel_truth
from tests.distributed import truth as oracle
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of
from tests.distributed.model import TinyLM, build_engine, close, train
from tests.distributed.parallel_models import build


def deepspeed_loads(targets: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Load each of the ``folders`` of a target with DeepSpeed; what differs from the first one's truth, and losses."""
    elastic_ckpt.uninstall()
    facts = []
    for target in targets:
        truth = truth_of(target["folders"][0])
        losses, differences, epochs = [], {}, []
        for folder in target["folders"]:
            engine = build_engine(target["setup"], TinyLM(seed=8))
            engine._config.load_universal_checkpoint = True
            _, client_state = engine.load_checkpoint(folder)
            epochs.append(client_state["epoch"])
            oracle.relink(engine)
            now = oracle.gather(engine, sorted({key for _, key in truth["states"]}))
            compared = {kind: truth[kind] for kind in ("masters", "states", "steps", "counters")}
            differences |= {f"{folder}: {key}": text for key, text in oracle.compare(now, compared).items()}
            losses.append(train(engine, SAVE_AT, CONTINUE_TO))
            has_report = hasattr(engine, "elastic_report")
            close(engine)
        found = {"differences": differences, "losses": losses, "epochs": epochs, "has_report": has_report}
        facts.append(SimpleNamespace(**found))
    return facts


def deepspeed_loads_parallel(targets: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Load each target's ``folder`` into its tensor- or pipeline-parallel ``setup`` with DeepSpeed."""
    elastic_ckpt.uninstall()
    facts = []
    for target in targets:
        truth = truth_of(target["folder"])
        engine = build(target["setup"], seed=8)
        engine._config.load_universal_checkpoint = True
        path, _ = engine.load_checkpoint(target["folder"])
        now = parallel_truth.gather(engine, target["setup"])
        differences = oracle.compare(now, {kind: truth[kind] for kind in ("masters", "states")})
        has_report = hasattr(engine, "elastic_report")
        facts.append(SimpleNamespace(path=path, differences=differences, has_report=has_report))
        close(engine)
    return facts
