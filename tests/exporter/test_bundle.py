"""Writing a bundle: all or nothing at its place, and weights that stand once, each on a page of its own."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_exporter.bundle import WeightFile, check_replaceable, file_entries, staged
from eagle_graphs import EagleError

PAGE = 4096


def write_bundle(directory: Path, text: str = "old") -> None:
    """What `check_replaceable` takes for a bundle."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text('{"schema": 1, "files": {}, "engines": []}')
    (directory / "graph").write_text(text)


def export_half(out: Path, error: BaseException) -> None:
    with staged(out) as directory:
        write_bundle(directory, "half")
        raise error


# Staging


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "bundle"
    with staged(out) as directory:
        assert directory.parent == out.parent  # one file system, so that renaming is all or nothing
        (directory / "below").mkdir()
        (directory / "below" / "file").write_text("new")
        assert not out.exists()
    assert (out / "below" / "file").read_text() == "new"
    assert out.stat().st_mode & 0o777 == 0o755
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("error", [EagleError("no"), RuntimeError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        export_half(tmp_path / "bundle", error)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_replaced_by_what_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    write_bundle(out)
    with pytest.raises(RuntimeError):
        export_half(out, RuntimeError())
    assert (out / "graph").read_text() == "old"
    with staged(out) as directory:
        (directory / "manifest.json").write_text("new")
    assert {path.name: path.read_text() for path in out.iterdir()} == {"manifest.json": "new"}
    assert list(tmp_path.iterdir()) == [out]


def test_an_empty_directory_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with staged(Path()) as directory:
        write_bundle(directory)
    assert (tmp_path / "out" / "graph").is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_the_user_s(tmp_path: Path, code: int) -> None:
    with pytest.raises(EagleError, match=r"no room for .*bundle"), staged(tmp_path / "bundle"):
        raise OSError(code, os.strerror(code))
    assert list(tmp_path.iterdir()) == []


def test_another_fault_of_the_system_is_let_through(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file"), staged(tmp_path / "bundle"):
        raise OSError(errno.EBADF, "Bad file descriptor")


@pytest.mark.parametrize("manifest", ["", "{", "[]", "{}", '{"manifest_version": 3}', '{"schema": 1, "files": {}}'])
def test_another_program_s_manifest_is_no_bundle(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(EagleError, match=f"--out {tmp_path} exists and is not a bundle"):
        check_replaceable(tmp_path)


def test_what_may_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replaceable(tmp_path / "absent")
    check_replaceable(tmp_path)
    write_bundle(tmp_path)
    check_replaceable(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    with pytest.raises(EagleError, match="is a mount point, which cannot be replaced: name a directory inside it"):
        check_replaceable(tmp_path)


def test_every_file_but_the_manifest_is_listed(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "empty").touch()
    entries = file_entries(tmp_path)
    assert list(entries) == ["below/empty", "graph"]
    assert (entries["below/empty"].size, entries["graph"].size) == (0, 3)
    assert entries["graph"].sha256 == hashlib.sha256(b"old").hexdigest()


# Weights


def model_of(**tensors: np.ndarray) -> ir.Model:
    """A graph that only holds initializers."""
    values = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in tensors.items()]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 23}, name="graph")
    return ir.Model(graph, ir_version=10)


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    initializers = ir.load(path).graph.initializers
    return {name: value.const_value.numpy() for name, value in initializers.items() if value.const_value is not None}


def externals(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    found = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, ir.ExternalTensor)}


def test_tensors_come_back_from_the_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        "floats": random.normal(size=(33, 17)).astype(np.float32),
        "numbers": random.integers(0, 99, 500),
        "small": np.arange(3.0, dtype=np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    model = model_of(**tensors)
    WeightFile(tmp_path).move_out(model)
    ir.save(model, tmp_path / "graph.onnx")
    assert externals(model).keys() == {"floats", "numbers"}
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    found = arrays_in(moved / "graph.onnx")
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_equal_tensors_stand_once_across_graphs(tmp_path: Path) -> None:
    shared, other = np.ones((64, 64), np.float32), np.zeros((64, 64), np.float32)
    weights = WeightFile(tmp_path)
    first, second = model_of(embedding=shared, lm_head=shared.copy()), model_of(embed=shared.copy(), other=other)
    weights.move_out(first)
    size = weights.path.stat().st_size
    assert size == shared.nbytes
    weights.move_out(second)
    places = {name: tensor.offset for name, tensor in (externals(first) | externals(second)).items()}
    assert places == {"embedding": 0, "lm_head": 0, "embed": 0, "other": shared.nbytes}
    assert weights.path.stat().st_size == shared.nbytes + other.nbytes


def test_equal_bytes_of_another_type_or_shape_keep_their_own(tmp_path: Path) -> None:
    zeros = np.zeros((16, 32), np.float32)
    model = model_of(floats=zeros, numbers=zeros.view(np.int32), turned=zeros.reshape(32, 16))
    WeightFile(tmp_path).move_out(model)
    ir.save(model, tmp_path / "graph.onnx")
    found = arrays_in(tmp_path / "graph.onnx")
    assert (found["numbers"].dtype, found["turned"].shape) == (np.int32, (32, 16))
    assert externals(model)["turned"].offset == externals(model)["floats"].offset


def test_every_tensor_begins_on_a_page(tmp_path: Path) -> None:
    sizes = (300, 1024, 1025, 5000)
    model = model_of(**{f"t{size}": np.full(size, size, np.float32) for size in sizes})
    weights = WeightFile(tmp_path)
    weights.move_out(model)
    places = [(tensor.offset, tensor.length) for tensor in externals(model).values()]
    assert [length for _, length in places] == [4 * size for size in sizes]
    assert all(offset % PAGE == 0 for offset, _ in places)
    assert all(end <= start for (start, _), end in zip(places[1:], (a + b for a, b in places), strict=False))
    assert weights.path.stat().st_size == sum(places[-1])
