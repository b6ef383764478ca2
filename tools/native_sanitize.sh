#!/bin/sh
# Runs the tests of the native ops against a library with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tools/native_sanitize.sh [pytest arguments]
#
# PYTHON names the interpreter that has the package's test dependencies, CXX the compiler (GCC).
set -eu
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

"${CXX:=g++}" -std=c++17 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -pthread -fPIC -shared \
    -fsanitize=address,undefined -fno-sanitize-recover=all \
    graphs/eagle_graphs/native/src/*.cpp -o "$build/eagle_ops.so"

# Python itself is not instrumented: the runtime must be loaded before it, and its own leaks are not looked at.
LD_PRELOAD="$("$CXX" -print-file-name=libasan.so):$("$CXX" -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
EAGLE_NATIVE_LIBRARY="$build/eagle_ops.so" \
    "${PYTHON:-python}" -m pytest -p no:cacheprovider tests/graphs/test_native_*.py tests/graphs/test_quant_linear.py \
    tests/graphs/test_top_logprobs.py "$@"
