"""Opens a checkpoint outside a training job. Local."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from elastic_ckpt.config import CONFIG_KEY, ElasticConfig, read_config
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.distributed import alone
from elastic_ckpt.errors import ConfigError, ElasticCkptError, NotFoundError, listed
from elastic_ckpt.formats import Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.detect import find_checkpoint, global_steps, look_at
from elastic_ckpt.formats.safetensors import find_safetensors
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.storage import VIEW, Entry, absolute, copies_of, folder_names, is_folder, is_url, seen_through
from elastic_ckpt.storage.listing import search
from elastic_ckpt.storage.local import steady
from elastic_ckpt.storage.remote import RemoteFolder
from elastic_ckpt.storage.view import REPLICAS, FolderView, NodeListing, list_folders, with_replicas

#: A folder, or several that have files of one checkpoint: of nodes with disks of their own.
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """An open checkpoint: its folder, its metadata, and the options by which it was read."""

    found: CheckpointInfo
    checkpoint: Checkpoint
    config: ElasticConfig

    @cached_property
    def metadata(self) -> CheckpointMetadata:
        """The checkpoint's metadata, renamed by the rules under ``"rename"``."""
        return rename_saved(self.checkpoint.metadata, self.config.rename)


@contextmanager
def seen_together(folders: Folders, config: ElasticConfig | None = None, tag: str | None = None) -> Iterator[str]:
    """A folder's path; of several, the first one's, below which the files of all are seen while the body runs.

    Those in object stores, opened with the options of ``config``, are listed whole, or what is at the top and of one
    tag, if it is there. Errors name the file that was read, not where it is seen. Raises :class:`NotFoundError` if
    there is no such folder, which is not looked at where it is the only one.
    """
    given = [folders] if isinstance(folders, (str, os.PathLike)) else folders
    names = [os.fspath(each) for each in given]
    if not all(names) or not names:
        raise ConfigError("no folder is given", None, "the folder that save_checkpoint was given", names)
    has_replicas = any(is_folder(os.path.join(name, REPLICAS)) for name in names if not is_url(name))
    if len(names) == 1 and not is_url(names[0]) and not has_replicas:
        yield names[0]
        return
    if (view := VIEW.get()) is not None and view.root == absolute(names[0]):  # by whoever calls this
        yield view.root
        return
    paths = list(map(absolute, names))
    options = {} if config is None else config.storage_options
    if missing := [path for path in paths if not is_url(path) and not is_folder(path)]:
        problem = "there is no such folder"
        remedy = "give the folders that save_checkpoint was given on each node"
        raise NotFoundError(problem, missing[0], "a folder with files of the checkpoint", "none", remedy=remedy)
    paths = with_replicas(paths) if has_replicas else paths
    remotes = {level: RemoteFolder(path, options) for level, path in enumerate(paths) if is_url(path)}
    stored = tuple(_stored(remotes[level], tag) if level in remotes else () for level in range(len(paths)))
    listings = [list_folders("", paths)] if len(remotes) < len(paths) else []
    listings += [NodeListing("", tuple(paths), stored)] if remotes else []
    mine = -1 if len(remotes) == len(paths) else 0
    with seen_through(FolderView(paths[0], listings, mine, remotes=remotes, in_order=False)):
        try:
            yield paths[0]
        except ElasticCkptError as error:
            error.file = error.file and copies_of(error.file)[0]
            raise


def _stored(remote: RemoteFolder, tag: str | None) -> tuple[Entry, ...]:
    if tag is not None:
        found = remote.entries([tag := os.path.normpath(tag)])
        if any(entry.name.startswith(f"{tag}/") for entry in found):
            return tuple(found)  # else an error has the names of the tags that are there
    return tuple(remote.entries())


def locate(folder: str, tag: str | None, trust_pickle: bool = False, without_latest: bool = True) -> CheckpointInfo:
    """The checkpoint in a folder with a ``latest`` file, in that of a tag, or the newest in a framework's folders.

    ``without_latest``: a lone tag needs no such file, as with ``--universal-checkpoint`` in ``load_checkpoint``. A
    framework's folders are those of Hugging Face's Trainer (``checkpoint-60``), Accelerate and Lightning; a tag may be
    the name of one of them. Raises :class:`NotFoundError` if there is none.
    """
    path = absolute(folder)
    itself = None if tag is not None else look_at(os.path.dirname(path), os.path.basename(path))
    find = partial(find_checkpoint, prefer_universal=False, trust_pickle=trust_pickle)
    found = itself or find(path, tag, without_latest=without_latest)
    others = list[str]()
    if found is None and is_folder(path):
        every = []
        with search(path) as count:
            for name in folder_names(path):
                with suppress(ElasticCkptError):  # of a folder that nobody asked for
                    each = find(os.path.join(path, name), None)
                    others += [name] if each is not None else []
                    every += [each] if each is not None and tag in (None, name, each.tag) else []
                count.refuse_if_used_up()
        found = max(every, key=lambda each: global_steps(each, trust_pickle) or -1, default=None)
    if found is None and tag is None:
        found = find_safetensors(path)
    if found is None:
        expected = "a folder with a latest file, the folder of a tag (global_step100), one with folders such as "
        expected += "checkpoint-100, or one of torch.distributed.checkpoint or of safetensors"
        have = "no such folder" if not is_folder(path) else "a folder without any of these"
        have = f"no {tag}, but " + listed(others) if others else have
        remedy = "give the folder that you pass to load_checkpoint, or one of the folders in it"
        raise NotFoundError("there is no DeepSpeed checkpoint here", path, expected, have, remedy=remedy)
    return found


def open_checkpoint(
    found: CheckpointInfo, config: ElasticConfig, with_states: bool = True, with_unmade: bool = True
) -> OpenedCheckpoint:
    """Read a checkpoint's metadata; :class:`ElasticCkptError` if it is incomplete, damaged, unsupported or moves.

    ``with_unmade``: whether its client state may have objects that are not made. Local: of a job, one rank may do it.
    """
    options = MetadataOptions.of(config, with_states=with_states, with_client_state=False, with_unmade=with_unmade)
    with steady(), alone():
        return OpenedCheckpoint(found, read_checkpoint(found, options), config)


def open_folder(folder: str, tag: str | None, config: ElasticConfig, with_states: bool = True) -> OpenedCheckpoint:
    """:func:`locate`, then :func:`open_checkpoint`."""
    return open_checkpoint(locate(folder, tag, config.trust_pickle), config, with_states)


def deepspeed_config(path: Path | None) -> dict[str, Any]:
    """A DeepSpeed config, empty without a path; :class:`ConfigError` if it cannot be read."""
    if path is None:
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))  # asks the system: a DeepSpeed config
    except (OSError, ValueError) as error:
        raise ConfigError("this DeepSpeed config cannot be read", file=str(path), found=str(error)) from error
    if not isinstance(loaded, dict):
        raise ConfigError("this DeepSpeed config is not a JSON object", file=str(path), found=type(loaded).__name__)
    return loaded


def config_of(path: Path | None, **overrides: Any) -> ElasticConfig:
    """A DeepSpeed config's ``"elastic_checkpoint"`` section, and overrides that are not empty; :class:`ConfigError`."""
    loaded = deepspeed_config(path)
    section = loaded.get(CONFIG_KEY, {})
    if isinstance(section, dict):  # anything else is refused below
        section = {**section, **{key: value for key, value in overrides.items() if value}}
    return read_config({**loaded, CONFIG_KEY: section})
