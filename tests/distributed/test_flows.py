"""What plain DeepSpeed completes, drawn at random for some minutes; ``python -m tests.flows`` draws for hours."""

from __future__ import annotations

import subprocess

import pytest

from tests.distributed.launch import REPO
from tests.flows.__main__ import draw

pytestmark = pytest.mark.nightly

#: ``launch/test.sh --all`` takes as long as this for it.
_SECONDS = 150


def test_what_deepspeed_completes_alone_completes_with_elastic_ckpt_and_leaves_the_same_bits(
    extensions_dir: str,
) -> None:
    # other flows for each commit, and the same where one is looked at again
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False).stdout
    seed = int(head[:8] or "0", 16)
    counted, failures = draw(_SECONDS, seed, extensions_dir, every=False)
    assert failures == [], f"seed {seed}"
    assert counted["right"] > counted["void"] / 2, counted
