"""Codecs for gradients: give one to `RemoteOptimizer(compress=...)` or `distribute(compress=...)`."""

from pserver.wire.compress import (
    BFloat16,
    Codec,
    ErrorFeedback,
    Float16,
    GradBucket,
    Int8,
    NoCompression,
    PowerSGD,
    TopK,
    register_codec,
)

__all__ = [
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "GradBucket",
    "Int8",
    "NoCompression",
    "PowerSGD",
    "TopK",
    "register_codec",
]
