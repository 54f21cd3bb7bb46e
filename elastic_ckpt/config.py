"""Configuration: the top-level key ``"elastic_checkpoint"`` of the DeepSpeed config, and the command-line flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from elastic_ckpt.core.fqn import NAME_PRESETS
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.core.state_kinds import NON_SHARD_KEYS, REPLICATED, StateOptions
from elastic_ckpt.core.values import AHEAD
from elastic_ckpt.errors import ConfigError

#: The key in the DeepSpeed config.
CONFIG_KEY = "elastic_checkpoint"
#: Environment variable with a mode; also 0 and 1, see :mod:`elastic_ckpt.load.installation`.
VARIABLE = "ELASTIC_CKPT"
Mode = Literal["auto", "require", "off"]
#: No file system has names with it.
_NO_NULL = r"^[^\x00]*$"
#: Options that need not be at their default where DeepSpeed's own loader takes over, which ignores all.
_FOR_ANY_LOADER = {"mode", "pretrained", "trust_pickle", "verify", "on_damage", "wait_for_files", "reading", "report"}
_FOR_ANY_LOADER |= {"sheet", _SECRET := "storage_options"}  # whose values are never printed
#: Options that others have, and why these are none here.
_LEFT_OUT = {
    "readers_per_node": "leave it out: it gains little once reads are merged (elastic-ckpt docs compatibility)"
}
#: A key of ``"states"`` about unknown states of at most so many elements.
_THRESHOLD = re.compile(r"numel<=(\d{1,9})", re.ASCII)


class Reading(BaseModel):
    """How the ranks read a checkpoint's files."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threads: int = Field(4, ge=1, le=64, description="reading threads per rank")
    storage: Literal["auto", "local", "network"] = Field(
        "auto",
        description="where checkpoints are: local: on a disk; network: on a network file system. Each read waits for "
        "an answer there, so reads at most 64 KiB apart are merged (see [small reads](architecture.md#small-reads)); "
        "auto: by the type of the file system. NFS, Lustre, GPFS, CephFS, BeeGFS, SMB, 9p and FUSE are network ones",
    )
    gap_kib: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="merge reads that are at most this many KiB apart in a file, and discard the bytes between them, "
        "which reads more bytes in far fewer calls. 0 reads only the bytes that a rank owns. With null, `storage` "
        "decides",
    )
    extra_memory_mib: int = Field(
        64, ge=4, description="host memory per rank, in MiB, for bytes that cannot be read into their place directly"
    )


