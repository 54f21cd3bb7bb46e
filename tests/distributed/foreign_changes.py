"""Changes to checkpoints, made file by file: copies that drifted, other stages and partitions, the universal format 0.1."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.distributed.foreign_folders import TAG, Tree, as_neox, mp_rank, read

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
#: Of BLOOM's parameters, what its code averages, and rows.
AVERAGED = ("layernorm.weight", "layernorm.bias", "norm.weight", "norm.bias", "dense.bias", "dense_4h_to_h.bias")
ROWS = ("self_attention.dense.weight", "dense_4h_to_h.weight")


def is_averaged_by_bloom(name: str) -> bool:
    return name.endswith(AVERAGED) or name in ("6.weight", "6.bias")


def is_norm(name: str) -> bool:
    return "norm" in name


def fragments(shapes: Sequence[Mapping[str, torch.Size]], state: Tree) -> Iterator[tuple[str, int, str, torch.Tensor]]:
    """Views of an optimizer's flat tensors of one data parallel rank: (name, group, key, values)."""
    for group, members in enumerate(shapes):
        held = state["base_optimizer_state"]["state"][group]
        flats = {"fp32": state["single_partition_of_fp32_groups"][group].data, **held}
        position = 0
        for name, shape in members.items():
            for key in KEYS:
                yield name, group, key, flats[key][position : position + shape.numel()].view(shape)
            position += shape.numel()


def optimizer_of(tag: Path, rank: int) -> Path:
    return next(tag.glob(f"*zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"))


def noise_like(values: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, 1, values.numel()).view(values.shape) ** 2


def drift(native: Path, target: Path, tp: int, is_drifted: Callable[[str], bool]) -> Path:
    """A copy in which the second tensor parallel rank's copies of some parameters are others: masters, moments, weights.

    ``truth.pt`` has the second copies under ``"seconds"``, by (name, key).
    """
    shutil.copytree(native, target)
    truth = read(target / "truth.pt") | {"seconds": {}}
    for path in sorted((target / TAG).glob("mp_rank_*.pt")):
        if mp_rank(path) % tp != 1:
            continue
        optimizer = optimizer_of(target / TAG, mp_rank(path))
        tree = read(optimizer)
        for name, _, key, values in fragments(read(path)["param_shapes"], tree["optimizer_state_dict"]):
            if is_drifted(name) and (name, key) not in truth["seconds"]:  # of stages, the first trains it
                values.mul_(1 + noise_like(values) / (8 if key == "exp_avg_sq" else 4))
                truth["seconds"][name, key] = values.clone()
                if key == "fp32":
                    _set_weight(target / TAG, name, values)
        torch.save(tree, optimizer)
    torch.save(truth, target / "truth.pt")
    return target


def _set_weight(tag: Path, name: str, values: torch.Tensor) -> None:
    """In the layer's file of the second tensor parallel rank."""
    layer, _, key = name.replace("tied_modules.embed.", "1.").partition(".")
    path = tag / f"layer_{int(layer):02d}-model_01-model_states.pt"
    weights = read(path)
    weights[key].copy_(values)
    torch.save(weights, path)


def as_means(folder: Path) -> None:
    """Let the truth of a drifted folder be the means of both copies."""
    truth = read(folder / "truth.pt")
    for (name, key), second in truth["seconds"].items():
        held, place = (truth["masters"], name) if key == "fp32" else (truth["states"], (name, key))
        held[place] = ((held[place].double() + second.double()) / 2).float()
    torch.save(truth, folder / "truth.pt")


def drifted(
    native: Path,
    target: Path,
    is_drifted: Callable[[str], bool],
    writes: Callable[[Path, Path], object],
    means: bool = True,
) -> None:
    """What ``writes`` makes of a copy of two tensor-parallel ranks that drifted; its truth has means, or first copies."""
    writes(drift(native, target.with_name(f"{target.name}-drifted"), 2, is_drifted), target)
    if means:
        as_means(target)


def recut_neox(native: Path, target: Path) -> None:
    """A folder of gpt-neox at TP 2, of four stages and two data-parallel ranks."""
    stages = (range(0, 3), range(3, 4), range(4, 5), range(5, 8))
    as_neox(recut(native, target.with_name(f"{target.name}-recut"), 2, stages, 2), target)


