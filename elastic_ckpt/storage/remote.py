"""Objects of S3, Google Cloud Storage, Azure and WebDAV servers, through ``obstore`` (extra ``remote``).

A folder is listed once a job, with the size and the version (ETag) of each object. Every read names that version: an
object that was overwritten since is an error, never a mixture. Credentials and endpoints are those of the environment,
as obstore reads it (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS`` ...).
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import (
    ANOTHER_TAG,
    ConfigError,
    DamagedError,
    ElasticCkptError,
    NotFoundError,
    Remedy,
    SavedOverError,
    listed,
)
from elastic_ckpt.report import Requests
from elastic_ckpt.storage import Entry
from elastic_ckpt.storage.listing import MOST_DEPTH
from elastic_ckpt.storage.local import first_bytes

logger = logger_of(__name__)
T = TypeVar("T")
#: Bytes of one request. Fewer would wait for answers more often; what is read is in memory once more meanwhile.
REQUEST_NBYTES = 8 << 20
#: How often a request is repeated after 429, 5xx, a cut answer or none.
_RETRIES = 8
#: Seconds before the first time. The pauses double, 50 s together. They are ours: obstore would tell nobody of its own.
_FIRST_PAUSE = 0.2
_PAGE = 1000  # most objects that a store lists in one answer
#: Most objects in a folder.
_MOST_OBJECTS = 1 << 20
#: Seconds until the next page of them is there, or the whole top of a folder.
_MOST_PAGE_SECONDS = 120.0
#: Characters of an object's name: as many as S3, Google Cloud Storage and Azure take bytes.
_MOST_NAME_LENGTH = 1024
#: Folders in it: those that are looked into below a tag, and the tag's.
_MOST_FOLDERS = MOST_DEPTH + 1
_PART_NBYTES = 1 << 20  # of an answer that is looked at at a time
_SHOWN = 400
_SECRETS = re.compile(r"(?<=\?)\S+|(?<=//)[^/\s]*(?=@)")  # of a URL: a signature in its query, a password
#: What is said where there are no credentials, also by clouds' services that are asked for some. Not a key's letters.
_NO_CREDENTIALS = re.compile(r"169\.254\.169\.254|//metadata[./]|(?<![/\w.%-])credential", re.IGNORECASE)
_EXPIRED = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired|status code: 40[13]")
_NO_DATE = re.compile(r"year -?\d+ is out of range")
_OTHER_REGION = re.compile(r"redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
_FINAL = re.compile(
    rf"builder error|following redirect|non-partial response|{_NO_CREDENTIALS.pattern}|{_OTHER_REGION.pattern}", re.I
)


def _is_above(path: str, paths: Sequence[str]) -> bool:
    """Whether any of the sorted paths is below a path."""
    inside = f"{path}/"
    first = bisect_left(paths, inside)
    return first < len(paths) and paths[first].startswith(inside)


class RemoteFolder:
    """A folder in an object store; ``options`` are obstore's: an endpoint, credentials, those of its HTTP client."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        parts = _parts_of(url)
        try:
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            problem = "reading from an object store needs obstore"
            remedy = Remedy(command=("pip", "install", "obstore>=0.12"))
            raise ConfigError(problem, url, remedy=remedy) from error
        self.url = url
        self._prefix = unquote(parts.path).strip("/")
        self.requests = Requests()
        self._lock = threading.Lock()
        retry = {"max_retries": 0, "retry_timeout": timedelta(0)}

        def open_with(given: Mapping[str, Any]) -> Any:
            return from_url(f"{parts.scheme}://{parts.netloc}", retry_config=retry, **given)  # type: ignore[call-overload]

        try:
            self._store = open_with(options)
        except BaseException as error:
            if not _is_of_obstore(error):
                raise
            raise _wrong_option(url, options, open_with, error) from None  # its text may have a secret

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    def entries(self, tags: Collection[str] | None = None) -> list[Entry]:
        """The objects in the folder: all of them, or those at the top and below some tags. A request for 1,000."""
        found: list[Any] = []
        if tags is not None:
            found += self._ask(self.url, lambda: _awaited(self._top()))
        for tag in [""] if tags is None else sorted(tags):
            prefix = self._key(tag) or None
            for page in self._ask(self.url, lambda prefix=prefix: _awaited(self._pages(prefix))):  # type: ignore[misc]
                found += page
        begin = len(self._prefix) + bool(self._prefix)
        paths = sorted(each["path"] for each in found)
        for path in paths if self._prefix else ():  # by its length: servers may spell the folder in other cases
            if len(path) != len(self._prefix) and path[len(self._prefix) :][:1] != "/":
                problem = "the object store lists an object that is not in this folder"
                expected = f"names that begin with {self._prefix}/"
                raise ElasticCkptError(problem, self.url, expected, path, remedy="check the URL and its endpoint")
        # consoles make empty objects in the place of folders, whose names have lost their last slash
        entries = [
            self._entry(each["path"][begin:], each)
            for each in found
            if each["size"] or not (each["path"] == self._prefix or _is_above(each["path"], paths))
        ]
        # a name has hundreds of folders in it, each with a path of its own for whoever makes or lists them
        kept = [entry for entry in entries if entry.name.count("/") <= _MOST_FOLDERS]
        if len(kept) < len(entries):
            what = counted(len(entries) - len(kept), "object")
            where = f"in more than {_MOST_FOLDERS} folders below {self.url}"
            logger.warning("elastic_ckpt leaves out %s %s, which no checkpoint has", what, where)
        return kept

    async def _top(self) -> Sequence[Any]:
        """What is listed at the top of the folder, all of it in one answer."""
        import obstore  # noqa: PLC0415

        listed = await self._in_time(obstore.list_with_delimiter_async(self._store, prefix=self._prefix or None))
        self._add_paths(set(), listed["objects"], 1)
        return listed["objects"]

    async def _pages(self, prefix: str | None) -> list[Any]:
        """All that is listed below a prefix, in pages; an error for a listing that has no end."""
        import obstore  # noqa: PLC0415

        stream = aiter(obstore.list(self._store, prefix=prefix, chunk_size=_PAGE))
        pages: list[Any] = []
        listed_paths: set[str] = set()
        while page := await self._in_time(anext(stream, None)):
            pages.append(page)
            self._add_paths(listed_paths, page, len(pages))
        return pages

    def _add_paths(self, known: set[str], page: Sequence[Any], number: int) -> None:
        """Add a page of a listing to the known paths; an error for what no store lists."""
        paths = {each["path"] for each in page}
        if len(paths) < len(page) or not known.isdisjoint(paths):
            found = f"{next(iter(known & paths), 'an object')} again, on page {number}"
            raise self._endless("each object once", found)
        if (longest := max(map(len, paths), default=0)) > _MOST_NAME_LENGTH:
            problem = "the object store lists an object whose name is longer than any store takes"
            raise ElasticCkptError(problem, self.url, f"at most {_MOST_NAME_LENGTH} characters", str(longest))
        known |= paths
        if len(known) > _MOST_OBJECTS:
            raise self._endless(f"at most {_MOST_OBJECTS} objects in a folder", f"{len(known)} and more")

    async def _in_time(self, answer: Awaitable[T]) -> T:
        """The next page of a listing. A store may send empty ones without end, of which obstore would ask for more."""
        import obstore  # noqa: PLC0415

        try:
            return await asyncio.wait_for(answer, _MOST_PAGE_SECONDS)
        except asyncio.TimeoutError:
            found = f"pages for {_MOST_PAGE_SECONDS:g} s, without an object or an end"
            raise self._endless(f"{_PAGE} objects, or the end of the folder", found) from None
        except Exception as error:
            if "panicked" not in str(error):
                raise
            with suppress(Exception):
                obstore.head(self._store, self._key("latest"))  # a panic again, here with its text
            raise

    def _endless(self, expected: str, found: str) -> ElasticCkptError:
        problem = "the object store lists this folder without end"
        remedy = "check the URL and its endpoint; of a folder so large, give the one of the checkpoint alone"
        return ElasticCkptError(problem, self.url, expected, found, remedy=remedy)

    def _entry(self, name: str, meta: Mapping[str, Any]) -> Entry:
        if (version := meta["e_tag"]) is None:
            problem = "this server gives its files no version"
            remedy = "take one that sends an ETag with each file"
            expected = "an ETag, without which a file that is overwritten during the load goes unnoticed"
            raise ConfigError(problem, f"{self.url}/{name}", expected, remedy=remedy)
        if not version.isprintable():
            problem = "this server gives a file a version that no request can name"
            remedy = "check its endpoint, or upload the file again"
            expected = "an ETag without control characters"
            raise ElasticCkptError(problem, f"{self.url}/{name}", expected, repr(version)[:200], remedy=remedy)
        return Entry(name, meta["size"], int(meta["last_modified"].timestamp() * 1e9), version)

    def open_ranges(self, entry: Entry) -> RemoteRanges:
        """An object of the listing."""
        return RemoteRanges(self, entry)

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes of an object in the version of the listing. Thread-safe."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import GenericError, PreconditionError  # noqa: PLC0415

        options: Any = {"range": (start, stop), "if_match": entry.version}

        def read() -> memoryview:
            answer = obstore.get(self._store, self._key(entry.name), options=options)
            if (version := answer.meta["e_tag"]) and _bare(version) != _bare(entry.version):
                raise PreconditionError(f"the version {version}, where {entry.version} was asked for")
            if answer.range != (start, stop):
                raise GenericError(f"bytes {answer.range} came, where {(start, stop)} were asked for")
            raw = memoryview(bytearray(stop - start))
            count = 0
            for part in answer.stream(min_chunk_size=_PART_NBYTES):  # its end is the server's to choose
                if count + len(part) > len(raw):
                    problem = "the object store sends more bytes than it was asked for"
                    remedy = "check its endpoint"
                    both = f"{len(raw)} bytes from byte {start} on", f"{count + len(part)} and more"
                    raise ElasticCkptError(problem, url, *both, remedy=remedy)
                raw[count : count + len(part)] = part
                count += len(part)
            if count < len(raw):
                raise GenericError(f"{count} bytes came, where {len(raw)} were asked for")
            return raw

        url = f"{self.url}/{entry.name}"
        return self._ask(url, read, stop - start)

    def _ask(self, url: str, question: Callable[[], T], nbytes: int = 0) -> T:
        """The answer of a store, which is asked again after failures that may pass; a list is one of pages."""
        from obstore.exceptions import GenericError  # noqa: PLC0415

        pause = _FIRST_PAUSE
        with named_errors(url):
            while True:
                try:
                    answer = question()
                except GenericError as error:
                    if pause >= _FIRST_PAUSE * 2**_RETRIES or not _is_passing(error):
                        raise
                    with self._lock:
                        say = logger.debug if self.requests.repeated else logger.warning
                        self.requests += Requests(1, repeated=1)
                    say("elastic_ckpt repeats a request for %s: %s", url, _words_of(error))
                    time.sleep(pause * random.uniform(0.5, 1.5))  # ranks that were refused must not meet again
                    pause *= 2
                else:
                    with self._lock:
                        self.requests += Requests(max(len(answer), 1) if isinstance(answer, list) else 1, nbytes)
                    return answer


