"""Options of ``elastic-ckpt plan``."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from elastic_ckpt.tools.virtual.survey import MOST_BY_DEFAULT

MOST_RANKS = 1 << 20
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(B|bit)(?:/s)?")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


class Offload(StrEnum):
    """Where masters and optimizer states are."""

    NONE = "none"
    CPU = "cpu"


class Dtype(StrEnum):
    """Of weights and gradients."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def long(self) -> str:
        """As torch calls it."""
        return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.value]


def bandwidth(text: str) -> float:
    """Bytes per second, from ``5GB/s`` or ``25Gbit/s``.

    Raises:
        BadParameter: it is neither.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0 if match is None else float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
    if match is None or not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r} is no bandwidth; write 5GB/s, 800MB/s or 25Gbit/s")
    return value / 8 if match[4] == "bit" else value


def _degree(what: str, option: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(option, min=1, max=MOST_RANKS, help=f"{what}-parallel degree.")
    return found


MaybeFolder = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="Folder with a [bold]latest[/] file, or the folder of one tag."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="No checkpoint, but the one of a big model: 104b, bloom-176b, or a JSON file."),
]
Dp = Annotated[int | None, _degree("Data", "--dp")]
Tp = Annotated[int | None, _degree("Tensor", "--tp")]
Pp = Annotated[int | None, _degree("Pipeline", "--pp")]
Zero = Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage.")]
SubGroupSize = Annotated[int, typer.Option("--sub-group-size", min=1, help="[bold]sub_group_size[/] of ZeRO-3.")]
OffloadTo = Annotated[Offload, typer.Option("--offload", help="Masters and optimizer states in host memory.")]
Weights = Annotated[Dtype, typer.Option("--precision", help="Of the weights.")]
Gradients = Annotated[Dtype, typer.Option("--gradients", help="Of the gradients that are accumulated.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Nodes that the ranks are packed on; default: 8 ranks each.")
]
Bandwidth = Annotated[
    float, typer.Option("--bandwidth", parser=bandwidth, metavar="RATE", help="What a node reads: 5GB/s, 25Gbit/s.")
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="Of load_module_only=True: neither optimizer states nor their memory.")
]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="Plan this rank alone, in detail.")]
Every = Annotated[
    bool, typer.Option("--all", help=f"Plan and list every rank; by default, of a big job, {MOST_BY_DEFAULT} of them.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw which file feeds which rank: a picture (.png, .pdf, .svg).")
]
