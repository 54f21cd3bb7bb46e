"""What kind each saved optimizer state is, told from all ranks at once; what stays uncertain is opaque."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.state_kinds import ELEMENTWISE, REPLICATED, TOUCHED, StateOptions
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.classification import (
    DAMAGED,
    FRESH,
    OPAQUE,
    UNKNOWN_LENGTHS,
    Lengths,
    RankStates,
    SavedKind,
    classify,
    compare_lengths,
)
from elastic_ckpt.formats.saved_states import ELEMENTWISE_NAMES, Digest, StatesOfOne
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

Shape = tuple[int, ...]
#: The same bytes, and ascending: what every rank has of a quantization map.
TABLE = Digest(7, ascending=True)
SAME = Digest(8, ascending=False)
ZEROS = Digest(10, ascending=False, constant=True)
PLAIN = SavedKind(ELEMENTWISE)
N = 1000


@dataclass(frozen=True)
class Saved:
    """A saved tensor, as far as classification looks at it, and what is known of its values."""

    shape: Shape
    dtype: str = "float32"
    digest: Digest | None = None


def rank(numel: int, states: Mapping[str, Saved], number: int = 0, touched: int = -1) -> RankStates:
    digests = {key: tensor.digest for key, tensor in states.items() if tensor.digest is not None}
    tensors = {key: TensorRef(tensor.dtype, tensor.shape, (), 0) for key, tensor in states.items()}
    return RankStates(f"/ckpt/rank{number}.pt", (numel,), touched, StatesOfOne(tensors, digests=digests))


def ranks(numel: int, *each: Mapping[str, Saved]) -> list[RankStates]:
    return [rank(numel, states, number) for number, states in enumerate(each)]


def said(max_numel: int = 0, **schema: str) -> StateOptions:
    """The user's word, as ``"states"`` has it."""
    return StateOptions(schema, max_numel)


def kind_of(state: Saved, options: StateOptions | None = None, numel: int = N, dp: int = 2, key: str = "mine") -> Any:
    """The kind of one state that all ranks saved alike."""
    return classify(ranks(numel, *[{key: state}] * dp), options or said())[key]


def refused(held: Sequence[RankStates], options: StateOptions, key: str, word: str) -> MismatchError:
    with pytest.raises(MismatchError, match=f"'{key}' is not a state of the kind \"{word}\"") as caught:
        classify(held, options)
    error = caught.value
    assert error.parameter == key
    assert error.file == held[0].path
    assert f"{word} state" in str(error.expected)
    assert str(held[0].tensors[key].shape) in str(error.found)
    assert held[0].tensors[key].dtype in str(error.found)
    assert f'"{key}"' in str(error.remedy)
    assert '"states"' in str(error.remedy)
    return error


# --- by shape ---------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5000),
    st.integers(1, 4),
    st.sampled_from([0, 2, 3, 8]),
    st.sampled_from(["exp_avg", "state1", "mine"]),
)
def test_a_tensor_as_long_as_the_partition_is_elementwise(numel: int, dp: int, rows: int, key: str) -> None:
    shape = (rows, numel) if rows else (numel,)
    assert kind_of(Saved(shape), numel=numel, dp=dp, key=key) == SavedKind(ELEMENTWISE, planes=rows or 1)


def test_partitions_may_be_of_different_lengths_on_different_ranks() -> None:
    held = [rank(5, {"mine": Saved((2, 5))}), rank(7, {"mine": Saved((2, 7))})]
    assert classify(held, said()) == {"mine": SavedKind(ELEMENTWISE, planes=2)}


@pytest.mark.parametrize("shape", [(N, 2), (2, 2, N), (N, N + 1), (), (N - 1,), (N + 1,), (2 * N,)])
@pytest.mark.parametrize("key", ["mine", "exp_avg"])
def test_a_tensor_of_another_shape_is_opaque(shape: Shape, key: str) -> None:
    kind = kind_of(Saved(shape), key=key)
    assert kind.kind == OPAQUE
    assert str(shape) in kind.why
    assert f"partition of {N}" in kind.why
    assert "float32" in kind.why


