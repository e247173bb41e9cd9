"""Chooses documents of packs: splits off held-out ones, and mixes sources by weight."""

import dataclasses
import itertools

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.core.rows import Packs
from llm_demo.data.packing import rows_of, tables_of

SPLIT_SEED = 0  # not --seed, so that runs with other seeds have the same held-out documents


def split_off(packs: Packs, fraction: float, pack: bool) -> tuple[Packs, Packs]:
    """(packs of the other documents, packs of a random `fraction` of them). A document that was
    split into pieces stays whole. pack: as in load_packs. Raises UserError if one part is empty."""
    origin = np.stack((packs.doc_file, packs.doc_row))
    _, document_of = np.unique(origin, axis=1, return_inverse=True)
    document_of = document_of.reshape(-1)
    total = int(document_of.max()) + 1
    chosen = round(total * fraction)
    if not 0 < chosen < total:
        raise UserError(
            f"--eval_fraction {fraction:g} of {total:,} documents leaves none to "
            f"{'train' if chosen else 'evaluate'} on"
        )
    held_out = np.zeros(total, bool)
    held_out[np.random.default_rng(SPLIT_SEED).permutation(total)[:chosen]] = True
    held_out = held_out[document_of]
    parts = (np.flatnonzero(~held_out), np.flatnonzero(held_out))
    return tuple(
        _of_passes(packs, [rows_of(packs.doc_start, part, packs.seq_len, pack)]) for part in parts
    )


def mix(
    packs: Packs, weights: list[float], seed: int, pack: bool, epochs: int, rows: int = 0
) -> Packs:
    """Packs of several passes, each of other documents: weight times as many of each file as these
    packs have. weights: of each file. Passes are added until there are `epochs` and `rows` rows.

    The documents of a file are dealt in a random order, then in another one, and so on; pass e gets
    the next share. So a weight of 2 takes each document twice a pass, and 0.3 takes another 30 % in
    each of three passes. A pass depends on seed and number alone, so a longer run has the same."""
    available, passes, n_rows = np.sort(packs.row_docs), [], 0
    files = [available[packs.doc_file[available] == n] for n in range(len(weights))]
    for epoch in itertools.count():
        documents = [
            _dealt(documents, weight, [seed, n], epoch)
            for n, (documents, weight) in enumerate(zip(files, weights, strict=True))
        ]
        chosen = np.sort(np.concatenate(documents))
        if not len(chosen):
            raise UserError(f"the weights {weights} of --train_json leave no document to train on")
        passes.append(rows_of(packs.doc_start, chosen, packs.seq_len, pack))
        n_rows += len(passes[-1][1]) - 1
        if epoch + 1 >= epochs and n_rows >= rows:
            return _of_passes(packs, passes)


def _dealt(documents: np.ndarray, weight: float, seed: list[int], epoch: int) -> np.ndarray:
    """The share of a file's documents that a pass takes."""
    n = len(documents)
    begin, end = (round(e * weight * n) for e in (epoch, epoch + 1))
    parts = []
    for deal in range(begin // max(1, n), -(-end // max(1, n))):
        order = np.random.default_rng([*seed, deal]).permutation(documents)
        parts.append(order[max(0, begin - deal * n) : end - deal * n])
    return np.concatenate([documents[:0], *parts])


def _of_passes(packs: Packs, passes: list[tuple]) -> Packs:
    """Packs of these passes, each from rows_of."""
    tables = tables_of(packs.doc_start, packs.doc_labels, packs.seq_len, passes)
    return dataclasses.replace(packs, **tables)
