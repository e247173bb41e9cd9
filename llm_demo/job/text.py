"""Words in messages: counts, what a library says, differences."""

STOPPED = 75  # exit code of a run that was asked to stop and has saved (sysexits' EX_TEMPFAIL)


def counted(n: int, one: str, many: str | None = None) -> str:
    """A count in words: 1 row, 2,700 rows. many: default is `one` with an s."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def words_of(error: BaseException) -> str:
    """What a library says, in one line. A KeyError's text is only the key."""
    text = " ".join(str(error).split())[:300]
    plain = text and not isinstance(error, LookupError)
    return text if plain else f"{type(error).__name__} {text}".strip()


def differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    """The differences between two identities, by name: "seed was 1, is 2"."""
    lines = []
    for key in {**before, **now}:
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key} ")
        elif a != b:
            lines.append(f"{prefix}{key} was {a}, is {b}")
    return lines
