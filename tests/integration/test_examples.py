"""Scripts of ``examples/`` and the sections that use them: each is run as its page says, and prints what the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blocks import REPO, blocks
from tests.integration.pages import EQUAL, Walk, walk
from tests.storage.buckets import serve_bucket

#: Sections about losses that are not the same.
HYPERPARAMETERS = "Change lr, betas or weight decay in mid-run"
LOSS_JUMPED = "My loss jumped"
#: Pages whose commands are executed, or one of their sections: loads of elastic_ckpt, and those of them whose tensors are
#: compared: not those of ranks with shards or experts of their own, nor what DeepSpeed did not save.
PAGES = [
    ("tutorial.md", "Accelerate", 1, 1),
    ("tutorial.md", "PyTorch Lightning", 1, 1),
    ("tutorial.md", "A bucket", 1, 1),
    ("tutorial.md", "Disks of nodes", 1, 1),
    ("huggingface.md", "16 GPUs to 8 tonight", 1, 1),
    ("megatron-slurm.md", "", 1, 0),
    ("optimizer-states.md", "8-bit Adam on another number of ranks", 2, 2),
    ("optimizer-states.md", HYPERPARAMETERS, 2, 2),
    ("experts.md", "Change the degree, step by step", 1, 0),
    ("dcp.md", "From FSDP2 to DeepSpeed and back, step by step", 1, 0),
    ("resume-sheet.md", LOSS_JUMPED, 1, 1),
]
#: Rounding of sums in another order over a few steps, and of what the Trainer prints.
ROUNDING = 2e-3
SCRIPTS = sorted(path.name for path in (REPO / "examples").glob("*.py"))


@pytest.fixture
def bucket_variables() -> Iterator[dict[str, str]]:
    """What the environment says of a bucket."""
    with serve_bucket() as bucket:
        names = {"endpoint": "AWS_ENDPOINT_URL", "access_key_id": "AWS_ACCESS_KEY_ID", "region": "AWS_REGION"}
        found = {variable: bucket.options[name] for name, variable in names.items()}
        yield {**found, "AWS_SECRET_ACCESS_KEY": bucket.options["secret_access_key"], "AWS_ALLOW_HTTP": "true"}


@pytest.mark.parametrize(
    ("page", "section", "loads", "compared"), PAGES, ids=lambda value: str(value).replace(".md", "")
)
def test_a_page_does_what_it_says(
    page: str,
    section: str,
    loads: int,
    compared: int,
    tmp_path: Path,
    extensions_dir: str,
    request: pytest.FixtureRequest,
) -> None:
    more = request.getfixturevalue("bucket_variables") if section == "A bucket" else {}
    done = Walk(tmp_path, extensions_dir, more)
    walk(page, section, done)
    printed = "".join(done.jobs)
    assert printed.count("elastic_ckpt: checkpoint restored") == loads
    counts = [int(count) for count in re.findall(EQUAL.format(r"(\d+)"), printed)]
    assert len(counts) == compared and all(count >= 12 for count in counts)
    if section not in (HYPERPARAMETERS, LOSS_JUMPED):
        of_several = [losses for losses in done.losses() if len(losses) > 1]
        assert len(of_several) >= 4
        assert all(max(losses) - min(losses) < ROUNDING for losses in of_several), of_several


def test_every_example_is_run_and_short() -> None:
    pages = {page for page, *_ in PAGES}
    commands = "\n".join("\n".join(block.commands()) for block in blocks("bash") if block.page.name in pages)
    for name in SCRIPTS:
        assert f"examples/{name}" in commands, name
        assert len((REPO / "examples" / name).read_text(encoding="utf-8").splitlines()) <= 80, name


def test_code_that_a_recipe_shows_is_that_of_its_example() -> None:
    shown = [
        block for block in blocks("python") if block.not_run and block.not_run.startswith("it is a part of examples")
    ]
    assert len(shown) >= 3
    for block in shown:
        script = re.findall(r"examples/\w+\.py", block.not_run or "")[0]
        assert block.text in (REPO / script).read_text(encoding="utf-8"), block.where