@pytest.mark.parametrize("other", [(N, 2), (2, N), (3, N)])
def test_a_tensor_that_is_elementwise_on_some_ranks_alone_is_opaque(other: Shape) -> None:
    for shapes in ([(N,), other], [other, (N,)]):
        kinds = classify(ranks(N, *[{"mine": Saved(shape, digest=SAME)} for shape in shapes]), said())
        assert kinds["mine"].kind == OPAQUE


def test_every_state_is_classified_on_its_own_and_in_order() -> None:
    states = {"exp_avg": Saved((N,)), "table": Saved((7,), digest=SAME), "two": Saved((2, N)), "odd": Saved((3,))}
    kinds = classify(ranks(N, states, states), said())
    assert {key: kind.kind for key, kind in kinds.items()} == {
        "exp_avg": ELEMENTWISE,
        "table": REPLICATED,
        "two": ELEMENTWISE,
        "odd": OPAQUE,
    }
    assert list(kinds) == list(states)


def test_no_states_are_no_kinds() -> None:
    assert classify(ranks(N, {}, {}), said()) == {}


@pytest.mark.parametrize("digest", [TABLE, SAME])
@pytest.mark.parametrize("shape", [(256,), (3, 5), ()])
def test_a_tensor_of_the_same_values_on_all_ranks_is_replicated_and_the_guess_is_told(
    shape: Shape, digest: Digest
) -> None:
    assert kind_of(Saved(shape, digest=digest)) == SavedKind(REPLICATED, why="the same values on all ranks")
    assert kind_of(Saved(shape, digest=digest), dp=5).kind == REPLICATED


@pytest.mark.parametrize(
    "digests", [(SAME, TABLE), (SAME, SAME, TABLE), (SAME, None), (None, SAME), (None, None), (SAME,), (TABLE,)]
)
def test_a_short_tensor_that_differs_or_that_only_one_rank_saved_is_opaque(digests: Sequence[Digest | None]) -> None:
    held = ranks(N, *[{"mine": Saved((7,), digest=digest)} for digest in digests])
    assert classify(held, said())["mine"].kind == OPAQUE


def test_a_short_tensor_of_another_shape_on_another_rank_is_opaque() -> None:
    held = ranks(N, {"mine": Saved((7,), digest=SAME)}, {"mine": Saved((8,), digest=SAME)})
    assert classify(held, said())["mine"].kind == OPAQUE
    assert classify(held, said(max_numel=100))["mine"].kind == OPAQUE


@pytest.mark.parametrize("key", sorted(ELEMENTWISE_NAMES))
def test_a_known_elementwise_state_of_a_wrong_length_is_never_guessed_to_be_replicated(key: str) -> None:
    kind = kind_of(Saved((256,), digest=SAME), said(max_numel=1 << 20), key=key)
    assert kind.kind == OPAQUE


@pytest.mark.parametrize("codes", ["uint8", "int8"])
@pytest.mark.parametrize("where", ["q", "mine"])
def test_beside_8_bit_codes_of_an_unknown_optimizer_a_short_tensor_is_opaque(codes: str, where: str) -> None:
    """The same scales on all ranks may be chance: right after the first step of a tiny model, or all zeros."""
    states = {"q": Saved((N,), codes), "mine": Saved((4,), digest=SAME)}
    kinds = classify(ranks(N, *[dict(sorted(states.items(), reverse=where == "q"))] * 2), said())
    assert kinds["q"] == PLAIN
    assert kinds["mine"].kind == OPAQUE
    assert "scales" in kinds["mine"].why


# --- a table as long as the partition ---------------------------------------------------------------------------


def test_a_table_of_256_values_beside_a_partition_of_256_elements_is_not_cut() -> None:
    kind = kind_of(Saved((256,), digest=TABLE), numel=256)
    assert kind.kind == OPAQUE
    assert "same ascending values on every rank" in kind.why


