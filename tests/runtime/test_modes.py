"""What each profile's name asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eagle_graphs import EagleError, Manifest
from eagle_runtime.bundle import open_bundle
from eagle_runtime.controller import NOTHING, Options
from eagle_runtime.modes import mode_from_name


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> Manifest:
    return dataclasses.replace(open_bundle(tiny_bundle).manifest, default_profile="8")


CHOICE = Options(drafts=(NOTHING, 4, 8, 16), sizes=(1, 4, 8, 16))
ALONE = Options(drafts=(NOTHING,), sizes=(1, 4, 8, 16))


@pytest.mark.parametrize(
    ("name", "lookup", "sampled", "nodes", "options", "looks_up"),
    [
        ("auto", None, False, 8, CHOICE, True),
        ("auto", False, False, 8, CHOICE, False),
        ("auto", None, True, 8, None, False),
        ("lookup", None, False, None, ALONE, True),
        ("plain", None, False, None, None, False),
        ("plain", False, True, None, None, False),
        ("4", None, False, 4, None, False),
        ("4", True, False, 4, Options(drafts=(4,), sizes=(4,)), True),
        ("4", None, True, 4, None, False),
    ],
)
def test_names(
    manifest: Manifest,
    name: str,
    lookup: bool | None,
    sampled: bool,
    nodes: int | None,
    options: Options | None,
    looks_up: bool,
) -> None:
    mode = mode_from_name(name, manifest, lookup=lookup, sampled=sampled)
    assert (mode.profile and mode.profile.nodes, mode.options, mode.lookup) == (nodes, options, looks_up)
    assert mode.drafts == (name not in ("plain", "lookup"))


@pytest.mark.parametrize(
    ("name", "lookup", "sampled"),
    [("5", None, False), ("plain", True, False), ("lookup", False, False), ("lookup", None, True), ("8", True, True)],
)
def test_what_cannot_be(manifest: Manifest, name: str, lookup: bool | None, sampled: bool) -> None:
    with pytest.raises(EagleError):
        mode_from_name(name, manifest, lookup=lookup, sampled=sampled)


def test_auto_drafts_even_where_plain_decoding_was_the_fastest_of_the_fixed(manifest: Manifest) -> None:
    plain = dataclasses.replace(manifest, default_profile="plain")
    assert mode_from_name("auto", plain, lookup=None).options == CHOICE
    assert mode_from_name("auto", plain, lookup=None).drafts
    assert mode_from_name("auto", plain, lookup=None, sampled=True).profile is None