class ElasticConfig(BaseModel):
    """Options of elastic loading. Unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    mode: Mode = Field(
        "auto",
        description="auto: uses elastic_ckpt when it can, and otherwise falls back to DeepSpeed's own loader, where "
        "that is known to be right; require: an error instead of DeepSpeed's own loader; off: always DeepSpeed's own "
        "loader",
    )
    pretrained: Literal["auto", "off"] = Field(
        "auto",
        description="auto: with ZeRO-3, each rank reads only its own bytes in Transformers' from_pretrained, where "
        "that is known to give the same model; off: from_pretrained is unchanged",
    )
    trust_pickle: bool = Field(
        False,
        description="allow checkpoint files to run code when they are read, as weights_only=False does. Only for files "
        "that you trust",
    )
    verify: Literal["load", "bytes", "off"] = Field(
        "load",
        description="load: compare all bytes that are read with the checksums in the checkpoint's files. Also "
        "compare a few masters of every ZeRO-1/2 shard with the weights saved beside it, and step counts with each "
        "other; bytes: compare only checksums. Use it if weights, steps or files were changed on purpose; "
        "off: compare nothing",
    )
    on_damage: Literal["error", "previous"] | Annotated[int, Field(ge=0)] = Field(
        "error",
        description="when the checkpoint is damaged or incomplete, or latest names none: error: refuse it; previous: "
        "load the newest complete checkpoint of load_dir that is older, and log as an error which steps are lost. An "
        "integer N does the same, going back at most N steps. A folder that may mix two saves is always refused",
    )
    fallback_dirs: list[Annotated[str, Field(min_length=1, pattern=_NO_NULL)]] = Field(
        [],
        description="folders that have files which load_dir lacks, in order of preference. For example, load_dir is "
        "in the memory of the nodes, and these are on disk. All files must be of one save",
    )
    storage_options: dict[str, Any] = Field(
        {},
        repr=False,
        description="options of obstore for folders in object stores (s3://, gs://, az://, https://), in addition to "
        'the environment\'s, such as {"endpoint": "http://minio:9000", "client_options": {"allow_http": '
        "true}}. elastic_ckpt does not print them. DeepSpeed saves its config in every checkpoint and may log it, so "
        "keep keys in the environment",
    )
    wait_for_files: int = Field(
        0,
        ge=0,
        description="seconds to wait for files that are missing, incomplete or changing before they count as damaged. "
        "A file system (NFS, but not Lustre) may show them late, or another job may still be writing them",
    )
    reading: Reading = Field(Reading.model_validate({}), description="how files are read")
    report: bool | Annotated[str, Field(pattern=_NO_NULL)] = Field(
        True,
        description="whether rank 0 prints the load report, and a progress bar on a terminal. A path also writes the "
        "report to that file, as JSON. If the load is refused, the file has its error, with complete lists of names",
    )
    sheet: bool = Field(
        True,
        description="whether save_checkpoint writes a [resume sheet](resume-sheet.md) beside the tensors, and a load "
        "compares it with the live run",
    )
    rename: list[Annotated[tuple[str, str], Field(strict=False)]] = Field(
        [],
        description="pairs of pattern and replacement, as for Python's re.sub, for the names in the checkpoint. "
        'Only the first pattern found in a name applies. "megatron-core-local" in place of a pair renames '
        "the names of Megatron Core to those of its layers without Transformer Engine",
    )
    added_rows: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="parameters that have more rows in the live model than in the checkpoint, as after tokens were "
        "added (resize_token_embeddings): their names, or patterns of whole names, as for Python's re.fullmatch. The "
        "saved rows are restored with their states; the others stay as the model has them, with states as the "
        "optimizer begins them. With tensor parallelism, a rule of the kind vocabulary does the same",
    )
    param_groups: Literal["match", "keep_live"] = Field(
        "match",
        description="match: each live param group takes the hyperparameters of the saved group that its members were "
        "in; keep_live: all groups keep those of the live run, except what a restored lr scheduler sets",
    )
    states: dict[str, Literal["replicated", "elementwise", "fresh"]] = Field(
        dict.fromkeys(NON_SHARD_KEYS, "replicated"),
        description="layouts of optimizer states by their exact names, in addition to the default. The key "
        '"numel<=256" matches every state of unknown layout with at most 256 elements, unless the state is as long as '
        "the partition or parameter that it belongs to. "
        "replicated: never sharded, the same tensor for every partition; elementwise: sharded like their parameters; "
        "fresh: not restored, nor is a hyperparameter of that name",
    )
    convert_optimizer: bool = Field(
        False,
        description="accept the states of another optimizer of the same family, which is Adam and AdamW of torch, "
        "DeepSpeed, apex and bitsandbytes",
    )
    on_change: Literal["warn", "error"] = Field(
        "warn",
        description="what to do when a load alters training: a different global batch or number of micro-batches per "
        "step; 8-bit blocks that resharding splits, which are requantized with an error of at most 0.7 % of the "
        "largest value of the block; or fp32 masters that an engine with bf16_master_weights_and_grads rounds",
    )
    align_partitions: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="pad every ZeRO partition (ZeRO-3: of every parameter) to a multiple of this many elements. Set "
        "to 4096 from the start of training, 8-bit states of bitsandbytes move between data-parallel degrees exactly. "
        "0 is DeepSpeed's own padding",
    )
    tp_rules: list[ShardSpec] = Field(
        [],
        strict=False,
        description="how tensor-parallel ranks shard parameters, which matters if their degree changes. A rule has "
        "the pattern of the name, the kind (column, row, vocabulary, replicated, averaged, summed), and the "
        "sub_parameters of a fused parameter",
    )
    tp_preset: str | None = Field(
        None,
        description="the rules of a code base (bloom, gpt-neox, megatron-core ...), or the path of a JSON file of "
        "rules",
    )
    replicated_params: Literal["strict", "first", "mean"] = Field(
        "strict",
        description="what to load if tensor-parallel ranks saved different values of a parameter that each has whole: "
        "strict: an error; first: the first rank's value, also of a module's extra state; mean: the mean of all values",
    )
    on_unreadable_entry: Literal["error", "skip"] = Field(
        "error",
        description="what to do with an entry of the client state that cannot be read without running code of the "
        "file: error: refuse it; skip: leave it out, with a warning",
    )

    @field_validator("states")
    @classmethod
    def _thresholds_are_of_replicated_states(cls, states: dict[str, str]) -> dict[str, str]:
        for key, layout in states.items():
            if "<" in key and (_THRESHOLD.fullmatch(key) is None or layout != REPLICATED):
                raise ValueError(f'{key!r}: a threshold is "numel<=N": "{REPLICATED}"')
        return states

    @field_validator("rename", mode="before")
    @classmethod
    def _presets_are_their_rules(cls, rules: Any) -> Any:
        if not isinstance(rules, list):
            return rules
        known = (NAME_PRESETS.get(rule, [rule]) if isinstance(rule, str) else [rule] for rule in rules)
        return list(chain.from_iterable(known))

    @field_validator("added_rows")
    @classmethod
    def _names_compile(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return patterns

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
    return config.mode == "require" or bool(config.model_dump(exclude_defaults=True).keys() - _FOR_ANY_LOADER)


def state_options(config: ElasticConfig) -> StateOptions:
    """The layouts of optimizer states that the user names, beside the default ones."""
    named = config.states if "states" in config.model_fields_set else {}
    thresholds = {key: match[1] for key in named if (match := _THRESHOLD.fullmatch(key)) is not None}
    layouts = {key: layout for key, layout in named.items() if key not in thresholds}
    return StateOptions(layouts, max(map(int, thresholds.values()), default=0))


#: What to write instead of keys that DeepSpeed ignores.
_LOAD_UNIVERSAL = '"checkpoint": {"load_universal": true}, or leave it out: elastic_ckpt detects universal checkpoints'
_WRONG_KEYS = ("load_universal_checkpoint", "universal_checkpoint")
#: Similarity from which a key counts as a misspelt :data:`CONFIG_KEY`; DeepSpeed's own keys reach at most 0.71.
_SIMILAR = 0.8
#: Options of this process from the command line, which override the DeepSpeed config.
flags: dict[str, Any] = {}


def flag_given() -> bool:
    """Whether ``--universal-checkpoint``, or the environment, says ``auto`` or ``require``."""
    return _flags_and_variable().get("mode") in ("auto", "require")


def _flags_and_variable() -> dict[str, Any]:
    mode = os.environ.get(VARIABLE, "")
    return {**({} if mode in ("", "0", "1") else {"mode": mode}), **flags}


def read_config(ds_config: Mapping[str, Any]) -> ElasticConfig:
    """Options of this job: flags override the DeepSpeed config, which overrides defaults.

    Raises :class:`ConfigError` for an unknown key, an invalid value, or a key that DeepSpeed would silently ignore.
    """
    _refuse_wrong_keys(ds_config)
    section = ds_config.get(CONFIG_KEY, {})
    if not isinstance(section, Mapping):
        expected = f'"{CONFIG_KEY}": {{"mode": "auto"}}'
        raise ConfigError(f'"{CONFIG_KEY}" must be an object', None, expected, repr(section))
    section = {key: value for key, value in section.items() if key != AHEAD}  # an engine's own note, in a copied config
    try:
        return ElasticConfig.model_validate({**section, **(given := _flags_and_variable())})
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["type"] not in ("extra_forbidden", "invalid_key"))
        path = [str(word) for word in first["loc"]]
        is_inside = path[0] == "reading" and len(path) > 1
        fields = (Reading if is_inside else ElasticConfig).model_fields
        key = path[is_inside]
        if key not in fields:
            problem = f'unknown key "{key}" under ' + '"reading" of ' * is_inside + f'"{CONFIG_KEY}"'
            nearest = get_close_matches(key, fields, n=1, cutoff=0.0)[0]
            remedy = _LEFT_OUT.get(key, f'did you mean "{nearest}"?')
            raise ConfigError(problem, None, f"one of {', '.join(fields)}", key, remedy=remedy) from error
        where = f"on the command line, or of {VARIABLE}," if key in given else f'under "{CONFIG_KEY}"'
        problem = f'the value of "{".".join(path[: is_inside + 1])}" {where} is not understood'
        expected = f"{first['msg']} ({fields[key].description})"
        found = "a value that is not shown, since it may hold secrets" if key == _SECRET else repr(first["input"])
        raise ConfigError(problem, None, expected, found) from (None if key == _SECRET else error)


def refuse_misplaced(ds_config: Mapping[str, Any]) -> None:
    """Refuse options of elastic_ckpt under ``"zero_optimization"``, where DeepSpeed has a switch of the same name."""
    zero = ds_config.get("zero_optimization")
    section = zero.get(CONFIG_KEY) if isinstance(zero, Mapping) else None
    if isinstance(section, Mapping):
        problem = f'"{CONFIG_KEY}" under "zero_optimization" is a switch of DeepSpeed\'s own, and takes no options'
        right = f'"{CONFIG_KEY}": {{...}} at the top level of the DeepSpeed config'
        found = f"an object with {', '.join(map(repr, section)) or 'nothing'}"
        raise ConfigError(problem, None, right, found, remedy=f"write {right}")


def _refuse_wrong_keys(ds_config: Mapping[str, Any]) -> None:
    section = ds_config.get("checkpoint")
    keys = [("", key, value) for key, value in ds_config.items()]
    keys += [(' under "checkpoint"', *item) for item in section.items()] if isinstance(section, Mapping) else []
    refuse_misplaced(ds_config)
    for where, key, value in keys:
        if key in (*_WRONG_KEYS, "universal" if where else "load_universal"):
            right = _LOAD_UNIVERSAL
        elif where or key == CONFIG_KEY or SequenceMatcher(None, str(key).lower(), CONFIG_KEY).ratio() < _SIMILAR:
            continue
        else:
            right = f'"{CONFIG_KEY}": {{...}}'
        problem = f'"{key}"{where} in the DeepSpeed config is ignored by DeepSpeed'
        found = f'"{key}"' if isinstance(value, Mapping) else f'"{key}": {value!r}'  # a section may have secrets
        raise ConfigError(problem, None, right, found, remedy=f"write {right}")
