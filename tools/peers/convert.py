"""The one checkpoint, a GGUF file, in a peer's own format; run in that peer's environment.

python convert.py safetensors MODEL.gguf OUT
python convert.py openvino MODEL.gguf OUT
"""

import json
import shutil
import sys
from pathlib import Path


def safetensors(model: Path, out: Path) -> None:
    """The weights in float32: what transformers runs, and what other builders start from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved; one of the same class does not.
    clean = type(read)(read.config)
    clean.load_state_dict(read.state_dict())
    clean.save_pretrained(out)
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config), "utf-8")


def openvino(model: Path, out: Path) -> None:
    """The graph that OpenVINO GenAI makes of a GGUF file and saves beside it, so that it need not be made each time."""
    import openvino_genai

    out.mkdir(parents=True, exist_ok=True)
    copy = out / "model.gguf"
    shutil.copy(model, copy)
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()


if __name__ == "__main__":
    {"safetensors": safetensors, "openvino": openvino}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
