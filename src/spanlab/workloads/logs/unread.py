"""What a reader of a log left out of the prompts: the place where every format counts it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

#: A conclusion about a whole log needs a smaller unread share than this.
MOST_UNREAD = 0.01


@dataclass
class Unread:
    """Bytes of a log that became tokens, and bytes that did not, by name of the part.

    `read`       bytes that became tokens or lengths
    `left`       bytes left out, by part: a key of a body, bad lines by their field
    `places`     number of times that each part was left out
    `requests`   requests that were read; `endless` are those with a part whose tokens the log does not determine
    """

    read: int = 0
    left: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    endless: int = 0

    def take(self, size: int) -> None:
        """Count bytes that became tokens."""
        self.read += size

    def leave(self, name: str, size: int) -> None:
        """Count bytes of a named part that were left out; `name` is a plural or a key."""
        self.left[name] += size
        self.places[name] += 1

    def finish(self, *, endless: bool = False) -> None:
        """Count a request; `endless` if its tokens are unknown whatever the bytes of the part, as of an image's URL."""
        self.requests += 1
        self.endless += endless

    def clear(self) -> None:
        """Forget all counts, since the log is read again."""
        self.read, self.requests, self.endless = 0, 0, 0
        self.left.clear()
        self.places.clear()

    @property
    def seen(self) -> int:
        """Bytes that were read or left out."""
        return self.read + self.left.total()

    @property
    def share(self) -> float:
        """Share of the log that is unknown: of its bytes, or of its requests where their bytes say nothing."""
        return max(self.left.total() / max(self.seen, 1), self.endless / max(self.requests, 1))

    @property
    def allows_verdict(self) -> bool:
        """Whether so little is unknown that a conclusion about the whole log stands."""
        return self.share <= MOST_UNREAD

    @property
    def reason(self) -> str:
        """Say how much is unknown, as the reason why no conclusion stands."""
        requests = f"the tokens of {self.endless:,} of {self.requests:,} requests are unknown"
        size = f"{100 * self.left.total() / max(self.seen, 1):.1f} % of the bytes of its prompts were left out"
        return f"{size}, and {requests}" if self.endless else size

    def describe(self) -> str:
        """Name the parts that were left out, the largest first, in one clause."""
        parts = [
            f"{name} ({self.places[name]:,} times, {size:,} bytes, {100 * size / max(self.seen, 1):.1f} %)"
            for name, size in self.left.most_common()
        ]
        return ", ".join(parts)

    def notes(self) -> tuple[str, ...]:
        """Return the caveat about what was left out; none if everything was read."""
        if not self.left:
            return ()
        unknown = f"; the tokens of {self.endless:,} of {self.requests:,} requests are unknown" if self.endless else ""
        return (f"left out of {self.seen:,} bytes of prompts: {self.describe()}{unknown}",)
