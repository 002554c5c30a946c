"""What a single field may be: numbers in a range, ids of a vocabulary, texts of a size. Knows no requests.

Every error is an InvalidArgument that names the field and says what it must be, in few words whatever was sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.errors import InvalidArgument

LONGEST_SHOWN = 80
"""Characters of a client's own words in an error: they travel in a status, which has little room."""


def wrong(field: str, must: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {must}", field=field)


def shown(value: object) -> str:
    """A value as an error repeats it."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def check_number(field: str, value: float | None, low: float, high: float, above: bool = False) -> None:
    """low .. high, both included; `above`: low itself is not. Absent is fine, NaN and infinities are not."""
    if value is None or ((low < value if above else low <= value) and value <= high):
        return
    allowed = f"above {low:g} and at most {high:g}" if above else f"in {low:g} .. {high:g}"
    raise wrong(field, f"must be a number {allowed}, not {shown(value)}")


def check_count(field: str, count: int, most: int, what: str) -> None:
    """Asks for the number alone, so that nobody need look at a hundred thousand of them."""
    if count > most:
        raise wrong(field, f"at most {most} {what}, not {count}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, first: int = 0) -> None:
    """Names the first position whose id is outside the vocabulary. first: position of token_ids[0]."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    at = next(i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    raise wrong(f"{field}[{first + at}]", f"must be 0 .. {vocab_size - 1}, not {shown(token_ids[at])}")


def check_unicode(field: str, text: str) -> None:
    """A lone surrogate can be said in JSON and in no UTF-8: neither tokenizers nor wires take it."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise wrong(field, f"must be valid Unicode; character {error.start} is a lone surrogate") from error


def check_bytes(field: str, text: str, most: int) -> None:
    check_unicode(field, text)
    size = len(text) if text.isascii() else len(text.encode())
    if size > most:
        raise wrong(field, f"must be at most {most} bytes of UTF-8, not {size}")
