"""Text to token ids and back, directly from the checkpoint's tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import DecodeStream

from services.checkpoint import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file. Raises: CheckpointError"""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


class Tokenizer:
    def __init__(self, directory: Path) -> None:
        """Raises: CheckpointError"""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json; name another tokenizer with --tokenizer"
            )
        try:
            self._tokenizer = HFTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = read_json(directory / "tokenizer_config.json")
        self.special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := config.get(name))
        }
        """Texts of the special tokens that a chat template may use."""
        self.eos_token_id = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        bos = self._tokenizer.token_to_id(self.special.get("bos_token", ""))
        adds = self._tokenizer.encode("a").ids[:1]
        self._bos = [bos] if config.get("add_bos_token") and bos is not None and adds != [bos] else []

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the special tokens the checkpoint puts around one."""
        return self._bos + list(self._tokenizer.encode(text).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """The output of a chat template, which has written its special tokens itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def stream(self, prompt: list[int]) -> "Detokenizer":
        return Detokenizer(self._tokenizer, prompt)


class Detokenizer:
    """Tokens of one answer to text, piece by piece; never half a character."""

    def __init__(self, tokenizer: HFTokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=prompt[-8:], skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; "" while a character is incomplete."""
        self._pending.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """What is left when no more tokens come: an incomplete character shows as U+FFFD."""
        text = str(self._tokenizer.decode(self._pending, skip_special_tokens=True)) if self._pending else ""
        self._pending.clear()
        return text
