"""Looks for bad rows before ranks start. Nothing heavy is imported."""

import os
from types import SimpleNamespace

from llm_demo.data.records import open_rows
from llm_demo.data.sources import hub_parts, is_array, place_of, read_rows

CHECKED = 16 << 20  # bytes of all files: at most two seconds


def check_rows(files: list[str], flags, most: int = CHECKED) -> None:
    """Raise UserError for bad rows in the first `most` bytes of local files, all files together. A
    file with one is read to its end, so that the error has all its bad rows. What is behind those
    bytes is read once the tokenizer is there. An array is read as a whole or not at all."""
    sizes = []
    bar = SimpleNamespace(update=sizes.append)
    for path in files:
        if hub_parts(path) or is_array(path) and os.path.getsize(path) > most:
            continue
        rows = read_rows(path, bar)
        _, rows = open_rows(rows, f"{path}{place_of(path)}", flags)
        for _ in rows:
            if sum(sizes) > most:
                return
