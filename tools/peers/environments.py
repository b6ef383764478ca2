"""An environment for each peer, made on first use under build/peers, so that no peer's dependencies meet another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from eagle_graphs import EagleError

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a peer needs from PyPI."""

    name: str
    requirements: tuple[str, ...]
    needs_torch: bool = False
    """Then it sees the packages of this interpreter where torch is one of them: it is too large to have twice."""
    build_variables: Mapping[str, str] = field(default_factory=dict)
    """Of the shell, for what pip compiles."""

    def python(self, root: Path) -> Path:
        """Its interpreter, with everything installed. Raises EagleError where that cannot be done."""
        directory, log = root / "environments" / self.name, root / "logs" / f"{self.name}-install.log"
        python, marker = directory / "bin" / "python", directory / "installed"
        base = _own_packages() if self.needs_torch else None
        requirements = [*self.requirements, *([TORCH] if self.needs_torch and base is None else [])]
        state = "\n".join([*requirements, *map("=".join, self.build_variables.items()), str(base or "")])
        if marker.is_file() and marker.read_text("utf-8") == state:
            return python
        log.parent.mkdir(parents=True, exist_ok=True)
        marker.unlink(missing_ok=True)
        run([sys.executable, "-m", "venv", str(directory)], log=log, doing=f"the environment of {self.name}")
        if base is not None:
            for packages in directory.glob("lib/python*/site-packages"):
                (packages / "base.pth").write_text(str(base), "utf-8")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *requirements]
        run(pip, log=log, doing=f"the environment of {self.name}", variables=self.build_variables)
        marker.write_text(state, "utf-8")
        return python


def run(command: Sequence[str], *, log: Path, doing: str, variables: Mapping[str, str] | None = None) -> None:
    """Runs a command whose output goes to `log`. Raises EagleError, with its last line, where it fails."""
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=peer_variables() | dict(variables or {})
            ).returncode
        except OSError as error:
            raise EagleError(f"{doing} cannot be made: {command[0]}: {error.strerror}") from None
    if code:
        raise EagleError(
            f"{doing} cannot be made: {' '.join(map(str, command[1:4]))} ended with {code}: {last_line(log)} "
            f"(all of it: {log}); mend that, or leave this peer out with --peers"
        )


def peer_variables() -> dict[str, str]:
    """Those of this process, but for its own packages and what would overrule a number of threads."""
    own = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in own}


def last_line(log: Path) -> str:
    """The last line that says something."""
    lines = log.read_text("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _own_packages() -> Path | None:
    """Where this interpreter has torch, if it does."""
    spec = find_spec("torch")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else None
