"""The programs start over once, with glibc's setting, whatever they were started as."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = (
    "import os, sys; from eagle_runtime.huge_pages import restart_with_huge_pages; restart_with_huge_pages(); "
    "print(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:], sys.stdin.read())"
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_process_starts_over_with_arguments_and_input_kept(before: str | None, after: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if before is not None:
        environment["GLIBC_TUNABLES"] = before
    command = [sys.executable, "-c", SHOW, "--prompt", "two words"]
    done = subprocess.run(command, input="typed", capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split("\n")[0] == f"{after} ['--prompt', 'two words'] typed"