class RemoteRanges:
    """One version of an object, of which ranges are read."""

    def __init__(self, folder: RemoteFolder, entry: Entry) -> None:
        self._folder = folder
        self._entry = entry

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill buffers in order with what one request brings; 0 at the end of the object."""
        stop = min(byte_offset + sum(map(len, buffers)), byte_offset + REQUEST_NBYTES, self._entry.nbytes)
        if stop <= byte_offset:
            return 0
        rest = self._folder.read(self._entry, byte_offset, stop)
        for buffer in first_bytes(buffers, len(rest)):
            buffer[:] = rest[: len(buffer)]
            rest = rest[len(buffer) :]
        return stop - byte_offset

    def close(self) -> None:
        """Nothing is open."""


def _awaited(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which runs in a thread of its own: a loop may run in this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="elastic_ckpt") as pool:
        return pool.submit(asyncio.run, answer).result()


def _is_passing(error: Exception) -> bool:
    """Whether an error may be gone in a moment."""
    if status := re.search(r"status code: (\d{3})", str(error)):
        return status[1].startswith("5") or status[1] in ("408", "429")
    return _FINAL.search(str(error)) is None


def _bare(version: str) -> str:
    """An ETag without its quotes, which Azure's listings lack, and without the mark of a server that compresses."""
    return version.removeprefix("W/").strip('"')


