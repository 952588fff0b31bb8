"""Supernets larger than a device: layers live on the host, and are on the device while micro-batches need them."""

from weft.pipeline.residency.resident import Resident
from weft.pipeline.residency.value import Residency

__all__ = ["Residency", "Resident"]
