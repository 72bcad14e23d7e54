from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CarriedRequest(_message.Message):
    __slots__ = ("id", "path", "request")
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    id: int
    path: str
    request: bytes
    def __init__(self, id: _Optional[int] = ..., path: _Optional[str] = ..., request: _Optional[bytes] = ...) -> None: ...

class CarriedReply(_message.Message):
    __slots__ = ("id", "reply", "error", "unknown_path")
    ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_PATH_FIELD_NUMBER: _ClassVar[int]
    id: int
    reply: bytes
    error: CarriedError
    unknown_path: bool
    def __init__(self, id: _Optional[int] = ..., reply: _Optional[bytes] = ..., error: _Optional[_Union[CarriedError, _Mapping]] = ..., unknown_path: _Optional[bool] = ...) -> None: ...

class FindStreamsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindStreamsReply(_message.Message):
    __slots__ = ("port", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class CarriedError(_message.Message):
    __slots__ = ("name", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    message: str
    def __init__(self, name: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
