"""Training that is ended and started anew as nodes leave and join; it notes the samples and the loss of every step.

``python -m tests.distributed.nodes_script FOLDER STEPS``, under torchrun; :mod:`tests.distributed.elastic_nodes`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import elastic_ckpt
from elastic_ckpt.data import ElasticSampler
from tests.distributed.launch import end_with_parent
from tests.distributed.model import TinyLM, batch

#: Samples in the data, of a step, and of a rank's micro-batch: 1, 2, 3 and 6 ranks divide a step.
LENGTH, BATCH, MICRO = 1_000_003, 12, 2
SEED = 11
#: Ranks that wait, before a step, for others to join or leave: ``"2:5"`` two ranks before step 5.
WAIT = "ELASTIC_CKPT_TEST_WAIT"
#: A step before which the last rank fails, once: ``"5"``.
FAIL = "ELASTIC_CKPT_TEST_FAIL"
#: Seconds that a step takes at least.
PACE = "ELASTIC_CKPT_TEST_PACE"


class Rows(torch.utils.data.Dataset[Any]):
    """Each sample with its number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, batch(number, 1, 0)[0]


def train(folder: Path, steps: int, stage: int = 1) -> None:
    """Go on with what the folder holds; of each step, a line in the folder's file of this process."""
    torch.set_num_threads(1)
    model = TinyLM()
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3), config=config)[0]
    sampler = ElasticSampler(Rows(), seed=SEED)
    elastic_ckpt.register(engine, sampler=sampler)
    engine.load_checkpoint(str(folder / "run"))
    start = [time.time_ns()]
    dist.broadcast_object_list(start, src=0)
    waits = dict(pair.split(":") for pair in os.environ.get(WAIT, "").split(",") if pair)
    loader = iter(DataLoader(Rows(), MICRO, sampler=sampler))
    world, rank = dist.get_world_size(), dist.get_rank()
    with (folder / f"{start[0]}-{rank}.jsonl").open("w") as lines:
        for step in range(engine.global_steps + 1, steps + 1):
            if step == int(waits.get(str(world), 0)):
                (folder / f"waiting-{world}-{rank}").touch()
                time.sleep(300)
            if step == int(os.environ.get(FAIL, "0")) and rank == world - 1 and not (folder / "failed").exists():
                (folder / "failed").touch()
                os._exit(1)
            began, numbers, total = time.monotonic(), [], torch.zeros(())
            for _ in range(engine.gradient_accumulation_steps()):
                found, rows = next(loader)
                loss = engine(rows)
                engine.backward(loss)
                engine.step()
                numbers.append(found.tolist())
                total += loss.detach()
            dist.all_reduce(total)
            mean = total.item() / world / engine.gradient_accumulation_steps()
            note = {"step": step, "start": start[0], "world": world, "samples": numbers, "loss": mean}
            lines.write(json.dumps(note) + "\n")
            lines.flush()
            if step % 2 == 0 or step == steps:
                engine.save_checkpoint(str(folder / "run"), tag=f"global_step{step}")
            time.sleep(max(float(os.environ.get(PACE, "0")) - (time.monotonic() - began), 0))
    engine.destroy()


def uninterrupted(arguments: tuple[str, int]) -> None:
    """The same on the ranks of a test job; ``nodes_script.<function>`` of :mod:`tests.distributed.jobs`."""
    train(Path(arguments[0]), arguments[1])


def main() -> None:
    end_with_parent()
    deepspeed.init_distributed(dist_backend="gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # all is written; threads of gloo now and then abort the interpreter's teardown


if __name__ == "__main__":
    main()