@pytest.mark.parametrize("digests", [(TABLE, Digest(9, ascending=True)), (TABLE, None), (None, None), (ZEROS, ZEROS)])
def test_other_values_as_long_as_the_partition_are_elementwise(digests: Sequence[Digest | None]) -> None:
    held = ranks(256, *[{"mine": Saved((256,), digest=digest)} for digest in digests])
    assert classify(held, said()) == {"mine": PLAIN}


def test_the_same_values_as_long_as_the_partition_may_be_a_table() -> None:
    kind = kind_of(Saved((256,), digest=SAME), numel=256)
    assert kind.kind == OPAQUE
    assert "yet with the same values on every rank" in kind.why
    assert kind_of(Saved((2,), digest=SAME), numel=2) == PLAIN  # few values are the same by chance
    assert kind_of(Saved((256,), digest=SAME), numel=256, dp=1) == PLAIN
    assert kind_of(Saved((256,), digest=SAME), numel=256, key="exp_avg") == PLAIN


def test_ascending_values_of_a_known_elementwise_state_are_chance() -> None:
    assert kind_of(Saved((2,), digest=TABLE), numel=2, key="exp_avg") == PLAIN


def test_ascending_values_of_a_single_rank_tell_nothing() -> None:
    assert kind_of(Saved((256,), digest=TABLE), numel=256, dp=1) == PLAIN


def test_a_quantization_map_is_known_by_its_name_whatever_the_length_of_the_partition() -> None:
    for numel, dp in ((256, 2), (256, 1), (N, 2), (N, 1)):
        assert kind_of(Saved((256,), digest=TABLE), numel=numel, dp=dp, key="qmap1") == SavedKind(REPLICATED)


@pytest.mark.parametrize("dp", [1, 2])
def test_8_bit_states_of_256_elements_keep_codes_and_map_apart(dp: int) -> None:
    states = {
        "state1": Saved((256,), "uint8"),
        "qmap1": Saved((256,), digest=TABLE),
        "absmax1": Saved((1,)),
    }
    assert classify(ranks(256, *[states] * dp), said()) == {"state1": SavedKind(ELEMENTWISE, block_numel=256)}


# --- bitsandbytes -----------------------------------------------------------------------------------------------


def quantized(numel: int, block: int, rows: int = 1, number: int = 1, codes: str = "uint8") -> dict[str, Saved]:
    blocks = -(-numel // block)
    many = (rows,) if rows > 1 else ()
    return {
        f"state{number}": Saved((*many, numel), codes),
        f"qmap{number}": Saved((256,), digest=TABLE),
        f"absmax{number}": Saved((*many, blocks)),
    }


@given(
    st.integers(257, 20000), st.sampled_from([256, 2048]), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2])
)
def test_codes_with_as_many_scales_as_a_row_has_blocks_are_quantized(
    numel: int, block: int, rows: int, dp: int, number: int
) -> None:
    states = quantized(numel, block, rows, number)
    expected = {f"state{number}": SavedKind(ELEMENTWISE, planes=rows, block_numel=block)}
    assert classify(ranks(numel, *[states] * dp), said()) == expected


@pytest.mark.parametrize("numel", [1, 255, 256])
def test_a_single_block_is_read_alike_whatever_its_size(numel: int) -> None:
    assert classify(ranks(numel, quantized(numel, 2048)), said())["state1"] == SavedKind(ELEMENTWISE, block_numel=256)


def test_scales_in_one_row_belong_to_codes_in_several() -> None:
    states = {**quantized(N, 256, rows=2), "absmax1": Saved((8,))}
    assert classify(ranks(N, states), said()) == {"state1": SavedKind(ELEMENTWISE, planes=2, block_numel=256)}


def test_signed_codes_are_none_of_bitsandbytes() -> None:
    kinds = classify(ranks(N, quantized(N, 256, codes="int8")), said())
    assert kinds["state1"] == SavedKind(ELEMENTWISE)
    assert kinds["absmax1"].kind == OPAQUE


