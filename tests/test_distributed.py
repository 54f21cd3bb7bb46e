"""What ranks send each other comes out as it went in. Collectives themselves are tested on real processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt import distributed
from elastic_ckpt.core.lacking import Lacking, Wanted
from elastic_ckpt.distributed import all_gather, common_nbytes, deterministic, inline_nbytes, pack, together, unpack
from elastic_ckpt.errors import CommunicationError, DamagedError, ElasticCkptError, UnforeseenError
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
RARE = (torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*DTYPES, *RARE], ids=str)
def test_tensors_of_every_dtype_are_sent_bit_by_bit(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype != torch.bool else raw > 20
    sent = unpack(pack({"state": [tensor, ("step", 4)]}))["state"]
    assert sent[0].dtype == dtype and sent[1] == ("step", 4)
    assert torch.equal(sent[0].view(torch.uint8), tensor.view(torch.uint8))


def test_views_are_sent_with_their_shape_and_values() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()[1:]
    assert torch.equal(unpack(pack(tensor)), tensor)


def test_values_are_sent_where_a_framework_has_torch_load_and_save_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DLRover's flash checkpoint during a load."""
    for name in ("load", "save"):
        monkeypatch.delattr(torch, name)
    assert unpack(pack({"step": 4})) == {"step": 4}


def test_a_process_alone_shares_with_itself() -> None:
    assert all_gather("share", lambda: {"a": 1}) == [{"a": 1}]


def sent_nbytes(nbytes: list[int], common: int) -> int:
    """What every rank receives, if so much of each message goes in one collective."""
    return len(nbytes) * common + sum(max(count - common, 0) for count in nbytes)


@given(st.lists(st.integers(0, 100) | st.integers(0, 1 << 24), min_size=1, max_size=40))
def test_padding_does_not_multiply_long_messages(nbytes: list[int]) -> None:
    common = common_nbytes(nbytes)
    assert common in {0, *nbytes}

    def cost(common: int) -> int:
        rounds = (common > 0) + sum(count > common for count in nbytes)
        return sent_nbytes(nbytes, common) + rounds * (1 << 18)

    assert cost(common) == min(cost(choice) for choice in {0, *nbytes})


@pytest.mark.parametrize(("nbytes", "common"), [
    ([0] * 9, 0),
    ([5000] * 8, 5000),
    ([5000, 4000], 5000),
    ([0, 5000, 0, 0], 0),
    ([300] * 4095 + [1 << 20], 300),  # one rank has read what all lack
    ([1 << 28, 1 << 20], 0),
])  # fmt: skip
def test_most_of_all_messages_travel_together(nbytes: list[int], common: int) -> None:
    assert common_nbytes(nbytes) == common
    assert sent_nbytes(nbytes, common) <= 2 * sum(nbytes)


@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 4096), (256, 4096), (1024, 1024), (4096, 256), (1 << 16, 256)])
def test_heads_of_messages_are_short_in_large_jobs(ranks: int, nbytes: int) -> None:
    assert inline_nbytes(ranks) == nbytes


def test_what_all_ranks_fail_in_alike_is_no_single_ranks_failure() -> None:
    with (
        pytest.raises(ElasticCkptError, match=r"failed to look: KeyError: 'nobody thought of it'") as caught,
        deterministic("look"),
    ):
        raise KeyError("nobody thought of it")
    assert caught.value.rank is None
    assert isinstance(caught.value.__cause__, KeyError)
    torn = DamagedError("torn", file="a.pt")
    with pytest.raises(DamagedError) as foreseen, deterministic("look"):
        raise torn
    assert foreseen.value is torn and torn.rank is None


def test_a_process_alone_has_nobody_to_tell_of_its_failure() -> None:
    with pytest.raises(KeyError), together("look"):
        raise KeyError("nobody thought of it")


def test_what_a_rank_found_by_itself_is_no_failed_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.time, "sleep", lambda _: None)
    try:
        distributed.begin_load()
        with pytest.raises(CommunicationError, match=r"^the file is cut") as caught, together("look", agrees=False):
            raise DamagedError("the file is cut", "a.pt", remedy="copy it again")
        assert caught.value.file == "a.pt" and "copy it again" in str(caught.value)
        assert "died or hangs" not in str(caught.value)
    finally:
        torch.distributed.destroy_process_group()


def test_a_load_is_not_told_of_what_failed_in_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)  # and the other rank waits
    monkeypatch.setattr(distributed.time, "sleep", lambda _: None)

    def fails(how: str) -> str:
        with pytest.raises(CommunicationError) as caught, together("look"):
            raise OSError(how)
        return str(caught.value)

    try:
        distributed.begin_load()
        assert "the first" in fails("the first")
        assert "the first" in fails("what follows it on another rank")
        distributed.begin_load()
        assert "the second" in fails("the second")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "stride", "contiguous"),
    [
        ((0, 3), (1, 7), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 1, 3), (3, 99, 1), True),
        ((1,), (5,), True),
        ((), (), True),
        ((4,), (2,), False),
    ],
)
def test_a_reference_knows_whether_its_elements_lie_one_behind_the_other(
    shape: tuple[int, ...], stride: tuple[int, ...], contiguous: bool
) -> None:
    assert TensorRef("float32", shape, stride, 64).is_contiguous == contiguous


def test_work_that_cannot_run_again_is_an_error_where_bytes_are_lacking() -> None:
    with pytest.raises(UnforeseenError, match="missing on this rank"), distributed.agree("read"):
        raise Lacking(Wanted(1, 0, 0, 10))
