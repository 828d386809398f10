"""Admission: how many computed tokens are stored; each rule is one registered file."""

from spanlab.core.admission.bypass import Bypass
from spanlab.core.admission.contract import ADMISSIONS, Admission, AdmissionFacts, ComputedPrefix, Rule, always
from spanlab.core.admission.min_length import min_length
from spanlab.core.admission.second_touch import SecondTouch

__all__ = [
    "ADMISSIONS",
    "Admission",
    "AdmissionFacts",
    "Bypass",
    "ComputedPrefix",
    "Rule",
    "SecondTouch",
    "always",
    "min_length",
]
