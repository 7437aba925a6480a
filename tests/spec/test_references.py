"""What a manager holds is counted: attributes, slots and entries, each object once."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

from radixkv.kvcache import CacheManager
from radixkv.spec.adapters.references import count_references


class Slotted:
    __slots__ = ("a", "unset")

    def __init__(self, a: Any) -> None:
        self.a = a


class Derived(Slotted):
    __slots__ = "b"

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a)
        self.b = b


class Private(Slotted):
    __slots__ = ("__dict__", "__hidden")

    def __init__(self, hidden: Any, **attributes: Any) -> None:
        super().__init__(None)
        self.__hidden = hidden
        self.__dict__.update(attributes)


class _Underscored:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden


class Named(list[Any]):
    def __init__(self, items: Any, name: Any) -> None:
        super().__init__(items)
        self.name = name


class Keyed(dict[Any, Any]):
    __slots__ = ("key",)

    def __init__(self, items: Any, key: Any) -> None:
        super().__init__(items)
        self.key = key


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_attributes_slots_and_entries_are_counted() -> None:
    assert count_references(Plain()) == 0
    assert count_references(Plain(a=1, b=None)) == 2
    assert count_references(Slotted([1, 2])) == 2 + 2
    assert count_references(Derived({1: "x"}, deque([1, 2, 3]))) == 3 + 2 + 3


def test_private_slots_are_followed() -> None:
    assert count_references(Private([1, 2, 3])) == 3 + 3
    assert count_references(Private(None, a=[1, 2])) == 3 + 1 + 2
    assert count_references(_Underscored([1, 2, 3])) == 1 + 3, "Python's name has one underscore"


def test_attributes_of_containers_are_followed() -> None:
    assert count_references(Named([1, 2], [3, 4, 5])) == 2 + 1 + 3
    assert count_references(Keyed({1: 2}, [3, 4, 5])) == 2 + 1 + 3


def test_each_object_is_followed_once_and_code_is_not() -> None:
    shared: list[Any] = [1, 2, 3]
    ring: list[Any] = []
    ring.append(ring)
    assert count_references([shared, shared]) == 2 + 3
    assert count_references(ring) == 1
    assert count_references([Plain, len, count_references, shared.append]) == 4


class Meta(type):
    """A kind of classes, as of abstract ones."""


class Cached(metaclass=Meta):
    cache = dict.fromkeys(range(100))


class Kind(Enum):
    FULL = 1


def test_classes_of_any_kind_and_members_of_enums_are_not_followed() -> None:
    assert count_references([Cached, Kind, Kind.FULL]) == 3


def test_what_is_left_out_is_counted_and_not_followed() -> None:
    free = [0] * 100
    assert count_references(Plain(free=free), free) == 1


def test_a_manager_that_serves_requests_one_after_another_does_not_grow() -> None:
    manager, sizes = CacheManager(8, 2), set()
    for number in range(20):
        lease = manager.admit(manager.match([number, 1, 2]))
        manager.publish(lease, [number, 1])
        manager.release(lease)
        manager.evict(8)
        sizes.add(count_references(manager))
    assert len(sizes) == 1
