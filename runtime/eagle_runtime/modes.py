"""What a profile's name asks for: a fixed tree, plain decoding, look-up alone, or a choice in every round."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_graphs import EagleError, Manifest, Profile
from eagle_runtime.controller import NOTHING, Options

PLAIN = "plain"
AUTO = "auto"
LOOKUP = "lookup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How an answer's trees are made."""

    profile: Profile | None
    """The tree where nothing is chosen; None for plain decoding."""
    options: Options | None
    """What is chosen from in every round; None where nothing is."""
    lookup: bool

    @property
    def drafts(self) -> bool:
        """Whether the head is needed."""
        return self.profile is not None or (self.options is not None and self.options.drafts != (NOTHING,))


def mode_from_name(name: str, manifest: Manifest, *, lookup: bool | None, sampled: bool = False) -> Mode:
    """The mode of a profile's name.

    Args:
        name: "auto", "plain", "lookup", or nodes of one of the bundle's profiles.
        manifest: the bundle's.
        lookup: whether to look up; None where it pays, which is wherever the tree is not fixed.
        sampled: whether trees are sampled, whose shape must be fixed: "auto" is then the bundle's default profile.

    Raises:
        EagleError: there is no such profile, or the wishes exclude each other.
    """
    profiles = {str(profile.nodes): profile for profile in manifest.profiles}
    if name not in (AUTO, PLAIN, LOOKUP, *profiles):
        raise EagleError(f"profile {name!r} is not in the bundle; it has {', '.join((AUTO, PLAIN, LOOKUP, *profiles))}")
    if sampled and (lookup or name == LOOKUP):
        raise EagleError('verify_mode is "sampled", whose trees the head must draw: use deterministic, or no look-up')
    if name == LOOKUP and lookup is False:
        raise EagleError('the profile "lookup" does nothing but look up: use the profile "plain", or allow look-up')
    if name == PLAIN and lookup:
        raise EagleError('the profile "plain" verifies no tree, so there is no look-up: use the profile "lookup"')
    fixed = profiles.get(manifest.default_profile if name == AUTO else name)
    nodes = tuple(sorted(profile.nodes for profile in manifest.profiles))
    options = None
    if not sampled:
        if name == AUTO:
            options = Options(drafts=(NOTHING, *nodes), sizes=(1, *nodes))
        elif name == LOOKUP:
            options = Options(drafts=(NOTHING,), sizes=(1, *nodes))
        elif fixed is not None and lookup:
            options = Options(drafts=(fixed.nodes,), sizes=(fixed.nodes,))
    chosen = options is not None and (lookup is None or lookup)
    return Mode(profile=fixed, options=options, lookup=chosen)
