"""KV events over the network: the wire of vLLM and SGLang, a publisher, and a checker of streams.

It needs the extra ``events``. A publisher takes the batches of `CacheManager.take_events`; the
wire is MessagePack over ZeroMQ, as routers such as Dynamo and llm-d read it.
"""

from .errors import EventAddressError, EventFormatError
from .publisher import EventPublisher
from .subscriber import EventSubscriber
from .wire import WireBatch, decode_batch, encode_batch

__all__ = [
    "EventAddressError",
    "EventFormatError",
    "EventPublisher",
    "EventSubscriber",
    "WireBatch",
    "decode_batch",
    "encode_batch",
]
