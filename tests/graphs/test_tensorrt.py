"""The room for TensorRT without the library: what is refused, how a builder's words are read, what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_graphs import EagleError
from eagle_graphs.passes import Pass
from eagle_graphs.tensorrt import library
from eagle_graphs.tensorrt.build import Built, Network, build_options
from eagle_graphs.tensorrt.bundle import choose_portable
from eagle_graphs.tensorrt.description import description_from_log
from eagle_graphs.tensorrt.report import report_from_engine

LAYER = (
    "Name: {name}, LayerType: {kind}, "
    "Inputs: [ {{ Name: x{mark}, Dimensions: [1,5], Datatype: {reads}, Format: any }}], "
    "Constants: [ {{ Name: w, Dimensions: [5,5], Datatype: {weights}, Format: any }}], "
    "Outputs: [ {{ Name: y, Dimensions: [1,5], Datatype: Float, Format: any }}], "
    "TacticName: t, StreamId: 0, Metadata: {nodes}"
)
TENSOR = (
    " Name: {name}, IOMode: {mode}, DataType: {dtype}, Dimensions: [1,-1], Location: Device, ProfileInfo: [ {info}]"
)


def shapes(*sizes: str) -> str:
    return ", ".join(
        f"{{ MinShape: [{size}], OptShape: [{size}], MaxShape: [{size}], Format: linear }}" for size in sizes
    )


TENSORS = "\n".join(
    [
        "",
        "I/O Tensors:",
        TENSOR.format(name="x", mode="Input", dtype="Half", info=shapes("1,1", "1,5")),
        TENSOR.format(name="past_key_0", mode="Input", dtype="Half", info=shapes("1,8", "1,8")),
        TENSOR.format(name="y", mode="Output", dtype="Float", info="{ Format: linear }"),
    ]
)
PASSES = (Pass(name="plain", rows=1, after=1, asked=1), Pass(name="tree 5", rows=5, after=5, asked=5))


def layer(
    name: str, *nodes: str, kind: str = "gemm", reads: str = "Half", weights: str = "Half", mark: str = ""
) -> str:
    metadata = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    return LAYER.format(name=name, kind=kind, reads=reads, weights=weights, mark=mark, nodes=metadata)


def built(*layers: str, attention: Any = "native") -> Built:
    messages = [
        "Total Activation Memory: 256 bytes",
        "Total Activation Memory: 512 bytes",
        "Total Weights Memory: 1024 bytes",
        "\n".join(["Layers:", *layers, TENSORS]),
    ]
    network = Network(attention=attention, attentions=("attention.0",), products=("a", "b"), quantized=frozenset({"a"}))
    return Built(size=2048, network=network, description=description_from_log(messages))


FUSED = (
    layer("a+b_myl1_0", "a", "dq", "b", weights="Int4"),
    layer("_gemv_mha_v1_myl1_1", "attention.0", kind="kgen"),
    layer("a [profile 1]_myl3_0", "a", "dq", weights="Int4", mark=" [profile 1]"),
    layer("b_myl3_1", "b"),
    layer("_gemm_mha_v2_myl3_2", "attention.0", kind="kgen"),
)


def test_an_engine_is_described_pass_by_pass() -> None:
    report = report_from_engine("target", PASSES, built(*FUSED))
    assert report.problems() == []
    plain, tree = report.passes
    assert (plain.layers, tree.layers) == ({"gemm": 1, "kgen": 1}, {"gemm": 2, "kgen": 1})
    assert (plain.products, tree.products) == ({"Int4": 2}, {"Int4": 1, "Half": 1})
    assert (plain.inputs, tree.inputs) == ({"x": (1, 1)}, {"x": (1, 5)})
    assert (plain.memory, tree.memory) == (256, 512)
    assert (report.cache, report.outputs, report.weights) == (("Half", (1, 8), 1), {"y": "Float"}, 1024)


def test_what_fell_apart_is_named() -> None:
    apart = (
        *FUSED[:2],
        layer("unpack_myl3_0", "dq", kind="kgen", weights="Int4", mark=" [profile 1]"),
        layer("a_myl3_1", "a"),
        layer("scores_myl3_2", "attention.0"),
        layer("softmax_myl3_3", "attention.0", kind="kgen"),
    )
    problems = report_from_engine("target", PASSES, built(*apart)).problems()
    assert problems == [
        "target, tree 5: 1 of 1 attentions fell apart into several kernels (attention.0)",
        "target, tree 5: the quantized weights of 1 products are unpacked in each pass (a)",
    ]


def test_a_plugin_is_an_attention_in_one_piece() -> None:
    layers = (*FUSED[:1], layer("attention.0", "attention.0", kind="PluginV3"), *FUSED[2:4])
    report = report_from_engine("target", PASSES, built(*layers, attention="plugin"))
    assert report.attention == "plugin"
    assert report.problems() == []
    assert [each.attentions for each in report.passes] == [1, 1]


def test_shapes_that_are_not_frozen_are_refused() -> None:
    text = "\n".join(["Layers:", *FUSED, TENSORS.replace("MaxShape: [1,5]", "MaxShape: [1,9]")])
    with pytest.raises(EagleError, match=r"x has shapes from 1,5 to 1,9 in one profile"):
        description_from_log([text])


@pytest.mark.parametrize("messages", [[], ["Total Weights Memory: 1 bytes"]])
def test_a_builder_that_says_nothing_is_refused(messages: list[str]) -> None:
    with pytest.raises(EagleError, match="did not describe the engine"):
        description_from_log(messages)


def options(backend: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {"precision": "fp16", "gpu": None, "strip_weights": False, "level": None}
    return build_options(backend, attention="native", **(given | changes))


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that builds for some GPUs."""
    names = ("NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120")
    module = SimpleNamespace(ComputeCapability=SimpleNamespace(__members__=dict.fromkeys(names)))
    monkeypatch.setattr(library, "import_tensorrt", lambda backend: module)


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize(
    ("precision", "gpu", "expected"),
    [
        ("fp16", None, ("sm80", "sm86", "sm89", "sm120")),
        ("fp8", None, ("sm89", "sm120")),
        ("fp16", "sm75", ("sm75",)),
        ("int4", "sm120,sm86,sm86", ("sm120", "sm86")),
    ],
)
def test_gpus_to_build_for(precision: str, gpu: str | None, expected: tuple[str, ...]) -> None:
    assert options("tensorrt-rtx", precision=precision, gpu=gpu).architectures == expected


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "sm90"}, "--gpu names 'sm90'; TensorRT-RTX builds for sm75, sm80, sm86, sm89, sm120"),
        ({"gpu": "sm89,sm86", "precision": "fp8"}, "--precision fp8 does not run on sm86; it needs sm89 or later"),
        ({"gpu": "sm75", "precision": "bf16"}, "--precision bf16 does not run on sm75; it needs sm80 or later"),
        ({"level": 6}, r"--builder-level is 6; expected 0 \(builds fast\) to 5"),
    ],
)
def test_what_the_library_cannot_build_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        options("tensorrt-rtx", **changes)


