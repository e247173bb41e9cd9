"""Looks for bad examples before ranks start. Nothing heavy is imported."""

import itertools

from llm_demo.data.readers import is_array, place_of, read_rows
from llm_demo.data.records import open_rows
from llm_demo.data.sources import hub_parts

CHECKED = 20_000  # examples of each file: at most two seconds


def check_rows(files: list[str], flags) -> None:
    """Raise UserError for bad examples at the beginning of local files. A file with one is read to
    its end, so that the error names all its bad examples. The rest of a file, and arrays, are read
    later, when the tokenizer is loaded."""
    for path in files:
        if not hub_parts(path) and not is_array(path):
            _, rows = open_rows(read_rows(path), f"{path}{place_of(path)}", flags)
            for _ in itertools.islice(rows, CHECKED):
                pass
