"""How independent spans are reused wherever they stand: the independent choices behind every published method.

Checked by the study, which knows the arm's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import not_negative, one_of, positive, share

PROVENANCES = ("isolated", "conditioned", "as_seen")
REPAIRS = ("none", "first", "last", "strided", "random", "deviation", "deviation_gradual")
CHOICES = {
    "base": ("spans", "prompt"),
    "score": ("values", "keys", "both"),
    "filter": ("queries", "layers"),
    "writes": ("all", "chosen"),
}
KEYS_OF_KERNEL = {"KR": ("raw",), "QR": ("local",), "MAT": ("local", "absolute")}


@dataclass
class RepairSettings:
    """Which tokens of reused spans are recomputed in full view; see `spanlab.core.repair`, `Repair` and `Check`.

    `kind`         none; first or last tokens of each span; strided or random (controls); deviation or
                   deviation_gradual: tokens whose keys or values differ most
    `k`            tokens per span; first and last need it, strided and random take it or `ratio`
    `ratio`        share of the tokens in `base`
    `seed`         of random
    `base`         what `ratio` is a share of: spans, the reused spans; prompt, all tokens before the suffix
    `check_layer`  first layer whose keys and values are compared, counted from 0
    `score`        what is compared: values, keys or both
    `filter`       where tokens that are not chosen leave: queries, before the attention of `check_layer`; layers, after
                   that layer
    `writes`       whose new keys and values `check_layer` keeps: all, or chosen
    `chunked`      whether the token budget cuts the repair; null: yes where its tokens are known beforehand
    """

    kind: str = "none"
    k: int | None = None
    ratio: float | None = None
    seed: int = 0
    base: str = "spans"
    check_layer: int = 1
    score: str = "values"
    filter: str = "queries"
    writes: str = "all"
    chunked: bool | None = None

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        one_of(f"{arm}.kind", self.kind, REPAIRS)
        positive(f"{arm}.k", self.k)
        for key, choices in CHOICES.items():
            one_of(f"{arm}.{key}", getattr(self, key), choices)
        self._check_check(arm)
        not_negative(f"{arm}.seed", self.seed)
        if self.ratio is not None:
            share(f"{arm}.ratio", self.ratio)
        by_length = self.kind in ("first", "last")
        by_share = self.kind.startswith("deviation")
        wanted = {"none": 0}.get(self.kind, 1)
        given = (self.k is not None) + (self.ratio is not None)
        if given != wanted or (by_length and self.k is None) or (by_share and self.ratio is None):
            expected = (
                "neither k nor ratio" if not wanted else "k" if by_length else "ratio" if by_share else "k or ratio"
            )
            raise ValueError(f"{arm}.kind={self.kind} with k={self.k}, ratio={self.ratio}: expected {expected}")

    def _check_check(self, arm: str) -> None:
        """Refuse measurements that say nothing, and rules that contradict one another."""
        if self.check_layer < 1:
            raise ValueError(f"{arm}.check_layer={self.check_layer}: expected 1 or more")
        if self.kind == "deviation_gradual" and self.filter == "queries":
            raise ValueError(f"{arm}.filter=queries with kind=deviation_gradual: expected layers")
        if self.writes == "chosen" and self.filter == "layers":
            raise ValueError(f"{arm}.writes=chosen with filter=layers: expected all")
        if self.chunked and self.kind.startswith("deviation"):
            raise ValueError(
                f"{arm}.chunked=true with kind={self.kind}, which compares all tokens: expected false or null"
            )
        if self.base == "prompt" and self.ratio is None and self.kind != "none":
            raise ValueError(f"{arm}.base=prompt with k={self.k}: expected ratio")

    def last_check_layer(self, layers: int) -> int:
        """The last layer of so many that this rule can check and still leave out tokens of."""
        return layers - (1 if self.filter == "queries" else 2)


@dataclass
class SpanSettings:
    """One point of the grid of position-independent methods.

    `provenance`   isolated: a span is computed alone; conditioned: after the prompt's opening text; as_seen: after the
                   text that preceded it in its first prompt
    `keys`         stored raw (not rotated), local (rotated by the position in the span) or absolute (by the position in
                   the first prompt)
    `positions`    sequential: as in the prompt; overlapping: all spans begin at one position; original: where they were
                   first computed, a control that must be worse
    `repair`       tokens that are recomputed in full view of the prompt
    `sharing`      canonical: stored pages are shared, and copied before a write; private: every request copies the
                   spans that it reads
    `kernel`       KR rotates keys as they are loaded, QR rotates queries, MAT reads keys that were rotated beforehand
    `temperature`, `scale`  of the attention to spans (APE's T and S); 1 and 1 change nothing
    """

    provenance: str = "isolated"
    keys: str = "local"
    positions: str = "sequential"
    repair: RepairSettings = field(default_factory=RepairSettings)
    sharing: str = "canonical"
    kernel: str = "QR"
    temperature: float = 1.0
    scale: float = 1.0

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        one_of(f"{arm}.provenance", self.provenance, PROVENANCES)
        one_of(f"{arm}.positions", self.positions, ("sequential", "overlapping", "original"))
        one_of(f"{arm}.sharing", self.sharing, ("canonical", "private"))
        one_of(f"{arm}.kernel", self.kernel, KEYS_OF_KERNEL)
        fitting = KEYS_OF_KERNEL[self.kernel]
        if self.keys not in fitting:
            expected = f"expected {' or '.join(fitting)}"
            raise ValueError(f"{arm}.keys={self.keys} with kernel={self.kernel}: {expected}")
        positive(f"{arm}.temperature", self.temperature)
        positive(f"{arm}.scale", self.scale)
        self.repair.check(f"{arm}.repair")
        self._check_pages(arm)

    def _check_pages(self, arm: str) -> None:
        """Who writes into pages needs his own, and who leaves keys where they were has nothing to write."""
        if self.positions == "original" and (self.kernel, self.keys) != ("MAT", "absolute"):
            given = f"kernel={self.kernel}, keys={self.keys}"
            raise ValueError(f"{arm}.positions=original with {given}: expected kernel=MAT, keys=absolute")
        if self.keys == "absolute" and self.positions != "original":
            raise ValueError(f"{arm}.keys=absolute with positions={self.positions}: expected keys=local")
        if self.provenance == "conditioned" and self.positions != "overlapping":  # how far the opening text is, counts
            raise ValueError(f"{arm}.provenance=conditioned with positions={self.positions}: expected overlapping")
        turns = self.kernel == "MAT" and self.positions != "original"
        if (turns or self.repair.kind.startswith("deviation")) and self.sharing != "private":
            reason = "kernel=MAT" if turns else f"repair.kind={self.repair.kind}"
            raise ValueError(f"{arm}.sharing={self.sharing} with {reason}, which writes to spans: expected private")
