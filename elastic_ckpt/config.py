"""Configuration: the top-level key ``"elastic_checkpoint"`` of the DeepSpeed config, and the command-line flags."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from elastic_ckpt.core.fqn import NAME_PRESETS
from elastic_ckpt.core.state_kinds import ELEMENTWISE, NON_SHARD_KEYS, REPLICATED, StateOptions
from elastic_ckpt.core.tp_rules import Rule
from elastic_ckpt.core.training_state import AHEAD
from elastic_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)
#: The key in the DeepSpeed config.
CONFIG_KEY = "elastic_checkpoint"
#: Environment variable with a mode; also 0 and 1, see :mod:`elastic_ckpt.load.startup`.
VARIABLE = "ELASTIC_CKPT"
Mode = Literal["auto", "require", "off"]


#: Marks an option that DeepSpeed's own loader ignores: a load that sets it is never left to DeepSpeed.
_ELASTIC_ONLY = object()


class ElasticConfig(BaseModel):
    """Options of elastic loading. Unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Mode = Field(
        "auto",
        description="auto: restore what can be restored exactly, leave to DeepSpeed's own loader what only it can; "
        "require: an error instead of DeepSpeed's own loader; off: always DeepSpeed's own loader",
    )
    trust_pickle: bool = Field(
        False,
        description="allow checkpoint files to run code when read (weights_only=False); only for files you trust",
    )
    check_shards: bool = Field(
        True,
        description="check a few fp32 masters of every ZeRO-1/2 shard against the weights saved beside it, and the "
        "step count of ZeRO-3 shards against the counters",
    )
    verify: Literal["load", "off"] = Field(
        "load",
        description="load: compare all bytes that are read with the checksums in the checkpoint's files; off: do not",
    )
    on_damage: Literal["error", "previous"] = Field(
        "error",
        description="when the checkpoint is damaged or incomplete, or latest names none: refuse it, or load the newest "
        "older one of load_dir that is whole, with a warning (of a tag that you name: those older than it)",
    )
    max_steps_back: int | None = Field(
        None, ge=0, description="with on_damage: how many steps older that checkpoint may be; null: any number"
    )
    wait_for_files: int = Field(
        0,
        ge=0,
        description="seconds to wait for missing, incomplete or moving files before they count as damaged: shared file "
        "systems show them late, or another job is still writing them",
    )
    read_threads: int = Field(4, ge=1, le=64, description="reading threads per rank")
    read_chunk_mib: int = Field(16, ge=1, le=1024, description="largest single read, in MiB")
    storage: Literal["local", "network"] = Field(
        "local",
        description="where checkpoints are: on a network file system each read waits for an answer, and reads at most "
        "64 KiB apart are merged (see [how that is chosen](architecture.md#small-reads))",
    )
    read_gap_kib: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="merge reads at most this many KiB apart in a file, discarding the bytes between them: more bytes "
        "but far fewer calls, where a row-parallel weight at another tensor-parallel degree, or parameters on twice "
        "as many ranks, are thousands of small reads. `null`: by `storage`; 0: every rank reads only its own bytes",
    )
    huge_pages: bool = Field(
        True,
        description="try huge pages for memory that reads touch first, until one takes too long to map",
    )
    max_extra_memory_mib: int = Field(
        64, ge=4, description="host memory per rank for bounce buffers, in MiB (strided, converted, accelerator)"
    )
    progress: bool | None = Field(None, description="show a progress bar on rank 0; null: only on a terminal")
    report: bool = Field(True, description="print the load report on rank 0")
    report_path: str | None = Field(None, description="file to which rank 0 writes the load report, as JSON")
    rename: Annotated[list[Annotated[tuple[str, str], Field(strict=False)]], _ELASTIC_ONLY] = Field(
        [],
        description="[pattern, replacement] for names in the checkpoint, as for Python's re.sub "
        '([["^old\\\\.(.*)", "new.\\\\1"]]); only the first pattern found in a name applies. "megatron-core-local" in '
        "place of a pair: from the names that Megatron Core saves to those of its layers without Transformer Engine",
    )
    param_groups: Annotated[Literal["match", "keep_live"], _ELASTIC_ONLY] = Field(
        "match",
        description="match: each live param group takes the hyperparameters of its members' saved group; "
        "keep_live: all keep those of the live run",
    )
    non_shard_state_keys: Annotated[list[str], _ELASTIC_ONLY] = Field(
        list(NON_SHARD_KEYS),
        description="optimizer states that are never sharded (the same tensor for every partition), by exact name; "
        "one that you list and the checkpoint lacks is reported",
    )
    shard_state_keys: Annotated[list[str], _ELASTIC_ONLY] = Field(
        [], description="optimizer states that are sharded like their parameters, by exact name"
    )
    fresh_state_keys: Annotated[list[str], _ELASTIC_ONLY] = Field(
        [], description="optimizer states and hyperparameters that are not restored, by exact name"
    )
    non_shard_max_numel: Annotated[int, _ELASTIC_ONLY] = Field(
        0,
        ge=0,
        description="deprecated, list the names from the report in non_shard_state_keys instead: treat optimizer "
        "states of unknown layout with at most this many elements as never sharded. 0: none",
    )
    state_schema: Annotated[dict[str, Literal["elementwise", "replicated", "fresh"]], _ELASTIC_ONLY] = Field(
        {},
        description="deprecated, use shard_state_keys (elementwise), non_shard_state_keys (replicated) and "
        "fresh_state_keys (fresh): the layout of optimizer states, by name",
    )
    convert_optimizer: Annotated[bool, _ELASTIC_ONLY] = Field(
        False,
        description="accept the states of another optimizer of the same family: Adam and AdamW of torch, DeepSpeed, "
        "apex and bitsandbytes",
    )
    eight_bit_realign: Annotated[Literal["requantize", "error"], _ELASTIC_ONLY] = Field(
        "requantize",
        description="how to handle 8-bit quantization blocks split by resharding: requantize them, with an error of at "
        "most 0.7 % of the largest value of the block, or refuse the load",
    )
    on_precision_loss: Annotated[Literal["warn", "error"], _ELASTIC_ONLY] = Field(
        "warn",
        description="when fp32 masters and states are loaded into an engine that keeps them in bf16 "
        "(bf16_master_weights_and_grads): round them with a note in the report, or refuse the load",
    )
    align_partitions: Annotated[int, _ELASTIC_ONLY] = Field(
        0,
        ge=0,
        le=1 << 20,
        description="pad every ZeRO partition (ZeRO-3: of every parameter) to a multiple of this many elements, from "
        "the start of training; with 4096, 8-bit states of bitsandbytes move between data-parallel degrees exactly. "
        "0: DeepSpeed's own padding",
    )
    tp_rules: Annotated[list[Rule], _ELASTIC_ONLY] = Field(
        [],
        strict=False,
        description="how tensor-parallel ranks shard parameters, if their degree changes: pattern of the name, kind "
        "(column, row, vocabulary, replicated, averaged, summed, custom), sub_parameters of fused ones",
    )
    tp_preset: Annotated[str | None, _ELASTIC_ONLY] = Field(
        None,
        description="rules of a code base (bloom, gpt-neox, megatron-core ...), or the path of a JSON file of rules",
    )
    replicated_params: Annotated[Literal["strict", "first", "mean"], _ELASTIC_ONLY] = Field(
        "strict",
        description="parameters that every tensor-parallel rank saved whole, with different values: "
        "strict: an error; first: the first rank's; mean: the mean of all",
    )
    on_unreadable_entry: Annotated[Literal["error", "skip"], _ELASTIC_ONLY] = Field(
        "error",
        description="on an entry of the client state that cannot be read without running code of the file; "
        "skip: it is left out, with a warning",
    )
    on_batch_size_change: Annotated[Literal["warn", "error"], _ELASTIC_ONLY] = Field(
        "warn", description="on a change of the global batch or of the micro-batches per step"
    )

    @field_validator("rename", mode="before")
    @classmethod
    def _presets_are_their_rules(cls, rules: Any) -> Any:
        if not isinstance(rules, list):
            return rules
        known = ([rule] if not isinstance(rule, str) else NAME_PRESETS.get(rule, [rule]) for rule in rules)
        return list(chain.from_iterable(known))

    @field_validator("rename")
    @classmethod
    def _patterns_compile(cls, rules: list[tuple[str, str]]) -> list[tuple[str, str]]:
        for pattern, replacement in rules:
            try:
                re.compile(pattern + "|").sub(replacement, "")  # the empty alternative makes re parse the replacement
            except (re.error, IndexError) as error:
                raise ValueError(f"{pattern!r} -> {replacement!r}: {error}") from error
        return rules


