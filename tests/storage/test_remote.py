"""Objects of a store: listed once, read in ranges, of one version; and what is said of errors."""

from __future__ import annotations

import http.client
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt import storage
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ConfigError, ElasticCkptError, NotFoundError, SavedOverError
from elastic_ckpt.report import Requests
from elastic_ckpt.storage import remote
from elastic_ckpt.storage.digest import content_digest
from elastic_ckpt.storage.local import open_ranges
from elastic_ckpt.storage.media import OBJECT_STORE
from elastic_ckpt.storage.remote import RemoteFolder
from elastic_ckpt.storage.view import FolderView, NodeListing
from elastic_ckpt.tools.opened import seen_together
from tests.storage.buckets import Bucket, serve_bucket

URL = "s3://bucket/run"
CONTENT = {"latest": b"step4", "step4/a.pt": os.urandom(3_000_000), "step4/zero/b.pt": b"b" * 10, "step5/c.pt": b"c"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("run")
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with serve_bucket() as bucket:
        bucket.put(folder, "run")
        bucket.put(folder, "runner")  # begins with the same letters
        yield bucket


@pytest.fixture
def bucket(server: Bucket) -> Bucket:
    server.asked.clear()
    server.faults.clear()
    server.refusal = None
    return server


def folder_in(bucket: Bucket, url: str = URL, **options: Any) -> RemoteFolder:
    return RemoteFolder(url, {**bucket.options, **options})


def entry_of(folder: RemoteFolder, name: str) -> storage.Entry:
    (entry,) = [entry for entry in folder.entries() if entry.name == name]
    return entry


def read(ranges: storage.Ranges, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    done = 0
    while count := ranges.read([memoryview(buffer)[done:]], start + done):
        done += count
    return bytes(buffer[:done])


@pytest.mark.parametrize("url", [URL, f"{URL}/"])
def test_a_folder_is_listed_with_sizes_and_versions_in_few_requests(bucket: Bucket, url: str) -> None:
    entries = folder_in(bucket, url).entries()
    assert {entry.name: entry.nbytes for entry in entries} == {name: len(each) for name, each in CONTENT.items()}
    assert all(entry.version and entry.mtime_ns > 0 for entry in entries)
    assert len(bucket.asked) == 1


def test_only_the_tags_that_are_asked_for_are_listed(bucket: Bucket) -> None:
    names = [entry.name for entry in folder_in(bucket).entries(["step4", "step9"])]
    assert sorted(names) == ["latest", "step4/a.pt", "step4/zero/b.pt"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 3_000_100), sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=4))
def test_ranges_are_those_of_the_object(bucket: Bucket, start: int, sizes: list[int]) -> None:
    content, folder = CONTENT["step4/a.pt"], folder_in(bucket)
    parts = [bytearray(size) for size in sizes]
    count = folder.open_ranges(entry_of(folder, "step4/a.pt")).read([memoryview(part) for part in parts], start)
    assert b"".join(parts)[:count] == content[start : start + sum(sizes)] and count == len(
        content[start:][: sum(sizes)]
    )