def _parts_of(url: str) -> SplitResult:
    """The parts of a folder's URL; :class:`ConfigError`, without what may be secret, if it has others or none."""
    with suppress(ValueError):  # of brackets that are no address
        parts = urlsplit(url)
        if parts.netloc and not (parts.username or parts.password or parts.query or parts.fragment):
            return parts
    problem = "this URL is not that of a folder in an object store"
    expected = "s3://bucket/run, say"
    remedy = 'give keys and signatures in the environment, or under "storage_options"; of a name, write # and ? as '
    found = "one without a bucket, or with keys, a query or a fragment"
    raise ConfigError(problem, f"{url.partition('://')[0]}://...", expected, found, remedy=f"{remedy}%23 and %3F")


def _words_of(error: BaseException) -> str:
    text = str(error).partition("Debug source")[0]
    return _SECRETS.sub("...", " ".join(text.split()))[:_SHOWN]


def _is_of_obstore(error: BaseException) -> bool:
    """Whether obstore has raised it; a panic of Rust is no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _wrong_option(
    url: str, options: Mapping[str, Any], open_with: Callable[[Mapping[str, Any]], Any], error: BaseException
) -> ConfigError:
    """An error that names the options with which alone the same error comes, and no value; or the URL, if none does."""

    def is_wrong(*keys: str) -> bool:
        try:
            open_with({key: options[key] for key in keys})
        except BaseException as other:
            if not _is_of_obstore(other):
                raise
            return str(other) == str(error)
        return False

    if is_wrong():
        remedy = "check its spelling, and at variables such as AWS_ENDPOINT_URL"
        return ConfigError("this cannot be read as an object store", url, found=_words_of(error), remedy=remedy)
    wrong = list(filter(is_wrong, options)) or list(options)
    problem = f'under "storage_options", this is not understood: {listed(wrong)}'
    expected = "options of obstore's store for this URL, with values of the right types"
    remedy = "https://developmentseed.org/obstore/ lists them; values are not shown here, since they may be secret"
    return ConfigError(problem, url, expected, type(error).__name__, remedy=remedy)


@contextmanager
def named_errors(url: str) -> Iterator[None]:
    """Raises what obstore says about an object or a folder as an error that names it.

    What obstore itself has raised is no cause of it, since a traceback would show its text, with passwords of URLs.
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_obstore(error) or isinstance(error, ElasticCkptError):
            raise
        _raise_named(error, url, _words_of(error))


