"""llama-cpp-python as Any: it annotates ctypes arguments more narrowly than its functions take them."""

from typing import Any

def __getattr__(name: str) -> Any: ...
