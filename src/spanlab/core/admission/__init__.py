"""What is kept at all: an admission rule is one registered file."""

from spanlab.core.admission.bypass import Bypass
from spanlab.core.admission.contract import ADMISSIONS, Admission, AdmissionFacts, Computed, Rule, always
from spanlab.core.admission.min_length import min_length
from spanlab.core.admission.second_touch import SecondTouch

__all__ = [
    "ADMISSIONS",
    "Admission",
    "AdmissionFacts",
    "Bypass",
    "Computed",
    "Rule",
    "SecondTouch",
    "always",
    "min_length",
]
