"""``docs/troubleshooting.md`` goes by the texts of errors: those that DeepSpeed, Accelerate and elastic_ckpt really have."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.source import names_in, texts_in

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_OTHERS = [
    (
        "deepspeed",
        "engine.py",
        "Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not",
    ),
    ("deepspeed", "engine.py", "Invalid for universal checkpoint: "),
    ("deepspeed", "engine.py", "Unable to find latest file at "),
    ("deepspeed", "ds_to_universal.py", " state is missing in checkpoint. Verify that client creates this state."),
    (
        "deepspeed",
        "stage_1_and_2.py",
        "zero_optimization.parameter_alignment setting. Load with the setting used to save ",
    ),
    ("deepspeed", "engine.py", "_restore_from_bit16_weights"),
    ("deepspeed", "state_dict_factory.py", "check_ckpt_list"),
    ("torch", "reductions.py", "Cowardly refusing to serialize non-leaf tensor"),
    ("deepspeed", "ds_to_universal.py", "--inject_missing_state"),
    ("torch", "serialization.py", "WeightsUnpickler error: "),
    ("torch", "_weights_only_unpickler.py", "Unsupported global"),
    ("accelerate", "dataclasses.py", "` not found in kwargs. "),
]
OURS_IN_PROSE = [
    "elastic_ckpt leaves this load to DeepSpeed's own loader: ",
    "this file is a mixture: several ranks wrote it at the same time",
    "this file may have been written over an older one",
    "the process that wrote it in the background has died",
]


@cache
def text_of(package: str, name: str = "*.py") -> str:
    """The strings and names in a package, or in its files of one name."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    files = Path(spec.submodule_search_locations[0]).rglob(name)
    found: list[str] = []
    for path in sorted(files):
        code = path.read_text(encoding="utf-8")
        found += [*texts_in(code), *names_in(code)]
    return "\n".join(found)


@pytest.mark.parametrize(("package", "file", "words"), OF_OTHERS)
def test_the_page_has_the_words_of_others(package: str, file: str, words: str) -> None:
    assert words in text_of(package, file)
    assert words.strip(" `") in PAGE.replace("\n", " ")


def test_the_page_has_our_own_words() -> None:
    ours = PAGE.partition("## Errors of elastic_ckpt")[2]
    texts = re.findall(r"^#### `(.+?)`$", ours, re.MULTILINE)
    assert len(texts) == ours.count("\n#### ") >= 7
    for text in OURS_IN_PROSE:
        assert f"`{text}" in PAGE and text in text_of("elastic_ckpt"), text
    for text in texts:
        # what depends on the case is a quoted key or a flag
        fixed = max(re.split(r'"\w+"|--[\w-]+\??', text), key=len).strip()
        assert len(fixed) > 15 and fixed in text_of("elastic_ckpt"), text