def test_equal_values_that_are_all_one_value_are_no_evidence_of_a_replicated_state() -> None:
    states = {"exp_avg": Saved((N,)), "scale": Saved((10,))}
    for constant, expected in ((True, OPAQUE), (False, REPLICATED)):
        states["scale"] = Saved((10,), digest=Digest(7, False, constant))
        held = ranks(N, states, states)
        assert classify(held, said())["scale"].kind == expected


def test_both_states_of_an_8_bit_adam_are_quantized_and_nothing_else_is_left() -> None:
    states = {**quantized(N, 256), **quantized(N, 256, number=2), "unorm_vec": Saved((1,))}
    quantized_kind = SavedKind(ELEMENTWISE, block_numel=256)
    kinds = classify(ranks(N, states, states), said())
    assert kinds == {"state1": quantized_kind, "state2": quantized_kind, "unorm_vec": SavedKind(REPLICATED)}


def test_one_quantized_state_does_not_speak_for_the_other() -> None:
    states = {**quantized(N, 256), "state2": Saved((N,))}
    assert classify(ranks(N, states, states), said())["state2"] == PLAIN


BLOCKS = -(-N // 256)


@pytest.mark.parametrize(
    "scales",
    [
        None,
        Saved((BLOCKS - 1,)),
        Saved((BLOCKS + 1,)),
        Saved((0,)),
        Saved((2, BLOCKS)),
        Saved((BLOCKS,), "float16"),
        Saved((BLOCKS,), "uint8"),
    ],
)
@pytest.mark.parametrize("where", ["everywhere", "first", "last"])
def test_codes_whose_scales_do_not_fit_are_damaged(scales: Saved | None, where: str) -> None:
    good = quantized(N, 256)
    bad = {key: value for key, value in {**good, "absmax1": scales}.items() if value is not None}
    each = {"everywhere": (bad, bad), "first": (bad, good), "last": (good, bad)}[where]
    (kind,) = classify(ranks(N, *each), said()).values()
    assert kind.kind == DAMAGED
    assert str(N) in kind.why
    assert ("on another rank" in kind.why) == (where != "everywhere")


def test_scales_of_blocks_of_different_sizes_on_two_ranks_are_damaged() -> None:
    held = ranks(N, quantized(N, 256), quantized(N, 2048))
    assert classify(held, said())["state1"].kind == DAMAGED


@pytest.mark.parametrize("shape", [(N - 1,), (N, 1), (2, 2, N)])
@pytest.mark.parametrize("where", [0, 1])
def test_codes_of_another_length_than_the_partition_are_damaged(shape: Shape, where: int) -> None:
    each = [quantized(N, 256), quantized(N, 256)]
    each[where]["state1"] = Saved(shape, "uint8")
    (kind,) = classify(ranks(N, *each), said()).values()
    assert kind.kind == DAMAGED


def test_codes_with_more_rows_on_one_rank_are_damaged() -> None:
    held = ranks(N, quantized(N, 256, rows=2), quantized(N, 256, rows=3))
    assert classify(held, said())["state1"].kind == DAMAGED


def test_scales_that_do_not_divide_into_rows_are_damaged() -> None:
    states = {**quantized(N, 256, rows=2), "absmax1": Saved((2 * BLOCKS - 1,))}
    assert classify(ranks(N, states), said())["state1"].kind == DAMAGED
    states["absmax1"] = Saved((2 * BLOCKS + 1,))
    assert classify(ranks(N, states), said())["state1"].kind == DAMAGED


def test_tensor_wise_quantization_of_old_versions_is_opaque() -> None:
    states = {
        "state1": Saved((N,), "uint8"),
        "qmap1": Saved((256,), digest=TABLE),
        "max1": Saved((1,)),
        "new_max1": Saved((1,)),
    }
    kinds = classify(ranks(N, states, states), said())
    assert kinds["state1"].kind == OPAQUE
    assert "block_wise=False" in kinds["state1"].why
    assert kind_of(Saved((N - 1,), "uint8"), key="state1").kind == DAMAGED
    assert kinds["max1"] == kinds["new_max1"] == SavedKind(REPLICATED)


def test_an_empty_state_is_said_to_be_empty() -> None:
    for options in (said(), said(max_numel=256)):
        assert kind_of(Saved((0,)), options) == SavedKind(REPLICATED, why="it has no elements")


@pytest.mark.parametrize("max_numel", [BLOCKS, 1 << 20])
def test_scales_are_scales_before_they_are_small(max_numel: int) -> None:
    held = ranks(N, quantized(N, 256), quantized(N, 256))
    assert classify(held, said(max_numel=max_numel)) == {"state1": SavedKind(ELEMENTWISE, block_numel=256)}
    lost = {key: value for key, value in quantized(N, 256).items() if key != "state1"}
    assert classify(ranks(N, {**lost, "q": Saved((N,), "uint8")}), said())["absmax1"].kind == OPAQUE


# --- the user's word --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(N,), (7,), (N, 2), (2, N)])
@pytest.mark.parametrize("key", ["mine", "exp_avg", "qmap1"])
def test_a_state_that_the_user_wants_fresh_is_left_whatever_it_is(shape: Shape, key: str) -> None:
    options = StateOptions(schema={key: "fresh"})
    for dp in (1, 2):
        assert kind_of(Saved(shape, digest=SAME), options, key=key, dp=dp) == SavedKind(FRESH)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_state_that_the_user_calls_elementwise_is(rows: int) -> None:
    shape = (N,) if rows == 1 else (rows, N)
    for digest in (None, SAME):
        assert kind_of(Saved(shape, digest=digest), said(mine="elementwise")) == SavedKind(ELEMENTWISE, planes=rows)


def test_the_users_word_settles_what_the_shape_leaves_open() -> None:
    table = Saved((256,), digest=TABLE)
    assert kind_of(table, numel=256).kind == OPAQUE
    assert kind_of(table, said(mine="replicated"), numel=256) == SavedKind(REPLICATED)
    assert kind_of(table, said(mine="fresh"), numel=256) == SavedKind(FRESH)


@pytest.mark.parametrize("digest", [None, SAME, TABLE])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_state_that_the_user_calls_replicated_is_and_that_is_no_guess(digest: Digest | None, dp: int) -> None:
    for shape in ((7,), (3, 5), (2 * N,)):
        assert kind_of(Saved(shape, digest=digest), said(mine="replicated"), dp=dp) == SavedKind(REPLICATED)


def test_the_users_word_comes_before_the_default_list() -> None:
    state = {"qmap1": Saved((N,), digest=SAME)}
    assert classify(ranks(N, state, state), said(qmap1="elementwise")) == {"qmap1": PLAIN}
    assert classify(ranks(N, state, state), said(qmap1="fresh")) == {"qmap1": SavedKind(FRESH)}


@pytest.mark.parametrize("shape", [(N - 1,), (N, 2), (2, 2, N), (256,)])
def test_a_state_that_is_no_elementwise_one_is_not_called_so(shape: Shape) -> None:
    state = {"mine": Saved(shape, digest=SAME)}
    refused(ranks(N, state, state), said(mine="elementwise"), "mine", "elementwise")


def test_a_state_that_is_elementwise_on_one_rank_alone_is_not_called_so() -> None:
    for other in ((N - 1,), (2, N)):
        for shapes in (((N,), other), (other, (N,))):
            held = ranks(N, *[{"mine": Saved(shape)} for shape in shapes])
            refused(held, said(mine="elementwise"), "mine", "elementwise")


@pytest.mark.parametrize("key", ["mine", "qmap1", "exp_avg"])
def test_a_table_that_all_ranks_share_is_not_called_elementwise(key: str) -> None:
    state = {key: Saved((256,), digest=TABLE)}
    error = refused(ranks(256, state, state), said(**{key: "elementwise"}), key, "elementwise")
    assert "quantization map" in str(error.found)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_a_known_elementwise_state_is_not_called_replicated(dp: int, shape: Shape) -> None:
    for digest in (None, SAME):
        state = {"exp_avg": Saved(shape, digest=digest)}
        error = refused(ranks(N, *[state] * dp), said(exp_avg="replicated"), "exp_avg", "replicated")
        assert f"as long as its partition ({N} elements)" in str(error.found)


@pytest.mark.parametrize("digests", [(SAME, TABLE), (None, None), (SAME, None)])
@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_a_state_as_long_as_its_partition_that_differs_by_rank_is_not_called_replicated(
    digests: Sequence[Digest | None], shape: Shape
) -> None:
    held = ranks(N, *[{"mine": Saved(shape, digest=digest)} for digest in digests])
    error = refused(held, said(mine="replicated"), "mine", "replicated")
    assert "of other values on other ranks" in str(error.found)


@pytest.mark.parametrize("digest", [SAME, TABLE, ZEROS])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_a_table_that_is_as_long_as_its_partition_is_replicated_where_the_user_says_so(digest: Digest, dp: int) -> None:
    state = {"mine": Saved((256,), digest=digest)}
    assert classify(ranks(256, *[state] * dp), said(mine="replicated")) == {"mine": SavedKind(REPLICATED)}


# --- what all partitions tell together -----------------------------------------------------------------------------


def of_all(numels: Sequence[int], length: int | None, dp: int, key: str = "mine") -> list[list[RankStates]]:
    """Flat tensors with partitions of these sizes, and a state as long as each, or of one ``length``, on all ranks."""
    states = [{key: Saved((length or numel,), digest=SAME if length else Digest(numel, False))} for numel in numels]
    return [ranks(numel, *[state] * dp) for numel, state in zip(numels, states, strict=True)]


@given(
    st.lists(st.integers(16, 400), min_size=2, max_size=5).filter(lambda numels: len(set(numels)) > 1),
    st.integers(1, 3),
    st.sampled_from(["listed", "threshold", "unlisted"]),
)
def test_a_table_is_never_cut_where_a_partition_happens_to_be_as_long(numels: list[int], dp: int, word: str) -> None:
    """Whichever flat tensor is as long as the table, and at every data-parallel degree."""
    options = {"listed": said(mine="replicated"), "threshold": said(max_numel=400), "unlisted": said()}[word]
    flats = of_all(numels, numels[0], dp)
    lengths = compare_lengths(chain.from_iterable(flats))
    kinds = {classify(flat, options, lengths=lengths)["mine"].kind for flat in flats}
    assert kinds == {OPAQUE if word == "unlisted" and dp == 1 else REPLICATED}


@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=5).filter(lambda numels: len(set(numels)) > 1),
    st.integers(1, 3),
    st.sampled_from([0, 100, 400]),
)
def test_a_state_that_is_as_long_as_each_of_several_lengths_is_elementwise(
    numels: list[int], dp: int, most: int
) -> None:
    flats = of_all(numels, None, dp)
    lengths = compare_lengths(chain.from_iterable(flats))
    for flat in flats:
        assert classify(flat, said(max_numel=most), lengths=lengths) == {"mine": PLAIN}
        with pytest.raises(MismatchError, match="not a state of the kind"):
            classify(flat, said(mine="replicated"), lengths=lengths)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_small_state_as_long_as_all_partitions_may_be_either(dp: int) -> None:
    """All of one length: only the user knows."""
    for digest in (SAME, ZEROS) if dp > 1 else (SAME, ZEROS, None):
        flat = ranks(256, *[{"mine": Saved((256,), digest=digest)}] * dp)
        lengths = compare_lengths([*flat, *flat])
        assert classify(flat, said(max_numel=256), lengths=lengths)["mine"].kind == OPAQUE
        assert classify(flat, said(max_numel=256, mine="elementwise"), lengths=lengths) == {"mine": PLAIN}
        assert classify(flat, said(max_numel=256, mine="replicated"), lengths=lengths)["mine"].kind == REPLICATED


