"""Gradient compression: codecs, and the registry that makes them from a name and arguments."""

from pserver.wire.compress.codec import BucketShape, Codec, GradBucket, Remembers, TensorSegment
from pserver.wire.compress.error_feedback import ErrorFeedback
from pserver.wire.compress.half import BFloat16, Float16
from pserver.wire.compress.int8 import Int8
from pserver.wire.compress.none import NoCompression
from pserver.wire.compress.powersgd import PowerSGD
from pserver.wire.compress.registry import CODECS, codec_arguments, codec_for, make_codec, register_codec
from pserver.wire.compress.topk import TopK

__all__ = [
    "CODECS",
    "BFloat16",
    "BucketShape",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "GradBucket",
    "Int8",
    "NoCompression",
    "PowerSGD",
    "Remembers",
    "TensorSegment",
    "TopK",
    "codec_arguments",
    "codec_for",
    "make_codec",
    "register_codec",
]
