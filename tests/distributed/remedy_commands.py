"""Commands that refuse, and what became of them once their remedies were followed; and packages that are missing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ElasticCkptError, Remedy
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.export import export
from elastic_ckpt.tools.opened import open_folder
from tests.distributed import damage
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel
from tests.distributed.remedy_cells import DIARY, MODEL, PLAIN, Change, edits
from tests.distributed.remedy_jobs import merged
from tests.distributed.remedy_parallel_cells import EIGHT_BIT, SHARDED
from tests.distributed.remedy_sites import Site, noted


@dataclass(frozen=True)
class Refusal:
    """What a command refuses.

    Attributes:
        command: ``convert`` or ``export``.
        saved: by which setup.
        way: a word of the config that the remedy to be followed has.
        change: of a copy of the files, before.
        config: ``"elastic_checkpoint"``, before the remedy's own.
    """

    command: str
    saved: Setup | Parallel
    way: str
    change: Change | None = None
    config: dict[str, Any] | None = None


#: How the parameters of :data:`SHARDED` are sharded, which nothing in its files says.
MATRICES = [
    {"pattern": r"tied_modules\.embed\.weight", "kind": "vocabulary"},
    {"pattern": r".*\.up\.weight", "kind": "column"},
    {"pattern": r".*\.gate_up\.weight", "kind": "column", "sub_parameters": [1, 1]},
    {"pattern": r".*\.down\.weight", "kind": "row"},
    {"pattern": r"1\.weight", "kind": "replicated"},
]
VECTORS = [{"pattern": r".*\.up\.bias", "kind": "column"}, {"pattern": r".*norm\..*", "kind": "replicated"}]


def keep_a_device(copy: Path) -> None:
    """The client state has a device of a backend outside torch, which this process does not know."""
    lines = [
        "import sys, torch",
        "torch.utils.rename_privateuse1_backend('acme')",
        "tree = torch.load(sys.argv[1], weights_only=False)",
        "tree['device'] = torch.device('acme')",
        "torch.save(tree, sys.argv[1])",
    ]
    command = [sys.executable, "-c", "\n".join(lines), str(damage.tag(copy) / MODEL)]
    subprocess.run(command, check=True, timeout=100)


REFUSALS: dict[str, Refusal] = {
    "a state of unknown layout": Refusal("convert", DIARY, "fresh"),
    "an entry that runs code": Refusal("convert", PLAIN, "skip", edits(damage.plant_bomb, MODEL)),
    "a mean of 8-bit states": Refusal(
        "convert", EIGHT_BIT, "first", config={"tp_rules": [*MATRICES, *VECTORS], "replicated_params": "mean"}
    ),
    "a device of another backend": Refusal("convert", PLAIN, "trust_pickle", keep_a_device),
    "shards of vectors": Refusal("export", SHARDED, "column", config={"tp_rules": MATRICES}),
}


@dataclass
class Followed:
    """What a command refused, the remedy that was followed, where it was made, and what then became of it."""

    error: ElasticCkptError
    remedy: Remedy
    sites: set[Site]
    result: Result
    differences: set[str]


def follow(refusal: Refusal, copy: Path) -> Followed:
    """Run a command on a copy of a checkpoint, which refuses; then again with the one remedy of its ``way``."""
    source, target = str(damage.tag(copy)), copy / "written"
    before = ElasticConfig(**refusal.config or {})
    with noted() as sites, pytest.raises(ElasticCkptError) as caught:
        if refusal.command == "export":
            export(source, target, config=before)
        else:
            convert(open_folder(source, None, before), target)
    (remedy,) = [each for each in caught.value.remedies if f'"{refusal.way}"' in json.dumps(each.config)]
    section = merged(refusal.config or {}, remedy.config)
    rules = [*remedy.config.get("tp_rules", []), *(refusal.config or {}).get("tp_rules", [])]
    config = copy / "ds.json"
    config.write_text(json.dumps({"elastic_checkpoint": {**section, "tp_rules": rules}}))
    result = CliRunner().invoke(app, [refusal.command, source, str(target), "--config", str(config)])
    differences = _differences(copy, target) if refusal.command == "export" else set()
    return Followed(caught.value, remedy, sites, result, differences)


def _differences(copy: Path, target: Path) -> set[str]:
    """Names of exported parameters that are not bit-equal to what was saved."""
    tensors = {name: value for path in target.glob("*.safetensors") for name, value in load_file(path).items()}
    masters = truth_of(str(copy))["masters"]
    return {name for name, value in masters.items() if name not in tensors or not torch.equal(tensors[name], value)}


#: Has a package look as if it were not installed, and runs the command line.
_WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from elastic_ckpt.cli import app; app()"


def command_line(words: Sequence[str], without: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, maybe ``without`` a package."""
    start = ["-c", _WITHOUT, without] if without else ["-m", "elastic_ckpt"]
    return subprocess.run([sys.executable, *start, *words], check=False, capture_output=True, text=True, timeout=120)


def requirements_of(command: str) -> set[str]:
    """Packages that a ``pip install`` installs, in versions that one of the project's extras declares."""
    first, second, *requirements = shlex.split(command)
    assert (first, second) == ("pip", "install"), command
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf'^\w+ = \[.*"{re.escape(each)}"', text, re.MULTILINE) for each in requirements), command
    return {re.split("[<>=]", each)[0] for each in requirements}
