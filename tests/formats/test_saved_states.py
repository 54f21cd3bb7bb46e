"""Optimizer states as files hold them, read from real ``torch.save`` files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch

from elastic_ckpt.core.state_kinds import ELEMENTWISE, REPLICATED, Codebook, StateOptions
from elastic_ckpt.core.values import LeftInFile, TensorValue, left_in_file
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats import saved_states
from elastic_ckpt.formats.classification import FRESH, OPAQUE, SavedKind, notes_and_warnings
from elastic_ckpt.formats.model_states import index_unpartitioned
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.saved_states import (
    Digest,
    StatesOfOne,
    normal_groups,
    read_groups,
    resolve_codebooks,
    saved_shape,
    sort_states,
    with_group_step,
)
from elastic_ckpt.formats.shards import index_shard
from tests.quantization import own_maps

DEFAULTS = StateOptions()
NESTED = "__bnb_optimizer_quant_state__"


def written(folder: Path, tree: Any, name: str = "states.pt") -> PickledFile:
    torch.save(tree, folder / name)
    return open_pickled(str(folder / name))


def sorted_of(folder: Path, states: Mapping[str, Any], options: StateOptions = DEFAULTS) -> StatesOfOne:
    file = written(folder, dict(states))
    return sort_states(file, file.tree, options)


def stepped(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict after two steps."""
    for _ in range(2):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer.state_dict()


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape))


# --- sorting ----------------------------------------------------------------------------------------------------


def test_states_are_sorted_by_what_they_are(tmp_path: Path) -> None:
    found = sorted_of(
        tmp_path,
        {
            "tensor": torch.arange(6.0).reshape(2, 3),
            "empty": torch.empty(0),
            "point": torch.tensor(2.5, dtype=torch.float64),
            "count": torch.tensor(7),
            "int": 3,
            "float": 0.25,
            "nothing": None,
            "bool": True,
            "text": "x",
            "list": [torch.ones(2), 1],
        },
    )
    assert set(found.tensors) == {"tensor", "empty"}
    assert found.tensors["tensor"].shape == (2, 3)
    count, point = TensorValue("int64", (), (7,)), TensorValue("float64", (), (2.5,))
    numbers = (("bool", True), ("count", count), ("float", 0.25), ("int", 3), ("nothing", None), ("point", point))
    assert repr(found.scalars) == repr(numbers)
    assert set(found.points) == {"point", "count"}
    assert found.opaque == {"text": "a str", "list": "a list"}


def test_states_of_a_real_adamw_are_tensors_and_a_step(tmp_path: Path) -> None:
    state = stepped(torch.optim.AdamW([parameter(3, 4)]))["state"][0]
    found = sorted_of(tmp_path, state)
    assert set(found.tensors) == {"exp_avg", "exp_avg_sq"}
    assert repr(found.scalars) == repr((("step", TensorValue("float32", (), (2.0,))),))
    assert found.opaque == {}


def test_a_parameter_has_few_states(tmp_path: Path) -> None:
    """All members of a flat tensor have them: few bytes would be many members times many states."""
    many = {f"k{number}": float(number) for number in range(1025)}
    with pytest.raises(UnsupportedError) as caught:
        sorted_of(tmp_path, many)
    assert caught.value.expected == "at most 1024 states of a parameter" and caught.value.found == "1025"
    del many["k0"]
    assert len(sorted_of(tmp_path, many).scalars) == 1024


def test_a_buffer_that_is_not_used_is_no_tensor(tmp_path: Path) -> None:
    assert sorted_of(tmp_path, {"momentum_buffer": None}) == StatesOfOne({}, (("momentum_buffer", None),))
    state = stepped(torch.optim.SGD([parameter(4)]))["state"]
    assert [sorted_of(tmp_path, found) for found in state.values()] in ([], [StatesOfOne({})])


