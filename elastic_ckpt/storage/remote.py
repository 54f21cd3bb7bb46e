"""Objects of S3, Google Cloud Storage, Azure and WebDAV servers, through ``obstore`` (extra ``remote``).

A folder is listed once a job, with the size and the version (ETag) of each object. Every read names that version: an
object that was overwritten since is an error, never a mixture. Credentials and endpoints are those of the environment,
as obstore reads it (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS`` ...).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from elastic_ckpt.errors import CommunicationError, ConfigError, NotFoundError, SavedOverError
from elastic_ckpt.storage import Entry

logger = logging.getLogger(__name__)
#: Bytes of one request. Fewer would wait for answers more often; what is read is in memory once more meanwhile.
_REQUEST_NBYTES = 8 << 20
#: Of one request: obstore's own repetitions after 429 and 5xx, and seconds for them; ours after a cut answer.
_RETRIES, _RETRY_SECONDS, _ATTEMPTS, _FIRST_PAUSE = 8, 120, 5, 0.2
_SHOWN = 300
_QUERY = re.compile(r"\?\S*")  # which may hold a signature


class RemoteFolder:
    """A folder in an object store.

    Args:
        url: of the folder.
        options: for obstore: an endpoint, credentials, options of its HTTP client.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            problem, remedy = "reading from an object store needs obstore", "pip install 'elastic_ckpt[remote]'"
            raise ConfigError(problem, url, remedy=remedy) from error
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query or not parts.netloc:
            problem, expected = "this URL is not that of a folder in an object store", "s3://bucket/run, say"
            remedy = 'give keys and signatures by the environment, or under "storage_options"'
            raise ConfigError(problem, f"{parts.scheme}://...", expected, "one with keys or a query", remedy=remedy)
        self.url, self._prefix = url, unquote(parts.path).strip("/")
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
        with named_errors(url):
            self._store = from_url(f"{parts.scheme}://{parts.netloc}", retry_config=retry, **options)  # type: ignore[call-overload]

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    def entries(self, tags: Collection[str] | None = None) -> list[Entry]:
        """The objects in the folder: all of them, or those at the top and below some tags. A request for 1,000."""
        import obstore  # noqa: PLC0415

        found: list[Any] = []
        with named_errors(self.url):
            if tags is not None:
                found += obstore.list_with_delimiter(self._store, prefix=self._prefix or None)["objects"]
            for tag in [""] if tags is None else sorted(tags):
                for page in obstore.list(self._store, prefix=self._key(tag) or None, chunk_size=1000):
                    found += page
        begin = len(self._prefix) + bool(self._prefix)
        # consoles make empty objects in the place of folders, whose names have lost their last slash
        folders = {each["path"].rpartition("/")[0] for each in found}
        return [
            self._entry(each["path"][begin:], each) for each in found if each["size"] or each["path"] not in folders
        ]

    def _entry(self, name: str, meta: Mapping[str, Any]) -> Entry:
        version = meta["e_tag"] or meta["version"]
        if version is None:
            problem, remedy = "this server gives its files no version", "take one that sends an ETag with each file"
            expected = "an ETag, without which a file that is overwritten during the load goes unnoticed"
            raise ConfigError(problem, f"{self.url}/{name}", expected, remedy=remedy)
        return Entry(name, meta["size"], int(meta["last_modified"].timestamp() * 1e9), version)

    def open_ranges(self, entry: Entry) -> RemoteRanges:
        """An object of the listing."""
        return RemoteRanges(self._store, f"{self.url}/{entry.name}", self._key(entry.name), entry)


class RemoteRanges:
    """One version of an object, of which ranges are read."""

    most_nbytes = _REQUEST_NBYTES

    def __init__(self, store: Any, url: str, key: str, entry: Entry) -> None:
        self._store, self._url, self._key, self._entry = store, url, key, entry

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill buffers in order with what one request brings; 0 at the end of the object."""
        stop = min(byte_offset + sum(map(len, buffers)), byte_offset + _REQUEST_NBYTES, self._entry.nbytes)
        if stop <= byte_offset:
            return 0
        rest = memoryview(self._get(byte_offset, stop))
        for buffer in buffers:
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
        return stop - byte_offset

    def _get(self, start: int, stop: int) -> Any:
        import obstore  # noqa: PLC0415
        from obstore.exceptions import GenericError  # noqa: PLC0415

        options: Any = {"range": (start, stop), "if_match": self._entry.version}
        with named_errors(self._url):
            for attempt in range(_ATTEMPTS):
                try:
                    raw = obstore.get(self._store, self._key, options=options).bytes()
                    if len(raw) == stop - start:
                        return raw
                    why = f"{len(raw)} bytes came, where {stop - start} were asked for"
                except GenericError as error:  # the answer was cut, or no answer came
                    if attempt == _ATTEMPTS - 1 or not _is_passing(error):
                        raise
                    why = _words_of(error)
                logger.warning("elastic_ckpt reads %s again: %s", self._url, why)
                time.sleep(_FIRST_PAUSE * 2**attempt)
        problem, remedy = "an object store sends other bytes than it was asked for", "load again, or ask who runs it"
        raise CommunicationError(problem, self._url, f"bytes {start} to {stop}", why, remedy=remedy)

    def close(self) -> None:
        """Nothing is open."""


def _is_passing(error: Exception) -> bool:
    """Whether an error may be gone in a moment: one without an answer that states another status than 5xx."""
    status = re.search(r"status code: (\d)", str(error))
    return status is None or status[1] == "5"


def _words_of(error: BaseException) -> str:
    return _QUERY.sub("?...", " ".join(str(error).split()))[:_SHOWN]


@contextmanager
def named_errors(url: str) -> Iterator[None]:
    """Raises what obstore says about an object or a folder as an error that names it."""
    from obstore import exceptions as known  # noqa: PLC0415

    try:
        yield
    except FileNotFoundError as error:
        problem, remedy = "an object of the checkpoint is gone", "load again, or take another tag"
        raise SavedOverError(problem, url, "the object that was listed", "none", remedy=remedy) from error
    except known.PreconditionError as error:
        problem = "the checkpoint was saved over while it was being loaded"
        remedy = "load again once that save has ended; a tag of its own for each save avoids it"
        raise SavedOverError(problem, url, "the version that was listed", "another one", remedy=remedy) from error
    except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
        problem, expected = "the object store does not let this job read", "credentials that may list and read there"
        remedy = "set those of the environment (AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_... )"
        raise ConfigError(problem, url, expected, _words_of(error), remedy=remedy) from error
    except known.BaseError as error:
        found = _words_of(error)
        if "NoSuchBucket" in found or "ContainerNotFound" in found or "bucket does not exist" in found:
            raise NotFoundError("there is no such bucket", url, "the name of a bucket", found) from error
        if re.search(r"credential|169\.254\.169\.254|metadata", found, re.IGNORECASE):
            problem, expected = "there are no credentials for this object store", "some in the environment"
            remedy = "set AWS_ACCESS_KEY_ID and the like, or AWS_SKIP_SIGNATURE=true for a public bucket"
            raise ConfigError(problem, url, expected, found, remedy=remedy) from error
        if isinstance(error, (known.NotSupportedError, known.UnknownConfigurationKeyError, known.InvalidPathError)):
            raise ConfigError("this cannot be read as an object store", url, found=found) from error
        problem, remedy = "the object store does not answer as it should", "load again once it does"
        raise CommunicationError(problem, url, found=found, remedy=remedy) from error
