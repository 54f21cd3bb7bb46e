"""DeepSpeed understands the ready configs, and ``configs/elasticity.json`` keeps the global batch on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from elastic_ckpt.config import ElasticConfig, read_config
from elastic_ckpt.sharding.rules import Preset

CONFIGS = Path(__file__).parents[2] / "configs"


Parse = Callable[..., DeepSpeedConfig]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """``parsed(name, ranks)``: a config of ``configs/`` as DeepSpeed understands it in a job of so many ranks."""

    def parse(name: str, ranks: int = 1, **more: Any) -> DeepSpeedConfig:
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        return DeepSpeedConfig({**json.loads((CONFIGS / name).read_text()), **more})

    return parse


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_deepspeed_understands_it(path: Path, parsed: Parse) -> None:
    config = parsed(path.name)
    assert config.train_batch_size == 24
    name = path.stem
    stage = {"megatron_3d": 1, "elasticity": 1}.get(name) or int(name.removeprefix("zero")[0])
    assert config.zero_optimization_stage == stage
    offloaded = config.zero_config.offload_optimizer is not None, config.zero_config.offload_param is not None
    assert offloaded == {"zero2_offload": (True, False), "zero3_offload": (True, True)}.get(name, (False, False))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_accelerate_takes_nothing_of_it_for_its_own(path: Path) -> None:
    """A value "auto" that it does not know is an error of Accelerate, and so of the Trainer."""
    config = json.loads(path.read_text())
    assert "auto" not in config["elastic_checkpoint"].values()
    assert isinstance(read_config(config), ElasticConfig)


@pytest.mark.parametrize(("ranks", "accumulated"), [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_the_global_batch_stays_and_the_accumulation_follows_the_ranks(
    ranks: int, accumulated: int, parsed: Parse
) -> None:
    config = parsed("elasticity.json", ranks)
    held = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert held == (24, 2, accumulated)


@pytest.mark.parametrize("ranks", [5, 7, 8, 24])
def test_ranks_that_do_not_divide_the_global_batch_are_refused_by_deepspeed(ranks: int, parsed: Parse) -> None:
    with pytest.raises(AssertionError, match=r"Check batch related parameters|has to be greater than 0"):
        parsed("elasticity.json", ranks)


def test_deepspeed_has_no_elasticity_of_its_own_any_more(parsed: Parse) -> None:
    """If it had, the page on launchers would have to say how the two go together."""
    with pytest.raises(DeepSpeedConfigError, match="Elastic training has been removed"):
        parsed("elasticity.json", 2, elasticity={"enabled": True})


def test_the_preset_of_the_megatron_config_exists() -> None:
    config = json.loads((CONFIGS / "megatron_3d.json").read_text())
    assert Preset.load(config["elastic_checkpoint"]["tp_preset"])
