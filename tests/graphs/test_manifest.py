"""The manifest: what is written is what is read, and anything else is refused by the name of the field."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest

from eagle_graphs.errors import EagleError
from eagle_graphs.manifest import (
    SCHEMA,
    Engine,
    Exactness,
    FileEntry,
    HeadInfo,
    Limits,
    Manifest,
    PluginGraphs,
    PortableGraphs,
    Source,
    TargetInfo,
    TokenizerFiles,
    check_path,
    manifest_from_json,
)
from eagle_graphs.ports import KVGeometry
from eagle_graphs.profiles import profiles_from_text, static_profile

FILES = (
    "target.onnx",
    "draft.onnx",
    "tokenizer/tokenizer.json",
    "tokenizer/chat_template.jinja",
    "round-4.onnx",
    "round-16.onnx",
)


NEAR_TIE = Exactness(kind="near-tie", logit_gap=1e-3, max_logit_difference=4.5e-5, rows=512)


def engine(kernels: Literal["native", "stock"]) -> Engine:
    return Engine(
        backend="onnxruntime",
        device="cpu",
        architectures=(),
        kernels=kernels,
        precision="fp32",
        cache_dtype="float32",
        weights_stripped=False,
        slots=1,
        target=FILES[0],
        draft=FILES[1],
        draft_rounds={"4": FILES[4], "16": FILES[5]},
        draft_steps={},
        exactness=NEAR_TIE,
    )


PORTABLE = PortableGraphs(precision="fp16", cache_dtype="float16", target=FILES[0], draft=FILES[1], draft_steps={})


def manifest(**changes: Any) -> Manifest:
    made = Manifest(
        files={path: FileEntry(size=10 + i, sha256=f"{i:064x}") for i, path in enumerate(FILES)},
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
        target=TargetInfo(
            source=Source(name="some/target", revision="0123abc", files={"model.safetensors": "a" * 64}),
            architecture="LlamaForCausalLM",
            hidden_size=576,
            vocab_size=49152,
            eos_token_ids=(2, 0),
            max_positions=8192,
            kv=KVGeometry(layers=30, kv_heads=3, head_dim=64),
        ),
        head=HeadInfo(
            source=Source(name="head", revision=None, files={}),
            kind="eagle3",
            layout="safeailab",
            taps=(2, 15, 27),
            position_offset=0,
            hidden_size=576,
            draft_vocab_size=8192,
            top_k=8,
            kv=KVGeometry(layers=1, kv_heads=3, head_dim=64),
        ),
        tokenizer=TokenizerFiles(
            tokenizer=FILES[2], chat_template=FILES[3], special_tokens={"eos_token": "<|im_end|>"}
        ),
        profiles=profiles_from_text("4,8,16"),
        default_profile="8",
        limits=Limits(capacity=1024, prefill_chunk=64, buffer_rows=1088),
        engines=(engine("native"), engine("stock")),
    )
    return replace(made, **changes)


def at(data: Any, *keys: str | int) -> Any:
    """What stands in `data` below these keys."""
    for key in keys:
        data = data[key]
    return data


def refusal(edit: Callable[[Any], object]) -> str:
    """The message that a manifest gets once `edit` has been at its JSON."""
    data = json.loads(manifest().to_json())
    edit(data)
    with pytest.raises(EagleError) as caught:
        manifest_from_json(json.dumps(data))
    return str(caught.value)


# What is written is read


@pytest.mark.parametrize(
    "written",
    [
        manifest(),
        manifest(default_profile="plain"),
        manifest(profiles=(), default_profile="plain", engines=(), versions={}),
        manifest(engines=(replace(engine("stock"), draft_rounds={}),)),
        manifest(portable=(PORTABLE, replace(PORTABLE, plugin=PluginGraphs(target=FILES[0], draft=FILES[1])))),
        manifest(tokenizer=TokenizerFiles(tokenizer=FILES[2], chat_template=None, special_tokens={})),
        manifest(versions={"größe": 'a "quoted" \\ line\n', "": ""}),
        manifest(engines=(replace(engine("stock"), exactness=replace(NEAR_TIE, logit_gap=0.1 + 0.2)),)),
    ],
    ids=["full", "plain by default", "only plain", "no rounds", "portable", "no template", "odd text", "float"],
)
def test_round_trip(written: Manifest) -> None:
    read = manifest_from_json(written.to_json())
    assert read == written
    assert read.to_json() == written.to_json()


def test_the_json_is_one_for_people_and_other_tools() -> None:
    text = manifest().to_json()
    data = json.loads(text)
    assert text.endswith("}\n")
    assert text.count("\n") > 50
    assert data["schema"] == SCHEMA
    assert data["head"]["taps"] == [2, 15, 27]
    assert data["head"]["source"]["revision"] is None
    assert data["profiles"][1] == {"nodes": 8, "top_k": 4, "depth": 3, "paths": []}


def test_a_whole_number_will_do_for_a_float() -> None:
    data = json.loads(manifest().to_json())
    data["engines"][0]["exactness"]["logit_gap"] = 0
    gap = manifest_from_json(json.dumps(data)).engines[0].exactness.logit_gap
    assert type(gap) is float
    assert gap == 0


# Not a manifest


@pytest.mark.parametrize("text", ["", "{", "not json", manifest().to_json()[:-20], "{'schema': 1}", "[" * 100_000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(EagleError, match=r"manifest.json is not JSON \(.*\): export the bundle again"):
        manifest_from_json(text)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"schema"', '["schema"]', "{}", '{"model_type": "llama"}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(EagleError, match="has no schema number: this is not a bundle of eagle-export"):
        manifest_from_json(text)


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, "1", None, [1]])
def test_another_schema_is_refused_whatever_else_it_holds(schema: Any) -> None:
    with pytest.raises(EagleError) as caught:
        manifest_from_json(json.dumps({"schema": schema, "later": "fields"}))
    assert f"has schema {schema!r}, this version reads schema {SCHEMA}" in str(caught.value)
    assert "install the version that made it" in str(caught.value)


@pytest.mark.parametrize("schema", [float(SCHEMA)])
def test_a_schema_that_only_equals_the_number_is_refused(schema: Any) -> None:
    assert "manifest.schema is" in refusal(lambda data: data.update(schema=schema))


# Fields

PLACES = [  # of objects with fields, at every depth, and how a message names them
    ((), "manifest"),
    (("target",), "manifest.target"),
    (("target", "source"), "manifest.target.source"),
    (("head", "kv"), "manifest.head.kv"),
    (("files", "draft.onnx"), "manifest.files['draft.onnx']"),
    (("profiles", 2), "manifest.profiles[2]"),
    (("engines", 0), "manifest.engines[0]"),
    (("engines", 0, "exactness"), "manifest.engines[0].exactness"),
    (("limits",), "manifest.limits"),
    (("tokenizer",), "manifest.tokenizer"),
]


@pytest.mark.parametrize(("place", "name"), PLACES, ids=[name for _, name in PLACES])
def test_an_unknown_field_is_refused(place: tuple[str | int, ...], name: str) -> None:
    message = refusal(lambda data: at(data, *place).update(surprise=1))
    assert message.startswith(f"{name} has unknown field 'surprise': ")
    assert "export it again" in message


@pytest.mark.parametrize(("place", "name"), PLACES, ids=[name for _, name in PLACES])
def test_each_missing_field_is_refused(place: tuple[str | int, ...], name: str) -> None:
    for field in at(json.loads(manifest().to_json()), *place):
        if field != "schema":
            message = refusal(lambda data, field=field: at(data, *place).pop(field))
            assert message.startswith(f"{name} has no field '{field}': ")


def test_all_that_is_wrong_with_an_object_is_named_at_once() -> None:
    def rename(data: Any) -> None:
        kv = data["target"]["kv"]
        kv["heads"], kv["dim"] = kv.pop("kv_heads"), kv.pop("head_dim")

    expected = "has unknown field 'dim', unknown field 'heads', no field 'head_dim', no field 'kv_heads': "
    assert expected in refusal(rename)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("target", "hidden_size"), "576", "manifest.target.hidden_size is str '576'; expected int"),
        (("target", "hidden_size"), 576.0, "manifest.target.hidden_size is float '576.0'; expected int"),
        (("target", "hidden_size"), True, "manifest.target.hidden_size is bool 'True'; expected int"),
        (("target", "hidden_size"), None, "manifest.target.hidden_size is NoneType 'None'; expected int"),
        (("target", "architecture"), 3, "manifest.target.architecture is int '3'; expected str"),
        (("target", "eos_token_ids"), 2, "manifest.target.eos_token_ids is int '2'; expected list"),
        (("target", "eos_token_ids", 1), "0", "manifest.target.eos_token_ids[1] is str '0'; expected int"),
        (("target", "source", "revision"), 7, "manifest.target.source.revision is int '7'; expected str"),
        (("target", "kv"), [30, 3, 64], "manifest.target.kv is list '[30, 3, 64]'; expected dict"),
        (("head", "kind"), "medusa", "manifest.head.kind is 'medusa'; expected one of 'eagle1', 'eagle3'"),
        (("head", "kind"), ["eagle3"], "manifest.head.kind is ['eagle3']; expected one of 'eagle1', 'eagle3'"),
        (("head", "taps"), {"0": 2}, "manifest.head.taps is dict"),
        (("engines", 0, "backend"), "tflite", "manifest.engines[0].backend is 'tflite'; expected one of 'onnxruntime'"),
        (("engines",), {}, "manifest.engines is dict '{}'; expected list"),
        (("engines", 0), None, "manifest.engines[0] is NoneType 'None'; expected dict"),
        (
            ("engines", 0, "exactness", "logit_gap"),
            "0",
            "manifest.engines[0].exactness.logit_gap is str '0'; expected float",
        ),
        (
            ("engines", 0, "exactness", "logit_gap"),
            False,
            "manifest.engines[0].exactness.logit_gap is bool 'False'; expected float",
        ),
        (("files",), [], "manifest.files is list '[]'; expected dict"),
        (("files", "draft.onnx", "size"), "10", "manifest.files['draft.onnx'].size is str '10'; expected int"),
        (("versions", "torch"), 2.13, "manifest.versions['torch'] is float '2.13'; expected str"),
        (
            ("tokenizer", "special_tokens", "eos_token"),
            None,
            "manifest.tokenizer.special_tokens['eos_token'] is NoneType",
        ),
        (("default_profile",), 8, "manifest.default_profile is int '8'; expected str"),
        (("profiles", 0, "nodes"), 4.5, "manifest.profiles[0].nodes is float '4.5'; expected int"),
    ],
)
def test_a_mistyped_field_is_refused(place: tuple[str | int, ...], value: Any, message: str) -> None:
    *above, last = place

    def edit(data: Any) -> None:
        at(data, *above)[last] = value

    assert refusal(edit).startswith(message)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refusal(lambda data: data.update(engines="x" * 10_000))) < 200


# What fits in type and not in sense


def test_a_profile_that_cannot_be_filled_is_refused() -> None:
    assert "needs 15 candidates" in refusal(lambda data: data["profiles"][2].update(depth=1))


def test_a_profile_wider_than_the_head_s_graph_is_refused() -> None:
    message = refusal(lambda data: data["head"].update(top_k=3))
    assert message.startswith("the manifest's profile 8 drafts 4 children of a node, its head gives 3: ")


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "place",
    [
        ("target", "vocab_size"),
        ("target", "kv", "layers"),
        ("head", "hidden_size"),
        ("head", "kv", "head_dim"),
        ("limits", "capacity"),
        ("limits", "prefill_chunk"),
        ("limits", "buffer_rows"),
        ("engines", 0, "slots"),
    ],
)
def test_a_size_of_nothing_is_refused(place: tuple[str | int, ...], value: int) -> None:
    *above, last = place
    message = refusal(lambda data: at(data, *above).update({last: value}))
    assert message.startswith("manifest.")
    assert f".{last} is {value}; expected 1 or more: " in message


def test_a_buffer_that_does_not_hold_whole_blocks_is_refused() -> None:
    message = refusal(lambda data: data["limits"].update(buffer_rows=1089))
    assert message.startswith("manifest.limits.buffer_rows is 1089; expected a multiple of the 16 rows of a block")
    rows = replace(manifest().limits, buffer_rows=1089)
    assert manifest(limits=rows, engines=(engine("stock"),)).limits == rows


@pytest.mark.parametrize("name", ["5", "plain", "26"])
def test_a_round_of_drafting_of_no_dynamic_profile_is_refused(name: str) -> None:
    def edit(data: Any) -> None:
        data["profiles"].append(asdict(static_profile()))
        data["engines"][1]["draft_rounds"][name] = FILES[4]

    message = refusal(edit)
    assert message.startswith(
        f"manifest.engines[1].draft_rounds has {name!r}; expected sizes of profiles whose tree is "
    )
    assert "dynamic, 4, 8, 16: export" in message


@pytest.mark.parametrize("place", [("engines", 1), ("portable", 0)], ids=["engine", "portable"])
def test_steps_of_drafting_are_one_a_level_of_a_profile(place: tuple[str, int]) -> None:
    portable = PortableGraphs(
        precision="fp16",
        cache_dtype="float16",
        target=FILES[0],
        draft=FILES[1],
        draft_steps={"4": (FILES[4], FILES[5])},
    )
    made = manifest(portable=(portable,))
    assert manifest_from_json(made.to_json()) == made
    where = f"manifest.{place[0]}[{place[1]}].draft_steps"

    def edit(data: Any, nodes: str, steps: list[str]) -> None:
        data["portable"] = [json.loads(made.to_json())["portable"][0]]
        at(data, *place)["draft_steps"] = {nodes: steps}

    assert refusal(lambda data: edit(data, "5", [FILES[4]])).startswith(f"{where} has '5'; expected sizes of profiles")
    assert refusal(lambda data: edit(data, "8", [FILES[4]])).startswith(f"{where}['8'] has 1 graphs; expected 3, one ")
    assert "names 'other'" in refusal(lambda data: edit(data, "4", [FILES[4], "other"]))

    def edit_static(data: Any, steps: list[str]) -> None:
        data["profiles"].append(asdict(static_profile()))
        edit(data, "26", steps)

    data = json.loads(made.to_json())
    edit_static(data, [FILES[4]] * 5)
    assert manifest_from_json(json.dumps(data)).portable
    assert refusal(lambda data: edit_static(data, [FILES[4]] * 4)).startswith(f"{where}['26'] has 4 graphs; expected 5")


def test_an_engine_says_how_exact_it_is() -> None:
    near, bits = NEAR_TIE.sentence(), replace(NEAR_TIE, kind="bitwise").sentence()
    assert "near-tie" in near
    assert "at most 4.5e-05 over 512 rows" in near
    assert "closer than 0.001" in near
    assert "bit for bit, over 512 rows" in bits


def test_a_position_offset_may_be_anything() -> None:
    assert manifest(head=replace(manifest().head, position_offset=-1)).head.position_offset == -1


@pytest.mark.parametrize("which", ["target", "head"])
def test_a_cache_of_no_known_type_is_refused(which: str) -> None:
    message = refusal(lambda data: data[which]["kv"].update(dtype="float15"))
    assert message.startswith(f"manifest.{which}.kv.dtype is 'float15'; expected one of ")


@pytest.mark.parametrize("default", ["5", "auto", "", "08", "8 "])
def test_a_default_profile_that_is_not_listed_is_refused(default: str) -> None:
    message = refusal(lambda data: data.update(default_profile=default))
    assert message == f"the manifest's default profile is {default!r}; it has plain, 4, 8, 16"
    with pytest.raises(EagleError, match="default profile"):
        manifest(default_profile=default)


@pytest.mark.parametrize(
    "place",
    [
        ("tokenizer", "tokenizer"),
        ("tokenizer", "chat_template"),
        ("engines", 0, "target"),
        ("engines", 0, "draft"),
        ("engines", 1, "draft_rounds", "16"),
    ],
)
def test_a_file_that_is_not_listed_is_refused(place: tuple[str | int, ...]) -> None:
    *above, last = place

    def edit(data: Any) -> None:
        at(data, *above)[last] = "../elsewhere"

    assert "names '../elsewhere' but does not list it among its files" in refusal(edit)


@pytest.mark.parametrize("changes", [{"target": "x"}, {"plugin": PluginGraphs(target=FILES[0], draft="x")}])
def test_a_portable_graph_that_is_not_listed_is_refused(changes: Any) -> None:
    with pytest.raises(EagleError, match="names 'x' but does not list it among its files"):
        manifest(portable=(replace(PORTABLE, **changes),))


OUTSIDE = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "a/b/../c",
    "/etc/passwd",
    "//server/share/x",
    "/",
    "\\x",
    "..\\x",
    "a\\..\\..\\x",
    "C:/x",
    "C:x",
    "C:\\x",
    "\\\\server\\share",
    "file:x",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leaves_the_bundle_is_refused(path: str) -> None:
    with pytest.raises(EagleError, match="is not inside the bundle: do not use this bundle"):
        check_path(path)
    message = refusal(lambda data: data["files"].update({path: {"size": 1, "sha256": "0" * 64}}))
    assert f"names the file {path!r}, which is not inside the bundle" in message


@pytest.mark.parametrize("path", ["x", "a/b.onnx", "..x", "a/x..", "a/...", ".hidden", "a b/c", "größe.json"])
def test_a_path_inside_the_bundle_is_accepted(path: str) -> None:
    check_path(path)
