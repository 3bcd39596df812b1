"""What belongs to the innermost call of a kind on this thread, for as long as the call lasts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Innermost(threading.local, Generic[T]):
    """A value of the innermost call of its kind, for each thread.

    The call alone holds it: an interrupt between any two lines ends it with the call, and leaves nothing behind.

    >>> class Names(set[str]):
    ...     pass
    >>> names = Innermost[Names]()
    >>> with names.entered(Names({"a"})) as own:
    ...     names.now() is own
    True
    >>> names.now()
    """

    now: Callable[[], T | None] = staticmethod(lambda: None)

    @contextmanager
    def entered(self, value: T) -> Iterator[T]:
        """Makes a value the innermost one for a while; it is held by the caller."""
        outer, self.now = self.now, weakref.ref(value)
        try:
            yield value
        finally:
            self.now = outer