@pytest.mark.parametrize("nested", [True, False])
def test_quantized_states_are_the_same_nested_or_flat(tmp_path: Path, nested: bool) -> None:
    param = parameter(5000)
    optimizer = bnb.optim.AdamW8bit([param])
    state = stepped(optimizer)["state"][0]
    assert NESTED in state
    tree = state if nested else {**{key: value for key, value in state.items() if key != NESTED}, **state[NESTED]}
    found = sorted_of(tmp_path, tree)
    assert set(found.tensors) == {"state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}
    assert repr(found.scalars) == repr((("step", 2),))
    assert found.opaque == {}
    assert found.codebooks == own_maps()
    assert found.digests == {}
    assert found.tensors["state1"].dtype == "uint8"
    raw = (tmp_path / "states.pt").read_bytes()
    start = found.tensors["absmax2"].byte_offset
    assert raw[start : start + 80] == optimizer.state[param]["absmax2"].numpy().tobytes()


def digest_of(folder: Path, tensor: torch.Tensor, key: str = "mine", options: StateOptions = DEFAULTS) -> Digest | None:
    return sorted_of(folder, {key: tensor}, options).digests.get(key)


def test_small_tensors_are_looked_into_and_large_ones_where_the_user_calls_them_replicated(tmp_path: Path) -> None:
    assert digest_of(tmp_path, torch.zeros(4096)) is not None
    assert digest_of(tmp_path, torch.zeros(4097)) is None
    assert digest_of(tmp_path, torch.zeros(64, 65)) is None
    assert digest_of(tmp_path, torch.zeros(5000), options=StateOptions({"mine": "replicated"})) is not None
    assert digest_of(tmp_path, torch.zeros(5000), options=StateOptions({"mine": "fresh"})) is None
    assert digest_of(tmp_path, torch.zeros(20), "absmax1") is None
    assert digest_of(tmp_path, torch.zeros(256), "qmap3") is not None
    assert digest_of(tmp_path, torch.zeros(256), "qmap1") is None


def test_a_tensor_that_is_too_large_to_be_replicated_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_states, "_MOST_REPLICATED_NUMEL", 5000)
    options = StateOptions({"mine": "replicated"})
    assert digest_of(tmp_path, torch.zeros(5000), options=options) is not None
    assert digest_of(tmp_path, torch.zeros(5001), options=options) is None


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(7), torch.arange(6).reshape(2, 3), torch.randn(5).bfloat16(), torch.zeros(3, dtype=torch.bool)],
)
def test_digests_tell_equal_bytes_from_others(tmp_path: Path, tensor: torch.Tensor) -> None:
    first = digest_of(tmp_path, tensor)
    assert first is not None
    assert digest_of(tmp_path, tensor.clone()) == first
    other = tensor.clone()
    other.view(-1)[-1] = not other.view(-1)[-1] if other.dtype == torch.bool else other.view(-1)[-1] + 1
    found = digest_of(tmp_path, other)
    assert found is not None
    assert found.crc32 != first.crc32


def test_digests_are_of_the_elements_in_order_whatever_the_strides(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4)
    assert digest_of(tmp_path, tensor.t().contiguous().t()) == digest_of(tmp_path, tensor)
    assert digest_of(tmp_path, tensor.t()) != digest_of(tmp_path, tensor)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1.0, 2.0], True),
        ([0.0, 0.0, 1.0], False),
        ([2.0, 1.0], False),
        ([1.0], False),
        ([0.0, float("nan"), 1.0], False),
        ([0, 1, 2], True),
    ],
)
def test_a_table_is_known_by_its_ascending_values(tmp_path: Path, values: list[float], expected: bool) -> None:
    digest = digest_of(tmp_path, torch.tensor(values))
    assert digest is not None
    assert digest.ascending == expected


def test_complex_and_empty_tensors_ascend_nowhere(tmp_path: Path) -> None:
    for tensor in (torch.tensor([0 + 0j, 1 + 0j]), torch.empty(0), torch.empty(3, 0)):
        digest = digest_of(tmp_path, tensor)
        assert digest is not None
        assert not digest.ascending


