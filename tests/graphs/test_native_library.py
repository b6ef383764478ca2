"""The library of native ops: it loads, and says what is wrong where it cannot."""

from __future__ import annotations

import ctypes

import pytest

from tests.graphs.native import instruction_set, library, offered_instruction_sets, session_options


def test_it_registers() -> None:
    session_options()


def test_it_registers_with_every_instruction_set_of_this_cpu() -> None:
    offered = offered_instruction_sets()
    assert offered[0] == "portable"
    for name in offered:
        with instruction_set(name):
            session_options()


def test_an_unknown_instruction_set_is_refused() -> None:
    with (
        instruction_set("sse9"),
        pytest.raises(Exception, match=r"EAGLE_CPU_ISA is 'sse9', but this CPU offers portable.*: name one of them"),
    ):
        session_options()


def test_an_old_onnxruntime_is_refused() -> None:
    messages: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(code: int, message: bytes) -> int:
        messages.append(message)
        return 1

    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    def get_api(version: int) -> int | None:
        return ctypes.addressof(table) if version == 1 else None

    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), None)
    entry = ctypes.CDLL(str(library())).RegisterCustomOps
    entry.restype = ctypes.c_void_p
    assert entry(None, base) == 1
    assert messages == [b"eagle.cpu needs ONNX Runtime 1.17 or later: upgrade onnxruntime"]