def requires_elastic(config: ElasticConfig) -> bool:
    """Whether DeepSpeed's own loader would ignore some of these options, so that it must not load."""
    fields = ElasticConfig.model_fields.items()
    marked = [(name, field) for name, field in fields if _ELASTIC_ONLY in field.metadata]
    return config.mode == "require" or any(
        getattr(config, name) != field.get_default(call_default_factory=True) for name, field in marked
    )


def state_options(config: ElasticConfig) -> StateOptions:
    """The user-defined layouts of optimizer states.

    Raises :class:`ConfigError` if options contradict each other; only ``state_schema`` overrides the allowlist.
    """
    named = config.non_shard_state_keys if "non_shard_state_keys" in config.model_fields_set else []
    schema: dict[str, str] = {**config.state_schema}
    for option, layout in (("shard_state_keys", ELEMENTWISE), ("fresh_state_keys", "fresh")):
        for key in getattr(config, option):
            other = REPLICATED if key in named else schema.setdefault(key, layout)
            if other != layout:
                raise ConfigError(
                    f'"{option}" under "{CONFIG_KEY}" names optimizer state {key!r}, which is {other} elsewhere',
                    parameter=key,
                    expected="one layout for a state",
                    found=f"{other} and {layout}",
                    remedy=f'take "{key}" out of one of the lists',
                )
    return StateOptions(tuple(config.non_shard_state_keys), tuple(named), config.non_shard_max_numel, schema)


