"""Settings of the entry `conformance`: the model, its properties and the test prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spanlab.checks import REQUIRED, one_of, positive
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry
from spanlab.settings.output import OutputSettings

if TYPE_CHECKING:
    from spanlab.study.conformance.verdicts import Measurement

#: Functions of a served model that return a measurement; `spanlab.study.conformance.verdicts` describes it.
PROPERTIES: Registry[Measurement] = Registry("properties", given=("subject",))
PROPERTIES.later("greedy_generation", "spanlab.study.conformance.prefixes")
PROPERTIES.later("prefix_reuse", "spanlab.study.conformance.prefixes")
PROPERTIES.later("chunked_prefill", "spanlab.study.conformance.prefixes")
PROPERTIES.later("preemption", "spanlab.study.conformance.prefixes")
PROPERTIES.later("tenant_isolation", "spanlab.study.conformance.stored")
PROPERTIES.later("copy_on_write", "spanlab.study.conformance.stored")
PROPERTIES.later("span_reuse", "spanlab.study.conformance.spans")
PROPERTIES.later("state_depth", "spanlab.study.conformance.hybrids")
PROPERTIES.later("map_composition", "spanlab.study.conformance.hybrids")

_UNREAD = {"clock": "virtual", "record": "nothing", "teacher": None, "temperature": 0.0}


@dataclass
class Conformance:
    """Check on a few prompts that reuse does not change a model's output: one verdict per property.

    `model`            the model's sizes
    `engine`           the model; its clock, record, teacher and temperature are not set
    `properties`       properties to check; empty: all
    `prompts`          prompts of each property
    `output_tokens`    tokens that each prompt generates
    `documents`        documents of a prompt
    `document_tokens`  most tokens of a document
    `output`           where the run is written
    """

    model: ModelSpec = REQUIRED
    engine: EngineSettings = field(default_factory=EngineSettings)
    properties: list[str] = field(default_factory=list)
    prompts: int = 4
    output_tokens: int = 16
    documents: int = 3
    document_tokens: int = 48
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        for key in ("documents", "output_tokens"):
            positive(key, getattr(self, key))
        if self.prompts < 2:
            raise ValueError(f"prompts={self.prompts}: expected 2 or more, for later prompts reuse earlier ones")
        if self.document_tokens < 2:
            raise ValueError(f"document_tokens={self.document_tokens}: expected 2 or more")
        for name in self.properties:
            one_of("properties", name, PROPERTIES)
        for key, only in _UNREAD.items():
            if (value := getattr(self.engine, key)) != only:
                expected = "null" if only is None else only
                raise ValueError(f"engine.{key}={value}: expected {expected}, for this entry chooses its own")
        self.output.refuse_resuming()
        dtype_of(self.model)

    @property
    def chosen(self) -> list[str]:
        """Names of the properties to check, in the order of the registry."""
        return [name for name in PROPERTIES if not self.properties or name in self.properties]
