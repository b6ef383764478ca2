"""SpecForge's EAGLE-3 layout (https://github.com/sgl-project/SpecForge), with the switches of EAGLE 3.1."""

from __future__ import annotations

from eagle_exporter.heads.config import ConfigReader
from eagle_exporter.heads.source import EAGLE3_FLAGS, Source, eagle3_spec, eagle3_taps
from eagle_exporter.heads.spec import HeadSpec

_IDS = "eagle_aux_hidden_state_layer_ids"


def read(source: Source) -> HeadSpec:
    """SafeAILab's tensor names without embeddings; layer ids count layer outputs, in `eagle_config` or beside it."""
    body = source.reader()
    eagle = body.section("eagle_config")
    body.refuse_unknown_flags(("eagle_config", _IDS, *EAGLE3_FLAGS))
    eagle.refuse_unknown_flags((_IDS, "use_aux_hidden_state", *EAGLE3_FLAGS))
    eagle.must_be("use_aux_hidden_state", True, "a head over the last hidden state alone is not supported")
    ids = eagle.ids(_IDS) or body.ids(_IDS)
    flags = ConfigReader({**source.config, **(source.config.get("eagle_config") or {})}, source.problems)
    taps = eagle3_taps(source, ids, "outputs")
    return eagle3_spec(source, body, flags=flags, layout="specforge", taps=taps)
