# SPDX-License-Identifier: Apache-2.0
"""Random Gated DeltaNet checkpoints in fla's format, for tests and for trying things out.

A toy is a complete model folder: config, weights and (when the vocabulary has room for all 256
bytes) a byte-level tokenizer with a chat template, so that everything that runs on a real
checkpoint runs on it, in milliseconds. Weights are random, but their statistics are those of a
trained model: decays from slow to fast, norms and convolution taps that are not all alike.

    from specla.models.toy import write_toy_checkpoint
    model = specla.models.load(str(write_toy_checkpoint("toy")), device="cpu", dtype=torch.float32)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from specla.errors import ConfigError
from specla.models.files import write_json
from specla.models.fla_gdn_config import expected_tensors, parse_config
from specla.models.resolve import INDEX_FILE, SINGLE_FILE
from specla.models.weights import Shape

SPECIAL_TOKENS = ("<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
BOS, END = 0, 4
TOKENIZER_SIZE = 320
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
_TEXT = (
    "A farmer has 12 apples and gives 5 to a neighbour, so 12 - 5 = 7 apples are left.",
    "The total is 3 * 4 + 8 = 20 because each of the 3 boxes holds 4 and 8 lie beside them.",
    "def add(first, second):\n    return first + second\n\nfor i in range(10):\n    print(i)",
    "If the train leaves at 9 and arrives at 11, then the journey takes 2 hours in all.",
)


def write_toy_checkpoint(
    path: Path | str,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    num_v_heads: int | None = None,
    head_dim: int = 16,
    expand_v: float = 2.0,
    intermediate: int = 96,
    vocab: int | None = None,
    tie: bool = False,
    neg_eigval: bool = False,
    use_gate: bool = True,
    dead_d: bool = False,
    shards: int = 1,
    dtype: str = "float32",
) -> Path:
    """Write a random model folder; the same arguments write the same bytes.

    Args:
        path: folder, made if needed.
        seed: of the weights.
        num_layers, hidden, heads, num_v_heads, head_dim, expand_v, intermediate: sizes as in
            config.json. K != V by default, so that a transposition cannot hide.
        vocab: None for the tokenizer's own size (320). Below 261 (five special tokens and 256
            bytes) there is no room for a tokenizer and none is written.
        tie: one matrix for embeddings and head.
        neg_eigval, use_gate: as in config.json.
        dead_d: also write the unused `attn.D` tensors of old checkpoints.
        shards: number of weight files; more than one brings an index.
        dtype: of the stored weights; A_log and dt_bias are always float32.

    Returns:
        The folder.
    """
    folder, size = Path(path), TOKENIZER_SIZE if vocab is None else vocab
    if size <= END:
        raise ConfigError(f"vocab must be above {END}, the end token's id, got {vocab}")
    values = {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "vocab_size": size,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_heads": heads,
        "num_v_heads": num_v_heads,
        "head_dim": head_dim,
        "expand_v": expand_v,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tie,
        "allow_neg_eigval": neg_eigval,
        "use_gate": use_gate,
        **_CONSTANTS,
        "dtype": dtype,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", values)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": [END], "pad_token_id": BOS},
    )
    _save_weights(folder, _weights(values, seed, dead_d), shards)
    if size >= len(SPECIAL_TOKENS) + 256:
        _save_tokenizer(folder, size)
    return folder


_CONSTANTS: dict[str, Any] = {
    "attn": None,
    "attn_mode": "chunk",
    "conv_size": 4,
    "use_short_conv": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "pad_token_id": BOS,
}


def _weights(values: Mapping[str, Any], seed: int, dead_d: bool) -> dict[str, Tensor]:
    config = parse_config(values, "the toy's config")
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, values["dtype"])
    tensors = {}
    for name, shape in expected_tensors(config).items():
        tensor = _random(name, shape, generator)
        keep = name.endswith((".A_log", ".dt_bias"))
        tensors[name] = tensor if keep else tensor.to(dtype)
    for i in range(config.num_hidden_layers if dead_d else 0):
        tensors[f"model.layers.{i}.attn.D"] = torch.ones(config.num_v_heads)
    return tensors


def _random(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    """One tensor with a trained model's statistics, float32."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):  # fla's own start: A uniform in (0, 16)
        return (torch.rand(shape, generator=generator) * 15.9 + 0.1).log()
    if name.endswith("dt_bias"):  # softplus(dt_bias) log-uniform in 0.001 .. 0.1, as in fla
        step = (torch.rand(shape, generator=generator) * math.log(100) + math.log(1e-3)).exp()
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("norm.weight"):
        return 1 + 0.3 * noise
    if "conv1d" in name:  # the current token weighs most
        return 0.25 * noise + torch.linspace(0, 0.6, shape[-1])
    # Head and embeddings: logits with a standard deviation near 2, so that neither greedy ties
    # nor one-token distributions make tests trivial.
    scale = 2.0 if name.startswith(("lm_head", "model.embeddings")) else 1.0
    return noise * (scale / math.sqrt(shape[-1]))


def _save_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    names, metadata = list(tensors), {"format": "pt"}
    if not 1 <= shards <= len(names):
        raise ConfigError(f"shards must be from 1 to {len(names)}, got {shards}")
    if stale := _other_weights(folder, shards):
        raise ConfigError(
            f"a toy must not share its folder with other weights, but {folder} holds "
            f"{stale[0]}; give a new folder"
        )
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata=metadata)
        return
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata=metadata)
        where.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where})


def _other_weights(folder: Path, shards: int) -> list[str]:
    """Weight files that would be mixed up with, or read instead of, those about to be written."""
    single = shards == 1
    ours = SINGLE_FILE if single else f"model-*-of-{shards:05}.safetensors"
    found = [*folder.glob("model*.safetensors"), *([folder / INDEX_FILE] if single else [])]
    return sorted(p.name for p in found if p.exists() and not p.match(ours))


def _save_tokenizer(folder: Path, size: int) -> None:
    """Byte-level BPE, lossless on any text, that puts <|bos|> before every prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, TOKENIZER_SIZE),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    bos = SPECIAL_TOKENS[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": bos, "eos_token": SPECIAL_TOKENS[END], "pad_token": bos}
    extra = {"additional_special_tokens": list(SPECIAL_TOKENS[1:END])}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            **names,
            **extra,
        },
    )
