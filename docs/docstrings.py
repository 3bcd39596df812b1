"""Makes Markdown of docstrings: to it, `>>>` is a quotation in a quotation in a quotation."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^>>> .*\n?(?:^(?!\s*$).*\n?)*", re.MULTILINE)
BOUND = re.compile(r"^( +\w+(?:, \w+)*: )>", re.MULTILINE)
"""An argument whose description begins with a bound, `eps: >= 0`: a quotation as well."""


class Markdown(Extension):
    """Puts a fence around each doctest, from its first prompt to the next empty line, and escapes bounds."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, BOUND.sub(r"\1\\>", obj.docstring.value))


def _fenced(example: re.Match[str]) -> str:
    return f"```pycon\n{example[0].rstrip()}\n```\n"
