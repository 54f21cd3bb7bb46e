"""Optimizers without ZeRO, names and live groups: which parameter is which, where shapes leave a single way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.fqn import NumberedStates
from elastic_ckpt.core.local_state import LiveGroup
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.live_names import name_states
from tests.unpartitioned import catalog_of, check_states, indexed, trained

Shape = tuple[int, ...]


class Block(torch.nn.Module):
    """Weights and norms, as a Trainer divides them; one without a gradient, and a frozen one of another shape."""

    def __init__(self, layers: int = 3, frozen: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Parameter(torch.randn(frozen), requires_grad=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(layers))

    def groups(self) -> list[dict[str, object]]:
        named = [(name, param) for name, param in self.named_parameters() if param.requires_grad]
        decay = [param for _, param in named if param.dim() > 1]
        return [{"params": decay}, {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0}]

    def step(self, optimizer: torch.optim.Optimizer, idle: tuple[str, ...] = ()) -> None:
        for name, param in self.named_parameters():
            param.grad = torch.randn_like(param) if param.requires_grad and name not in idle else None
        optimizer.step()


def test_groups_of_the_trainer_are_told_by_shapes(tmp_path: Path) -> None:
    model = Block()
    optimizer = torch.optim.AdamW(model.groups())
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    metadata = catalog_of(tmp_path, shard)
    del model.frozen
    check_states(metadata, model, optimizer)
    assert {name: saved.group for name, saved in metadata.parameters.items()} == {
        name: int(param.dim() == 1) for name, param in model.named_parameters()
    }
    assert "taken in the order of the model" in " ".join(metadata.notes)


def test_one_that_never_got_a_gradient_is_told_where_all_others_are(tmp_path: Path) -> None:
    model = Block()
    del model.frozen
    optimizer, idle = torch.optim.AdamW(model.groups()), ("layers.1.weight",)
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer, idle))
    with pytest.raises(MismatchError, match="only a load"):  # biases may be it
        catalog_of(tmp_path, shard)


@pytest.mark.parametrize("frozen", [4, 0])
def test_what_may_be_of_two_groups_or_of_none_is_refused_without_a_word_of_live_groups(
    tmp_path: Path, frozen: int
) -> None:
    model = Block(frozen=frozen or 7)
    groups = model.groups()
    if not frozen:  # two groups with members of one shape
        groups[0]["params"], groups[1]["params"] = (
            groups[0]["params"][:2],
            groups[0]["params"][2:] + groups[1]["params"],
        )
    optimizer = torch.optim.AdamW(groups)
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    with pytest.raises(MismatchError, match="leave the optimizer states out") as error:
        catalog_of(tmp_path, shard)
    assert error.value.parameter is None and "build the param groups" not in str(error.value)


SHAPES = st.sampled_from([(1,), (2,), (3,), None])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from([(1,), (2,), (3,)]), st.integers(-1, 2)), max_size=9), st.data())
def test_what_is_dealt_out_is_the_only_way(dealt: list[tuple[Shape, int]], data: st.DataObject) -> None:
    """Every other way to divide the model's order is tried: ``-1`` is of no group."""
    names, shapes = [f"p{at}" for at in range(len(dealt))], {f"p{at}": shape for at, (shape, _) in enumerate(dealt)}
    members = [[at for at, (_, group) in enumerate(dealt) if group == number] for number in range(3)]
    known = {at: data.draw(st.booleans(), label=f"state of {at}") for at in range(len(dealt))}
    saved = [[shapes[f"p{at}"] if known[at] else None for at in group] for group in members]
    found = name_states(NumberedStates("", ({}, {}, {}), saved, False, shapes), needed=False)
    if found is not None:
        assert ways_of(saved, names, shapes) == [found[0]] == [[[f"p{at}" for at in group] for group in members]]


def ways_of(left: list[list[Shape | None]], names: list[str], shapes: dict[str, Shape]) -> list[list[list[str]]]:
    if not names:
        return [] if any(left) else [[[] for _ in left]]
    first, *rest = names
    found = ways_of(left, rest, shapes)  # it is of no group
    for group, members in enumerate(left):
        if members and members[0] in (None, shapes[first]):
            others = [each[1:] if at == group else each for at, each in enumerate(left)]
            for way in ways_of(others, rest, shapes):
                found.append([[first, *each] if at == group else each for at, each in enumerate(way)])
    return found


@settings(max_examples=300)
@given(st.data())
def test_live_groups_without_what_is_empty_name_the_states_right_or_not_at_all(data: st.DataObject) -> None:
    """As of ZeRO in DeepSpeed since 0.18, whose groups lack empty parameters; a state of none may be missing."""
    kinds = [(), (1,), (2,), (0,), (0, 2), (3, 0)]
    dealt = data.draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 1)), min_size=1, max_size=8))
    shapes: dict[str, Shape] = {f"p{at}": shape for at, (shape, _) in enumerate(dealt)}
    members = [[f"p{at}" for at, (_, of) in enumerate(dealt) if of == group] for group in range(2)]
    has_state = {name: 0 not in shape or data.draw(st.booleans(), label=name) for name, shape in shapes.items()}
    if data.draw(st.booleans(), label="one that is not empty has no state, either"):
        has_state[data.draw(st.sampled_from(sorted(shapes)))] = False
    saved = [[shapes[name] if has_state[name] else None for name in group] for group in members if group]
    full = [tuple(name for name in group if 0 not in shapes[name]) for group in members]
    live = [LiveGroup(names, {"name": number}) for number, names in enumerate(full) if names]
    labels = tuple({"name": number} for number, group in enumerate(members) if group)
    try:
        found = name_states(NumberedStates("", labels, saved, False, shapes), live)
    except MismatchError:
        assert not live or not all(has_state[name] for name, shape in shapes.items() if 0 not in shape)
        return
    assert found is not None
    for group, of_group, names in zip([each for each in members if each], found[0], saved, strict=True):
        for name, named, shape in zip(group, of_group, names, strict=True):
            assert shape is None or 0 in shape or named == name
