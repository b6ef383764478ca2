#!/usr/bin/env bash
# All that waits for a GPU, in under 8 minutes:
#
#   tools/gpu_checks.sh BUNDLE [MODEL HEAD]
#
# BUNDLE was made with eagle-export --portable, and may hold engines; MODEL and HEAD are its checkpoints, for torch.
# Uses what is installed, says what it skips and why, and ends with status 1 where a check failed.
# PYTHON names the interpreter, DEVICE=cpu tries the script where there is no GPU.
set -u
bundle=${1:?usage: tools/gpu_checks.sh BUNDLE [MODEL HEAD]}
model=${2:-} head=${3:-}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
tools=$(cd "$(dirname "$0")" && pwd)
started=$SECONDS
failed=0

section() { printf '\n== %s\n' "$1"; }
skip() { printf 'skipped: %s\n' "$1"; }
has() { "$python" -c "import $1" 2>/dev/null; }
# What is left of 8 minutes bounds each step, so that the last one is told apart from a machine that hangs.
check() {
    local left=$((480 - (SECONDS - started)))
    if ((left < 20)); then skip "no time left for: $*"; return; fi
    timeout "$left" "$@" || { printf 'FAILED (status %s): %s\n' "$?" "$*"; failed=1; }
}

section "machine"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$python" - <<'PY'
from importlib.metadata import PackageNotFoundError, version
for name in ("onnxruntime", "onnxruntime-gpu", "cuda-bindings", "tensorrt", "tensorrt-rtx-cu13", "torch", "triton", "polygraphy"):
    try:
        print(f"{name} {version(name)}")
    except PackageNotFoundError:
        print(f"{name} -")
PY

section "tree-attention kernel: numbers and time"
if ! has triton; then skip "triton is not installed"
elif ! has eagle_graphs.plugin.calls; then skip "this checkout has no kernel"
elif [ "$device" = cuda ] && ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null
then skip "torch has no CUDA here"
else check "$python" "$tools/gpu_kernel.py" --device "$device" ${BANDWIDTH:+--bandwidth "$BANDWIDTH"}
fi

section "engines and portable graphs: lossless, and how fast"
check "$python" "$tools/gpu_checks.py" "$bundle" --device "$device"

section "engines against ONNX Runtime and torch, output by output"
torch_of=()
[ -n "$model" ] && [ -n "$head" ] && torch_of=(--model "$model" --draft "$head")
if ! has polygraphy; then skip "polygraphy is not installed"
else
    # flavour, graph, its ONNX file, its engine, rows of a pass of it
    while IFS=$'\t' read -r flavour graph onnx engine rows; do
        if [ -z "$onnx" ]; then skip "the engine $engine has no portable graph beside it"; continue; fi
        arguments=("$graph" --onnx "$bundle/$onnx" --rows "$rows" --tolerance 0.05)
        if [ "$engine" != - ]; then
            if ! has "${flavour//-/_}"; then skip "$flavour is not installed ($engine)"; continue; fi
            arguments+=(--engine "$bundle/$engine" --flavour "$flavour")
        elif [ ${#torch_of[@]} -eq 0 ]; then skip "no engine to compare, and no MODEL and HEAD to compare $graph with"; continue
        fi
        check "$python" "$tools/compare.py" "${arguments[@]}" ${torch_of[@]+"${torch_of[@]}"}
    done < <("$python" "$tools/gpu_pairs.py" "$bundle")
fi

section "$((SECONDS - started)) s, $([ $failed = 0 ] && echo "nothing failed" || echo "SOMETHING FAILED")"
exit $failed