def test_a_large_range_takes_several_requests(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REQUEST_NBYTES", 1 << 20)
    folder = folder_in(bucket)
    ranges = folder.open_ranges(entry_of(folder, "step4/a.pt"))
    bucket.asked.clear()
    assert read(ranges, 0, 3_000_000) == CONTENT["step4/a.pt"] and len(bucket.asked) == 3
    assert bucket.read_nbytes == 3_000_000


@pytest.mark.parametrize("faults", [["503"], ["429", "500"], ["cut"], ["cut", "503", "cut"]], ids="-".join)
def test_passing_failures_are_retried(bucket: Bucket, faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    folder = folder_in(bucket)
    ranges = folder.open_ranges(entry_of(folder, "step4/a.pt"))
    bucket.faults += faults
    assert read(ranges, 5, 1_000_000) == CONTENT["step4/a.pt"][5:1_000_005] and not bucket.faults
    assert folder.requests == Requests(2 + len(faults), 1_000_000, len(faults))  # with that of the listing


def test_the_first_repetition_is_told(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    folder = folder_in(bucket)
    ranges = folder.open_ranges(entry_of(folder, "step4/a.pt"))
    bucket.faults += ["503", "cut"]
    read(ranges, 0, 1000)
    (record,) = caplog.records
    assert f"repeats a request for {URL}/step4/a.pt" in record.message and "503" in record.message


def test_a_server_that_never_answers_in_full_is_an_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_FIRST_PAUSE": 0.001, "_RETRIES": 0}.items():
        monkeypatch.setattr(remote, name, value)
    folder = folder_in(bucket)
    ranges = folder.open_ranges(entry_of(folder, "step4/a.pt"))
    bucket.faults += ["cut"] * 100
    with pytest.raises(ElasticCkptError, match="does not answer") as caught:
        read(ranges, 0, 100_000)
    assert caught.value.file == f"{URL}/step4/a.pt"


@pytest.mark.parametrize("change", ["overwrite", "remove", "overwrite unseen"])
def test_an_object_that_changed_since_it_was_listed_is_an_error(bucket: Bucket, change: str) -> None:
    obstore.put(bucket.store, "run2/a.pt", b"one save")
    folder = folder_in(bucket, "s3://bucket/run2")
    ranges = folder.open_ranges(entry_of(folder, "a.pt"))
    assert read(ranges, 0, 3) == b"one"
    bucket.faults += ["any version"] * ("unseen" in change)  # as of stores that do not know If-Match
    if change.startswith("overwrite"):
        obstore.put(bucket.store, "run2/a.pt", b"another!")
    else:
        obstore.delete(bucket.store, "run2/a.pt")
    with pytest.raises(SavedOverError) as caught:
        read(ranges, 3, 3)
    assert caught.value.file == "s3://bucket/run2/a.pt"


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    with pytest.raises(NotFoundError, match="no such bucket") as caught:
        folder_in(bucket, "s3://nobody/run").entries()
    assert caught.value.file == "s3://nobody/run"


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", ConfigError, "does not let this job read"),
        (403, "InvalidAccessKeyId", ConfigError, "does not let this job read"),
        (400, "ExpiredToken", ConfigError, "does not let this job read"),
        (400, "AuthorizationHeaderMalformed", ConfigError, "in another region"),
        (301, "PermanentRedirect", ConfigError, "in another region"),
        (501, "NotImplemented", ElasticCkptError, "does not answer as it should"),
    ],
)
def test_what_a_store_says_of_a_listing_is_told_at_once(
    bucket: Bucket, status: int, code: str, kind: type[ElasticCkptError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_RETRIES", 0)
    bucket.refusal = status, code
    folder = folder_in(bucket)
    with pytest.raises(kind, match=words):
        folder.entries()
    assert status >= 500 or folder.requests.repeated == 0


@pytest.mark.parametrize("name", [".metadata", "credentials/a.pt"])
def test_an_object_with_a_telling_name_is_no_lack_of_credentials(
    bucket: Bucket, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_RETRIES", 0)
    obstore.put(bucket.store, f"run3/{name}", b"content")
    folder = folder_in(bucket, "s3://bucket/run3")
    entry = entry_of(folder, name)
    bucket.refusal = 500, "InternalError"
    with pytest.raises(ElasticCkptError, match="does not answer"):
        folder.read(entry, 0, 7)


def test_a_folder_that_is_not_there_is_empty(bucket: Bucket) -> None:
    folder = folder_in(bucket, "s3://bucket/nothing")
    assert folder.entries() == [] == folder.entries(())


def test_secrets_are_in_no_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_RETRIES", 0)
    texts = []
    for url, options in (
        ("s3://nobody/run", {}),
        (URL, {"endpoint": "http://127.0.0.1:1/?sig=SECRET-OF-TESTS"}),
        (URL, {"endpoint": "http://user:SECRET-OF-TESTS@127.0.0.1:1"}),
        (URL, {"no_such_option": "SECRET-OF-TESTS"}),
        ("ftp://bucket/run", {}),
    ):
        with pytest.raises(ElasticCkptError) as caught:
            folder_in(bucket, url, **options).entries()
        texts += traceback.format_exception(caught.value)
    assert not any("SECRET-OF-TESTS" in text for text in texts), texts


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("endpoint", 5),
        ("endpoint", ["SECRET-OF-TESTS"]),
        ("secret_access_key", {"a": "SECRET-OF-TESTS"}),
        ("client_options", "SECRET-OF-TESTS"),
        ("client_options", {"timeout": "SECRET-OF-TESTS"}),
        ("client_options", {"default_headers": {"a": "b\nSECRET-OF-TESTS"}}),
        ("no_such_option", "SECRET-OF-TESTS"),
        ("credential_provider", "SECRET-OF-TESTS"),
    ],
)
def test_an_option_that_is_not_understood_is_named_without_its_value(bucket: Bucket, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"not understood: {option}\n") as caught:
        folder_in(bucket, **{option: value})
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "no url SECRET-OF-TESTS"}, "InvalidUri"),
        ({"endpoint": "http://"}, "InvalidUri"),
        ({"secret_access_key": "SECRET-OF-TESTS\n", "access_key_id": "key\n"}, "InvalidHeaderValue"),
        ({"client_options": {}}, "builder error"),
    ],
)
def test_requests_that_cannot_be_made_are_an_error_of_the_configuration(
    bucket: Bucket, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match="no request can be made") as caught:
        folder_in(bucket, **options).entries()
    assert words in str(caught.value.found) and "allow_http" in str(caught.value.remedy)
    assert "SECRET" not in str(caught.value)


