"""The peers: their versions, the settings that are tried, and their own builds of the one checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.client import Worker
from peers.environments import Environment, peer_variables, run

from eagle_graphs import EagleError

HERE = Path(__file__).parent
EAGLE = "eagle-aot"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For every engine, since this project's commands ask for them by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way of running a peer."""

    peer: str
    name: str
    model: str
    """A method of Builds."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the peer's class in worker.py."""
    plain: bool = True
    """Without speculation."""

    def __str__(self) -> str:
        return f"{self.peer}, {self.name}"


def llama_cpp_environment(cpu_flags: set[str]) -> Environment:
    """Compiled for this processor. Its own choice of instructions is not used: its AMX path has crashed."""
    wanted = {"avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16"}
    options = [f"-DGGML_{name}=ON" for flag, name in wanted.items() if flag in cpu_flags]
    native = ["-DGGML_NATIVE=OFF", *options] if options else []
    variables = {"CMAKE_ARGS": " ".join(["-DLLAVA_BUILD=OFF", *native])}  # nor is what reads pictures
    return Environment(name="llama.cpp", requirements=("llama-cpp-python==0.3.36",), build_variables=variables)


def environments() -> dict[str, Environment]:
    """Of each peer."""
    listed = (
        llama_cpp_environment(cpu_flags()),
        # OpenVINO GenAI is linked with one release of OpenVINO but asks for any of its series.
        Environment(name="openvino", requirements=("openvino-genai==2026.4.0.0", "openvino==2026.4.0")),
        Environment(
            name="onnxruntime-genai",
            requirements=("onnxruntime-genai==0.18.0", "transformers==5.24.0", "onnx-ir==1.1.0"),
            needs_torch=True,
        ),
        Environment(
            name="transformers",
            requirements=("transformers==5.24.0", "accelerate>=1.0", "gguf>=0.17"),
            needs_torch=True,
        ),
    )
    return {environment.name: environment for environment in listed}


SETTINGS = (
    Setting(peer="llama.cpp", name="Q4_1", model="gguf"),
    Setting(peer="llama.cpp", name="Q4_1, flash attention", model="gguf", options={"flash_attention": True}),
    *(
        Setting(peer="llama.cpp", name=f"Q4_1, look-up {n}", model="gguf", options={"lookup": n}, plain=False)
        for n in (2, 4)
    ),
    Setting(peer="openvino", name="int4", model="openvino"),
    *(
        Setting(peer="openvino", name=f"int4, look-up {n}", model="openvino", options={"lookup": n}, plain=False)
        for n in (2, 4)
    ),
    Setting(peer="onnxruntime-genai", name="int4", model="onnx_int4"),
    Setting(peer="onnxruntime-genai", name="int8", model="onnx_int8"),
    Setting(peer="transformers", name="float32", model="safetensors"),
)


class Builds:
    """The checkpoint in the peers' formats, each made on first use under `root`."""

    def __init__(self, checkpoint: Path, root: Path, pythons: Callable[[str], Path]) -> None:
        self.checkpoint, self.root, self._pythons = checkpoint, root, pythons

    def gguf(self) -> Path:
        """As it is."""
        return self.checkpoint

    def safetensors(self) -> Path:
        """Float32, of the dequantized weights."""
        return self._build("transformers", "safetensors", [str(HERE / "convert.py"), "safetensors", self.checkpoint])

    def openvino(self) -> Path:
        """OpenVINO GenAI's own reading of the GGUF file, with a zero point of 4 bits for each block's minimum."""
        return self._build("openvino", "openvino", [str(HERE / "convert.py"), "openvino", self.checkpoint])

    def onnx_int4(self) -> Path:
        """ONNX Runtime GenAI's builder, with its default of 8-bit activations in the products (accuracy level 4)."""
        return self._onnx("int4")

    def onnx_int8(self) -> Path:
        """The same with weights of 8 bits."""
        return self._onnx("int8")

    def _onnx(self, precision: str) -> Path:
        source = self.safetensors()
        cache = self.root / "cache"
        command: list[str | Path] = [
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            source,
            "-p",
            precision,
            "-e",
            "cpu",
            "-c",
            cache,
        ]
        return self._build("onnxruntime-genai", f"onnx-{precision}", [*command, "-o"])

    def _build(self, peer: str, name: str, command: list[str | Path]) -> Path:
        """Runs `command`, with where to write at its end, unless that was done."""
        out = self.root / "models" / self.checkpoint.stem / name
        if not out.is_dir():
            part = out.with_name(f"{name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.parent.mkdir(parents=True, exist_ok=True)
            python = self._pythons(peer)
            run(
                [str(python), *map(str, command), str(part)],
                log=self.root / "logs" / f"{name}.log",
                doing=f"the {name} build of {self.checkpoint.name}",
            )
            part.rename(out)
        return out


def peer_worker(setting: Setting, *, python: Path, model: Path, threads: int, ends: list[int], logs: Path) -> Worker:
    """Starts a peer; `ends` are the tokens that end an answer."""
    options = {"model": str(model), "threads": threads, "ends": ends, **setting.options}
    command = [str(python), str(HERE / "worker.py"), setting.peer, json.dumps(options)]
    log = logs / f"{str(setting).replace(' ', '-')}.log"
    return Worker(str(setting), command, log=log, variables=peer_variables() | HUGE_PAGES)


def eagle_worker(profile: str, *, bundle: Path, threads: int, ends: list[int], logs: Path) -> Worker:
    """Starts this project's runtime, of this interpreter."""
    import os

    options = {"model": str(bundle), "threads": threads, "ends": ends, "profile": profile}
    command = [sys.executable, str(HERE / "worker.py"), "eagle", json.dumps(options)]
    log = logs / f"{EAGLE}-{profile}.log"
    return Worker(f"{EAGLE}, {profile}", command, log=log, variables=os.environ | HUGE_PAGES)


def chosen_settings(peers: str) -> list[Setting]:
    """Of the peers named, divided by commas; all for "all". Raises EagleError on another name."""
    known = list(dict.fromkeys(setting.peer for setting in SETTINGS))
    names = known if peers == "all" else peers.split(",")
    if unknown := [name for name in names if name not in known]:
        raise EagleError(f"--peers names {unknown[0]!r}; expected some of {', '.join(known)}, or all")
    return [setting for setting in SETTINGS if setting.peer in names]


def cpu_flags() -> set[str]:
    """What Linux says of the processor's instructions; empty elsewhere."""
    return set(_cpuinfo("flags").split())


def cpu_model() -> str:
    """The processor's name."""
    return _cpuinfo("model name") or "unknown"


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")
