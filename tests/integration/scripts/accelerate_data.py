"""A training loop with Accelerate and a registered sampler, which writes down its samples."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader

import elastic_ckpt
from elastic_ckpt.data import ElasticSampler
from tests.integration.scripts.trainer_data import LENGTH, Line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    parser.add_argument("--resume_from")
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    options = parser.parse_args()
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=options.accumulation)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=options.accumulation)
    model = Line()
    sampler = ElasticSampler(LENGTH, seed=5, num_replicas=1, rank=0)
    loader = DataLoader([{"number": number} for number in range(LENGTH)], options.micro, sampler=sampler)
    model, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    elastic_ckpt.register(model, sampler=sampler)
    if options.resume_from:
        accelerator.load_state(options.resume_from)
    seen: list[list[int]] = []
    while len(seen) < options.batches:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
            seen.append(batch["number"].tolist())
            if len(seen) == options.batches:
                break
    accelerator.save_state(os.path.join(options.output_dir, "saved"))
    found = [sampler.samples_consumed, seen]
    (options.seen / f"samples-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
