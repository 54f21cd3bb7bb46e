"""Arguments of the run that saved a checkpoint, and the enums among them."""

from __future__ import annotations

import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from elastic_ckpt.errors import UnsafePickleError
from elastic_ckpt.formats import saved_config as saved_config_module
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.saved_config import parse_options, run_arguments, saved_config

NEOX = {"num_layers": 2, "model_parallel_size": 2}

FLOW = """# a comment: with {braces}, "quotes
{
   # parallelism
   "pipe-parallel-size": 4, 'model_parallel_size': 2, hidden-size: 0x,
   "lr": 0.97e-4, "eps": 1.0e-8, "count": -3, "gpt_j_residual": True, "nothing": null,
   "data-path": data/enwik8/a:b, "url": "http://x/#1", "text": "a \\"b\\"", "words": two words,
   "optimizer": {"type": "Adam", "activation": "geglu", "params": {"betas": [0.9, 0.95],}},
   "attention-config": [[["flash"], 12]],
   "activation": "gelu",   # at the end
}
"""


def options_of(folder: Path, text: str) -> dict[str, Any] | None:
    (folder / "options.yml").write_text(text)
    return parse_options((folder / "options.yml").read_bytes())


def test_options_of_a_flow_mapping_are_read_as_yaml_means_them(tmp_path: Path) -> None:
    assert options_of(tmp_path, FLOW) == {
        "pipe_parallel_size": 4,
        "model_parallel_size": 2,
        "hidden_size": "0x",
        "lr": 0.97e-4,
        "eps": 1e-8,
        "count": -3,
        "gpt_j_residual": True,
        "nothing": None,
        "data_path": "data/enwik8/a:b",
        "url": "http://x/#1",
        "text": 'a "b"',
        "words": "two words",
        "activation": "gelu",
    }


def test_options_of_lines_are_read_and_what_belongs_to_others_is_not(tmp_path: Path) -> None:
    text = "---\nactivation: swiglu # new\noptimizer:\n  type: Adam\n  gpt_j_residual: true\nlist: [1, 2]\nnum-kv-heads: 4\n"
    assert options_of(tmp_path, text) == {"activation": "swiglu", "num_kv_heads": 4}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1',
        '{"a": 1} and more',
        "{: 1}",
        'a: "open',
        "no options here",
        "{'a' 'b': 1}",
        "a: " + "9" * 5000,
        "[" * 5000,
        "a: 2020-99-99",
        "a: !!python/none x",
        "a: \x01",
    ],
)
def test_what_is_no_configuration_is_passed_over(tmp_path: Path, text: str) -> None:
    assert options_of(tmp_path, text) is None


def test_aliases_and_merge_keys_are_not_expanded(tmp_path: Path) -> None:
    """Each line has twice the entries of the one before: 2 ** 40 of them, were they built."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{number}: &a{number} {{<<: [*a{number - 1}, *a{number - 1}]}}" for number in range(1, 40)]
    assert options_of(tmp_path, "\n".join([*lines, "seed: 3"])) == {"seed": 3}


def test_a_namespace_gives_its_plain_values(tmp_path: Path) -> None:
    saved = Namespace(swiglu=False, dtype=torch.bfloat16, heads=8, paths=["a"], teacher=None, model_parallel_size=2)
    expected = {"swiglu": False, "heads": 8, "teacher": None, "model_parallel_size": 2}
    assert run_arguments(saved, str(tmp_path)) == expected
    assert run_arguments(None, str(tmp_path)) == {}


def configure(folder: Path, **files: str) -> None:
    (folder / "configs").mkdir(parents=True)
    for name, text in files.items():
        (folder / "configs" / f"{name}.yml").write_text(text)


@pytest.mark.parametrize("where", ["tag", "."])
def test_gpt_neox_options_come_from_the_files_beside_it_and_the_rest_from_its_defaults(
    where: str, tmp_path: Path
) -> None:
    configure(tmp_path / where, model='{"gpt-j-residual": true, "num_layers": 99}', other="seed: 3\n")
    (tmp_path / "tag").mkdir(exist_ok=True)
    found = run_arguments(NEOX, str(tmp_path / "tag"))
    defaults = {"activation": "gelu", "num_kv_heads": None, "output_layer_parallelism": "column"}
    assert found == {**NEOX, **defaults, "gpt_j_residual": True, "seed": 3}


def test_options_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    names = [f"option_{letter}" for letter in "qwertyuiop"]
    configure(
        tmp_path, a="".join(f"{name}: 1\n" for name in names[:5]), b="".join(f"{name}: 2\n" for name in names[5:])
    )
    assert [name for name in run_arguments(NEOX, str(tmp_path)) if name in names] == names


def test_without_files_nothing_is_assumed(tmp_path: Path) -> None:
    assert run_arguments(NEOX, str(tmp_path)) == NEOX


def test_files_that_disagree_or_cannot_be_read_leave_options_unknown(tmp_path: Path) -> None:
    configure(tmp_path / "two", a='{"activation": "geglu", "x": 1}', b='{"activation": "gelu", "x": 1}')
    found = run_arguments(NEOX, str(tmp_path / "two"))
    assert "activation" not in found and found["x"] == 1 and found["gpt_j_residual"] is False
    configure(tmp_path / "broken", a='{"x": 1}', b="{")
    assert run_arguments(NEOX, str(tmp_path / "broken")) == {**NEOX, "x": 1}


def test_files_that_are_too_big_are_not_read(tmp_path: Path) -> None:
    configure(tmp_path, a='{"x": 1}', b="# " + "x" * (1 << 18))
    assert run_arguments(NEOX, str(tmp_path)) == {**NEOX, "x": 1}


def test_all_files_together_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML takes 12 seconds a MiB, so that 32 files of a quarter of one would take a minute and a half."""
    texts = {f"file{number}": f"x{number}: 1\n# " + "y" * (1 << 16) for number in range(8)}
    configure(tmp_path, **texts, last="z: 1\n")
    parsed: list[int] = []
    parse = saved_config_module.parse_options
    monkeypatch.setattr(saved_config_module, "parse_options", lambda text: [parsed.append(len(text)), parse(text)][1])
    assert run_arguments(NEOX, str(tmp_path)) == {**NEOX, "x0": 1, "x1": 1, "x2": 1, "z": 1}
    assert sum(parsed) <= 1 << 18