def recut(native: Path, target: Path, tp: int, stages: Sequence[range], dp: int) -> Path:
    """A copy whose optimizer- and model-states files are of other stages and more data parallel ranks.

    Args:
        native: ZeRO-1 of one data parallel rank, without tied layers.
        target: to be made.
        tp: its tensor parallel degree, which stays.
        stages: numbers of the layers of every stage.
        dp: data parallel degree.
    """
    shutil.copytree(native, target)
    tag = target / TAG
    models = {mp_rank(path): read(path) for path in tag.glob("mp_rank_*.pt")}
    trees = {rank: read(optimizer_of(tag, rank)) for rank in models}
    buffers = sorted({name for model in models.values() for name in model["buffer_names"]})
    for path in tag.glob("*mp_rank_*.pt"):
        path.unlink()
    for tp_rank in range(tp):
        held: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        for rank in sorted(models):
            if rank % tp == tp_rank:
                state = trees[rank]["optimizer_state_dict"]
                for name, group, key, values in fragments(models[rank]["param_shapes"], state):
                    held.setdefault((group, name), {})[key] = values
        for number, layers in enumerate(stages):
            rank = number * tp + tp_rank
            mine = {place: values for place, values in held.items() if int(place[1].partition(".")[0]) in layers}
            names = [name for name in buffers if int(name.partition(".")[0]) in layers]
            model = models[tp_rank] | {"dp_world_size": dp, "buffer_names": names}
            _write_stage(tag, rank, dp, model, trees[tp_rank], mine)
    return target


def _write_stage(tag: Path, rank: int, dp: int, model: Tree, tree: Tree, mine: Mapping[tuple[int, str], Any]) -> None:
    """The files of one model-parallel rank, as ZeRO-1 writes them: padded at the end, masters without the padding."""
    groups = sorted({group for group, _ in mine})
    flats = [
        {key: torch.cat([held[key].flatten() for at, held in mine.items() if at[0] == g]) for key in KEYS}
        for g in groups
    ]
    shapes = [{at[1]: held["fp32"].shape for at, held in mine.items() if at[0] == g} for g in groups]
    torch.save(model | {"param_shapes": shapes}, tag / f"mp_rank_{rank:02d}_model_states.pt")
    state = tree["optimizer_state_dict"]
    paddings = [-len(flat["fp32"]) % (2 * dp) for flat in flats]
    for dp_rank in range(dp):
        is_last = dp_rank == dp - 1
        masters, held = [], {}
        for group, (flat, padding) in enumerate(zip(flats, paddings, strict=True)):
            whole = {key: torch.cat([values, torch.zeros(padding)]) for key, values in flat.items()}
            mine_now = {key: values.chunk(dp)[dp_rank].clone() for key, values in whole.items()}
            master = mine_now.pop("fp32")
            masters.append(master[: len(master) - padding].clone() if is_last else master)
            held[group] = state["base_optimizer_state"]["state"][group] | mine_now
        base = state["base_optimizer_state"] | {"state": held}
        changed = {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
        changed |= {"group_paddings": paddings if is_last else [0] * len(groups), "partition_count": [dp] * len(groups)}
        path = tag / f"zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}_optim_states.pt"
        torch.save(tree | {"optimizer_state_dict": state | changed}, path)


def with_universal_01(bloom: Path, target: Path) -> None:
    """A copy with BLOOM's universal folder: a folder for each parameter, and copies of the model-states files."""
    native = Path(shutil.copytree(bloom, target))
    truth = read(native / "truth.pt")
    universal = native / f"{TAG}_universal"
    names = list(truth["masters"])
    for name in names:
        folder = universal / "zero" / name
        folder.mkdir(parents=True)
        for key in KEYS:
            value = truth["masters"][name] if key == "fp32" else truth["states"][name, key]
            entry: Tree = {} if is_averaged_by_bloom(name) else {"cat_dim": int(name.endswith(ROWS))}
            if "word_embeddings.weight" in name:
                entry["vocab_divisibility_padding_tensor"] = value[-1].clone()
            torch.save(entry | {"param": value}, folder / f"{key}.pt")
    for path in (native / TAG).glob("mp_rank_*.pt"):
        shutil.copy(path, universal)
    (native / "latest_universal").write_text(universal.name)
