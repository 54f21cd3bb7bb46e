"""The files beside the weights from which Transformers and PEFT make the model and its tokenizer."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from elastic_ckpt.errors import ConfigError

#: One of them is there: a model's, or a PEFT adapter's.
_CONFIGS = {"config.json", "adapter_config.json"}
#: Of generation, tokenizers and processors, as ``save_pretrained`` of Transformers writes them.
_OTHERS = re.compile(
    r"(added_tokens|chat_template|generation_config|(pre)?processor_config|special_tokens_map|tokenizer(_config)?|vocab)"
    r"\.json|chat_template\.jinja|(merges|vocab)\.txt|(sentencepiece\.bpe|spiece|tokenizer)\.model"
)
_LARGEST_NBYTES = 128 << 20


def copy_configs(source: Path, target: Path) -> list[str]:
    """Copy the model's config, generation config and tokenizer files, and no others; returns their names.

    Raises :class:`ConfigError` if there is no config, or one of these is no regular file, or too large.
    """
    try:
        there = os.listdir(source)
    except OSError as error:
        raise _refused(source, "a folder", error) from error
    names = sorted(name for name in there if name in _CONFIGS or _OTHERS.fullmatch(name))
    if not _CONFIGS.intersection(names):
        raise _refused(source, f"{' or '.join(sorted(_CONFIGS))} in this folder", None)
    for name in names:
        expected = f"a regular file, no symbolic link, of at most {_LARGEST_NBYTES} bytes"
        try:
            with open(os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
                is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
                data = stream.read(_LARGEST_NBYTES + 1) if is_file else b""
        except OSError as error:
            raise _refused(source / name, expected, error) from error
        if not is_file or len(data) > _LARGEST_NBYTES:
            raise _refused(source / name, expected, None)
        (target / name).write_bytes(data)
    return names


def _refused(path: Path, expected: str, error: OSError | None) -> ConfigError:
    found = None if error is None else error.strerror
    return ConfigError(
        "the files to copy beside the weights cannot be taken", file=str(path), expected=expected, found=found
    )
