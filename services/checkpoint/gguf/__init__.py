"""GGUF files: header, tokenizer and configuration, without torch. Weights are read by `services.worker.weights`."""

from services.checkpoint.gguf.config import head_size
from services.checkpoint.gguf.header import GgufHeader, GgufTensor, forget_headers, read_header
from services.checkpoint.gguf.names import architecture, tensors_by_name
from services.checkpoint.gguf.texts import FILES, read_gguf_text
