"""Tiny models for the tests: a random target, a random head for it, a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 320
HIDDEN = 64
LAYERS = 6
DRAFT_VOCAB = 96
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB tokens with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the other one"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def write_tiny_target(directory: Path, *, seed: int = 0, **config: object) -> LlamaForCausalLM:
    """A random Llama whose greedy output is neither constant nor flat."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **config,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


def write_tiny_model(directory: Path, model_type: str, *, layers: int, **config: object) -> PreTrainedModel:
    """A random model of any architecture; norms, biases and other vectors are random too."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **config,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


def write_tiny_head(
    directory: Path, *, seed: int = 1, target_hidden: int = HIDDEN, vocab: int = VOCAB, own_embedding: bool = False
) -> None:
    """A random EAGLE-3 head in SafeAILab's layout, with the target's embedding or its own."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * shape[-1] ** -0.5

    hidden, queries, keys, inner = target_hidden, target_hidden, target_hidden // 2, 80
    draft_ids = torch.randperm(vocab, generator=random)[:DRAFT_VOCAB].sort()[0]
    membership = torch.zeros(vocab, dtype=torch.bool)
    membership[draft_ids] = True
    tensors = {
        "fc.weight": weight(hidden, 3 * target_hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": weight(queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weight(keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weight(keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weight(hidden, queries),
        "midlayer.mlp.gate_proj.weight": weight(inner, hidden),
        "midlayer.mlp.up_proj.weight": weight(inner, hidden),
        "midlayer.mlp.down_proj.weight": weight(hidden, inner),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(DRAFT_VOCAB, hidden) * 3,
        "d2t": draft_ids - torch.arange(DRAFT_VOCAB),
        "t2d": membership,
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = weight(vocab, hidden)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
