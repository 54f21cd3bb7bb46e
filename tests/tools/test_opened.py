"""Opening checkpoints and configs outside a training job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_ckpt.errors import ConfigError, NotFoundError
from elastic_ckpt.tools.opened import config_of, locate


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([1], "is no JSON object"),
        ({"elastic_checkpoint": 5}, "must be an object"),
        ({"elastic_checkpoint": ["mode"]}, "must be an object"),
        ({"elastic_checkpoint": {"mod": "auto"}}, 'unknown key "mod"'),
    ],
)
def test_a_config_of_another_form_is_an_error_that_says_so(config: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        config_of(path, tp_preset="bloom")


def test_the_command_line_overrides_the_config_where_it_says_something(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "elastic_checkpoint": {"tp_preset": "bloom"}}))
    assert config_of(path, tp_preset=None).tp_preset == "bloom"
    assert config_of(path, tp_preset="gpt-neox").tp_preset == "gpt-neox"
    assert config_of(None) == config_of(None, tp_preset=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        config_of(tmp_path / "none.json")


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        locate(str(tmp_path), None)
    assert caught.value.file == str(tmp_path) and "latest" in str(caught.value.expected)
