"""Executing plans on real files, against slices of the bytes that were written."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig, Reading
from elastic_ckpt.core.read_plan import ReadItem
from elastic_ckpt.errors import DamagedError, SavedOverError
from elastic_ckpt.io.coalesce import ReadOptions, read_options
from elastic_ckpt.io.reader import check_files, execute
from elastic_ckpt.io.staging import ReadStats
from elastic_ckpt.storage.local import pinned
from tests.reading import UNTOUCHED, plan_of, run, untouched, write


def test_ranges_go_where_the_plan_says_and_nowhere_else(tmp_path: Path) -> None:
    values = torch.arange(20.0)
    file = write(tmp_path / "a", values, header=3)
    first, second = untouched(10), untouched(6)
    copies = [ReadItem(0, 3 + 4 * 2, 0, 1, 4, "float32"), ReadItem(0, 3 + 4 * 9, 1, 0, 5, "float32")]
    stats = run([file], [first, second], copies)
    assert first.tolist() == [UNTOUCHED, 2, 3, 4, 5, *[UNTOUCHED] * 5]
    assert second.tolist() == [9, 10, 11, 12, 13, UNTOUCHED]
    assert stats == ReadStats(nbytes=36, calls=2, staged_nbytes=0)


def test_a_plan_without_copies_reads_nothing(tmp_path: Path) -> None:
    tensor = untouched(3)
    assert run([tmp_path / "not there"], [tensor], []) == ReadStats(0, 0, 0)
    assert tensor.tolist() == [UNTOUCHED] * 3


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64", "int16"])
def test_tensors_of_any_dtype_are_read_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    values = torch.tensor([1, 0, 1, 1, 0]).to(torch_dtype)
    target = torch.zeros(5, dtype=torch_dtype)
    stats = run([write(tmp_path / "a", values, header=1)], [target], [ReadItem(0, 1, 0, 0, 5, dtype)])
    assert torch.equal(target, values)
    assert stats.staged_nbytes == 0


def test_neighbours_in_a_file_are_read_in_one_call_whatever_their_targets(tmp_path: Path) -> None:
    file = write(tmp_path / "a", torch.arange(12.0))
    tensors = [untouched(4) for _ in range(3)]
    copies = [ReadItem(0, 16 * number, 2 - number, 0, 4, "float32") for number in range(3)]
    assert run([file], tensors, copies) == ReadStats(48, 1, 0)
    assert torch.cat(tensors[::-1]).tolist() == list(range(12))


def test_more_buffers_than_the_kernel_takes_become_several_calls(tmp_path: Path) -> None:
    count = 2500
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    file = write(tmp_path / "a", torch.arange(float(count)))
    target = untouched(count)
    copies = [ReadItem(0, 4 * number, 0, int(order[number]), 1, "float32") for number in range(count)]
    stats = run([file], [target], copies)
    assert torch.equal(target[order], torch.arange(float(count)))
    assert stats == ReadStats(4 * count, 3, 0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 199, 200, 201])
def test_no_single_read_is_longer_than_a_chunk(tmp_path: Path, chunk: int) -> None:
    file = write(tmp_path / "a", torch.arange(50.0), header=5)
    target = untouched(50)
    stats = run([file], [target], [ReadItem(0, 5, 0, 0, 50, "float32")], ReadOptions(chunk_nbytes=chunk))
    assert target.tolist() == list(range(50))
    assert stats == ReadStats(200, -(-200 // chunk), 0)


def test_small_neighbours_share_a_chunk_but_do_not_exceed_it(tmp_path: Path) -> None:
    file = write(tmp_path / "a", torch.arange(9.0))
    tensors = [untouched(3) for _ in range(3)]
    copies = [ReadItem(0, 12 * number, number, 0, 3, "float32") for number in range(3)]
    assert run([file], tensors, copies, ReadOptions(chunk_nbytes=24)).calls == 2
    assert torch.cat(tensors).tolist() == list(range(9))


def test_ranges_of_several_files_are_kept_apart(tmp_path: Path) -> None:
    # each range begins at the offset where that of the file before it ends
    files = [write(tmp_path / str(number), torch.arange(4.0) + 10 * number, header=16 * number) for number in range(3)]
    target = untouched(12)
    copies = [ReadItem(number, 16 * number, 0, 4 * (2 - number), 4, "float32") for number in range(3)]
    assert run(files, [target], copies).calls == 3
    assert target.tolist() == [20, 21, 22, 23, 10, 11, 12, 13, 0, 1, 2, 3]


def test_bf16_in_the_file_is_widened_into_an_fp32_target(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -2.5, 3.140625, float("inf"), 2.0**-126]).bfloat16()
    target = untouched(7)
    stats = run([write(tmp_path / "a", values, header=6)], [target], [ReadItem(0, 6, 0, 1, 5, "bfloat16")])
    assert target.tolist() == [UNTOUCHED, *values.float().tolist(), UNTOUCHED]
    assert stats == ReadStats(nbytes=10, calls=1, staged_nbytes=10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [0, 4])
def test_a_transposed_tensor_is_written_by_its_row_major_positions(tmp_path: Path, dtype: str, offset: int) -> None:
    values = torch.arange(15).to(getattr(torch, dtype))
    target = torch.full((5, 3), UNTOUCHED).t()  # 3 x 5, strides (1, 3)
    assert not target.is_contiguous()
    itemsize = values.element_size()
    stats = run(
        [write(tmp_path / "a", values)], [target], [ReadItem(0, offset * itemsize, 0, offset, 15 - offset, dtype)]
    )
    assert target.flatten().tolist() == [UNTOUCHED] * offset + list(range(offset, 15))
    assert stats.staged_nbytes == (15 - offset) * itemsize


def test_a_tensor_with_gaps_between_its_elements_leaves_the_gaps_alone(tmp_path: Path) -> None:
    memory = untouched(10)
    run([write(tmp_path / "a", torch.arange(5.0))], [memory[::2]], [ReadItem(0, 0, 0, 0, 5, "float32")])
    assert memory.tolist() == [0, UNTOUCHED, 1, UNTOUCHED, 2, UNTOUCHED, 3, UNTOUCHED, 4, UNTOUCHED]


@pytest.mark.parametrize("shape", [(2, 3), (1, 6, 1), ()])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_contiguous_tensors_of_any_shape_are_written_in_place(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    target = torch.full(shape, UNTOUCHED)
    values = torch.arange(float(target.numel())).to(getattr(torch, dtype))
    run([write(tmp_path / "a", values)], [target], [ReadItem(0, 0, 0, 0, target.numel(), dtype)])
    assert torch.equal(target, values.float().reshape(shape))


def test_an_empty_tensor_is_a_target_like_any_other(tmp_path: Path) -> None:
    target, other = torch.empty(0, 3), untouched(2)
    run([write(tmp_path / "a", torch.arange(2.0))], [target, other], [ReadItem(0, 0, 1, 0, 2, "float32")])
    assert other.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("numel", [0, 1])
def test_a_slice_too_short_to_show_its_stride_is_a_target_like_any_other(
    tmp_path: Path, numel: int, dtype: str
) -> None:
    memory = torch.zeros(6, dtype=getattr(torch, dtype))
    target = memory[1::2][:numel]
    assert target.is_contiguous() and target.stride() == (2,), "torch ignores strides of single elements"
    file = write(tmp_path / "a", torch.ones(1, dtype=memory.dtype))
    run([file], [target], [ReadItem(0, 0, 0, 0, 1, dtype)] if numel else [])
    assert memory.tolist() == [0, numel, 0, 0, 0, 0]


def test_a_read_that_returns_less_than_was_asked_for_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # regular files on local disks do not do this, network file systems may
    preadv = os.preadv

    def at_most_three_bytes(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", at_most_three_bytes)
    tensors = [untouched(4), untouched(2)]
    copies = [ReadItem(0, 0, 1, 0, 2, "float32"), ReadItem(0, 8, 0, 0, 4, "float32")]
    run([write(tmp_path / "a", torch.arange(6.0))], tensors, copies)
    assert (tensors[1].tolist(), tensors[0].tolist()) == ([0, 1], [2, 3, 4, 5])


@pytest.mark.parametrize(("staging", "threads"), [(1, 4), (16, 1), (40, 2), (200, 1), (1 << 20, 3)])
def test_staged_reads_are_cut_to_the_memory_that_is_allowed(tmp_path: Path, staging: int, threads: int) -> None:
    values = torch.arange(100).bfloat16()
    target = untouched(102)
    options = ReadOptions(threads=threads, staging_nbytes=staging)
    stats = run([write(tmp_path / "a", values, header=2)], [target], [ReadItem(0, 2, 0, 1, 100, "bfloat16")], options)
    assert target.tolist() == [UNTOUCHED, *range(100), UNTOUCHED]
    bounce = max(staging // threads // 2, 16)  # two a thread, never less than one element of the widest dtype
    assert stats == ReadStats(200, -(-200 // min(bounce, 200)), 200)


def test_staged_reads_are_no_longer_than_a_chunk(tmp_path: Path) -> None:
    target = untouched(20)
    file = write(tmp_path / "a", torch.arange(20).bfloat16())
    stats = run([file], [target], [ReadItem(0, 0, 0, 0, 20, "bfloat16")], ReadOptions(chunk_nbytes=17))
    assert target.tolist() == list(range(20))
    assert stats.calls == 3


def test_direct_and_staged_copies_of_one_file_add_up(tmp_path: Path) -> None:
    raw = (
        torch.arange(3.0).view(torch.uint8).numpy().tobytes()
        + torch.arange(4).bfloat16().view(torch.uint8).numpy().tobytes()
    )
    (tmp_path / "a").write_bytes(raw)
    masters, widened = untouched(3), untouched(4)
    copies = [ReadItem(0, 0, 0, 0, 3, "float32"), ReadItem(0, 12, 1, 0, 4, "bfloat16")]
    assert run([tmp_path / "a"], [masters, widened], copies) == ReadStats(nbytes=20, calls=2, staged_nbytes=8)
    assert (masters.tolist(), widened.tolist()) == ([0, 1, 2], [0, 1, 2, 3])


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths of pieces of a file, and the order in which they go into the target."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    return lengths, draw(st.permutations(range(len(lengths))))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tilings(),
    st.sampled_from(["float32", "float16"]),
    st.integers(1, 300),
    st.integers(1, 200),
    st.integers(1, 5),
    st.booleans(),
)
def test_any_cut_chunk_and_number_of_threads_gives_the_same_tensor(
    tmp_path: Path,
    tiling: tuple[list[int], list[int]],
    dtype: str,
    chunk: int,
    staging: int,
    threads: int,
    strided: bool,
) -> None:
    lengths, order = tiling
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    values = torch.arange(sum(lengths)).to(getattr(torch, dtype))
    target = untouched(2 * len(values))[::2] if strided else untouched(len(values))
    copies: list[ReadItem] = []
    expected: list[int] = []
    position = 0
    for piece in order:
        byte_offset = 5 + starts[piece] * values.element_size()
        copies.append(ReadItem(0, byte_offset, 0, position, lengths[piece], dtype))
        expected += range(starts[piece], starts[piece] + lengths[piece])
        position += lengths[piece]
    options = ReadOptions(threads=threads, chunk_nbytes=chunk, staging_nbytes=staging)
    stats = run([write(tmp_path / "a", values, header=5)], [target], copies, options)
    assert target.tolist() == expected
    nbytes = len(values) * values.element_size()
    assert stats.nbytes == nbytes
    assert stats.staged_nbytes == (0 if target.is_contiguous() and dtype == "float32" else nbytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_ends_early_is_damage_and_is_named(tmp_path: Path, dtype: str) -> None:
    file = write(tmp_path / "short", torch.arange(10).to(getattr(torch, dtype)))
    target = untouched(20)
    plan = plan_of([file], [target], [ReadItem(0, 0, 0, 0, 20, dtype)])
    with pytest.raises(DamagedError, match="reading a file") as caught:
        execute(plan, [target], ReadOptions(threads=2))
    assert caught.value.file == str(file)
    assert str(caught.value.found) == f"end of file at byte {file.stat().st_size}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_thread_is_the_callers_own(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thread, "start", lambda _: pytest.fail("a thread was started"))
    values, target = torch.arange(50.0), untouched(50)
    file = write(tmp_path / "a", values.to(getattr(torch, dtype)))
    run([file], [target], [ReadItem(0, 0, 0, 0, 50, dtype)], ReadOptions(threads=1, chunk_nbytes=16))
    assert torch.equal(target, values)


def test_a_file_that_cannot_be_read_is_damage_and_is_named(tmp_path: Path) -> None:
    target = untouched(2)
    plan = plan_of([tmp_path], [target], [ReadItem(0, 0, 0, 0, 2, "float32")])  # a folder
    with pytest.raises(DamagedError, match="found:     a folder") as caught:
        execute(plan, [target], ReadOptions())
    assert caught.value.file == str(tmp_path)


def test_a_file_that_vanished_after_the_check_is_damage_and_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "gone", torch.arange(2.0))
    target = untouched(2)
    plan = plan_of([file], [target], [ReadItem(0, 0, 0, 0, 2, "float32")])
    file.unlink()
    with pytest.raises(DamagedError) as caught:
        execute(plan, [target], ReadOptions())
    assert caught.value.file == str(file)


def test_files_are_closed_after_success_and_after_failure(tmp_path: Path) -> None:
    file = write(tmp_path / "a", torch.arange(4.0))
    before = set(os.listdir("/proc/self/fd"))
    target = untouched(8)
    execute(plan_of([file], [target], [ReadItem(0, 0, 0, 0, 4, "float32")]), [target], ReadOptions())
    with pytest.raises(DamagedError):
        execute(plan_of([file], [target], [ReadItem(0, 0, 0, 0, 8, "float32")]), [target], ReadOptions())
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_check_files_passes_over_files_that_no_copy_reads(tmp_path: Path) -> None:
    file = write(tmp_path / "a", torch.arange(2.0))
    plan = plan_of([tmp_path / "not there", file], [untouched(2)], [ReadItem(1, 0, 0, 0, 2, "float32")])
    check_files(plan)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_check_files_notices_another_size(tmp_path: Path, nbytes: int) -> None:
    file = write(tmp_path / "a", torch.arange(2.0))
    plan = plan_of([file], [untouched(2)], [ReadItem(0, 0, 0, 0, 2, "float32")])
    file.write_bytes(bytes(nbytes))
    with pytest.raises(DamagedError, match="same size") as caught:
        check_files(plan)
    assert caught.value.file == str(file)
    assert (str(caught.value.expected), str(caught.value.found)) == ("8 bytes", f"{nbytes} bytes")


def test_a_pipe_in_the_place_of_a_file_is_never_waited_for(tmp_path: Path) -> None:
    """Before the check, and after it."""
    os.mkfifo(tmp_path / "pipe")
    target = untouched(2)
    plan = plan_of([tmp_path / "pipe"], [target], [ReadItem(0, 0, 0, 0, 2, "float32")])
    for read in (check_files, lambda plan: execute(plan, [target], ReadOptions())):
        with pytest.raises(DamagedError, match="found:     a named pipe"):
            read(plan)


def test_check_files_notices_a_file_that_this_rank_does_not_see(tmp_path: Path) -> None:
    plan = plan_of([tmp_path / "not there"], [untouched(2)], [ReadItem(0, 0, 0, 0, 2, "float32")])
    with pytest.raises(DamagedError, match="cannot be reached") as caught:
        check_files(plan)
    assert caught.value.file == str(tmp_path / "not there")
    assert caught.value.found == "no such file"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_progress_bar_is_drawn_where_wanted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wanted: bool
) -> None:
    file = write(tmp_path / "a", torch.arange(2.0))
    target = untouched(2)
    plan = plan_of([file], [target], [ReadItem(0, 0, 0, 0, 2, "float32")])
    execute(plan, [target], ReadOptions(progress=wanted))
    assert ("elastic_ckpt" in capfd.readouterr().err) == wanted


def test_a_checkpoint_of_more_files_than_a_process_may_open_is_read(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 300
    target = untouched(count)
    files = [write(tmp_path / f"{number}", torch.tensor([float(number)])) for number in range(count)]
    copies = [ReadItem(number, 0, 0, number, 1, "float32") for number in range(count)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        run(files, [target], copies, ReadOptions(threads=8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert torch.equal(target, torch.arange(float(count)))


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run([write(tmp_path / "a", torch.ones(4))], [untouched(4)], [ReadItem(0, 0, 0, 0, 4, "float32")])
    assert len(os.listdir("/proc/self/fd")) == before


# --- rows at regular distances ----------------------------------------------------------------------------------

STRIDED = ReadItem(0, 3 + 4 * 2, 0, 1, 3, "float32", rows=4, file_stride=6, target_stride=5)


def strided_truth() -> list[float]:
    """Rows of three, six apart in a file of 0, 1, 2 ..., from the third element on; five apart in the target."""
    expected = [UNTOUCHED] * 24
    for row in range(4):
        for column in range(3):
            expected[1 + 5 * row + column] = 2 + 6 * row + column
    return expected


def test_rows_go_straight_into_the_target(tmp_path: Path) -> None:
    target = untouched(24)
    stats = run([write(tmp_path / "a", torch.arange(30.0), header=3)], [target], [STRIDED])
    assert target.tolist() == strided_truth()
    assert stats == ReadStats(nbytes=48, calls=4, staged_nbytes=0)


@pytest.mark.parametrize("chunk", [4, 8, 1 << 20])
def test_rows_of_another_dtype_are_staged_by_the_strides_of_the_file(tmp_path: Path, chunk: int) -> None:
    file, target = write(tmp_path / "a", torch.arange(30).bfloat16(), header=3), untouched(24)
    copy = replace(STRIDED, byte_offset=3 + 2 * 2, dtype="bfloat16")
    stats = run([file], [target], [copy], ReadOptions(chunk_nbytes=chunk))
    assert target.tolist() == strided_truth()
    assert (stats.nbytes, stats.staged_nbytes) == (24, 24)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_go_into_a_strided_tensor_by_its_row_major_positions(tmp_path: Path, dtype: str) -> None:
    values = torch.arange(30).to(getattr(torch, dtype))
    target = torch.full((6, 4), UNTOUCHED).t()
    copy = replace(STRIDED, byte_offset=2 * values.element_size(), dtype=dtype)
    run([write(tmp_path / "a", values)], [target], [copy])
    assert target.flatten().tolist() == strided_truth()


def test_rows_that_touch_in_the_file_are_read_in_one_call(tmp_path: Path) -> None:
    target = untouched(24)
    copy = replace(STRIDED, byte_offset=0, file_stride=3)
    assert run([write(tmp_path / "a", torch.arange(12.0))], [target], [copy]) == ReadStats(48, 1, 0)
    assert [target[1 + 5 * row + column].item() for row in range(4) for column in range(3)] == list(range(12))


def test_a_row_beyond_the_end_of_the_file_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="failed"):
        run([write(tmp_path / "a", torch.arange(22.0))], [untouched(24)], [replace(STRIDED, byte_offset=8)])


def test_a_config_says_how_to_read() -> None:
    config = ElasticConfig(reading=Reading(threads=2, extra_memory_mib=5, gap_kib=7), report=False)
    assert read_options(config) == ReadOptions(2, 16 << 20, 5 << 20, False, 7 << 10)
    # what is summed up is still in the processor's cache; but where calls wait, there are no more than reads
    assert read_options(ElasticConfig()) == ReadOptions(call_nbytes=1 << 20)
    assert read_options(ElasticConfig(verify="off")) == ReadOptions()
    assert read_options(ElasticConfig(reading=Reading(storage="network"))) == ReadOptions(gap_nbytes=64 << 10)
    assert read_options(ElasticConfig(reading=Reading(storage="network", gap_kib=0))).gap_nbytes == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_every_thread_compares_what_it_opens_with_what_the_load_has_seen(tmp_path: Path, threads: int) -> None:
    file, target = write(tmp_path / "a", torch.arange(2.0)), untouched(2)
    plan = plan_of([file], [target], [ReadItem(0, 0, 0, 0, 2, "float32")])
    with pinned():
        check_files(plan)
        os.utime(file, ns=(0, 5))
        with pytest.raises(SavedOverError):
            check_files(plan)
        with pytest.raises(SavedOverError):
            execute(plan, [target], ReadOptions(threads=threads))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["absmax1", "absmax2", "exp_avg"])
@pytest.mark.parametrize(("rows", "flat"), [(1, 5), (3, 0)])
def test_scales_that_are_copied_are_judged_as_those_of_which_values_are_made(
    tmp_path: Path, bad: float, key: str, rows: int, flat: int
) -> None:
    """What is not finite elsewhere is what the run had."""
    values = torch.arange(12.0)
    values[9] = bad
    path, target = write(tmp_path / "file", values), untouched(14)
    item = ReadItem(0, 0, 0, 1, 12 // rows, "float32", rows, 12 // rows, 12 // rows)
    plan = plan_of([path], [target], [item])
    plan = replace(plan, targets=(replace(plan.targets[0], key=key, flat=flat),))
    if key == "exp_avg":
        execute(plan, [target], ReadOptions())
        assert torch.equal(target[1:13].view(torch.int32), values.view(torch.int32))
        return
    with pytest.raises(DamagedError, match="scale of an 8-bit block is not finite") as caught:
        execute(plan, [target], ReadOptions())
    assert caught.value.file == str(path) and caught.value.parameter == f"{key} of flat partition {flat}"
    path.write_bytes(torch.arange(12.0).numpy().tobytes())
    target[0] = bad  # of no item
    execute(plan, [target], ReadOptions())