def test_a_map_of_a_wild_size_is_not_read_and_one_of_a_wrong_size_is_told_of(tmp_path: Path) -> None:
    assert sorted_of(tmp_path, {"qmap1": torch.zeros(4097)}).codebooks == {}
    assert len(sorted_of(tmp_path, {"qmap1": torch.zeros(255)}).codebooks["qmap1"].values) == 255


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
NO_REALS = [torch.bool, torch.int8, torch.uint8, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("shape", [(5,), (), (3, 2)])
def test_moments_of_a_dtype_in_which_no_optimizer_keeps_them_are_damage(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for key in MOMENTS:
        for dtype in NO_REALS:
            states = {key: torch.zeros(shape).to(dtype)}
            with pytest.raises(DamagedError, match="not what optimizers keep under its name") as caught:
                sorted_of(tmp_path, states)
            assert caught.value.file == str(tmp_path / "states.pt")
            assert str(dtype).removeprefix("torch.") in str(caught.value.found)
            for layout in ("elementwise", "replicated", "fresh"):  # of an optimizer of the user's
                sorted_of(tmp_path, states, StateOptions({key: layout}))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            sorted_of(tmp_path, {key: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    "step",
    [True, 4j, torch.tensor(True), torch.tensor(4j), torch.tensor([4j]), torch.tensor(1.0).to(torch.float8_e5m2)],
    ids=repr,
)
def test_a_step_that_is_no_real_number_is_damage(tmp_path: Path, step: Any) -> None:
    with pytest.raises(DamagedError, match="optimizer state step: a real number"):
        sorted_of(tmp_path, {"step": step})


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0), torch.tensor([3], dtype=torch.int32)])
def test_a_step_counts_in_any_real_dtype(tmp_path: Path, step: Any) -> None:
    found = sorted_of(tmp_path, {"step": step})
    assert "step" in {*dict(found.scalars), *found.tensors}


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [torch.tensor(1j), torch.tensor(True), torch.tensor(0.5).to(torch.float8_e5m2), 1j])
def test_a_hyperparameter_that_is_no_real_number_is_damage(tmp_path: Path, key: str, value: Any) -> None:
    each = (0.9, value) if key == "betas" else value
    file = written(tmp_path, {"param_groups": [{key: each}]})
    with pytest.raises(DamagedError, match=f"a param group / {key}: a real number"):
        read_groups(file, file.tree["param_groups"])


# --- quantization maps ------------------------------------------------------------------------------------------

SIGNED, UNSIGNED = own_maps()["qmap1"], own_maps()["qmap2"]
#: A map of nobody's, as good as any.
OTHER = Codebook((*torch.linspace(-1, 1, 255).tolist()[:127], 0.0, *torch.linspace(1 / 128, 1, 128).tolist()))


def quantized(folder: Path, **maps: Codebook | None) -> StatesOfOne:
    """The states of a file with these maps, as a file would give them."""
    tree: dict[str, Any] = {}
    for qmap, codebook in maps.items():
        tree[f"state{qmap[-1]}"] = torch.zeros(5000, dtype=torch.uint8)
        tree[f"absmax{qmap[-1]}"] = torch.zeros(20)
        if codebook is not None:
            tree[qmap] = torch.tensor(codebook.values)
    return sorted_of(folder, tree)


def flipped(codebook: Codebook, bit: int = 30, position: int = 100) -> Codebook:
    """A map in which one bit of one value is wrong."""
    values = torch.tensor(codebook.values)
    values.view(torch.int32)[position] ^= 1 << bit
    return Codebook(tuple(values.tolist()))


def test_the_map_of_nobody_is_a_map() -> None:
    assert len(OTHER.values) == 256
    assert OTHER.problem is None


def test_the_map_that_all_files_hold_is_taken_without_a_word(tmp_path: Path) -> None:
    states = quantized(tmp_path, qmap1=SIGNED, qmap2=UNSIGNED)
    assert resolve_codebooks([("a", states), ("b", states)]) == ({"qmap1": SIGNED, "qmap2": UNSIGNED}, {})


def test_no_codes_need_no_map(tmp_path: Path) -> None:
    states = sorted_of(tmp_path, {"exp_avg": torch.zeros(5), "state1": torch.zeros(5), "qmap1": torch.zeros(256)})
    assert resolve_codebooks([("a", states)]) == resolve_codebooks([]) == ({}, {})


