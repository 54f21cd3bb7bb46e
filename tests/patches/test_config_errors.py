"""Options of elastic_ckpt where DeepSpeed has a switch of the same name."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from elastic_ckpt import install, uninstall
from elastic_ckpt.config import read_config
from elastic_ckpt.errors import ConfigError


def config(value: Any) -> dict[str, Any]:
    return {"train_batch_size": 1, "zero_optimization": {"stage": 1, "elastic_checkpoint": value}}


@pytest.mark.parametrize("value", [{"mode": "require"}, {}])
def test_an_object_is_named_as_a_mistake(value: dict[str, Any]) -> None:
    install()
    try:
        with pytest.raises(ConfigError, match='under "zero_optimization" is a switch of DeepSpeed') as caught:
            DeepSpeedConfig(config(value))
    finally:
        uninstall()
    assert "top level" in str(caught.value.remedy) and ("'mode'" in str(caught.value.found)) == bool(value)
    with pytest.raises(ConfigError, match="takes no options"):
        read_config(config(value))
    with pytest.raises(ValueError, match="valid boolean"):
        DeepSpeedConfig(config(value))


def test_the_switch_and_other_mistakes_stay_deepspeeds() -> None:
    install()
    try:
        assert DeepSpeedConfig(config(True)).zero_config.elastic_checkpoint is True
        with pytest.raises(ValueError, match="valid boolean"):
            DeepSpeedConfig(config("x"))
    finally:
        uninstall()
    assert read_config(config(False)).mode == "auto"
