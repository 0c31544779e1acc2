"""A hint for who has misspelt a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], last: str = "") -> str:
    """A hint at the name that is nearest to a word, "" if none is near.

    Args:
      word: what was written.
      known: the names that there are.
      last: last part of a dotted word; a name whose last part is near it will do as well.
    """
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(word, known, n=1)
    if not near and last:
        by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [by_last[n] for n in difflib.get_close_matches(last, by_last, n=1)]
    return f"; did you mean {near[0]}?" if near else ""
