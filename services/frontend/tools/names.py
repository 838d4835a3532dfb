"""Names of tools: OpenAI's form, with dots and twice the length."""

MAX_NAME = 128
"""Characters."""
NAME_CHAR = "[a-zA-Z0-9_.-]"
NAME_PATTERN = f"{NAME_CHAR}{{1,{MAX_NAME}}}"
