"""One engine with one model in a process of its own, asked line by line. Only this file runs where a peer is.

    python worker.py ENGINE '{"model": ..., "threads": 2, ...}'

Both directions are JSON lines. The worker says {"ready": true} once it has loaded its model. Then it answers

    {"generate": [token, ...], "max_new_tokens": n}  with  {"tokens": [...], "prefill_s": s, "decode_s": s}
    {"score": [token, ...]}                          with  {"nll": [...], "likeliest": [...]}

and ends where its input does. `tokens` are greedy, up to and with an end-of-sequence token; the prompt's pass, which
also gives the first of them, is timed apart from the rest. `nll` is the negative log-likelihood, in nats, of every
token but the first, `likeliest` what the model would have said there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

Answer = tuple[list[int], float, float]
"""Tokens, and the seconds that the first and all others took."""


class Engine(Protocol):
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer: ...

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[L, V], behind each token."""


def timed(tokens: Iterable[int], max_new_tokens: int, ends: Sequence[int]) -> Answer:
    """Takes tokens as they are made, up to the end of the answer."""
    found: list[int] = []
    start = first = time.perf_counter()
    for token in tokens:
        if not found:
            first = time.perf_counter()
        found.append(token)
        if token in ends or len(found) == max_new_tokens:
            break
    return found, first - start, time.perf_counter() - first


class Eagle:
    """This project. Options: profile."""

    def __init__(self, *, model: str, threads: int, ends: list[int], profile: str) -> None:
        from eagle_runtime import Session

        self.session = Session.open(model, threads=threads, profile=profile)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        self.session.reset()
        start = time.perf_counter()
        answer = self.session.generate(token_ids=list(prompt), max_new_tokens=max_new_tokens)
        seconds = time.perf_counter() - start
        return answer.token_ids, answer.stats.prefill_s, seconds - answer.stats.prefill_s

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        raise NotImplementedError("the bundle's own report says how good it is")


class LlamaCpp:
    """llama-cpp-python. Options: lookup, tokens to draft from the prompt; flash_attention."""

    def __init__(self, *, model: str, threads: int, ends: list[int], lookup: int = 0, flash_attention: bool = False):
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.ends = ends
        self.options: dict[str, Any] = {
            "model_path": model,
            "n_ctx": 2048,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn": flash_attention,
            "verbose": False,
        }
        draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
        self.llama = Llama(**self.options, draft_model=draft)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        self.llama.reset()
        return timed(self.llama.generate(list(prompt), temp=0.0), max_new_tokens, self.ends)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        if not self.llama._logits_all:
            self.llama = type(self.llama)(**self.options, logits_all=True)
        self.llama.reset()
        self.llama.eval(list(tokens))
        return self.llama.scores[: len(tokens)]


class OpenVino:
    """OpenVINO GenAI. Options: lookup, tokens to draft from the prompt."""

    def __init__(self, *, model: str, threads: int, ends: list[int], lookup: int = 0) -> None:
        import openvino
        import openvino_genai

        self.model, self.threads = model, threads
        self.tensor, self.inputs = openvino.Tensor, openvino_genai.TokenizedInputs
        more = {"prompt_lookup": True} if lookup else {}
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **more)
        self.config = openvino_genai.GenerationConfig()
        self.config.do_sample = False
        self.config.stop_token_ids = set(ends)
        if lookup:
            self.config.num_assistant_tokens, self.config.max_ngram_size = lookup, 3

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        tokens = np.array([prompt], np.int64)
        self.config.max_new_tokens = max_new_tokens
        inputs = self.inputs(self.tensor(tokens), self.tensor(np.ones_like(tokens)))
        start = time.perf_counter()
        answer = self.pipeline.generate(inputs, self.config)
        seconds = time.perf_counter() - start
        first = answer.perf_metrics.get_ttft().mean / 1e3
        return list(answer.tokens[0]), first, seconds - first

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self.graph.reset_state()
        ids = np.array([tokens], np.int64)
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return self.graph.infer(feeds)["logits"][0]

    @cached_property
    def graph(self) -> Any:
        """The pipeline keeps its logits to itself: the same graph, asked directly."""
        import openvino

        options = {"INFERENCE_NUM_THREADS": self.threads}
        path = f"{self.model}/openvino_model.xml"
        return openvino.Core().compile_model(path, "CPU", options).create_infer_request()


class OnnxRuntimeGenAi:
    """ONNX Runtime GenAI."""

    def __init__(self, *, model: str, threads: int, ends: list[int]) -> None:
        import onnxruntime_genai

        self.genai, self.ends = onnxruntime_genai, ends
        config = onnxruntime_genai.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = onnxruntime_genai.Model(config)

    def generator(self, length: int) -> Any:
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(max_length=length, do_sample=False)
        return self.genai.Generator(self.model, params)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        generator = self.generator(len(prompt) + max_new_tokens)

        def tokens() -> Iterator[int]:
            generator.append_tokens(np.array(prompt, np.int32))
            while True:
                generator.generate_next_token()
                yield int(generator.get_next_tokens()[0])

        return timed(tokens(), max_new_tokens, self.ends)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        generator = self.generator(len(tokens) + 1)
        generator.append_tokens(np.array(tokens, np.int32))
        return generator.get_output("logits")[0]


class Transformers:
    """transformers, in float32."""

    def __init__(self, *, model: str, threads: int, ends: list[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.ends = torch, ends
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        stamps: list[float] = []

        class Clock:
            """A streamer is given the prompt, then each token."""

            def put(self, _: object) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None: ...

        ids = self.torch.tensor([prompt])
        start = time.perf_counter()
        answer = self.model.generate(
            ids,
            attention_mask=self.torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self.ends,
            streamer=Clock(),
        )
        return answer[0, len(prompt) :].tolist(), stamps[1] - start, stamps[-1] - stamps[1]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self.model(self.torch.tensor([tokens]), use_cache=False).logits[0].numpy()


ENGINES: dict[str, type[Engine]] = {
    "eagle": Eagle,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "onnxruntime-genai": OnnxRuntimeGenAi,
    "transformers": Transformers,
}


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if "generate" in request:
        tokens, prefill_s, decode_s = engine.generate(request["generate"], request["max_new_tokens"])
        return {"tokens": tokens, "prefill_s": prefill_s, "decode_s": decode_s}
    tokens = request["score"]
    logits = engine.logits(tokens)[:-1]
    logits = logits - logits.max(axis=1, keepdims=True)
    said = np.take_along_axis(logits, np.array(tokens[1:])[:, None], axis=1)[:, 0]
    nll = np.log(np.exp(logits).sum(axis=1, dtype=np.float64)) - said
    return {"nll": nll.tolist(), "likeliest": logits.argmax(axis=1).tolist()}


def serve(engine: Engine, requests: Iterable[str], write: Any) -> None:
    """Answers until the requests end."""
    for line in requests:
        print(json.dumps(answer(engine, json.loads(line))), file=write, flush=True)


def main() -> None:
    # What libraries print, from C++ too, must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    serve(engine, sys.stdin, answers)


if __name__ == "__main__":
    main()
