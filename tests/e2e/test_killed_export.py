"""An export that is ended midway leaves nothing that opens, and what was there before as it was."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import assert_refused, eagle_run

PATIENCE_S = 120


def start(target: Path, head: Path, out: Path) -> subprocess.Popen[str]:
    """An export that has loaded its models and is now tracing."""
    command = [sys.executable, "-m", "eagle_exporter.cli", "--model", str(target), "--draft", str(head)]
    return subprocess.Popen(
        [*command, "--accept-probe", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background run of the tests ignores it
    )


def wait_for_first_step(export: subprocess.Popen[str]) -> None:
    assert export.stderr is not None
    assert "load and check" in export.stderr.readline()


def end(export: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    """Its status and what more it said."""
    export.send_signal(how)
    out, err = export.communicate(timeout=PATIENCE_S)
    assert out == ""
    return export.returncode, err


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_an_export_that_is_ended_midway(
    tiny_target: Path, tiny_head: Path, tiny_bundle: Path, tmp_path: Path, how: signal.Signals
) -> None:
    new, old = tmp_path / "new" / "bundle", tmp_path / "old" / "bundle"
    shutil.copytree(tiny_bundle, old)
    exports = [start(tiny_target, tiny_head, out) for out in (new, old)]
    for export in exports:
        wait_for_first_step(export)
        assert not new.exists()
    for export in exports:
        status, said = end(export, how)
        assert "Traceback" not in said
        # CPython ends by the signal itself where it came during an exec(), whoever caught it; a shell calls both 130.
        assert status in ((-how,) if how == signal.SIGKILL else (128 + how, -how)), said

    assert_refused(eagle_run(new, "--prompt", "x"), f"there is no bundle at {new}")
    assert contents(old) == contents(tiny_bundle)
    assert eagle_run(old, "--prompt", "x", "--verify").status == 0
    if how != signal.SIGKILL:
        assert list(new.parent.iterdir()) == []
        assert list(old.parent.iterdir()) == [old]
    for left in new.parent.iterdir():  # what a killed process cannot clean up is no bundle
        assert left.name.startswith(".bundle.partial-")
        assert_refused(eagle_run(left, "--prompt", "x"), "its export did not finish")