def test_a_file_without_codes_beside_others_is_passed_over(tmp_path: Path) -> None:
    plain = sorted_of(tmp_path, {"state1": torch.zeros(5)})
    assert resolve_codebooks([("a", plain), ("b", quantized(tmp_path, qmap1=SIGNED))]) == ({"qmap1": SIGNED}, {})


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (None, "none"),
        (flipped(SIGNED), "values"),
        (flipped(SIGNED, bit=1), "another one"),
        (OTHER, "another one"),
        (Codebook(SIGNED.values[:255]), "255 values"),
    ],
)
def test_a_map_that_differs_between_ranks_or_is_malformed_is_refused(
    tmp_path: Path, damaged: Codebook | None, words: str, position: int
) -> None:
    files = [(f"{number}.pt", quantized(tmp_path, qmap1=OTHER, qmap2=UNSIGNED)) for number in range(3)]
    assert resolve_codebooks(files) == ({"qmap1": OTHER, "qmap2": UNSIGNED}, {})
    files = [(path, quantized(tmp_path, qmap1=SIGNED)) for path, _ in files]
    files[position] = (files[position][0], quantized(tmp_path, qmap1=damaged))
    resolved, problems = resolve_codebooks(files)
    assert resolved == {} and problems.keys() == {"qmap1"} and words in problems["qmap1"]
    if words != "another one":
        assert f"in {position}.pt" in problems["qmap1"]
        assert resolve_codebooks([(path, files[position][1]) for path, _ in files])[1].keys() == {"qmap1"}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (SIGNED.values, None),
        (UNSIGNED.values, None),
        (SIGNED.values[:-1], "255 values"),
        ((*SIGNED.values, 2.0), "257 values"),
        ((*SIGNED.values[:5], float("nan"), *SIGNED.values[6:]), "not finite"),
        ((*SIGNED.values[:-1], float("inf")), "not finite"),
        ((*SIGNED.values[:5], SIGNED.values[4], *SIGNED.values[6:]), "do not ascend"),
        ((*SIGNED.values[:-1], 1.5), "to 1.5"),
        ((-1.5, *SIGNED.values[1:]), "from -1.5"),
        (tuple(value + 1e-9 if value == 0.0 else value for value in SIGNED.values), "no code for zero"),
    ],
)
def test_a_map_is_usable_if_it_has_256_ascending_values_one_of_them_zero(
    values: tuple[float, ...], problem: str | None
) -> None:
    found = Codebook(values).problem
    assert found is problem is None or problem in str(found)


def test_the_code_of_zero_and_the_sign_are_those_of_bitsandbytes() -> None:
    assert [SIGNED.zero, UNSIGNED.zero] == [127, 0]
    assert [SIGNED.signed, UNSIGNED.signed] == [True, False]
    gaps = torch.tensor(SIGNED.values).diff()
    assert pytest.approx(float(gaps.max()) / 2, abs=1e-7) == SIGNED.bound


# --- notes ------------------------------------------------------------------------------------------------------


def test_guesses_and_words_that_met_nothing_are_told_of() -> None:
    kinds = {
        "exp_avg": SavedKind(ELEMENTWISE),
        "table": SavedKind(REPLICATED, why="the same values on all ranks"),
        "declared": SavedKind(REPLICATED),
        "left": SavedKind(FRESH),
        "odd": SavedKind(OPAQUE, why="odd"),
    }
    options = StateOptions({"declared": "replicated", "nobody": "replicated", "left": "fresh", "no one": "fresh"})
    (replicated,), (unmatched,) = notes_and_warnings(kinds, options)
    assert replicated == "optimizer state table was taken as replicated: the same values on all ranks"
    assert "no one, nobody, which" in unmatched
    assert "qmap1" not in unmatched


def test_words_about_scales_and_maps_meet_them() -> None:
    kinds = {"state1": SavedKind(ELEMENTWISE, block_numel=256)}
    options = StateOptions({"qmap1": "replicated", "qmap2": "replicated"})
    _, (note,) = notes_and_warnings(kinds, options)
    assert "named qmap2, which" in note
    options = StateOptions({"qmap1": "replicated"})
    assert notes_and_warnings(kinds, options) == ([], [])
    assert len(notes_and_warnings({"state1": SavedKind(ELEMENTWISE)}, options)[1]) == 1


def test_a_checkpoint_without_states_meets_no_word_and_says_nothing() -> None:
    assert notes_and_warnings({}, StateOptions({"mine": "replicated", "other": "fresh"})) == ([], [])
    assert notes_and_warnings({"exp_avg": SavedKind(ELEMENTWISE)}, DEFAULTS) == ([], [])