def _raise_named(error: BaseException, url: str, found: str) -> NoReturn:
    from obstore import exceptions as known  # noqa: PLC0415

    if isinstance(error, FileNotFoundError):
        problem = "an object of the checkpoint is gone"
        ways = (Remedy("load again"), ANOTHER_TAG)
        raise SavedOverError(problem, url, "the object that was listed", "none", remedy=ways) from None
    if isinstance(error, known.PreconditionError):
        problem = "the checkpoint was overwritten while it was being loaded"
        remedy = "load again once that save has ended; a tag of its own for each save avoids it"
        raise SavedOverError(problem, url, "the version that was listed", "another one", remedy=remedy) from None
    if isinstance(error, known.InvalidPathError) or "Could not parse path" in found:  # a//b, a/../b, control characters
        problem = "an object has a name that cannot be read"
        ways = (Remedy("rename or remove it"), ANOTHER_TAG)
        raise ConfigError(problem, url, found=found, remedy=ways) from None
    if isinstance(error, ValueError) and _NO_DATE.search(found):  # of one in the listing, and which is not told
        problem = "an object has a date that cannot be read"
        expected = "one of the years 1 to 9999"
        ways = Remedy("upload the object again"), ANOTHER_TAG
        raise DamagedError(problem, url, expected, found, remedy=ways) from None
    if not isinstance(error, known.BaseError) or "builder error" in found:  # a panic, say
        problem = "no request can be made of this URL and the options"
        expected = "an endpoint: http://minio:9000"
        remedy = 'look for spaces and line breaks in endpoint and keys; http:// needs {"allow_http": true} under '
        remedy += '"client_options" of "storage_options"'
        raise ConfigError(problem, url, expected, found, remedy=remedy) from None
    if "NoSuchBucket" in found or "ContainerNotFound" in found or "bucket does not exist" in found:
        raise NotFoundError("there is no such bucket", url, "the name of a bucket", found) from None
    if _OTHER_REGION.search(found):
        problem = "the bucket is in another region"
        expected = 'its own in AWS_REGION, or as "region"'
        raise ConfigError(problem, url, f'{expected} under "storage_options"', found) from None
    if _NO_CREDENTIALS.search(found):
        problem = "there are no credentials for this object store"
        expected = "some in the environment"
        remedy = "set AWS_ACCESS_KEY_ID and the like (profiles of ~/.aws are not read), or AWS_SKIP_SIGNATURE=true for "
        raise ConfigError(problem, url, expected, found, remedy=f"{remedy}a public bucket") from None
    if isinstance(error, (known.PermissionDeniedError, known.UnauthenticatedError)) or _EXPIRED.search(found):
        problem = "the object store does not let this job read"
        expected = "credentials that may list and read there"
        remedy = "set them in the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_... )"
        raise ConfigError(problem, url, expected, found, remedy=remedy) from None
    problem = "the object store does not answer as it should"
    remedy = "load again once it does; check its endpoint"
    if isinstance(error, Exception) and not _is_passing(error):
        remedy = "check the URL and its endpoint: https:// is for servers of WebDAV, s3:// and the like for stores"
    # no CommunicationError, after which ranks take part in no collective any more
    raise ElasticCkptError(problem, url, found=found, remedy=remedy) from None
