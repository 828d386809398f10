"""What a study with speculative decoding must be, and why other studies refuse it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spanlab.settings.study import Study


def check_speculation(study: Study) -> None:
    """Refuse drafts where nothing could verify them, or take them back."""
    key = f"batch.speculation.draft_tokens={study.batch.speculation.draft_tokens}"
    if not study.batch.speculation.draft_tokens:
        return
    if study.backend != "sim":
        raise ValueError(f"{key} with backend={study.backend}: expected 0, for nothing drafts there")
    if study.model.is_hybrid:
        reason = "a rejected draft needs the recurrent state before it, and no policy here keeps one per draft"
        raise ValueError(f"{key} with model.name={study.model.name}: expected 0, for {reason}")
    if study.timing.kind == "calibrated":
        raise ValueError(f"{key} with timing.kind=calibrated: expected 0, for no drafts were measured")
    for name in study.chosen():
        if study.arms[name].spans is not None:
            reason = "verifying drafts on spans read at other positions is not modelled"
            raise ValueError(f"{key} with arms.{name}.spans: expected 0, for {reason}")
