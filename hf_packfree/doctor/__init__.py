"""Which packages are installed and whether they work, which backends would run, and which families
are supported, as data.
"""

from hf_packfree.doctor.diagnosis import Diagnosis, diagnose
from hf_packfree.doctor.packages import REQUIREMENTS, Import, Package, Requirement, examine, probe
from hf_packfree.doctor.plans import Device, Plan, Supported, supported_models

__all__ = [
    "REQUIREMENTS",
    "Device",
    "Diagnosis",
    "Package",
    "Plan",
    "Import",
    "Requirement",
    "Supported",
    "diagnose",
    "examine",
    "probe",
    "supported_models",
]
