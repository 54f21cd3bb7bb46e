"""``python -m benchmarks.generated FOLDER``: real checkpoints of any size and topology, without training or a job.

Each rank is a process of its own, one after another, to which torch's ``fake`` process group answers every collective.
DeepSpeed itself builds its engine and saves: the files are those of a job of as many processes, byte by byte
(tests/distributed/test_generated.py). Values are computed from names and places in whole parameters, so that every
element can be checked anywhere. It takes the memory of one rank: weights, masters and states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import deepspeed
import torch
import torch.distributed as dist
import typer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from benchmarks import privates
from benchmarks.cases import MODELS, ModelSize
from benchmarks.held import Held
from benchmarks.launching import Launcher
from benchmarks.model import KEYS, SAVED, Block, build_model, build_optimizer, values

app = typer.Typer(add_completion=False)
TAG = "step10"
#: By the last parts of a parameter's name, the dimension that tensor-parallel ranks divide; others have all of it.
_DIMENSIONS = {
    "attention.weight": 0,
    "attention.bias": 0,
    "up.weight": 0,
    "up.bias": 0,
    "projection.weight": 1,
    "down.weight": 1,
}


@dataclass(frozen=True)
class Layout:
    """Which checkpoint: a size of :data:`benchmarks.cases.MODELS`, its topology, and so many experts in each layer."""

    params: str
    stage: int
    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: int = 0

    @property
    def name(self) -> str:
        """Of its folder."""
        degrees = "".join(f"-{key}{value}" for key, value in asdict(self).items() if key not in ("params", "stage"))
        return f"{self.params}-z{self.stage}{degrees}"


class TensorParallel:
    """The ``mpu`` of ranks that lie side by side."""

    def __init__(self, tp: int) -> None:
        world, self._rank = dist.get_world_size(), dist.get_rank()
        self._tp = tp
        tensor = [list(range(first, first + tp)) for first in range(0, world, tp)]
        data = [list(range(first, world, tp)) for first in range(tp)]
        self._tensor, self._data = (
            next(group for ranks, group in [(each, dist.new_group(each)) for each in cut] if self._rank in ranks)
            for cut in (tensor, data)
        )

    def get_model_parallel_rank(self) -> int:
        """See :class:`deepspeed.runtime.engine.DeepSpeedEngine`."""
        return self._rank % self._tp

    def get_model_parallel_world_size(self) -> int:
        """See :meth:`get_model_parallel_rank`."""
        return self._tp

    def get_model_parallel_group(self) -> Any:
        """See :meth:`get_model_parallel_rank`."""
        return self._tensor

    def get_data_parallel_rank(self) -> int:
        """See :meth:`get_model_parallel_rank`."""
        return self._rank // self._tp

    def get_data_parallel_world_size(self) -> int:
        """See :meth:`get_model_parallel_rank`."""
        return dist.get_world_size() // self._tp

    def get_data_parallel_group(self) -> Any:
        """See :meth:`get_model_parallel_rank`."""
        return self._data


class Mixtures(nn.Module):
    """Blocks, each with a mixture of experts behind it."""

    def __init__(self, size: ModelSize, layout: Layout) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(size.width, 2 * size.width), nn.Linear(2 * size.width, size.width))
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.mixtures = nn.ModuleList(
            MoE(size.width, expert, num_experts=layout.experts, ep_size=layout.ep) for _ in range(size.layers)
        )


def build_engine(layout: Layout) -> Any:
    """An engine of this rank; of a pipeline, in fp32, as DeepSpeed's pipelines are at ZeRO-1."""
    size, mpu, model = MODELS[layout.params], None, None
    config = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": layout.stage},
        **({} if layout.pp > 1 else {"bf16": {"enabled": True}}),
    }
    data = layout.ranks // (layout.tp * layout.pp)
    config["train_batch_size"] = 24 // data * data
    if layout.pp > 1:
        layers = [LayerSpec(nn.Embedding, size.vocabulary, size.width)]
        layers += [LayerSpec(Block, size.width) for _ in range(size.layers)]
        topology = PipeModelDataParallelTopology(layout.pp, layout.tp, data)
        model = PipelineModule(layers, topology=topology, partition_method="uniform", activation_checkpoint_interval=0)
    elif layout.experts:
        model = Mixtures(size, layout).to(torch.bfloat16)
    else:
        model = build_model(size, saved=False)
        mpu = TensorParallel(layout.tp) if layout.tp > 1 else None
    for name, param in model.named_parameters():
        _shard(name, param, layout)
        param.data.copy_(logical(layout, name, "fp32", param, 0, param.numel()).view(param.shape))
    optimizer = build_optimizer(model, SAVED)
    if layout.experts:
        groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
        optimizer = torch.optim.AdamW(groups, lr=SAVED.lr)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def _shard(name: str, param: nn.Parameter, layout: Layout) -> None:
    """Keep a rank's part of a tensor-parallel parameter."""
    dimension = _dimension(name)
    if layout.tp > 1 and layout.pp == 1 and dimension is not None:
        param.data = param.data.chunk(layout.tp, dimension)[0].clone()


