"""What is installed and whether it works, which implementations would run, and what is supported: as data."""

from hf_packfree.doctor.diagnosis import Diagnosis, diagnose
from hf_packfree.doctor.packages import Package, examine
from hf_packfree.doctor.plans import Device, Plan
from hf_packfree.doctor.probe import Probe, probe
from hf_packfree.doctor.requirements import REQUIREMENTS, Requirement
from hf_packfree.doctor.supported import Supported, supported_models

__all__ = [
    "REQUIREMENTS",
    "Device",
    "Diagnosis",
    "Package",
    "Plan",
    "Probe",
    "Requirement",
    "Supported",
    "diagnose",
    "examine",
    "probe",
    "supported_models",
]