def test_commands_list_the_tag_that_they_are_given_and_no_other(bucket: Bucket) -> None:
    config = ElasticConfig(storage_options=bucket.options)
    for tag, names in (("step4", {"latest", "step4"}), ("step9", {"latest", "step4", "step5"})):
        with seen_together(URL, config, tag) as root:
            assert set(storage.file_names(root)) == names
            assert storage.medium_of(root, "local") == OBJECT_STORE
    assert storage.medium_of("/dev/shm", "auto") != OBJECT_STORE


def test_without_the_library_the_remedy_installs_it(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ConfigError) as caught:
        folder_in(bucket)
    assert "pip install 'obstore>=0.12'" in str(caught.value.remedy)


def test_a_view_reads_objects_and_files_of_a_folder_together(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "step4").mkdir()
    (tmp_path / "step4" / "d.pt").write_bytes(b"here")
    folder = folder_in(bucket)
    here = storage.Entry("step4/d.pt", 4, 1)
    listings = [
        NodeListing("here", (str(tmp_path), URL), ((here,), ())),
        NodeListing(URL, (str(tmp_path), URL), ((), tuple(folder.entries()))),
    ]
    view = FolderView(str(tmp_path), listings, remotes={1: folder})
    with storage.seen_through(view):
        for name, content in {**CONTENT, "step4/d.pt": b"here"}.items():
            with storage.open_stream(str(tmp_path / name)) as stream:
                assert stream.read() == content and storage.size_of(stream) == len(content)


def test_an_object_has_the_digest_of_its_file(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT["step4/a.pt"])
    folder = folder_in(bucket)
    entry = entry_of(folder, "step4/a.pt")
    local = content_digest(open_ranges(str(tmp_path / "a")), entry.nbytes)
    assert content_digest(folder.open_ranges(entry), entry.nbytes) == local


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket//run/./a/../b", "s3://bucket/run/b"),
        ("https://host:9000/x", "https://host:9000/x"),
        ("/a/../b", "/b"),
    ],
)
def test_paths_of_stores_are_normal(path: str, expected: str) -> None:
    assert storage.absolute(path) == expected and storage.is_url(path) == ("://" in path)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:SECRET-OF-TESTS@host/run",
        "az://run/x?sig=SECRET-OF-TESTS",
        "s3:///run",
        "s3://bucket/run#3",  # which is no folder "run"
        "s3://[bucket/run",
    ],
)
def test_a_url_with_secrets_is_refused_without_them(bucket: Bucket, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        folder_in(bucket, url)
    assert "SECRET" not in str(caught.value)


def test_objects_that_stand_for_folders_are_no_files(bucket: Bucket) -> None:
    for name in ("marked/", "marked/step3/", "marked/step3", "marked/step3/zero/a.pt"):
        obstore.put(bucket.store, name, b"content" if name.endswith(".pt") else b"")
    assert [entry.name for entry in folder_in(bucket, "s3://bucket/marked").entries()] == ["step3/zero/a.pt"]


def test_names_that_are_no_paths_are_told_as_such(bucket: Bucket) -> None:
    connection = http.client.HTTPConnection(bucket.options["endpoint"].removeprefix("http://"))
    connection.request("PUT", "/bucket/odd/a//b", b"content")  # obstore itself writes no such name
    assert connection.getresponse().status == 200
    for tags in (None, ["../run/step4"], ["step4\nstep5"]):
        with pytest.raises(ConfigError, match="a name that cannot be read"):
            folder_in(bucket, "s3://bucket/odd").entries(tags)


@pytest.mark.parametrize("url", ["hdfs://name/run", "s3://buck et/run"])
def test_a_url_that_obstore_does_not_take_is_not_the_fault_of_options(bucket: Bucket, url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as an object store"):
        folder_in(bucket, url)
