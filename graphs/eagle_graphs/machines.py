"""Machines by their data sheets, for the roofline.

Rates are dense (data sheets like to double them for 2:4 sparsity), at boost clocks, with 32-bit accumulation where
the sheet tells it apart (on GeForce cards half the figure for 16-bit accumulation). A multiply-add is two operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from eagle_graphs.errors import EagleError

ARITHMETICS = ("fp32", "fp16", "fp8", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device's limits. Raises EagleError on numbers that cannot be."""

    name: str
    bandwidth: float
    """Bytes a second from its memory."""
    memory: float | None
    """Bytes; None where unknown."""
    rates: Mapping[str, float]
    """Operations a second in each arithmetic that it has."""

    def __post_init__(self) -> None:
        for what, value in {"bandwidth": self.bandwidth, "memory": self.memory, **self.rates}.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise EagleError(f"{what} of {self.name} is {value:g}; expected a positive number")
        if unknown := sorted(self.rates.keys() - set(ARITHMETICS)):
            raise EagleError(
                f"{self.name} has a rate for {unknown[0]!r}; expected {', '.join(ARITHMETICS)} (bf16 counts as fp16)"
            )

    def rate(self, arithmetic: str) -> float:
        """Operations a second. Raises EagleError where it has no such arithmetic."""
        if arithmetic not in self.rates:
            raise EagleError(
                f"{self.name} has no {arithmetic} arithmetic that is known here, only {', '.join(self.rates)}: choose "
                "another precision, or state its rate with --flops"
            )
        return self.rates[arithmetic]

    def reaching(self, share: float) -> Machine:
        """The machine as kernels that reach this share of its limits find it."""
        if not 0 < share <= 1:
            raise EagleError(
                f"the share of a machine's limits that is reached is {share:g}; expected above 0, at most 1"
            )
        rates = {arithmetic: rate * share for arithmetic, rate in self.rates.items()}
        return replace(self, bandwidth=self.bandwidth * share, rates=rates)


def _gpu(name: str, gigabytes_a_second: float, gigabytes: float, **tera: float) -> tuple[str, Machine]:
    rates = {arithmetic: rate * 1e12 for arithmetic, rate in tera.items()}
    machine = Machine(name=name, bandwidth=gigabytes_a_second * 1e9, memory=gigabytes * 1e9, rates=rates)
    return name.lower().replace(" ", "-"), machine


MACHINES = dict(
    (
        # NVIDIA T4 data sheet (2019)
        _gpu("T4", 320, 16, fp32=8.1, fp16=65, int8=130),
        # NVIDIA A100 data sheet (2021), SXM4 80 GB
        _gpu("A100", 2039, 80, fp32=19.5, fp16=312, int8=624),
        # NVIDIA A10 data sheet (2021)
        _gpu("A10", 600, 24, fp32=31.2, fp16=125, int8=250),
        # NVIDIA GA102 architecture whitepaper v2, appendix A: GeForce RTX 3090
        _gpu("RTX 3090", 936, 24, fp32=35.6, fp16=71, int8=284),
        # NVIDIA L4 data sheet (2023); its tensor figures are with sparsity
        _gpu("L4", 300, 24, fp32=30.3, fp16=121, fp8=242.5, int8=242.5),
        # NVIDIA L40S data sheet (2023)
        _gpu("L40S", 864, 48, fp32=91.6, fp16=362, fp8=733, int8=733),
        # NVIDIA Ada architecture whitepaper v2, appendix A: GeForce RTX 4090
        _gpu("RTX 4090", 1008, 24, fp32=82.6, fp16=165.2, fp8=330.3, int8=660.6),
        # NVIDIA H100 data sheet (2023), SXM5; its tensor figures are with sparsity
        _gpu("H100", 3350, 80, fp32=67, fp16=989, fp8=1979, int8=1979),
        # NVIDIA H200 data sheet (2024), SXM5; likewise
        _gpu("H200", 4800, 141, fp32=67, fp16=989, fp8=1979, int8=1979),
        # NVIDIA RTX Blackwell architecture whitepaper, appendix A: GeForce RTX 5090
        _gpu("RTX 5090", 1792, 32, fp32=104.8, fp16=209.5, fp8=419, int8=838),
    )
)
"""By the name that --machine takes."""