def test_tensorrt_builds_for_the_gpu_at_hand() -> None:
    assert options("tensorrt").architectures == ()
    with pytest.raises(EagleError, match=r"--gpu sm89 is for --backend tensorrt-rtx"):
        options("tensorrt", gpu="sm89")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, module, advice in (
        ("tensorrt-rtx", "tensorrt_rtx", r"pip install 'eagle-aot\[tensorrt-rtx\]'"),
        ("tensorrt", "tensorrt", "install TensorRT from NVIDIA"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(EagleError, match=rf"--backend {backend} needs its library, .*{advice}"):
            library.import_tensorrt(backend)  # type: ignore[arg-type]


def test_attentions_that_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("tensorrt-rtx", "tensorrt"):
        library.check_attention(backend, "native")  # type: ignore[arg-type]
    with pytest.raises(EagleError, match=r"--attention plugin is not for .*: use --attention native"):
        library.check_attention("tensorrt-rtx", "plugin")
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    library.check_attention("tensorrt", "plugin")
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(
        EagleError, match=r"needs triton and onnx_ir, .*not installed: pip install 'eagle-aot\[plugin\]'"
    ):
        library.check_attention("tensorrt", "plugin")


def test_the_portable_graphs_to_build_from() -> None:
    def manifest(*precisions: str) -> Any:
        return SimpleNamespace(portable=tuple(SimpleNamespace(precision=each) for each in precisions))

    assert choose_portable(manifest("fp8"), None).precision == "fp8"
    assert choose_portable(manifest("fp8", "int4"), "int4").precision == "int4"
    with pytest.raises(EagleError, match="no portable graphs to build from: export it with --portable"):
        choose_portable(manifest(), None)
    with pytest.raises(EagleError, match=r"--precision is one of .*: fp8, int4; none was named"):
        choose_portable(manifest("fp8", "int4"), None)
    with pytest.raises(EagleError, match=r"--precision is one of .*: fp8; found 'fp16'"):
        choose_portable(manifest("fp8"), "fp16")


def test_building_needs_nothing_of_the_export() -> None:
    code = "import json, sys, eagle_graphs.tensorrt.cli; print(json.dumps([n.split('.')[0] for n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(json.loads(done.stdout))
    assert "eagle_graphs" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "tensorrt_rtx", "tensorrt"}