def test_lengths_tell_nothing_of_known_elementwise_states() -> None:
    for length in (None, 256):
        assert compare_lengths(chain.from_iterable(of_all([256, 300], length, 1, key="exp_avg"))) == UNKNOWN_LENGTHS


def test_a_state_of_different_shapes_is_not_called_replicated() -> None:
    held = ranks(N, {"mine": Saved((7,))}, {"mine": Saved((8,))})
    refused(held, said(mine="replicated"), "mine", "replicated")


def test_the_default_list_alone_refuses_no_state_for_its_length() -> None:
    for digest in (None, SAME):
        assert kind_of(Saved((1,), digest=digest), numel=1, key="unorm_vec") == SavedKind(REPLICATED)


@pytest.mark.parametrize("word", ["elementwise", "fresh"])
def test_a_quantization_map_beside_its_codes_is_called_nothing_but_replicated(word: str) -> None:
    held = ranks(N, quantized(N, 256), quantized(N, 256))
    error = refused(held, said(qmap1=word), "qmap1", word)
    assert "a quantization map" in str(error.found)
    for options in (said(qmap1="replicated"), said()):
        assert classify(held, options) == {"state1": SavedKind(ELEMENTWISE, block_numel=256)}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("word", ["elementwise", "replicated", "fresh"])
