"""Supernets larger than a device: layers live on the host and are on the device while micro-batches need them."""

from weft.offload.config import OffloadConfig
from weft.offload.manager import OffloadManager

__all__ = ["OffloadConfig", "OffloadManager"]
