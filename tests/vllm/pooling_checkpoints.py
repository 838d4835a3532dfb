"""Tiny random checkpoints of models that embed, classify or score, with a tokenizer that marks pairs as BERT's does."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

CONTEXT = 128
"""Context length in tokens."""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += [prefix + letter for letter in string.ascii_lowercase + string.digits for prefix in ("", "##")]
WORDS += list(string.punctuation)
SMALL = {
    "vocab_size": len(WORDS),
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
BERT = {**SMALL, "cls_token_id": 2, "sep_token_id": 3}
QWEN3 = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}
ROBERTA = {**SMALL, "max_position_embeddings": CONTEXT + 1, "type_vocab_size": 1}
"""RoBERTa counts positions from the one behind the padding token's id."""
LABELS = {"num_labels": 3, "id2label": {0: "bad", 1: "so so", 2: "good"}}

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**BERT)),
    "bert-mean": lambda: BertModel(BertConfig(**BERT)),
    "roberta": lambda: RobertaModel(RobertaConfig(**ROBERTA)),
    "modernbert": lambda: ModernBertModel(ModernBertConfig(**BERT, local_attention=32, global_attn_every_n_layers=2)),
    "qwen3-embedder": lambda: Qwen3Model(Qwen3Config(**QWEN3)),
    "bert-classifier": lambda: BertForSequenceClassification(BertConfig(**BERT, **LABELS)),
    "bert-scorer": lambda: BertForSequenceClassification(BertConfig(**BERT, num_labels=1)),
    "roberta-scorer": lambda: RobertaForSequenceClassification(RobertaConfig(**ROBERTA, num_labels=1)),
    "bert-tagger": lambda: BertForTokenClassification(BertConfig(**BERT, **LABELS)),
    "qwen3-classifier": lambda: Qwen3ForSequenceClassification(Qwen3Config(**QWEN3, **LABELS)),
    "qwen3-generator": lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN3)),
    "qwen3-scorer": lambda: Qwen3ForSequenceClassification(Qwen3Config(**QWEN3, num_labels=1)),
}


def make(name: str, directory: Path) -> Path:
    """Write the checkpoint `name`, one of `MAKERS`, to the new `directory`. Returns the directory."""
    torch.manual_seed(7)
    model = MAKERS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms other than 0 and 1
            is_norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.3)
    model.save_pretrained(directory)
    if name == "bert-mean":
        _set_mean(directory)
    _save_tokenizer(directory, marks_pairs=not name.startswith("qwen3"))
    return directory


def _set_mean(directory: Path) -> None:
    """Write the files of a sentence transformer that averages and whose embeddings may be shortened."""
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [32, 64, 128]}))


def _save_tokenizer(directory: Path, marks_pairs: bool) -> None:
    """
    Args:
        marks_pairs: False: vLLM leaves out `token_type_ids`, which decoders fail on.
    """
    tokenizer = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": 0, "unk_token": 1, "cls_token": 2, "sep_token": 3, "mask_token": 4}
    config: dict[str, Any] = {name: WORDS[i] for name, i in names.items()}
    config["tokenizer_class"] = "BertTokenizer"
    if not marks_pairs:
        config["model_input_names"] = ["input_ids", "attention_mask"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