def test_scales_beside_their_codes_are_called_nothing_at_all(number: int, word: str) -> None:
    held = ranks(N, quantized(N, 256, number=number), quantized(N, 256, number=number))
    key = f"absmax{number}"
    error = refused(held, said(**{key: word}), key, word)
    assert "scales of 8-bit blocks" in str(error.found)


def test_scales_are_not_put_into_the_list_of_replicated_states() -> None:
    held = ranks(N, quantized(N, 256), quantized(N, 256))
    error = refused(held, said(absmax1="replicated"), "absmax1", "replicated")
    assert "scales of 8-bit blocks" in str(error.found)
    classify(held, said(absmax2="replicated"))  # there is no such state


def test_codes_are_not_called_replicated() -> None:
    held = ranks(N, quantized(N, 256), quantized(N, 256))
    refused(held, said(state1="replicated"), "state1", "replicated")


CODED = {"state1": SavedKind(ELEMENTWISE, block_numel=256)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (said(state1="elementwise"), CODED),
        (said(state1="elementwise", max_numel=1000), CODED),
        (said(state1="fresh"), {"state1": SavedKind(FRESH)}),
    ],
)
def test_a_true_word_on_codes_leaves_them_with_their_scales(
    options: StateOptions, expected: Mapping[str, SavedKind]
) -> None:
    assert classify(ranks(N, quantized(N, 256), quantized(N, 256)), options) == expected


