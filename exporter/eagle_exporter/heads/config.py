"""Reading a head's config: every value is checked, and what is wrong is noted instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle_exporter.heads.spec import UNKNOWN

DEFAULT_ROPE_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the sequence; a graph cannot follow the others."""

_FLAG_PREFIXES = ("eagle", "norm_", "fc_", "use_mtp", "use_aux", "parallel_draft")


class ConfigReader:
    """Values of one JSON object; faults go to `problems`, and a value that fits takes the faulty one's place."""

    def __init__(self, data: Mapping[str, Any], problems: list[str], *, where: str = "config.json") -> None:
        self._data, self._problems, self._where = data, problems, where

    def __contains__(self, name: str) -> bool:
        return self._data.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it is, None where there is none."""
        return self._data.get(name)

    def size(self, name: str, *, default: object = None) -> int:
        """A positive whole number; UNKNOWN where it is none."""
        value = default if self._data.get(name) is None else self._data[name]
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        if default != UNKNOWN or name in self:
            self.fault(name, value, "a positive whole number")
        return UNKNOWN

    def number(self, name: str, *, default: float) -> float:
        """A positive finite number."""
        value = self._data.get(name)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
        self.fault(name, value, "a positive number")
        return default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A truth value."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fault(name, value, "true or false")
            return default
        return value

    def name(self, name: str, known: Container[str], *, default: str) -> str:
        """One of the names that transformers knows."""
        value = self._data.get(name) or default
        if isinstance(value, str) and value in known:
            return value
        self._problems.append(f"its {self._where} has {name} {value!r}, which transformers does not know")
        return default

    def ids(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where there is none, or it is faulty."""
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return tuple(value)
        self.fault(name, value, "a list of layer numbers")
        return None

    def section(self, name: str) -> ConfigReader:
        """A nested object, empty where there is none."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, dict):
            self.fault(name, value, "an object")
        where = f"{name} of {self._where}"
        return ConfigReader(value if isinstance(value, dict) else {}, self._problems, where=where)

    def must_be(self, name: str, expected: bool, why: str) -> None:
        """Notes a fault where the flag is stated otherwise."""
        if self.flag(name, default=expected) != expected:
            self._problems.append(f"its {self._where} has {name} {str(not expected).lower()}: {why}")

    def refuse_unknown_flags(self, known: Container[str]) -> None:
        """Notes every key that looks like a switch of the draft's arithmetic and is not among `known`."""
        for name in sorted(self._data):
            if name.startswith(_FLAG_PREFIXES) and name not in known and self._data[name] not in (None, False):
                self._problems.append(f"its {self._where} has the flag {name}, which this version does not know")

    def fault(self, name: str, value: object, expected: str) -> None:
        """Notes a value of the wrong kind."""
        self._problems.append(f"its {self._where} has {name} {value!r}; expected {expected}")

    def rope_parameters(self, *, head_dim: int, max_positions: int) -> dict[str, Any]:
        """Rope in the newer form of transformers' configs, from that form or the older one."""
        name = "rope_parameters" if self._data.get("rope_parameters") else "rope_scaling"
        stated = self._data.get(name) or {}
        default = {"rope_type": "default", "rope_theta": self.number("rope_theta", default=DEFAULT_ROPE_THETA)}
        if not isinstance(stated, dict):
            self.fault(name, stated, "an object")
            return default
        rope = default | stated
        if kind := rope.pop("type", None):
            rope["rope_type"] = stated.get("rope_type", kind)
        if {self.get("partial_rotary_factor"), rope.get("partial_rotary_factor")} - {None, 1}:
            self._problems.append(f"its {self._where} rotates a part of each head only (partial_rotary_factor)")
        if "mrope_section" in rope:
            self._problems.append(f"its {self._where} has {name} with mrope_section: positions of images, not of text")
        elif rope["rope_type"] not in ROPE_TYPES:
            self._problems.append(
                f"its {self._where} has rope_type {rope['rope_type']!r}; this version knows {', '.join(ROPE_TYPES)}"
            )
        else:
            try:
                return checked_rope(rope, head_dim=head_dim or 2, max_positions=max_positions)
            except _INCOMPLETE as error:
                reason = str(error.args[0] if error.args else type(error).__name__).splitlines()[0]
                self._problems.append(f"its {self._where} has an incomplete {name}: {reason}")
        return default


_INCOMPLETE = (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)


def checked_rope(rope: dict[str, Any], *, head_dim: int, max_positions: int) -> dict[str, Any]:
    """`rope`, if transformers can make frequencies of it; whatever it raises where it cannot."""
    LlamaRotaryEmbedding(
        LlamaConfig(head_dim=head_dim, max_position_embeddings=max_positions or 2048, rope_parameters=dict(rope))
    )
    return rope
