"""Large objects go to a bucket in parts, and copies past this machine: what lost answers do."""

import re
import urllib.request

import pytest
from s3_server import DENIED, ERROR, ERROR_AFTER, LOST, NO_UPLOAD, REFUSED, SLOW_DOWN
from test_stores import SOON

from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.objects import ObjectStore

FAULTS = [LOST, ERROR_AFTER, REFUSED, ERROR, SLOW_DOWN]
CONTENT = b"0123456789abcdef" * (20 << 16)


@pytest.fixture
def objects(bucket):
    return ObjectStore(bucket, SOON)


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(CONTENT)
    return path


def creates(request):
    return request.method == "POST" and "?uploads" in request.path


def part(request):
    return request.method == "PUT" and "partNumber=2" in request.path


def completes(request):
    return request.method == "POST" and "uploadId=" in request.path


def uploads_in(s3, bucket):
    """The uploads that are neither completed nor aborted; each costs what its parts take."""
    name = bucket.split("/")[2]
    with urllib.request.urlopen(f"{s3.endpoint}/{name}?uploads") as answer:
        return re.findall(r"<UploadId>(.*?)</UploadId>", answer.read().decode())


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("which", [creates, part, completes])
def test_a_file_is_there_whole_whatever_answer_was_lost(objects, bucket, s3, large, how, which):
    s3.fail(how, which)
    objects.put_file("a/large", large)
    assert sum(map(which, s3.requests)) == 2
    assert bytes(objects.read("a/large")) == CONTENT
    assert not large.exists()
    # Of an upload whose name was lost on the way nobody knows: it is for a lifecycle rule.
    lost = which is creates and how in (LOST, ERROR_AFTER)
    assert len(uploads_in(s3, bucket)) == lost


def test_an_upload_that_was_completed_unheard_is_done(objects, s3, large):
    """Servers differ in what they say to who completes it once more."""
    s3.fail(LOST, completes)
    s3.fail(NO_UPLOAD, completes)
    objects.put_file("a/large", large)
    assert bytes(objects.read("a/large")) == CONTENT


@pytest.mark.parametrize("before", [None, b"of another length"])
def test_an_upload_that_was_aborted_by_others_is_not_done(objects, s3, large, before):
    if before is not None:
        objects.put("a/large", before)
    s3.fail(NO_UPLOAD, completes)
    with pytest.raises(StateError, match=r"a/large cannot be written: .* aborted the upload"):
        objects.put_file("a/large", large)
    assert large.exists()


def test_an_upload_that_fails_is_aborted(objects, bucket, s3, large):
    s3.fail(DENIED, part)
    with pytest.raises(StateError, match="status 403"):
        objects.put_file("a/large", large)
    assert uploads_in(s3, bucket) == []
    assert objects.list() == []


@pytest.mark.parametrize("how", FAULTS)
def test_a_copy_is_there_whole_whatever_answer_was_lost(objects, s3, how):
    objects.put("a", b"once")
    s3.fail(how, lambda one: one.method == "PUT" and one.path.endswith("/b"))
    assert objects.copy("a", "b") == 4
    assert sum(one.method == "PUT" and one.path.endswith("/b") for one in s3.requests) == 2
    assert objects.get("b").data == b"once"