def test_shards_of_the_legacy_elastic_checkpoint_are_refused(tmp_path: Path) -> None:
    states = [{"exp_avg": torch.zeros(90), "step": 3}]
    file = written(tmp_path, {"optimizer_state_dict": {"base_optimizer_state": states}})
    with pytest.raises(UnsupportedError, match="legacy") as caught:
        index_shard(file, 0, StateOptions())
    assert caught.value.file == file.path


# --- saved groups -----------------------------------------------------------------------------------------------


def test_a_step_count_in_the_param_group_is_a_state_of_its_members() -> None:
    apex = {"step": 7, "bias_correction": True}
    assert with_group_step((), True, apex) == (("step", 7),)
    assert with_group_step((("z", 1.0), ("a", 2.0)), True, apex) == (("a", 2.0), ("step", 7), ("z", 1.0))
    assert with_group_step((), True, {"step": 7}) == ()  # of another optimizer it is a hyperparameter like others


@pytest.mark.parametrize(
    ("scalars", "has_states", "group"),
    [
        ((), False, {"step": 7, "bias_correction": True}),
        ((), True, {}),
        ((), True, {"step": None, "bias_correction": True}),
        ((), True, {"step": 7.5, "bias_correction": True}),
        ((("step", 3.0),), True, {"step": 7, "bias_correction": True}),
    ],
)
def test_a_step_count_that_belongs_to_no_state_is_none(
    scalars: tuple[tuple[str, float], ...], has_states: bool, group: dict[str, Any]
) -> None:
    assert with_group_step(scalars, has_states, group) == scalars


def test_saved_groups_lose_their_step_and_bitsandbytes_tells_its_weight_decay() -> None:
    groups = [{"lr": 0.1, "step": 7, "bias_correction": True}, {"lr": 0.2, "decoupled_weight_decay": False}]
    assert normal_groups(groups, is_bitsandbytes=False) == ({"lr": 0.1, "bias_correction": True}, groups[1])
    assert normal_groups(groups, is_bitsandbytes=True) == (
        {"lr": 0.1, "bias_correction": True, "decoupled_weight_decay": True},
        {"lr": 0.2, "decoupled_weight_decay": True},
    )
    assert groups[0]["step"] == 7
    assert normal_groups([{"step": 3}], is_bitsandbytes=False) == ({"step": 3},)


def test_groups_are_read_without_their_members(tmp_path: Path) -> None:
    param = parameter(3)
    optimizer = torch.optim.AdamW([("w", param)], lr=torch.tensor(0.25), capturable=False, foreach=False)
    file = written(tmp_path, optimizer.state_dict())
    (group,) = read_groups(file, file.tree["param_groups"])
    assert repr(group["lr"]) == repr(TensorValue("float32", (), (0.25,)))
    assert group["betas"] == (0.9, 0.999)
    assert not {"params", "param_names"} & set(group)


def test_dtypes_and_numbers_in_groups_are_those_of_the_optimizer_and_devices_no_ones(tmp_path: Path) -> None:
    """AnyPrecisionAdamW has dtypes among its hyperparameters, and Adam takes betas that are tensors."""
    mine = {
        "momentum_dtype": torch.bfloat16,
        "layout": torch.strided,
        "size": torch.Size([2]),
        "kind": "a",
        "numpy": np.dtype("<f4"),
    }
    more = {"betas": (torch.tensor(0.5), torch.tensor(0.25)), "of": {"a": [torch.float32, np.float32(1.5)]}}
    file = written(tmp_path, {"param_groups": [{**mine, **more, "device": torch.device("cuda", 1), "params": [0]}]})
    (group,) = read_groups(file, file.tree["param_groups"])
    assert group == {**mine, "betas": (0.5, 0.25), "of": {"a": [torch.float32, 1.5]}}
    assert not any(left_in_file(group))