def test_text_is_parsed_once_for_all_files_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, a="seed: 12345\n")
    first = run_arguments(NEOX, str(tmp_path))
    monkeypatch.setattr(yaml, "SafeLoader", None)
    assert run_arguments(NEOX, str(tmp_path)) == first and first["seed"] == 12345


def test_text_that_is_nested_too_deeply_is_no_config(tmp_path: Path) -> None:
    path = str(tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"ds_config": "[" * 200_000}, path)
    assert saved_config(open_pickled(path, False)) is None


@pytest.mark.parametrize("value", ["!!bool foo", "!!int ''", "1:" * 3000 + "1.0", "!!timestamp foo", "!!float x"])
def test_scalars_that_are_not_what_their_tag_says_leave_options_unknown(value: str, tmp_path: Path) -> None:
    assert options_of(tmp_path, f"a: {value}\n") is None


@pytest.mark.parametrize("value", ["0x" + "f" * 5000, "0b" + "1" * 9000, "1" + ":0" * 400, str(2**64)])
def test_integers_that_count_nothing_are_no_options(value: str, tmp_path: Path) -> None:
    options = options_of(tmp_path, f"a: {value}\nb: 3\n")
    assert options is not None and options["b"] == 3 and "a" not in options


def test_arguments_of_other_code_do_not_have_files_read(tmp_path: Path) -> None:
    configure(tmp_path, a='{"x": 1}')
    assert run_arguments({"seed": 3}, str(tmp_path)) == {"seed": 3}


def save_with(path: Path, module_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save a file that names an enum of a module that is there only meanwhile; returns the member."""
    kind = Enum(name, {"rotary": 1, "alibi": 3})  # type: ignore[misc]
    kind.__module__ = module_name
    with monkeypatch.context() as patch:
        parts = module_name.split(".")
        for count in range(1, len(parts) + 1):
            patch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        setattr(sys.modules[module_name], name, kind)
        torch.save({"args": Namespace(embedding=kind["alibi"], heads=8)}, path)
    return kind["alibi"]


def test_an_enum_of_megatron_is_data_where_megatron_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with(tmp_path / "file.pt", "megatron.enums", "PositionEmbeddingType", monkeypatch)
    args = open_pickled(str(tmp_path / "file.pt")).section("args")
    assert repr(args.embedding) == "megatron.enums.PositionEmbeddingType(3)" and args.heads == 8
    assert "megatron.enums" not in sys.modules
    assert run_arguments(args, str(tmp_path)) == {"heads": 8}


def test_an_enum_of_megatron_is_itself_where_the_job_has_imported_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = save_with(tmp_path / "file.pt", "megatron.enums", "PositionEmbeddingType", monkeypatch)
    module = ModuleType("megatron.enums")
    module.PositionEmbeddingType = type(member)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    file = open_pickled(str(tmp_path / "file.pt"))
    assert materialise(file, file.section("args")).embedding is member


@pytest.mark.parametrize(
    ("module", "name"), [("megatron.enums", "Launcher"), ("megatron.training", "ModelType"), ("os", "system")]
)
def test_other_names_are_refused(module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with(tmp_path / "file.pt", f"megatron.{module}" if module == "os" else module, name, monkeypatch)
    with pytest.raises(UnsafePickleError, match=name):
        open_pickled(str(tmp_path / "file.pt"))


def test_a_function_in_the_place_of_an_enum_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with(tmp_path / "file.pt", "megatron.enums", "ModelType", monkeypatch)
    called: list[Any] = []
    module = ModuleType("megatron.enums")
    module.ModelType = called.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    file = open_pickled(str(tmp_path / "file.pt"))
    assert repr(materialise(file, file.section("args")).embedding) == "megatron.enums.ModelType(3)"
    assert not called