#: Deprecated options -> what to write instead.
_REPLACEMENTS = {
    "state_schema": '"shard_state_keys", "non_shard_state_keys" and "fresh_state_keys", which list states by name',
    "non_shard_max_numel": '"non_shard_state_keys", with the names that the load report lists',
}
_warned: set[str] = set()
#: What to write instead of keys that DeepSpeed ignores.
_LOAD_UNIVERSAL = '"checkpoint": {"load_universal": true}, or leave it out: elastic_ckpt detects universal checkpoints'
_WRONG_KEYS = ("load_universal_checkpoint", "universal_checkpoint")
#: Similarity from which a key counts as a misspelt :data:`CONFIG_KEY`; DeepSpeed's own keys reach at most 0.71.
_SIMILAR = 0.8
#: Options from the command line, which override the DeepSpeed config.
_flags: dict[str, Any] = {}


def set_flags(**values: Any) -> None:
    """Set process-wide options from the command line, which override the DeepSpeed config."""
    _flags.update(values)


def clear_flags() -> None:
    """Forget the options from the command line."""
    _flags.clear()


def flag_given() -> bool:
    """Whether ``--universal-checkpoint``, or the environment, says ``auto`` or ``require``."""
    return _flags_and_variable().get("mode") in ("auto", "require")


def _flags_and_variable() -> dict[str, Any]:
    mode = os.environ.get(VARIABLE, "")
    return {**({} if mode in ("", "0", "1") else {"mode": mode}), **_flags}


def read_config(ds_config: Mapping[str, Any]) -> ElasticConfig:
    """Options of this job: flags override the DeepSpeed config, which overrides defaults.

    Raises:
        ConfigError: an unknown key, an invalid value, or a wrong key that DeepSpeed would silently ignore.
    """
    _refuse_wrong_keys(ds_config)
    section = ds_config.get(CONFIG_KEY, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'"{CONFIG_KEY}" must be an object',
            expected='"elastic_checkpoint": {"mode": "auto"}',
            found=repr(section),
        )
    section = {key: value for key, value in section.items() if key != AHEAD}  # an engine's own note, in a copied config
    known = list(ElasticConfig.model_fields)
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ConfigError(
                f'unknown key "{key}" under "{CONFIG_KEY}"',
                expected=f"one of {', '.join(known)}",
                found=key,
                remedy=f'did you mean "{nearest[0]}"?',
            )
    flags = _flags_and_variable()
    try:
        config = ElasticConfig(**{**section, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = f"on the command line, or of {VARIABLE}," if key in flags else f'under "{CONFIG_KEY}"'
        raise ConfigError(
            f'the value of "{key}" {where} is not understood',
            expected=f"{first['msg']} ({ElasticConfig.model_fields[key].description})",
            found=repr(first["input"]),
        ) from error
    state_options(config)
    _warn_of_deprecated(section)
    return config


def _refuse_wrong_keys(ds_config: Mapping[str, Any]) -> None:
    section = ds_config.get("checkpoint")
    wrong = [(key, "", ds_config, _LOAD_UNIVERSAL) for key in (*_WRONG_KEYS, "load_universal")]
    if isinstance(section, Mapping):
        wrong += [(key, ' under "checkpoint"', section, _LOAD_UNIVERSAL) for key in (*_WRONG_KEYS, "universal")]
    for key in ds_config:
        if key != CONFIG_KEY and difflib.SequenceMatcher(None, str(key).lower(), CONFIG_KEY).ratio() >= _SIMILAR:
            wrong.append((key, "", ds_config, f'"{CONFIG_KEY}": {{...}}'))
    for key, where, values, right in wrong:
        if key in values:
            raise ConfigError(
                f'"{key}"{where} in the DeepSpeed config is a key that nobody reads',
                expected=right,
                found=f'"{key}": {values[key]!r}',
                remedy=f"write {right}",
            )


def _warn_of_deprecated(section: Mapping[str, Any]) -> None:
    """Warn once per option, on the first rank of the job, at the first load."""
    for key in _REPLACEMENTS.keys() & section.keys() - _warned:
        _warned.add(key)
        if os.environ.get("RANK", "0") == "0":
            logger.warning('elastic_ckpt: "%s" is deprecated; use %s', key, _REPLACEMENTS[key])