def test_groups_of_trusted_pickles_are_read_in_the_same_way(tmp_path: Path) -> None:
    mine = {"numpy": np.dtype("<f4"), "class": np.float32, "scalar": np.float64(0.5), "array": np.ones(2)}
    torch.save({"param_groups": [{**mine, "device": torch.device("cuda", 1)}]}, tmp_path / "states.pt")
    file = open_pickled(str(tmp_path / "states.pt"), trust_pickle=True)
    (group,) = read_groups(file, file.tree["param_groups"])
    assert group == {**mine, "scalar": 0.5, "array": LeftInFile("array([1., 1.])")} and type(group["scalar"]) is float


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(17),
        (0.1, np.arange(2.0)),
        [torch.device("cpu"), 0.5],
        torch.tensor(0.5).to(torch.float8_e4m3fn),
        {"a": torch.ones(2).untyped_storage()},
    ],
)
def test_what_is_not_read_of_a_group_is_left_in_its_file(tmp_path: Path, value: Any) -> None:
    groups = []
    for name, more in ("a", []), ("b", [torch.ones(8)]):  # where tensors are in a file does not count
        file = written(tmp_path, {"more": more, "param_groups": [{"lr": 0.1, "mine": value}]}, name)
        groups.append(read_groups(file, file.tree["param_groups"]))
    assert groups[0] == groups[1] and repr(groups[0]) == repr(groups[1])
    assert any(left_in_file(groups[0]))


def test_a_dtype_that_this_torch_lacks_is_left_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, {"param_groups": [{"kind": torch.float8_e5m2fnuz}]})
    monkeypatch.delattr(torch, "float8_e5m2fnuz")
    assert read_groups(file, file.tree["param_groups"]) == ({"kind": LeftInFile("an object of torch.float8_e5m2fnuz")},)


# --- the shape of an unpartitioned parameter, from its states ---------------------------------------------------


def shape_of(folder: Path, optimizer: torch.optim.Optimizer) -> tuple[int, ...] | None:
    """What the states of the optimizer's only parameter tell of its shape."""
    file = written(folder, {"optimizer": stepped(optimizer)})
    state = index_unpartitioned(file, DEFAULTS)
    assert state is not None
    (states,) = state.states.values()
    return saved_shape(states)


OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "bnb Adam": bnb.optim.Adam,
    "bnb Lion": bnb.optim.Lion,
    "bnb AdEMAMix": bnb.optim.AdEMAMix,
    "bnb LAMB": bnb.optim.LAMB,
}


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 4), (1,), (1, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_tell_the_shape_of_their_parameter(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    assert shape_of(tmp_path, OPTIMIZERS[name]([parameter(*shape)])) == shape


@pytest.mark.parametrize("name", ["bnb.AdamW8bit", "AdEMAMix8bit", "Lion8bit"])
def test_8_bit_states_tell_the_shape_of_their_parameter(tmp_path: Path, name: str) -> None:
    cls = getattr(bnb.optim, name.rpartition(".")[2])
    assert shape_of(tmp_path, cls([parameter(70, 90)])) == (70, 90)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("bnb")])
def test_states_of_a_parameter_without_dimensions_tell_that_it_has_none(tmp_path: Path, name: str) -> None:
    assert shape_of(tmp_path, OPTIMIZERS[name]([parameter()])) == ()


def test_states_that_tell_nothing_tell_nothing(tmp_path: Path) -> None:
    assert saved_shape(StatesOfOne({})) is None
    assert saved_shape(sorted_of(tmp_path, {"step": torch.tensor(3.0), "n": 4})) is None
    assert saved_shape(sorted_of(tmp_path, {"mine": torch.zeros(3, 4), "step": 3})) == (3, 4)


def test_of_two_rows_the_single_one_tells_the_shape(tmp_path: Path) -> None:
    assert saved_shape(sorted_of(tmp_path, {"state1": torch.zeros(2, 5), "state2": torch.zeros(5)})) == (5,)
    assert saved_shape(sorted_of(tmp_path, {"mine": torch.zeros(7), "exp_avg": torch.zeros(5)})) == (5,)


@pytest.mark.parametrize("name", ["fp32", "buffer", "frozen"])
def test_a_state_of_a_name_of_our_own_is_not_understood(tmp_path: Path, name: str) -> None:
    states = sorted_of(tmp_path, {name: torch.zeros(4), "m": torch.zeros(4)})
    assert set(states.tensors) == {"m"}
    assert set(states.opaque) == {name}


def test_a_hyperparameter_without_a_name_is_refused(tmp_path: Path) -> None:
    torch.save({"groups": [{"lr": 0.1, 5: 1.0}]}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    with pytest.raises(DamagedError, match="no hyperparameter of any optimizer") as caught:
        read_groups(file, file.tree["groups"])
    assert caught.value.file == str(tmp_path / "file.pt")
