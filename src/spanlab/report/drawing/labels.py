"""Placement of short labels beside points, without overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanlab.report.drawing.style import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABEL_PT = 7.5
_PIXELS_PER_PT = DPI / 72
_POINT_PX = 4.0 * _PIXELS_PER_PT
_SAMPLE_PX = 5.0
# Candidate positions of a label around its point, best first: (horizontal, vertical) steps, then wider gaps.
_AROUND = ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
_RINGS = (1.0, 2.8, 5.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Label:
    """A text to be placed near the point (x, y) in data coordinates."""

    x: float
    y: float
    text: str
    colour: str


def place_labels(ax: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]] = ()) -> None:
    """Place each label near its point and off all points, and off `lines` where there is room.

    A label without a free position is omitted. The limits and the position of `ax` must be final.
    """
    if not labels:
        return
    points = ax.transData.transform([(label.x, label.y) for label in labels])
    sampled = np.concatenate([points, *(_sampled(ax.transData.transform(line)) for line in lines)])
    occupied = np.empty((0, 4))
    placed = []
    for k in np.argsort(points[:, 0], kind="stable"):
        size = _size(labels[k].text)
        candidates = _inside(
            np.asarray(ax.bbox.extents), [_box(points[k], size, ring, *side) for ring in _RINGS for side in _AROUND]
        )
        box = _free(candidates, sampled, occupied)
        box = _free(candidates, points, occupied) if box is None else box
        if box is not None and labels[k].text:
            occupied = np.vstack([occupied, box])
            placed.append((labels[k], points[k], box))
    _write(ax, placed)


def _size(text: str) -> Floats:
    # estimated, not rendered: rendering every candidate would take longer than the figure itself
    return np.array([0.62 * len(text), 1.05]) * _LABEL_PT * _PIXELS_PER_PT


def _sampled(corners: Floats) -> Floats:
    steps = np.hypot(*np.diff(corners, axis=0).T)
    pieces = [
        np.linspace(start, stop, 2 + int(step / _SAMPLE_PX))
        for start, stop, step in zip(corners[:-1], corners[1:], steps, strict=True)
    ]
    return np.concatenate(pieces) if pieces else corners


def _box(point: Floats, size: Floats, ring: float, right: int, up: int) -> Floats:
    centre = point + np.array([right, up]) * (size / 2 + ring * _POINT_PX)
    return np.concatenate([centre - size / 2, centre + size / 2])


def _inside(frame: Floats, boxes: Sequence[Floats]) -> list[Floats]:
    return [box for box in boxes if (box[:2] >= frame[:2]).all() and (box[2:] <= frame[2:]).all()]


def _free(boxes: Sequence[Floats], points: Floats, occupied: Floats) -> Floats | None:
    for box in boxes:
        covers = ((points > box[:2] - 0.6 * _POINT_PX) & (points < box[2:] + 0.6 * _POINT_PX)).all(axis=1)
        overlaps = ((box[:2] < occupied[:, 2:]) & (box[2:] > occupied[:, :2])).all(axis=1)
        if not covers.any() and not overlaps.any():
            return box
    return None


def _write(ax: Axes, placed: Sequence[tuple[Label, Floats, Floats]]) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    leaders, colours = [], []
    to_axes = ax.transAxes.inverted()
    for label, point, box in placed:
        # thin letters look paler than the marker of the same colour
        darker = tuple(0.7 * channel for channel in to_rgb(label.colour))
        x, y = to_axes.transform((box[:2] + box[2:]) / 2)
        ax.text(x, y, label.text, transform=ax.transAxes, ha="center", va="center", fontsize=_LABEL_PT, color=darker)
        near = np.clip(point, box[:2], box[2:])
        if np.hypot(*(near - point)) > 2 * _POINT_PX:
            leaders.append(to_axes.transform([point, near]))
            colours.append(darker)
    ax.add_collection(
        LineCollection(leaders, colors=colours, linewidths=0.5, transform=ax.transAxes, zorder=2.5), False
    )
