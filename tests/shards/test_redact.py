"""No user name, password or signature reaches a message."""

from __future__ import annotations

from pathlib import Path

import pytest
from shards_help import Build

from shards import build as building
from shards.base import storage
from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.storage import RemoteStore, store_at
from shards.config import CacheConfig
from shards.reader import Split, read_manifest

SECRETS = ("user", "top", "secretpart", "AKIA", "c1gn")
SIGNED = "https://host/shards?X-Amz-Credential=AKIA&X-Amz-Signature=c1gn&version=3"


def hides_secrets(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://user:top@secretpart@bucket/x", "s3://***@bucket/x"),
        ("s3://user:top/secretpart@bucket/x", "s3://***@bucket/x"),  # keys of S3 may hold a slash
        ("https://user@host/x?token=secretpart", "https://***@host/x?token=***"),
        (SIGNED, "https://host/shards?X-Amz-Credential=***&X-Amz-Signature=***&version=3"),
        ("https://host/x?sv=1&sig=c1gn%3D", "https://host/x?sv=1&sig=***"),
        ("https://host/x?Signature=c1gn;key=top", "https://host/x?Signature=***;key=***"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("s3://bucket/why?/me@home:1/x", "s3://bucket/why?/me@home:1/x"),
        ("data/what?/monkey=3", "data/what?/monkey=3"),
    ],
)
def test_a_url_is_shown_without_its_secrets_and_a_path_as_it_is(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert repr(RemoteStore(url, "s3")) == shown
    assert redact(f'in "{url}", twice {url}') == f'in "{shown}", twice {shown}'


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3://user:top@secretpart@bucket/x", "carries a password"),
        ("s3://user:top/secretpart@bucket/x", "carries a password"),
        ("ftp://user:top@secretpart@host/x", "not read from ftp:// URLs"),
        ("file://user:top@secretpart@host/x", "carries a password"),
        ("file://x?sig=c1gn", "after file:// comes an absolute path"),
        ("https://user:top@secretpart@[host/x", "is not a URL"),
    ],
)
def test_errors_of_store_at_hide_secrets(url: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        store_at(url)
    assert hides_secrets(str(caught.value))


@pytest.mark.parametrize(
    "arguments",
    [
        ["s3://user:top@secretpart@bucket/x"],
        ["output=s3://user:top@secretpart@bucket/x"],
        ["source=s3://user:top@secretpart@bucket/x"],
        ["rho=s3://user:top@secretpart@bucket/x"],
    ],
)
def test_a_mistyped_command_does_not_repeat_secrets(arguments: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        building.main(arguments)
    assert "***@bucket" in str(caught.value)
    assert hides_secrets(str(caught.value))


def test_what_a_library_says_of_a_signed_url_is_hidden() -> None:
    def refused() -> None:
        raise OSError(f"403 Forbidden: {SIGNED}")

    with pytest.raises(UserError, match="403 Forbidden") as caught:
        storage.with_retries(refused, "x", deadline=0)
    assert hides_secrets(str(caught.value))


def test_a_reader_names_a_bad_shard_without_secrets(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    about = read_manifest(build())
    monkeypatch.setattr(RemoteStore, "sizes", lambda *_: {})
    monkeypatch.setattr("shards.reader.store_at", lambda url: RemoteStore(url, "s3"))
    with pytest.raises(UserError, match=r"s3://\*\*\*@bucket/x/train-000000.tar is missing") as caught:
        Split("s3://user:top@secretpart@bucket/x", "train", about, CacheConfig(folder=str(Path.cwd())), verify=True)
    assert hides_secrets(str(caught.value))