def test_the_word_on_one_state_leaves_the_others_alone() -> None:
    states = {"exp_avg": Saved((N,)), "mine": Saved((7,), digest=SAME)}
    kinds = classify(ranks(N, states, states), said(exp_avg="fresh", nobody="replicated"))
    assert kinds == {"exp_avg": SavedKind(FRESH), "mine": SavedKind(REPLICATED, why="the same values on all ranks")}


# --- a threshold -------------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 60), st.integers(1, 3))
def test_small_unknown_tensors_are_replicated_up_to_the_size_that_the_user_gave(numel: int, most: int, dp: int) -> None:
    held = ranks(N, *[{"mine": Saved((numel,), digest=Digest(number, ascending=False))} for number in range(dp)])
    kind = classify(held, said(max_numel=most))["mine"]
    expected = SavedKind(REPLICATED, why=f'"numel<={most}" under "states"') if numel <= most else None
    assert kind == expected or (expected is None and kind.kind == OPAQUE)


def test_the_size_counts_all_elements() -> None:
    for most, expected in ((14, OPAQUE), (15, REPLICATED)):
        assert kind_of(Saved((3, 5)), said(max_numel=most)).kind == expected


@pytest.mark.parametrize("shape", [(N,), (2, N)])
@pytest.mark.parametrize("key", ["mine", "exp_avg"])
def test_a_state_as_long_as_its_partition_that_differs_by_rank_is_elementwise_though_small(
    shape: Shape, key: str
) -> None:
    held = ranks(N, *[{key: Saved(shape, digest=digest)} for digest in (SAME, TABLE)])
    assert classify(held, said(max_numel=1 << 20))[key].kind == ELEMENTWISE


# --- momentum of whole parameters -------------------------------------------------------------------------------


