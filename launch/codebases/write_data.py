"""``write_data.py FOLDER``: two small datasets with ids below 990 and 500, and a vocabulary of 1024 tokens."""

import json
import sys

import numpy as np
import torch
from megatron.data import indexed_dataset

for ids in (990, 500):
    prefix, generator = f"{sys.argv[1]}/data-{ids}", np.random.default_rng(0)
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=1000)
    for _ in range(400):
        start, length, step = (int(generator.integers(*limits)) for limits in ((0, 900), (50, 300), (1, 4)))
        builder.add_item(torch.from_numpy(((start + np.arange(length) * step) % ids).astype(np.int64)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
with open(f"{sys.argv[1]}/vocabulary.json", "w") as vocabulary:
    json.dump({f"token {number}": number for number in range(1023)} | {"<|endoftext|>": 1023}, vocabulary)