def _dimension(name: str) -> int | None:
    return _DIMENSIONS.get(".".join(name.split(".")[-2:]))


def logical(layout: Layout, name: str, key: str, param: Any, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of what this rank has of a parameter, or of one of its states."""
    dimension, tp_rank = _dimension(name), dist.get_rank() % layout.tp
    if "deepspeed_experts" in name:  # by its number among all
        head, _, tail = name.partition("deepspeed_experts.")
        number, _, tail = tail.partition(".")
        first = dist.get_rank() % layout.ep * (layout.experts // layout.ep)
        return values(f"{head}deepspeed_experts.{first + int(number)}.{tail}", key, start, stop)
    if layout.tp == 1 or layout.pp > 1 or dimension is None:
        return values(name, key, start, stop)
    shape = list(param.shape)
    shape[dimension] *= layout.tp
    whole = values(name, key, 0, param.numel() * layout.tp).view(shape)
    return whole.chunk(layout.tp, dimension)[tp_rank].reshape(-1)[start:stop]


def fill_states(engine: Any, layout: Layout) -> None:
    """Masters and states of this rank, as if ten steps had been made."""
    held, params = Held(engine), dict(engine.module.named_parameters())
    held.fill_as_saved()
    for name, key, start, tensor in held.parts():
        tensor.copy_(logical(layout, name, key, params[name], start, start + tensor.numel()))


def prove(engine: Any, layout: Layout) -> None:
    """What is saved is where DeepSpeed's public getters look for it. Collective, of a real job."""
    privates.link_states(engine)
    for name, param in engine.module.named_parameters():
        for key in KEYS:
            found = safe_get_full_fp32_param(param) if key == "fp32" else safe_get_full_optimizer_state(param, key)
            if not torch.equal(found.view(-1), logical(layout, name, key, param, 0, found.numel())):
                raise AssertionError(f"{name}: DeepSpeed has another {key}")


def generate(arguments: dict[str, Any]) -> None:
    """The job: save each of ``layouts`` below ``folder``."""
    for fields in arguments["layouts"]:
        layout = Layout(**fields)
        engine = build_engine(layout)
        fill_states(engine, layout)
        if not arguments["one_by_one"]:
            prove(engine, layout)
        engine.save_checkpoint(str(Path(arguments["folder"]) / layout.name), tag=TAG)
        engine.destroy()
        deepspeed.utils.groups.mpu = None  # of the next engine, which has another


@app.command()
def main(
    folder: Path,
    params: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "1M",
    stage: Annotated[int, typer.Option(min=1, max=3)] = 3,
    ranks: int = 2,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    experts: int = 0,
    extensions: Annotated[Path, typer.Option(help="TORCH_EXTENSIONS_DIR.")] = Path("benchmark_results/extensions"),
) -> None:
    """Write a checkpoint into FOLDER, one rank after another."""
    layout = Layout(params, stage, ranks, tp, pp, ep, experts)
    write([layout], folder, extensions)
    print(folder / layout.name)


def write(layouts: Sequence[Layout], folder: Path, extensions: Path, one_by_one: bool = True) -> None:
    """Write checkpoints of as many ranks each."""
    arguments = {"layouts": list(map(asdict, layouts)), "folder": str(folder.resolve()), "one_by_one": one_by_one}
    Launcher(folder / "logs", extensions).run(layouts[0].ranks, "generate", arguments, timeout_s=3600)


if __name__ == "__main__":
    app()
