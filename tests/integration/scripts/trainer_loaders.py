"""Trainers of several loaders, one after the other, that write down the samples of each step; no word of elastic_ckpt."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler
from trainer_data import LENGTH, Line, Noting
from transformers import TrainingArguments, set_seed

#: The step after which each is saved. ``dropped`` is at the end of an epoch then, without its last samples.
SAVED_AT = {"plain": 3, "stream": 3, "unsized": 3, "smaller": 3, "distributed": 3, "dropped": 4}
SAVED_AT |= {"shard": 3, "shards": 3, "bare": 4, "split": 3}
_UNSIZED = ("stream", "unsized", "shard", "shards")
_DATA = [{"number": number} for number in range(LENGTH)]


class _Stream(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter(_DATA)


class _Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class _Bare:
    """A loader that has a length and batches, and nothing else."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _Loading(Noting):
    """With a loader that a script makes, where ``kind`` has one."""

    kind = "plain"

    def get_train_dataloader(self) -> Any:
        micro = self.args.per_device_train_batch_size
        common: dict[str, Any] = {"dataset": _DATA, "collate_fn": self.data_collator}
        if self.kind in ("distributed", "bare"):
            ranks, rank = self.args.world_size, self.args.process_index
            loader = DataLoader(**common, batch_size=micro, sampler=DistributedSampler(_DATA, ranks, rank))
            return loader if self.kind == "distributed" else _Bare(loader)
        if self.kind == "smaller":
            return self.accelerator.prepare(DataLoader(**common, batch_size=1, sampler=SequentialSampler(_DATA)))
        if self.kind == "unsized":
            return self.accelerator.prepare(DataLoader(**common, batch_size=micro, sampler=_Unsized()))
        return super().get_train_dataloader()


def train(kind: str, folder: str, resume_from: str | None) -> list[tuple[int, int, list[int]]]:
    settings = TrainingArguments(
        output_dir=f"{folder}/{kind}",
        num_train_epochs=2,
        max_steps=8 if kind in _UNSIZED else -1,
        save_steps=SAVED_AT[kind],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_drop_last=kind == "dropped",
        accelerator_config={"split_batches": kind == "split", "dispatch_batches": False if "shard" in kind else None},
        # by DeepSpeed's count, a step is one micro-batch: gradient_accumulation_steps is left out
        deepspeed={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"},
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(1)
    data: Any = _Stream() if kind in ("stream", "shard") else _DATA
    if kind == "shards":  # of which each rank gets some
        data = datasets.Dataset.from_list(_DATA).to_iterable_dataset(num_shards=6)
    print(f"kind: {kind}", flush=True)
    trainer = _Loading(Line(), settings, train_dataset=data)
    trainer.kind = kind
    trainer.train(resume_from_checkpoint=resume_from and f"{resume_from}/{kind}/checkpoint-{SAVED_AT[kind]}")
    return trainer.samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    parser.add_argument("--resume_from", help="output_dir of the run that saved")
    options = parser.parse_args()
    # alone, "bare" would begin within an epoch, for which Accelerate asks its data set
    kinds = [kind for kind in SAVED_AT if kind != "bare" or os.environ["WORLD_SIZE"] != "1"]
    seen = {kind: train(kind, options.output_dir, options.resume_from) for kind in kinds}
    (options.seen / f"loaders-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