def muons(*each: tuple[int, int], key: str = "momentum_buffer", partition: int = N) -> list[RankStates]:
    """(length of the buffer, elements of the parameters that the rank touches)."""
    return [
        rank(partition, {key: Saved((length,), "bfloat16")}, number, touched)
        for number, (length, touched) in enumerate(each)
    ]


def test_a_momentum_buffer_of_all_parameters_that_a_rank_touches_is_kept_whole() -> None:
    assert classify(muons((1500, 1500), (1200, 1200)), said()) == {"momentum_buffer": SavedKind(TOUCHED)}
    assert classify(muons((900, 900)), said()) == {"momentum_buffer": SavedKind(TOUCHED)}
    assert classify(muons((1500, 1500), (N, N)), said()) == {"momentum_buffer": SavedKind(TOUCHED)}


def test_a_momentum_buffer_of_the_partition_is_elementwise() -> None:
    assert classify(muons((N, 1500), (N, 1200)), said()) == {"momentum_buffer": PLAIN}
    assert classify(muons((N, N), (N, N)), said()) == {"momentum_buffer": PLAIN}


@pytest.mark.parametrize("each", [[(1500, 1500), (1200, 1100)], [(1500, 1400), (1200, 1200)], [(1500, -1)]])
def test_a_momentum_buffer_of_another_length_is_opaque(each: list[tuple[int, int]]) -> None:
    assert classify(muons(*each), said())["momentum_buffer"].kind == OPAQUE


def test_no_other_state_is_kept_for_whole_parameters() -> None:
    for key, kind in {"exp_avg": DAMAGED, "mine": OPAQUE}.items():  # of Adam's, the shape is known
        assert classify(muons((1500, 1500), (1200, 1200), key=key), said())[key].kind == kind


def test_the_users_word_comes_before_whole_parameters() -> None:
    held = muons((1500, 1500), (1200, 1200))
    assert classify(held, said(momentum_buffer="fresh")) == {"momentum_buffer": SavedKind(FRESH)}
    refused(held, said(momentum_buffer="elementwise"), "momentum_buffer", "elementwise")
    refused(held, said(momentum_buffer="replicated"), "momentum_buffer", "replicated")


def test_a_square_matrix_of_a_partition_is_not_cut_by_columns() -> None:
    assert kind_of(Saved((N, N))).kind == kind_of(Saved((1, 1)), numel=1, dp=1).kind == OPAQUE
    assert kind_of(Saved((2, N))) == SavedKind(ELEMENTWISE, 2)


def test_a_state_that_is_a_tensor_on_some_ranks_alone_is_opaque() -> None:
    for each in ({"mine": Saved((N,))}, {}), ({}, {"mine": Saved((N,))}):
        assert classify(ranks(N, *each), said())["mine"].kind == OPAQUE


class Counted(dict[str, TensorRef]):
    """Tensors that count how often all of them are looked at."""

    walks = 0

    def values(self) -> Any:
        Counted.walks += 1
        return super().values()


@pytest.mark.parametrize("count", [1, 50])
def test_no_state_is_compared_with_all_others(count: int) -> None:
    states = {f"odd{number}": Saved((7,)) for number in range(count)}
    one = rank(N, states)
    one = one._replace(states=replace(one.states, tensors=Counted(one.tensors)))
    Counted.walks = 0
    assert len(classify([one], said())) == count
    assert Counted.walks == 1


class CountedSet(frozenset[str]):
    """A set that counts how often another is made of it."""

    copies = 0

    def __ror__(self, other: Any) -> Any:
        CountedSet.copies += 1
        return frozenset(other).union(self)


def test_what_all_partitions_tell_is_not_copied_for_each_state() -> None:
    names = [f"odd{number}" for number in range(50)]
    lengths = Lengths(elementwise=CountedSet(names))
    CountedSet.copies = 0
    assert classify([rank(N, {name: Saved((N,)) for name in names})], said(), lengths=lengths) == dict.fromkeys(
        names, PLAIN
    )
    assert CountedSet.copies == 0
