"""The scaling model: by hand, in each argument, from files; and the fit, on points whose coefficients are known."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scaling_fit import Measured, checks, errors, fit, held_out, nonnegative
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.forecast import Memory, RankForecast, Reads
from elastic_ckpt.scaling import (
    DEFAULT_SCALING,
    ROUNDS,
    Coefficients,
    Factors,
    ReadWork,
    Room,
    Scaling,
    agreeing_factors,
    load_scaling,
    metadata_factors,
    opening_factors,
    planning_factors,
    reading_factors,
)
from elastic_ckpt.timing import Cluster, Saved, seconds_of

NAMES = list(Coefficients.model_fields)
#: Of powers of two: sums of them are exact, and tell what they are of.
BY_HAND = Coefficients(**{name: 2.0**number for number, name in enumerate(NAMES)})
NOTHING = Coefficients(**dict.fromkeys(NAMES, 0.0))
WORK = ReadWork(nbytes=1200, nbytes_fresh=800, nbytes_staged=400, reads=30, reads_staged=10, pieces=60, files=6)


def only(**coefficients: float) -> Coefficients:
    return NOTHING.model_copy(update=coefficients)


# --- the model --------------------------------------------------------------------------------------------------------


def test_bytes_are_shared_by_threads_and_calls_are_not() -> None:
    bytes_alone, calls = only(byte=1.0, byte_fresh=10.0, byte_staged=100.0), only(read=1.0, read_staged=10.0, piece=100)
    weighted, called = 1200 + 8000 + 40_000, 30 + 100 + 6000
    for ranks, cores, threads, workers, crowding in (
        (1, 1, 4, 1, 1),
        (1, 8, 4, 4, 1),  # no more workers than threads
        (2, 4, 4, 2, 1),
        (4, 2, 4, 0.5, 2),  # two ranks on each core
        (1, 8, 1, 1, 1),
    ):
        factors = reading_factors(WORK, Room(ranks, cores, threads))
        assert bytes_alone.of(factors) == weighted / workers
        assert calls.of(factors) == called * crowding
        assert only(fixed=5.0).of(factors) == 5.0
        assert only(file_read=7.0).of(opening_factors(WORK, Room(ranks, cores, threads))) == 42 * crowding
        assert BY_HAND.of(opening_factors(WORK, Room(ranks, cores, threads))) == 6 * crowding * BY_HAND.file_read


def test_each_file_is_opened_once_and_extents_are_told_to_everybody() -> None:
    for ranks, files_of_one in ((1, 10), (4, 3), (10, 1), (100, 1)):
        factors = metadata_factors(files=10, parameters=20, extents=300, ranks=ranks, room=Room(2, 8, 4))
        assert factors == {"file_metadata": files_of_one, "parameter_metadata": 20, "extent_metadata": 300}
    crowded = metadata_factors(files=10, parameters=20, extents=300, ranks=8, room=Room(8, 2, 4))
    assert list(crowded.values()) == [2 * 4, 20 * 4, 300 * 4]
    assert planning_factors(90, 7, 5, Room(4, 2, 4)) == {
        "extent_planned": 180,
        "copy_planned": 14,
        "parameter_recut": 10,
    }
    assert agreeing_factors(1) == {"round_of_rank": 0}
    assert agreeing_factors(8) == {"round_of_rank": 8 * ROUNDS}


def test_every_coefficient_is_part_of_the_model() -> None:
    room = Room(2, 2, 4)
    steps = (
        reading_factors(WORK, room),
        opening_factors(WORK, room),
        metadata_factors(10, 20, 300, 2, room),
        planning_factors(90, 7, 5, room),
        agreeing_factors(2),
    )
    assert sorted(name for factors in steps for name in factors) == sorted(NAMES)
    # seconds are seconds: a machine that takes twice as long for everything takes twice as long
    doubled = Coefficients(**{name: 2 * value for name, value in BY_HAND.model_dump().items()})
    assert [doubled.of(factors) for factors in steps] == [2 * BY_HAND.of(factors) for factors in steps]


READS = Reads(4000, 40, 100, 100, 4, 80, 0, nbytes_fresh=900, nbytes_staged=600, calls_staged=5, pieces=70, copies=12)
SAVED = Saved(files=9, parameters=50.0, extents=400, stages=2, recut=3.0)
MODEL = Scaling(machine="a slide rule", cores=1, measured="1972-01-01", coefficients=BY_HAND)


def total_of(reads: Reads, cluster: Cluster, saved: Saved, threads: int = 4) -> float:
    ranks = [RankForecast(rank, reads, Memory(0, (), 0, 0, 0, False), {}) for rank in range(cluster.ranks)]
    return seconds_of(ranks, cluster, saved, MODEL, threads).total


def test_a_whole_load_by_hand() -> None:
    cluster = Cluster(ranks=4, nodes=2, bandwidth=0.5, cores=1)
    ranks = [RankForecast(rank, READS, Memory(0, (), 0, 0, 0, False), {}) for rank in range(4)]
    found = seconds_of(ranks, cluster, SAVED, MODEL, 4)
    assert found.node_nbytes == 2 * (4000 + 80)
    assert found.by_bandwidth == 2 * 4080 / 0.5
    c = BY_HAND
    by_bytes = 2 * (c.byte * 4080 + c.byte_fresh * 900 + c.byte_staged * 600)
    assert found.by_work == c.fixed + by_bytes + 2 * (c.read * 40 + c.read_staged * 5 + c.piece * 70)
    assert found.reading == max(found.by_bandwidth, found.by_work)
    assert found.opening == 2 * 4 * c.file_read
    assert found.metadata == 2 * (3 * c.file_metadata + 50 * c.parameter_metadata + 400 * c.extent_metadata)
    assert found.planning == 2 * (200 * c.extent_planned + 12 * c.copy_planned + 3 * c.parameter_recut)
    assert found.agreeing == 4 * ROUNDS * c.round_of_rank
    assert found.total == found.reading + found.opening + found.metadata + found.planning + found.agreeing
    slow = seconds_of(ranks, dataclasses.replace(cluster, bandwidth=1e-3), SAVED, MODEL, 4)
    assert slow.reading == slow.by_bandwidth == 2 * 4080 / 1e-3


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Reads) if "nbytes" not in field.name])
def test_more_to_do_takes_longer(name: str) -> None:
    cluster = Cluster(ranks=4, nodes=2, bandwidth=1e9, cores=3)
    before = total_of(READS, cluster, SAVED)
    assert total_of(dataclasses.replace(READS, **{name: getattr(READS, name) + 10}), cluster, SAVED) > before


@pytest.mark.parametrize("name", ["nbytes", "nbytes_compared", "nbytes_fresh", "nbytes_staged"])
def test_more_bytes_take_longer(name: str) -> None:
    more = dataclasses.replace(READS, **{name: getattr(READS, name) + 10})
    cluster = Cluster(ranks=4, nodes=2, bandwidth=1e9, cores=3)
    assert total_of(more, cluster, SAVED) > total_of(READS, cluster, SAVED)
    slow = dataclasses.replace(cluster, bandwidth=1e-6)  # where all wait for the file system
    of_node = name in ("nbytes", "nbytes_compared")
    assert (total_of(more, slow, SAVED) > total_of(READS, slow, SAVED)) == of_node


def test_more_of_everything_else() -> None:
    cluster = Cluster(ranks=4, nodes=2, bandwidth=1e9, cores=3)
    before = total_of(READS, cluster, SAVED)
    for more in ({"files": 13}, {"parameters": 51.0}, {"extents": 401}, {"stages": 1}, {"recut": 4.0}):
        assert total_of(READS, cluster, dataclasses.replace(SAVED, **more)) > before
    assert total_of(READS, dataclasses.replace(cluster, cores=1), SAVED) > before
    assert total_of(READS, dataclasses.replace(cluster, nodes=1), SAVED) > before
    roomy = dataclasses.replace(cluster, cores=64)
    assert total_of(READS, roomy, SAVED, threads=1) > total_of(READS, roomy, SAVED, threads=2)
    slow = dataclasses.replace(cluster, bandwidth=1e-3)
    assert total_of(READS, dataclasses.replace(slow, bandwidth=2e-3), SAVED) < total_of(READS, slow, SAVED)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_ready_model_says_where_it_is_from() -> None:
    found = load_scaling()
    assert found == load_scaling(DEFAULT_SCALING)
    assert found.machine and found.cores >= 1
    assert found.coefficients.byte > 0 and found.coefficients.read > 0


def test_a_model_comes_back_from_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(MODEL.model_dump_json(indent=2))
    assert load_scaling(str(path)) == MODEL


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"read": -1e-9}, "greater than or equal to 0"),
        ({"read": None}, "read"),
        ({"read": float("inf")}, "finite"),
        ({"read": float("nan")}, "read"),
        ({"reed": 1.0}, "reed"),
    ],
)
def test_bad_coefficients_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "mine.json"
    document = json.loads(MODEL.model_dump_json())
    document["coefficients"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="this file is no scaling model") as caught:
        load_scaling(str(path))
    assert caught.value.file == str(path)
    assert says in str(caught.value.found) and "none of them negative" in str(caught.value.expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_coefficient_is_no_zero(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.json"
    document = json.loads(MODEL.model_dump_json())
    del document["coefficients"][name]
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        load_scaling(str(path))
    assert f"coefficients.{name}" in str(caught.value.found)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match='no scaling model "cray-1"') as caught:
        load_scaling("cray-1")
    assert DEFAULT_SCALING in str(caught.value.expected)


# --- the fit ----------------------------------------------------------------------------------------------------------

TRUTH = {
    "fixed": 2e-3,
    "byte": 3e-10,
    "byte_fresh": 7e-10,
    "byte_staged": 0.0,
    "read": 1.5e-5,
    "read_staged": 8e-5,
    "piece": 2e-6,
}


def points(noise: float, seed: int = 7) -> list[Measured]:
    """Jobs of 1, 2 and 4 ranks on 2 cores, whose coefficients are known."""
    dice = random.Random(seed)
    found = []
    for number in range(120):
        ranks = (1, 2, 4)[number % 3]
        nbytes, reads = int(10 ** dice.uniform(6, 8.6)), int(10 ** dice.uniform(0, 4.3))
        fresh, staged = dice.choice([(nbytes, 0), (0, 0), (0, nbytes)])
        work = ReadWork(nbytes, fresh, staged, reads, reads if staged else 0, reads * dice.choice([1, 16]), 1)
        factors = reading_factors(work, Room(ranks, 2, 4))
        seconds = sum(TRUTH[name] * count for name, count in factors.items())
        found.append(Measured(factors, seconds * (1 + dice.uniform(-noise, noise)), ranks))
    return found


def test_known_coefficients_are_found() -> None:
    found = fit(points(0))
    assert found == {name: pytest.approx(value, rel=1e-6, abs=1e-15) for name, value in TRUTH.items()}
    assert max(errors(found, points(0))) < 1e-6


def test_known_coefficients_are_found_through_noise() -> None:
    found = fit(points(0.1))
    assert min(found.values()) >= 0
    for name, value in TRUTH.items():
        assert abs(found[name] - value) <= (0.15 * value or 5e-11), name


def test_nothing_is_fitted_below_zero() -> None:
    dice = np.random.default_rng(3)
    for _ in range(50):
        matrix, target = dice.normal(size=(12, 5)), dice.normal(size=12)
        found = nonnegative(matrix, target)
        slope = matrix.T @ (matrix @ found - target)
        # the conditions of Karush, Kuhn and Tucker: no other answer that is nowhere negative is nearer
        assert (found >= 0).all() and (slope > -1e-8).all()
        assert np.allclose(slope[found > 0], 0, atol=1e-8)
    assert (nonnegative(np.eye(3), np.array([-1.0, 2.0, 0.0])) == [0, 2, 0]).all()


def test_points_held_out_tell_how_far_a_fit_is_off() -> None:
    found = checks(points(0.1))
    assert sorted(found) == ["4 ranks, by fewer", "every third point"]
    for held in found.values():
        assert held.points == 40
        assert 0.005 < held.median < 0.1
        assert held.median < held.worst < 0.35
    # a machine on which four ranks take twice as long as the model thinks
    slow = [dataclasses.replace(p, seconds=p.seconds * (2 if p.ranks == 4 else 1)) for p in points(0)]
    assert checks(slow)["4 ranks, by fewer"].median == pytest.approx(0.5)


def test_points_that_are_held_out_are_not_fitted() -> None:
    def at(count: float, seconds: float) -> Measured:
        factors: Factors = {"read": count}
        return Measured(factors, seconds, 1)

    found = held_out([at(1, 1.0), at(2, 2.0), at(5, 20.0)], lambda number, _: number == 2)
    assert found is not None and (found.points, found.median, found.worst) == (1, 0.75, 0.75)
    assert held_out([at(1, 1.0)], lambda number, _: True) is None
    assert held_out([at(1, 1.0)], lambda number, _: False) is None
    with pytest.raises(ValueError, match="took some time"):
        fit([at(1, 0.0)])
    with pytest.raises(ValueError, match="took some time"):
        fit([])
